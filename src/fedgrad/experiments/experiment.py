"""What an experiment is, and how it is reproduced: run, saved, drawn, and held to its claims."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import fedgrad as fg
from fedgrad.experiments.results import Claim, ExperimentError, Results, Table, report

Progress = bool | Console  # as for fg.fit


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper.

    `run` gives arrays and the names along their axes; everything that is shown is a function of the
    results, so that it can be drawn again without running anything.
    """

    name: str
    description: str
    sizes: Mapping[str, Any]  # settings by name: quick, default, full
    run: Callable[[Path, Any, Progress], Results]
    figures: Callable[[Results], Mapping[str, fg.charts.Figure]]
    tables: Callable[[Results], list[Table]]
    claims: Callable[[Results], list[Claim]]

    def settings(self, size: str = "default") -> Any:
        """The settings of this size."""
        if size not in self.sizes:
            message = f"Experiment {self.name!r} has no size {size!r}."
            raise ExperimentError.here(message, size, self.sizes)
        return self.sizes[size]


@dataclass(frozen=True)
class Reproduction:
    """What reproducing an experiment gave."""

    results: Results
    figures: Mapping[str, fg.charts.Figure]
    tables: list[Table]
    claims: list[Claim]

    def text(self) -> str:
        """Tables and claims, for a terminal."""
        return "\n\n".join([*(t.text() for t in self.tables), report(self.claims)])


def reproduce(
    experiment: Experiment, out: Path, settings: Any = None, progress: Progress = True
) -> Reproduction:
    """Run an experiment (or go on with a run that was interrupted) and write all of it to `out`:
    results.json and results.npz, figures, and results.txt with the tables and claims."""
    settings = experiment.settings() if settings is None else settings
    start = time.perf_counter()
    results = experiment.run(out, settings, progress)
    facts = {
        **results.facts,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {name: version(name) for name in ("fedgrad", "jax", "numpy", "optax")},
    }
    results = replace(results, settings=asdict(settings), facts=facts)
    results.save(out)
    return show(experiment, results, out)


def show(experiment: Experiment, results: Results, out: Path) -> Reproduction:
    """Draw and judge results, into `out`."""
    shown = Reproduction(
        results, experiment.figures(results), experiment.tables(results), experiment.claims(results)
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in shown.figures.items():
        figure.save(out / f"{name}.svg")
    (out / "results.txt").write_text(shown.text() + "\n", encoding="utf-8")
    return shown


def evaluations_of(task: fg.tasks.Task, every: int) -> dict[str, fg.Evaluation]:
    """What is measured of a model: the loss on what it trains on, the metrics on what it does not
    see."""
    return {
        "train": fg.Evaluation({"loss": task.loss}, task.train, every=every),
        "test": fg.Evaluation(task.metrics, task.test, every=every),
    }


def announce(progress: Progress, message: str) -> None:
    """Say on the error stream what runs next, if anybody is to be told."""
    if progress is not False:
        console = progress if isinstance(progress, Console) else Console(stderr=True)
        console.print(message, highlight=False, markup=False)
