"""Checkpoints: the state and the history of a run in one file with a checksum.

The file is an .npz that `np.load` opens. It holds the leaves of the state by name, the history, and
`checkpoint.json`, which describes them; it contains no code. Its last 64 bytes, the comment of the
zip archive, are the SHA-256 of all other bytes. The previous checkpoint is kept beside it.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.handles import Handle
from fedgrad.core.types import State
from fedgrad.training import models
from fedgrad.training.best import Best
from fedgrad.training.config import differences, leaves, name_of
from fedgrad.training.files import RunFolderError, write_whole
from fedgrad.training.history import History
from fedgrad.training.log import number, plain

NAME, PREVIOUS, FORMAT = "checkpoint.npz", "checkpoint.previous.npz", 1
DIGEST = 64  # hexadecimal characters of a SHA-256


@dataclass(frozen=True)
class Checkpoint:
    """A run after some number of rounds."""

    round: int
    state: State
    history: History
    config: dict[str, Any]
    best: Best | None = None  # with fg.keep_best only


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and keep the one that it replaces as the previous one."""
    found, expected = list(leaves(checkpoint.state)), list(checkpoint.config["state"])
    if not set(found) <= set(expected) or any("[" not in n for n in set(expected) - set(found)):
        raise RunFolderError.here(
            "The state cannot be kept: its first one has other leaves than the one after round "
            f"{checkpoint.round}: {sorted(set(found) ^ set(expected))}. Let `init` and `round` "
            "give states of one structure; only entries of dicts may go, in `before_round`."
        )
    arrays: dict[str, np.ndarray] = {}
    description: dict[str, Any] = {"format": FORMAT, "round": checkpoint.round}
    description |= {"config": checkpoint.config, "state": [], "history": []}
    for i, leaf in enumerate(jax.tree.leaves(checkpoint.state)):
        arrays[f"state/{i}"], kind = _encode(leaf)
        description["state"].append({"name": found[i], **kind})
    for i, name in enumerate(checkpoint.history):
        arrays[f"history/{i}/rounds"] = checkpoint.history.rounds(name)
        arrays[f"history/{i}/values"] = checkpoint.history[name]
        description["history"].append({"name": name})
    description["model"] = models.kept(checkpoint.state, arrays, _encode)
    if checkpoint.best is not None:
        description["best"] = _kept_best(checkpoint.best, arrays)
    write_whole(folder / NAME, _pack(arrays, description), folder / PREVIOUS)


def load(
    folder: Path, template: Any, config: dict[str, Any], other_data: bool = False
) -> Checkpoint | None:
    """Load the checkpoint in a folder, or return None if there is none.

    The checkpoint must be of a run with this config (except for the data, with `other_data`). The
    initial state, `template`, gives the structure of the state.
    """
    path = newest(folder)
    if path is None:
        return None
    arrays, description = read(path)
    different = differences(description["config"], config, other_data)
    if different:
        others = 'If they are meant to be others, give resume="other data" to fg.run_folder. '
        only_data = not differences(description["config"], config, other_data=True)
        raise RunFolderError.here(
            f"{path} is of another run:\n  " + "\n  ".join(different) + "\nTo go on with that run, "
            f"call fg.fit as it was called then. {others if only_data else ''}For a new one choose "
            "another out=, or give resume=False to write over it."
        )
    kept = [kind["name"] for kind in description["state"]]
    template = _left(template, set(kept))
    if list(leaves(template)) != kept:
        raise RunFolderError.here(
            f"{path} holds a state that cannot be put together again: its leaves are {kept}, those "
            f"of this algorithm {list(leaves(template))}. Let `before_round` only take entries out "
            "of dicts."
        )
    first, structure = jax.tree.flatten(template)
    state = [
        decode(arrays[f"state/{i}"], kind, first[i]) for i, kind in enumerate(description["state"])
    ]
    whole = jax.tree.unflatten(structure, state)
    return Checkpoint(
        description["round"],
        whole,
        history(arrays, description),
        description["config"],
        _best(arrays, description.get("best"), whole),
    )


def newest(folder: Path) -> Path | None:
    """Return the path of the checkpoint to resume from, if there is one."""
    # Only the previous file exists after a crash between the two renames, or if the user deleted a
    # damaged checkpoint.
    return next((path for path in (folder / NAME, folder / PREVIOUS) if path.exists()), None)


def history(arrays: dict[str, np.ndarray], description: dict[str, Any]) -> History:
    """Return the history in a checkpoint returned by `read`."""
    columns = {
        column["name"]: (arrays[f"history/{i}/rounds"], arrays[f"history/{i}/values"])
        for i, column in enumerate(description["history"])
    }
    return History(columns)


