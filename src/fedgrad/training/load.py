"""A run that is in its folder, without the algorithm and the clients: `fg.load`."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import known_arguments
from fedgrad.core.types import Hyper, Params
from fedgrad.training import checkpoint, models
from fedgrad.training.best import Best
from fedgrad.training.files import SEARCH, RunFolderError
from fedgrad.training.fit import Result
from fedgrad.training.history import History
from fedgrad.training.log import number


@dataclass(frozen=True, repr=False)
class LoadedState:
    """Of a state that was loaded, the model, and all arrays by name."""

    arrays: Mapping[str, Any]
    model: Callable[[], Params]

    @property
    def params(self) -> Params:
        """The model."""
        return self.model()

    @property
    def last(self) -> Params:
        """The model that training goes on with, which only the algorithm knows."""
        raise RunFolderError.here(
            "A run that was loaded has its model, as params; what training goes on with is known "
            "to the algorithm. Call fg.fit as it was called then, with the same out=."
        )


@known_arguments()
def load(folder: str | os.PathLike[str], like: Params | None = None) -> Result:
    """The run in a folder that was given as `fg.fit(..., out=)`, as of its last checkpoint: its
    `params`, `hyper`, `history` and `rounds`, also while it goes on. It needs neither the algorithm
    nor the clients.

    A model of dicts, lists and tuples is there as it was. One of other classes, such as an Equinox
    module, needs one `like` it, with whatever numbers; without it the `best` one, where
    `fg.keep_best` kept it, is a dict of arrays by name.
    """
    path = checkpoint.newest(Path(folder))
    if path is None and (Path(folder) / SEARCH).exists():
        raise RunFolderError.here(
            f"{folder} holds a search, not a run. Call fg.random_search or fg.grid_search as it "
            "was called then, with the same out=: of what is there it trains nothing again, and "
            f"gives all of it. fg.report({str(folder)!r}) shows it."
        )
    if path is None:
        raise RunFolderError.here(
            f"{folder} has no run: there is no {checkpoint.NAME} in it. Name the folder that was "
            "given as fg.fit(..., out=)."
        )
    arrays, description = checkpoint.read(path)
    kept = description.get("model")
    model = functools.partial(models.read, arrays, kept, like, checkpoint.decode)
    state = LoadedState(_named(arrays, description), model)
    history, config = checkpoint.history(arrays, description), description["config"]
    if like is not None:
        model()  # what does not fit is said now
    name = config["algorithm"].get("name", config["algorithm"]["round"])
    hyper, best = _hyper(config["hyper"], history), _best(arrays, description, like)
    ended = (history, description["round"], _stopped(Path(folder)))
    return Result(state, hyper, *ended, name=name, best=best)


def _named(arrays: Mapping[str, np.ndarray], description: Mapping[str, Any]) -> dict[str, Any]:
    return {
        kind["name"]: checkpoint.decode(arrays[f"state/{i}"], kind)
        for i, kind in enumerate(description["state"])
        if kind["of"] != "nodes"
    }


def _best(
    arrays: dict[str, np.ndarray], description: dict[str, Any], like: Params | None
) -> Best | None:
    """The best model that was kept, which has the structure of every other."""
    kept, model = description.get("best"), description.get("model")
    if kept is None or model is None:
        return None
    leaves = [
        {"name": leaf["name"], "at": f"best/{i}", **kind}
        for i, (leaf, kind) in enumerate(zip(model["leaves"], kept["leaves"], strict=True))
    ]
    found = {**model, "leaves": leaves}
    if like is None and not models.is_plain(model):
        params: Params = {
            leaf["name"]: checkpoint.decode(arrays[leaf["at"]], leaf) for leaf in leaves
        }
    else:
        params = models.read(arrays, found, like, checkpoint.decode)
    return Best(params, number(kept["round"]), number(kept["value"]), kept["metric"])


def _hyper(first: Mapping[str, Any], history: History) -> Hyper:
    """Those that it began with, and what was learned since, nested as they were."""
    learned = {n: v[-1].item() for n, v in Metrics.of(history).hyper.items() if v.ndim == 1}
    nested: dict[str, Any] = {}
    for name, value in {**first, **{n: v for n, v in learned.items() if n in first}}.items():
        *groups, last = name.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return nested


def _stopped(folder: Path) -> str | None:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("stopped")
    except (OSError, ValueError):
        return None
