"""The description of a run: everything that must match for its checkpoint to be resumed."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.hyper import LOOKED_AT
from fedgrad.algorithms.objective import WithFixed
from fedgrad.clients.handles import Handle
from fedgrad.clients.population import Population
from fedgrad.core.arguments import read_arguments
from fedgrad.core.control import text_of
from fedgrad.core.primitives import make_jaxpr
from fedgrad.core.trace import struct
from fedgrad.core.types import State
from fedgrad.training.cohort_schedule import Course, Draw
from fedgrad.training.evaluation import Evaluations
from fedgrad.training.log import plain

# These may differ when a run is resumed: its length and the versions of libraries.
FREE = ("rounds", "planned", "versions")
DATA = ("populations", "evaluations")
# If one of these differs, so do the arguments of a round and the structure of the state.
ANOTHER_STATE = tuple(
    f"algorithm.{name}" for name in ("name", "learns", "tuning.", "finds", "average", "schedules.")
)


def brief(course: Course, rounds: int) -> dict[str, Any]:
    """Return a short description of a run."""
    algorithm = course.algorithm
    return {
        "algorithm": {**algorithm.described, "name": algorithm.name},
        "hyper": {
            name: plain(np.asarray(v)) for name, v in names_of.paths(algorithm.hyper).items()
        },
        "cohort_size": course.cohort_size,
        "clients": len(course.populations["cohort"]),
        "rounds": rounds,
    }


def describe(course: Course, state: State, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a run as JSON. `state` is its initial state."""
    algorithm, hyper, draw = course.algorithm, course.algorithm.hyper, course.draw(1)
    scheduled = {name: _values(s) for name, s in names_of.schedules(hyper).items()}
    return {
        "algorithm": {
            **algorithm.described,
            "name": algorithm.name,
            "round": algorithm.round.name,
            "program": _program(course, state, draw),
            "schedules": {name: _digest([_content(v)]) for name, v in scheduled.items()},
        },
        "hyper": {
            **{name: plain(np.asarray(v)) for name, v in names_of.paths(hyper).items()},
            **{name: _shown(values) for name, values in scheduled.items()},
        },
        "state": leaves(state),
        "first_state": _digest([_content(leaf) for leaf in jax.tree.leaves(state)]),
        "fixed": _fixed(algorithm.loss),
        "populations": {
            name: {**_data(clients), **_rows(clients)}
            for name, clients in course.populations.items()
        },
        "first_key": _digest([_content(draw.key)]),
        "versions": {name: version(name) for name in ("fedgrad", "jax", "jaxlib", "numpy")},
        **settings,
    }


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], other_data: bool = False
) -> list[str]:
    """List the differences between two descriptions as sentences; `other_data` ignores the data."""
    old, new = (names_of.paths(_comparable(one, then, now)) for one in (then, now))
    free = list(FREE)
    if then.get("versions") != now.get("versions"):
        # Other versions print the same program differently, and may round differently.
        free += ["algorithm.program", "algorithm.schedules"]
    if "name" not in then.get("algorithm", {}):  # written by an older version, which recorded less
        more = set(now.get("algorithm", {})) - set(then.get("algorithm", {}))
        free += [f"algorithm.{name}" for name in more]
    if "fixed" not in then:
        free.append("fixed")
    if old.get("algorithm.program", "") == new.get("algorithm.program"):
        # Optimizers of optax are described by internal names, which change between versions.
        free += [name for name in new if name.endswith(".optimizer")]
    found = [
        name
        for name in [*old, *(n for n in new if n not in old)]
        if old.get(name) != new.get(name)
        and not any(name == f or name.startswith(f"{f}.") for f in free)
    ]
    if other_data:
        meant = [n for n in found if n.startswith(DATA) and _in_both(n, old, new)]
        if any(n.startswith("populations.") for n in meant):
            meant.append("algorithm.program")  # its shapes depend on the number of examples
        found = [n for n in found if n not in meant]
    if any(n.startswith(ANOTHER_STATE) for n in found):
        # Another algorithm has other rounds, states and cohorts; saying so would be redundant.
        found = [n for n in found if n != "algorithm.round" and not _comes_along(n, old, new)]
    told = [name for name in found if not _digests(name)]
    # `config` mostly repeats other settings, and a command line always does, so it is reported only
    # if nothing else is.
    beside = [name for name in told if name.startswith("config.")]
    said_elsewhere = [n for n in beside if ".command." in n]
    told = [n for n in told if n not in beside] or [n for n in beside if n not in said_elsewhere]
    told = told or said_elsewhere
    said = [
        f"{called(n)}: {_said(old.get(n))} in the checkpoint, {_said(new.get(n))} now."
        for n in told
    ]
    # A digest can differ for many reasons, so it is reported only if nothing else explains it.
    digests = {n: words for n in found if (words := _digests(n)) and not _known(n, found)}
    for n in digests:
        if n.startswith(DATA) and not (n in old and n in new):
            digests[n] = f"whether {_whose(n)} have the examples of the checkpoint is not known"
    return said + [f"{words}." for words in digests.values()]


