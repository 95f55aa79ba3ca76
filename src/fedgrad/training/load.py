"""Load a run from its folder, without the algorithm and the clients: `fg.load`."""

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
    """The model and the named arrays of a loaded state."""

    arrays: Mapping[str, Any]
    model: Callable[[], Params]

    @property
    def params(self) -> Params:
        """The model."""
        return self.model()

    @property
    def last(self) -> Params:
        """Unavailable: only the algorithm knows which model training continues from."""
        raise RunFolderError.here(
            "A run that was loaded has its model, as params; what training goes on with is known "
            "to the algorithm. Call fg.fit as it was called then, with the same out=."
        )


@known_arguments()
def load(folder: str | os.PathLike[str], like: Params | None = None) -> Result:
    """Load a run from the folder given as `fg.fit(..., out=)`, as of its last checkpoint.

    The result has its `params`, `hyper`, `history` and `rounds`. The run may still be going on.
    Neither the algorithm nor the clients are needed.

    Args:
        folder: The folder of the run.
        like: A model with the same structure and any numbers. It is needed for models that contain
            other classes than dicts, lists and tuples, such as Equinox modules. Without it, the
            `best` model kept by `fg.keep_best` is a dict of arrays by name for such models.

    Returns:
        A `Result`, as `fg.fit` returns.

    Raises:
        RunFolderError: If the folder holds no run, or a search, or `like` does not fit the model.
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
        model()  # fail now if `like` does not fit
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
    """Rebuild the best model, which has the same structure as the model in the state."""
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
    """Return the initial hyperparameters, updated with the learned values, nested as they were."""
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
