"""From a folder to its `report.html`."""

from pathlib import Path

from fedgrad.experiments.experiment import Experiment, Reproduction, show
from fedgrad.experiments.registry import experiment
from fedgrad.experiments.results import load
from fedgrad.report import run
from fedgrad.report.experiment import experiment_page
from fedgrad.report.page import ReportError
from fedgrad.report.search import search_page
from fedgrad.report.tuning import run_page
from fedgrad.training import search_folder
from fedgrad.training.files import write_whole


def write_report(folder: Path) -> Path:
    """Write the report of a run folder, of a search or of an experiment, and say where it is."""
    if not folder.is_dir():
        raise ReportError.here(f"There is no folder {folder}.")
    if (folder / "results.json").exists():
        results = load(folder)
        found = experiment(results.experiment, results.facts.get("task"))
        return write_experiment_report(folder, found, show(found, results, folder))
    if (folder / search_folder.NAME).exists():
        return _written(folder, search_page(search_folder.read(folder)))
    return write_run_report(folder)[0]


def write_run_report(folder: Path) -> tuple[Path, run.Run]:
    """Write the report of a run: its path, and what was found in the folder."""
    found = run.read(folder)
    return _written(folder, run_page(found)), found


def write_experiment_report(folder: Path, experiment: Experiment, shown: Reproduction) -> Path:
    """Write the report of an experiment that has been run."""
    return _written(folder, experiment_page(experiment, shown))


def _written(folder: Path, page: str) -> Path:
    path = folder / "report.html"
    write_whole(path, page.encode())
    return path
