"""Reports from Python, `fg.report` and `fg.compare`, and those written during a run."""

import os
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.reports import run_source as source
from fedgrad.reports.page import ReportError
from fedgrad.reports.run_page import run_page
from fedgrad.reports.run_source import Run
from fedgrad.reports.search_page import search_page
from fedgrad.reports.series import Curves, together
from fedgrad.reports.settings_table import differences
from fedgrad.training import search_folder
from fedgrad.training.files import make_folder, write_whole
from fedgrad.training.fit import Result
from fedgrad.training.live import Seen, reported_by
from fedgrad.training.search import Search
from fedgrad.training.search_folder import Standing

NAME = "report.html"
Reported = Result | str | os.PathLike[str]


@known_arguments()
def report(
    run: Reported | Search, path: str | os.PathLike[str] | None = None, open: bool = False
) -> Path:
    """Write the report of a run or a search: one HTML file that works offline in any browser.

        fg.report(result, "report.html")
        fg.report("runs/1", open=True)

    Args:
        run: The result of `fg.fit` or of a search, or the folder of either, even while it is
            running.
        path: The file to write. Defaults to `report.html`, in the folder if there is one.
        open: Whether to open the report in a browser.

    Returns:
        The path of the report.

    Raises:
        ReportError: If the folder does not hold a run or a search.
    """
    if isinstance(run, Result):
        return _written(Path(NAME if path is None else path), run_page(source.of_result(run)), open)
    if isinstance(run, Search):
        return _written(Path(NAME if path is None else path), search_page(run.standing), open)
    folder = _folder(run)
    if (folder / "results.json").exists():
        # Experiments depend on fedgrad, not the other way around.
        raise ReportError.here(
            f"{folder} is the folder of an experiment. `fedgrad report {folder}` writes its report."
        )
    if (folder / search_folder.NAME).exists():
        text = search_page(search_folder.read(folder))
    else:
        text = run_page(source.read(folder))
    return _written(folder / NAME if path is None else Path(path), text, open)


@known_arguments()
def compare(
    runs: Mapping[str, Reported | Sequence[Reported]],
    path: str | os.PathLike[str] = "compare.html",
    open: bool = False,
) -> Path:
    """Write a page that compares runs.

        fg.compare({"learned": a, "fixed": b}, "compare.html")

    Args:
        runs: By name, the result of `fg.fit` or the folder of a run; or a list of these for several
            seeds, which are shown as their mean and a band from the lowest to the highest.
        path: The file to write.
        open: Whether to open the page in a browser.

    Returns:
        The path of the page.

    Raises:
        ArgumentError: If `runs` is empty, or the seeds of a name are trials of other
            hyperparameters.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise ArgumentError.here(
            'fg.compare takes runs by name, such as {"learned": result, "fixed": other}, got '
            f"{type(runs).__name__}."
        )
    entries: dict[str, Curves] = {}
    first: dict[str, Run] = {}
    for name, given in runs.items():
        found = [_one(str(name), one) for one in _several(given)]
        first[str(name)] = found[0]
        for label in found[0].entries:
            if not all(label in one.entries for one in found):
                raise ArgumentError.here(
                    f"fg.compare: the runs of {name!r} are not trials of the same hyperparameters."
                )
            seeds = together([one.entries[label] for one in found])
            entries[f"{name}, {label}" if found[0].trials else str(name)] = seeds
    return _written(Path(path), run_page(Run(entries), differences(first)), open)


@reported_by
def follow(seen: Seen) -> Path:
    """Write the report of a run in progress, and of the learned run that it belongs to."""
    with suppress(ReportError):  # the parent folder may not be a run of ours
        if (both := source.beside(seen)) is not None:
            _written(seen.folder.parent / NAME, run_page(both))
    return _written(seen.folder / NAME, run_page(source.now(seen)))


@search_folder.reported_by
def follow_search(folder: Path, found: Standing, open: bool) -> Path:
    """Write the report of a search, running or finished."""
    return _written(folder / NAME, search_page(found, running=not found.over), open)


def _several(given: Any) -> Sequence[Any]:
    alone = isinstance(given, str) or not isinstance(given, Sequence) or not given
    return [given] if alone else given


def _one(name: str, given: Any) -> Run:
    if isinstance(given, Result):
        return source.of_result(given)
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError.here(
            f"fg.compare: {name!r} is {type(given).__name__}. Give what fg.fit gave, the folder of "
            "a run, or a list of these."
        )
    found = source.read(_folder(given))
    return found if found.trials else found.alone()


def _folder(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        several = " Several runs are compared: fg.compare({'name': [one, two]})."
        raise ArgumentError.here(
            f"fg.report takes what fg.fit gave, or the folder of a run, got {type(given).__name__}."
            + (several if isinstance(given, Sequence | Mapping) else "")
        )
    folder = Path(given)
    if not folder.is_dir():
        raise ReportError.here(f"There is no folder {folder}.")
    return folder


def _written(path: Path, text: str, open: bool = False) -> Path:
    make_folder(path.parent)
    write_whole(path, text.encode())
    if open:
        webbrowser.open(path.resolve().as_uri())
    return path