def _kept_best(best: Best, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Add the arrays of the best model to `arrays` and return its description."""
    found = [_encode(leaf) for leaf in jax.tree.leaves(best.params)]
    arrays |= {f"best/{i}": array for i, (array, _) in enumerate(found)}
    at, value = (plain(np.asarray(x)) for x in (best.round, best.value))
    leaves = [kind for _, kind in found]
    return {"round": at, "value": value, "metric": best.metric, "leaves": leaves}


def _best(arrays: dict[str, np.ndarray], kept: dict[str, Any] | None, state: State) -> Best | None:
    """Rebuild the best model, which has the same structure as the model in the state."""
    if kept is None:
        return None
    first, structure = jax.tree.flatten(state.params)
    leaves = [decode(arrays[f"best/{i}"], k, first[i]) for i, k in enumerate(kept["leaves"])]
    params = jax.tree.unflatten(structure, leaves)
    return Best(params, number(kept["round"]), number(kept["value"]), kept["metric"])


def _left(state: State, names: set[str], at: tuple[Any, ...] = ()) -> State:
    """Drop the dict entries with no leaf in `names`, such as the losers that a race has dropped."""
    children, structure = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: node is not state
    )
    if any(child is state for _, child in children):  # a leaf
        return state
    parts = [(at + step, child) for step, child in children]
    if not isinstance(state, dict):
        return jax.tree.unflatten(structure, [_left(child, names, path) for path, child in parts])

    def stays(path: tuple[Any, ...], child: Any) -> bool:
        below, _ = jax.tree_util.tree_flatten_with_path(child)
        return not below or any(name_of(path + step) in names for step, _ in below)

    return {p[-1].key: _left(child, names, p) for p, child in parts if stays(p, child)}


def _pack(arrays: dict[str, np.ndarray], description: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("checkpoint.json", json.dumps(description, indent=1))
        archive.comment = b"-" * DIGEST
    content = file.getbuffer()[:-DIGEST]
    return bytes(content) + hashlib.sha256(content).hexdigest().encode()


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read and verify a checkpoint file; return its arrays and their description."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunFolderError.here(f"Cannot read {path}: {error.strerror}.") from error
    if hashlib.sha256(content[:-DIGEST]).hexdigest().encode() != content[-DIGEST:]:
        raise RunFolderError.here(
            f"{path} is damaged: its {len(content):,} bytes do not fit its checksum. "
            + _advice(path)
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    description = json.loads(arrays.pop("checkpoint.json"))
    if description["format"] != FORMAT:
        raise RunFolderError.here(
            f"{path} has format {description['format']}, this version of fedgrad reads {FORMAT}. "
            "Use the version that wrote it."
        )
    return arrays, description


def _advice(path: Path) -> str:
    older = path.with_name(PREVIOUS)
    if path.name == NAME and older.exists():
        try:
            round = read(older)[1]["round"]
        except RunFolderError:
            return f"So is {older.name}. Give resume=False to start again."
        return f"Delete it to go on from the one before it, {older.name}, of round {round}."
    return "Give resume=False to start again."


def _encode(leaf: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Convert a leaf to an array that .npy can hold, and describe how to convert it back."""
    if isinstance(leaf, Handle):
        text = json.dumps(leaf.saved())
        return np.frombuffer(text.encode(), np.uint8), {"of": "nodes"}
    kind: dict[str, Any] = {"of": "jax" if isinstance(leaf, jax.Array) else "numpy"}
    if kind["of"] == "jax" and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind |= {"of": "key", "implementation": str(jax.random.key_impl(leaf))}
        leaf = jax.random.key_data(leaf)
    # Weak types take part in dtype promotion, so losing them would change later rounds.
    kind["weak"] = bool(getattr(leaf, "weak_type", False))
    array = np.asarray(leaf)
    kind |= {"dtype": array.dtype.name, "shape": list(array.shape)}
    if array.dtype.kind not in "biufc":  # such as bfloat16, which .npy cannot represent
        array = np.frombuffer(array.tobytes(), np.uint8)
    return array, kind


def decode(array: np.ndarray, kind: dict[str, Any], first: Any = None) -> Any:
    """Invert `_encode`. For values kept on nodes, `first` is a handle that knows the nodes."""
    if kind["of"] == "nodes":
        return first.restored(json.loads(array.tobytes()))
    dtype = np.dtype(kind["dtype"])
    if array.dtype != dtype:
        array = np.frombuffer(array.tobytes(), dtype)
    array = array.reshape(kind["shape"])
    if kind["of"] == "numpy":
        return array
    if kind["of"] == "key":
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind["implementation"])
    if kind["weak"]:
        scalar = dtype.type(0).item()  # a Python number makes a weakly typed array
        made = jnp.broadcast_to(jnp.asarray(scalar), array.shape).at[...].set(array)
        return made if made.dtype == dtype else jnp.asarray(array)
    return jnp.asarray(array)
