"""Experiments, and their reproduction: run, save, draw, and check the claims."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import fedgrad as fg
from fedgrad_experiments.results import Claim, ExperimentError, Results, Table, report

Progress = bool | Console  # as for fg.fit
QUICK = "quick"  # the size that only shows that the experiment works
# The tasks of the paper; their size "paper" has its models.
PAPER = ("cifar100", "emnist", "shakespeare", "stackoverflow_tags", "stackoverflow_words")


@dataclass(frozen=True)
class OnTask:
    """A task and the number of its clients per round; by default the task's own number."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cohort_size: int | None = None

    def make(self, **more: Any) -> fg.tasks.Task:
        """Make the task."""
        return fg.tasks.task(self.name, **self.options, **more)

    @staticmethod
    def as_in_the_paper(name: str, options: Mapping[str, Any]) -> "OnTask":
        """Return the task with the paper's 50 clients per round, and with the paper's model if the
        task has it; explicit options take precedence."""
        large = {"size": "paper"} if name in PAPER else {}
        return OnTask(name, {**large, **options}, cohort_size=50)


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper.

    `run` returns arrays and the names along their axes. Everything that is shown is a function of
    the results, so that it can be drawn again without running anything. `on(task, options)` is the
    same experiment on one task: a separate experiment, whose results have the task among their
    facts.
    """

    name: str
    description: str
    sizes: Mapping[str, Any]  # settings by name: quick, default, full; on a task also paper
    run: Callable[[Path, Any, Progress], Results]
    figures: Callable[[Results], Mapping[str, fg.charts.Figure]]
    tables: Callable[[Results], list[Table]]
    claims: Callable[[Results], list[Claim]]
    on: "Callable[[str, Mapping[str, Any]], Experiment] | None" = None
    # The experiment's own tasks, by name: `on` takes several (a,b), or none for all; they share one
    # folder.
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, size: str = "default") -> Any:
        """Return the settings of this size."""
        if size not in self.sizes:
            message = f"Experiment {self.name!r} has no size {size!r}."
            raise ExperimentError.here(message, size, self.sizes)
        return self.sizes[size]

    def size_of(self, settings: Mapping[str, Any]) -> str:
        """Return the name of the size with these settings (original or from JSON), or "" if there
        is none."""
        found = _as_json(settings)
        return next((n for n, one in self.sizes.items() if _as_json(asdict(one)) == found), "")


@dataclass(frozen=True)
class Reproduction:
    """The outcome of reproducing an experiment."""

    results: Results
    figures: Mapping[str, fg.charts.Figure]
    tables: list[Table]
    claims: list[Claim]

    def text(self) -> str:
        """Return tables and claims as text for a terminal."""
        return "\n\n".join([*(t.text() for t in self.tables), report(self.claims)])


def reproduce(
    experiment: Experiment, out: Path, settings: Any = None, progress: Progress = True
) -> Reproduction:
    """Run an experiment, or continue an interrupted run, and write everything to `out`:
    results.json and results.npz, figures, and results.txt with the tables and claims."""
    settings = experiment.settings() if settings is None else settings
    _require_same(out / "settings.json", asdict(settings))
    start, worked = time.perf_counter(), time.process_time()
    results = experiment.run(out, settings, progress)
    facts = {
        **results.facts,
        "size": experiment.size_of(asdict(settings)),
        "seconds": round(time.perf_counter() - start, 1),
        "processor seconds": round(time.process_time() - worked, 1),
        "versions": {name: version(name) for name in ("fedgrad", "jax", "numpy", "optax")},
    }
    results = replace(results, settings=asdict(settings), facts=facts)
    results.save(out)
    return show(experiment, results, out)


def _require_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to continue a run that was started with other settings."""
    text = json.dumps(settings, indent=2, default=str)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        begun, asked = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
        other = sorted(n for n in asked if begun.get(n) != asked[n])
        raise ExperimentError.here(
            f"What is in {path.parent} was begun with other settings ({', '.join(other)}). Choose "
            "another folder, or remove this one to start again."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def show(experiment: Experiment, results: Results, out: Path) -> Reproduction:
    """Draw results and judge the claims; write both to `out`."""
    shown = Reproduction(
        results,
        experiment.figures(results),
        experiment.tables(results),
        _judged(experiment, results),
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in shown.figures.items():
        figure.save(out / f"{name}.svg")
    (out / "results.txt").write_text(shown.text() + "\n", encoding="utf-8")
    return shown


def _judged(experiment: Experiment, results: Results) -> list[Claim]:
    """Return the claims. Runs that are too small to decide them give numbers without verdicts."""
    claims, why = experiment.claims(results), ""
    if results.facts.get("size") == QUICK:
        why = "This size is to see that it works."
    elif results.settings.get("seeds") == 1:
        why = "One seed decides nothing."
    return [claim.undecided(why) for claim in claims] if why else claims


def _as_json(settings: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(settings), default=str))  # tuples become lists


def evaluations_of(
    task: fg.tasks.Task, every: int, clients: int | None = None
) -> dict[str, fg.Evaluation]:
    """Return the evaluations of a model: its loss on training clients, and the metrics on test
    clients. At most `clients` of each are used."""
    if task.test is None or not task.metrics:
        raise ExperimentError.here(
            f"Task {task.name!r} has no {'metrics' if task.test else 'test='}: an experiment "
            "compares models by a metric of examples that they were not trained on."
        )

    return {
        "train": fg.Evaluation({"loss": task.loss}, some_of(task.train, clients), every=every),
        "test": fg.Evaluation(task.metrics, some_of(task.test, clients), every=every),
    }


def some_of(clients: fg.Population, most: int | None, role: str = "cohort") -> Any:
    """Return all clients, or a sample of `most` of them that is always the same."""
    if most is None or most >= len(clients):
        return clients
    return clients.sample(jax.random.key(0), most, role=role)


def announce(progress: Progress, message: str) -> None:
    """Print to stderr what runs next, unless progress is off."""
    if progress is not False:
        console = progress if isinstance(progress, Console) else Console(stderr=True)
        console.print(message, highlight=False, markup=False)
