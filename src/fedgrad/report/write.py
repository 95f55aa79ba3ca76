"""The reports of experiments, and of whatever a folder holds."""

import webbrowser
from pathlib import Path

from fedgrad.experiments.experiment import Experiment, Reproduction, show
from fedgrad.experiments.registry import experiment
from fedgrad.experiments.results import load
from fedgrad.report import run
from fedgrad.report.experiment import experiment_page
from fedgrad.report.runs import NAME, report
from fedgrad.report.tuning import run_page
from fedgrad.training.files import write_whole


def write_report(folder: Path, open: bool = False) -> Path:
    """Write the report of a run folder, of a search or of an experiment, and say where it is."""
    if not (folder / "results.json").exists():
        return report(folder, open=open)
    results = load(folder)
    found = experiment(results.experiment, results.facts.get("task"))
    path = write_experiment_report(folder, found, show(found, results, folder))
    if open:
        webbrowser.open(path.resolve().as_uri())
    return path


def write_run_report(folder: Path) -> tuple[Path, run.Run]:
    """Write the report of a run: its path, and what was found in the folder."""
    found = run.read(folder)
    return _written(folder, run_page(found)), found


def write_experiment_report(folder: Path, experiment: Experiment, shown: Reproduction) -> Path:
    """Write the report of an experiment that has been run."""
    return _written(folder, experiment_page(experiment, shown))


def _written(folder: Path, page: str) -> Path:
    path = folder / NAME
    write_whole(path, page.encode())
    return path
