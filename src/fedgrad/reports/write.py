"""Write the report of any folder: a run, a search or an experiment."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedgrad.core.errors import MissingExtra
from fedgrad.reports import run_source
from fedgrad.reports.run_page import run_page
from fedgrad.reports.runs import NAME, report
from fedgrad.training.files import write_whole

EXPERIMENTS = "fedgrad.experiments"  # the group of entry points of fedgrad-experiments


def write_report(folder: Path, open: bool = False) -> Path:
    """Write the report of a run folder, a search or an experiment, and return its path."""
    if (folder / "results.json").exists():
        return Path(from_experiments("report")(folder, open))
    return report(folder, open=open)


def write_run_report(folder: Path) -> tuple[Path, run_source.Run]:
    """Write the report of a run; return its path and the run."""
    found = run_source.read(folder)
    path = folder / NAME
    write_whole(path, run_page(found).encode())
    return path, found


def from_experiments(name: str) -> Any:
    """Return what fedgrad-experiments, a separate project, offers under this name.

    Raises:
        MissingExtra: If it is not installed.
    """
    for point in entry_points(group=EXPERIMENTS, name=name):
        return point.load()
    raise MissingExtra.here(
        "The experiments of the paper are a project of their own, fedgrad-experiments, which is "
        "not installed. In a checkout of fedgrad: pip install ./experiments"
    )