def _comparable(one: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    """Reduce a description to the data that two runs can be compared by.

    These are the evaluations that both runs have, and the digests of all examples, or of some rows
    if the checkpoint was written by an older version, which recorded no others.
    """
    both = then.get("evaluations", {}).keys() & now.get("evaluations", {}).keys()
    known = any("digest" in told for told in then.get("populations", {}).values())
    left_out = "data" if known else "digest"
    return {
        **one,
        "evaluations": {name: one["evaluations"][name] for name in sorted(both)},
        "populations": {
            name: {what: value for what, value in told.items() if what != left_out}
            for name, told in one.get("populations", {}).items()
        },
    }


def _in_both(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether both runs have the clients that this entry describes."""
    clients = f"{name.rpartition('.')[0]}.clients"
    return clients in old and clients in new


def _comes_along(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a part of the state, a cohort or a tuning setting exists in only one run."""
    parts = ("state.", "populations.", "algorithm.tuning.")
    return name.startswith(parts) and not (name in old and name in new)


def _digests(name: str) -> str:
    """Return what a difference in this digest means, or "" if the name is not a digest."""
    parts = name.split(".")
    if parts[0] in DATA and parts[-1] in ("data", "digest"):
        return f"{_whose(name)} have other examples than those of the checkpoint"
    if parts[0] == "fixed":
        array = name.removeprefix("fixed.")
        return f"the array {array} of fg.with_fixed is another one than in the checkpoint"
    if name.startswith("algorithm.schedules."):
        return (
            f"the schedule of {name.removeprefix('algorithm.schedules.')} is another one later on"
        )
    return {
        "algorithm.program": "a round computes something else than in the checkpoint: another loss "
        "or model, or another algorithm",
        "first_state": "the run begins with other numbers (of `params`) than in the checkpoint",
        "first_key": "key= is another one than in the checkpoint",
    }.get(name, "")


def _known(digest: str, found: list[str]) -> bool:
    """Return whether another difference explains why this digest differs."""
    schedule = digest.removeprefix("algorithm.schedules.")
    if schedule != digest:
        return f"hyper.{schedule}" in found
    why = {
        "algorithm.program": (
            *("algorithm.", "hyper.", "state.", "cohort_size", "populations."),
            "fixed.",
        ),
        "first_state": ("algorithm.", "state."),
    }.get(digest, (digest.removesuffix("data").removesuffix("digest"),))
    return any(name.startswith(why) for name in found if name != digest)


def called(name: str) -> str:
    """Return the display name of an entry, such as `batch size of clients` or `cohort size`.

    Dotted names that users write themselves are left unchanged.
    """
    group, _, rest = name.partition(".")
    if group == "state":
        return rest
    if group in DATA:
        what = name.rpartition(".")[2]
        words = {"examples": "number of examples of ", "held_out": "examples held out of "}
        return words.get(what, "number of ") + _whose(name)
    if group == "algorithm":
        side, _, what = rest.partition(".")
        if rest.startswith("tuning.form."):
            return f"form of {rest.removeprefix('tuning.form.')}"
        whose = {"client": "clients", "server": "the server", "tuning": "self-tuning"}.get(side)
        return f"{what} of {whose}".replace("_", " ") if whose else rest.replace("_", " ")
    return name if rest else name.replace("_", " ")


def _whose(name: str) -> str:
    """Return whose `populations.NAME.digest` or `evaluations.NAME.digest` it is, for messages."""
    group, _, rest = name.partition(".")
    who = rest.rpartition(".")[0]
    if group == "evaluations":
        return f"clients of the evaluation {who!r}" if who else "clients of the evaluation"
    return "clients" if who == "cohort" else f"clients of {who}"


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def leaves(tree: Any) -> dict[str, str]:
    """Return the leaves of a pytree by name, each with its type, such as `float32[60,10]`."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        name_of(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in named
    }


def name_of(path: Any) -> str:
    """Return the name of a leaf from its path, such as `params['w']`."""
    return jax.tree_util.keystr(path).lstrip(".")


def _program(course: Course, state: State, draw: Draw) -> str | None:
    """Return a digest of what a round computes, for facts such as the batch size that names and
    shapes do not show."""
    if not all(clients.here for clients in course.populations.values()):
        return None
    program, hyper = course.algorithm.round, course.algorithm.hyper
    arguments = read_arguments(program, program.bind(*course.arguments(state, hyper, draw)))
    jaxpr, _ = make_jaxpr(
        lambda *flat: program.call(arguments.rebuild(list(flat))),
        program.client_placements,
        *map(struct, arguments.values),
    )
    return _digest([text_of(jaxpr.jaxpr).encode(), *map(_content, jaxpr.consts)])


def _fixed(loss: Any) -> dict[str, str]:
    """Return digests of the arrays that a loss reads but does not train, such as `fixed['in']`."""
    if not isinstance(loss, WithFixed):
        return {}
    named, _ = jax.tree_util.tree_flatten_with_path(loss.fixed)
    return {
        f"fixed{jax.tree_util.keystr(path)}": _digest(
            [f"{leaf.dtype}{leaf.shape}".encode(), _content(leaf)]
        )
        for path, leaf in named
    }


def _values(schedule: names_of.Schedule) -> np.ndarray:
    """Return the values of a schedule for its first rounds, as many as are quick to evaluate."""
    return schedule.values(LOOKED_AT)


def _shown(values: np.ndarray) -> str:
    rounds = [10**k for k in range(len(str(LOOKED_AT)) - 1)]
    first = ", ".join(f"{values[i]:.5g}" for i in (0, *rounds))
    return f"a schedule, {first} in rounds 0, {', '.join(map(str, rounds))}"


def judged_by(evaluations: Evaluations) -> dict[str, Any]:
    """Describe the data of evaluations by name, leaving out those without data."""
    return {
        name: {**_data(one.of), "held_out": None if one.held_out is None else str(one.held_out)}
        for name, one in evaluations.by_name.items()
        if one.program is not None
    }


def _data(clients: Any) -> dict[str, Any]:
    """Return what distinguishes a population or a cohort from others."""
    return {"clients": len(clients), "digest": getattr(clients, "digest", None)}


def _rows(clients: Population) -> dict[str, Any]:
    """Describe a population as checkpoints without a digest of all examples do."""
    found: dict[str, Any] = {}
    if clients.counts is not None:
        found["examples"] = int(clients.counts.sum())
    if rows := clients.some_data():
        found["data"] = _digest([_content(x) for x in rows])
    return found


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Handle):
        return leaf.origin()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(leaf).tobytes()


def _digest(parts: list[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]
