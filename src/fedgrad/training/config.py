"""What a run is: everything that must be the same for its checkpoint to be continued."""

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
from fedgrad.clients.population import Population
from fedgrad.core.arguments import read_arguments
from fedgrad.core.control import text_of
from fedgrad.core.primitives import make_jaxpr
from fedgrad.core.trace import struct
from fedgrad.core.types import State
from fedgrad.federation.protocol.values import NodeValue
from fedgrad.training.course import Course, Draw
from fedgrad.training.evaluation import Evaluations
from fedgrad.training.log import plain

# May differ between a run and its continuation: how long, and what it runs on.
FREE = ("rounds", "planned", "versions")
DATA = ("populations", "evaluations")
# Where these differ, what a round takes and keeps does, too.
ANOTHER_STATE = tuple(
    f"algorithm.{name}" for name in ("name", "learns", "tuning.", "finds", "average", "schedules.")
)


def brief(course: Course, rounds: int) -> dict[str, Any]:
    """What one wants to know about a run, in a few words."""
    algorithm = course.algorithm
    return {
        "algorithm": {**algorithm.settings, "name": algorithm.name},
        "hyper": {
            name: plain(np.asarray(v)) for name, v in names_of.paths(algorithm.hyper).items()
        },
        "cohort_size": course.cohort_size,
        "clients": len(course.populations["cohort"]),
        "rounds": rounds,
    }


def describe(course: Course, state: State, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The run as JSON. `state` is its first one."""
    algorithm, hyper, draw = course.algorithm, course.algorithm.hyper, course.draw(1)
    scheduled = {name: _values(s) for name, s in names_of.schedules(hyper).items()}
    return {
        "algorithm": {
            **algorithm.settings,
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
    """What differs between two descriptions, as sentences; with `other_data`, beside their data."""
    old, new = (names_of.paths(_comparable(one, then, now)) for one in (then, now))
    free = list(FREE)
    if then.get("versions") != now.get("versions"):
        # Other versions write the same program in other words, and round in other places.
        free += ["algorithm.program", "algorithm.schedules"]
    if "name" not in then.get("algorithm", {}):  # an older version wrote down less
        more = set(now.get("algorithm", {})) - set(then.get("algorithm", {}))
        free += [f"algorithm.{name}" for name in more]
    if "fixed" not in then:
        free.append("fixed")
    if old.get("algorithm.program", "") == new.get("algorithm.program"):
        # What optax has made is told by what is inside, which another version may call otherwise.
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
            meant.append("algorithm.program")  # which is another one for more examples
        found = [n for n in found if n not in meant]
    if any(n.startswith(ANOTHER_STATE) for n in found):
        # It has other rounds, another state and other cohorts: that needs not be said, too.
        found = [n for n in found if n != "algorithm.round" and not _comes_along(n, old, new)]
    told = [name for name in found if not _digests(name)]
    # What was written down beside it mostly says the same in other words, a command line always.
    beside = [name for name in told if name.startswith("config.")]
    said_elsewhere = [n for n in beside if ".command." in n]
    told = [n for n in told if n not in beside] or [n for n in beside if n not in said_elsewhere]
    told = told or said_elsewhere
    said = [
        f"{called(n)}: {_said(old.get(n))} in the checkpoint, {_said(new.get(n))} now."
        for n in told
    ]
    # A digest differs for any reason: it says something where nothing else does.
    digests = {n: words for n in found if (words := _digests(n)) and not _known(n, found)}
    for n in digests:
        if n.startswith(DATA) and not (n in old and n in new):
            digests[n] = f"whether {_whose(n)} have the examples of the checkpoint is not known"
    return said + [f"{words}." for words in digests.values()]


def _comparable(one: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    """A description, of whose data only that is left which two runs can be compared by: the
    evaluations that both have; and digests of all examples, or of some rows where an older version
    wrote the checkpoint, which knew no others."""
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
    """Whether both runs have the clients that this is said of."""
    clients = f"{name.rpartition('.')[0]}.clients"
    return clients in old and clients in new


def _comes_along(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a part of the state, a cohort or a way to tune is only in one of two runs."""
    parts = ("state.", "populations.", "algorithm.tuning.")
    return name.startswith(parts) and not (name in old and name in new)


def _digests(name: str) -> str:
    """What it means that this digest differs; nothing, if it is not one."""
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
    """Whether something else that was found is why this digest differs."""
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
    """`batch size of clients`, `cohort size`; what users name with dots stays as they write it."""
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
    """Whom `populations.NAME.digest` or `evaluations.NAME.digest` is of."""
    group, _, rest = name.partition(".")
    who = rest.rpartition(".")[0]
    if group == "evaluations":
        return f"clients of the evaluation {who!r}" if who else "clients of the evaluation"
    return "clients" if who == "cohort" else f"clients of {who}"


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def leaves(tree: Any) -> dict[str, str]:
    """The leaves of a pytree: what each is called and what it is, `float32[60,10]`."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        name_of(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in named
    }


def name_of(path: Any) -> str:
    """What a leaf is called, from where it is: `params['w']`."""
    return jax.tree_util.keystr(path).lstrip(".")


def _program(course: Course, state: State, draw: Draw) -> str | None:
    """A digest of what the round computes, which names and shapes do not tell: the batch size."""
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
    """Digests of the arrays that a loss reads and nobody trains: `fixed['in']`."""
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
    """What a schedule says, for as many rounds as can be looked at quickly."""
    return schedule.values(LOOKED_AT)


def _shown(values: np.ndarray) -> str:
    rounds = [10**k for k in range(len(str(LOOKED_AT)) - 1)]
    first = ", ".join(f"{values[i]:.5g}" for i in (0, *rounds))
    return f"a schedule, {first} in rounds 0, {', '.join(map(str, rounds))}"


def judged_by(evaluations: Evaluations) -> dict[str, Any]:
    """The data of evaluations by name, as far as they have any."""
    return {
        name: {**_data(one.of), "held_out": None if one.held_out is None else str(one.held_out)}
        for name, one in evaluations.by_name.items()
        if one.program is not None
    }


def _data(clients: Any) -> dict[str, Any]:
    """What tells a population or a cohort from others."""
    return {"clients": len(clients), "digest": getattr(clients, "digest", None)}


def _rows(clients: Population) -> dict[str, Any]:
    """What checkpoints say of a population that have no digest of all examples."""
    found: dict[str, Any] = {}
    if clients.counts is not None:
        found["examples"] = int(clients.counts.sum())
    if rows := clients.some_data():
        found["data"] = _digest([_content(x) for x in rows])
    return found


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, NodeValue):  # the same for all clients, when they begin
        return str(leaf.remote.of(0).source).encode()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(leaf).tobytes()


def _digest(parts: list[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]
