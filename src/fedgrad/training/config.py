"""What a run is: everything that must be the same for its checkpoint to be continued."""

import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.hyper import LOOKED_AT
from fedgrad.clients.population import Population
from fedgrad.core.arguments import read_arguments
from fedgrad.core.primitives import make_jaxpr
from fedgrad.core.trace import struct
from fedgrad.core.types import State
from fedgrad.federation.protocol.values import NodeValue
from fedgrad.training.course import Course, Draw
from fedgrad.training.log import plain

# May differ between a run and its continuation: how long, and what it runs on.
FREE = ("rounds", "planned", "versions")


def describe(course: Course, state: State, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The run as JSON. `state` is its first one."""
    algorithm, hyper, draw = course.algorithm, course.algorithm.hyper, course.draw(1)
    scheduled = {name: _values(s) for name, s in names_of.schedules(hyper).items()}
    return {
        "algorithm": {
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
        "populations": {name: _population(clients) for name, clients in course.populations.items()},
        "first_key": _digest([_content(draw.key)]),
        "versions": {name: version(name) for name in ("fedgrad", "jax", "jaxlib", "numpy")},
        **settings,
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions, as sentences."""
    old, new = names_of.paths(then), names_of.paths(now)
    free = list(FREE)
    if then.get("versions") != now.get("versions"):
        # Other versions write the same program in other words, and round in other places.
        free += ["algorithm.program", "algorithm.schedules"]
    return [
        f"{name}: {old.get(name, 'nothing')} in the checkpoint, {new.get(name, 'nothing')} now."
        for name in [*old, *(n for n in new if n not in old)]
        if old.get(name) != new.get(name)
        and not any(name == f or name.startswith(f"{f}.") for f in free)
    ]


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
    text = re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr.jaxpr))
    return _digest([text.encode(), *map(_content, jaxpr.consts)])


def _values(schedule: names_of.Schedule) -> np.ndarray:
    """What a schedule says, for as many rounds as can be looked at quickly."""
    return schedule.values(LOOKED_AT)


def _shown(values: np.ndarray) -> str:
    rounds = [10**k for k in range(len(str(LOOKED_AT)) - 1)]
    first = ", ".join(f"{values[i]:.5g}" for i in (0, *rounds))
    return f"a schedule, {first} in rounds 0, {', '.join(map(str, rounds))}"


def _population(clients: Population) -> dict[str, Any]:
    found: dict[str, Any] = {"clients": len(clients)}
    if clients.counts is not None:
        found["examples"] = int(clients.counts.sum())
    if data := clients.some_data():
        found["data"] = _digest([_content(x) for x in data])
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
