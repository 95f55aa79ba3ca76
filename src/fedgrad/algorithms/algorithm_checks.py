"""Checks of an algorithm: when it is made, and when its round is traced.

Neither check costs anything at run time: the second one happens while JAX traces the round.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.metrics import require_metrics
from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import SERVER, is_client
from fedgrad.core.program import Program
from fedgrad.core.types import Hyper, Params, State

ROUND = "round(state, hyper, cohort, key)"
SEE = "See docs/write-your-own-algorithm.md."


def require_algorithm(
    init: Any,
    round: Any,
    hyper: Any,
    loss: Any,
    further: Mapping[str, Any],
    client_init: Any,
    before_round: Any,
) -> None:
    """Refuse the parts of an algorithm that do not fit together."""
    _require_function("init", init, ("params", "hyper"), "-> the first state")
    if not callable(loss):
        _refuse(f"loss={loss!r} is no function. Give loss(params, batch), one number per example.")
    _require_hyper(hyper)
    if client_init is not None:
        _require_function("client_init", client_init, ("params", "clients"), "-> a client's state")
    if before_round is not None:
        _require_function(
            "before_round", before_round, ("state", "done", "planned"), "-> the state"
        )
    _require_round(round, further, client_init is not None)


def _require_round(round: Any, further: Mapping[str, Any], keeps: bool) -> None:
    if not isinstance(round, Program):
        _refuse(
            f"round={round!r} is no program. Decorate it: @fg.program(cohort=fg.CLIENTS) above "
            f"def {ROUND}."
        )
    known = round.signature.parameters
    if any(p.kind is p.VAR_POSITIONAL for p in known.values()):
        return  # it forwards its arguments
    by_position = [n for n, p in known.items() if p.kind is not p.KEYWORD_ONLY]
    if len(by_position) < 4:
        _refuse(
            f"{round.name}{round.signature} takes {len(by_position)} arguments by position. A "
            f"round is called with four: def {ROUND}."
        )
    state, hyper, cohort, key = by_position[:4]
    if cohort not in round.placements:
        _refuse(
            f"{round.name}: its third argument, {cohort!r}, is the cohort, but it is at the server."
            f" Place it: @fg.program({cohort}=fg.CLIENTS)."
        )
    for name in (state, hyper, key):
        if name in round.placements:
            _refuse(
                f"{round.name}: {name!r} is placed at clients, but it is the server's: the order is"
                f" {ROUND}. Leave it out of @fg.program(...), and fg.broadcast what clients need."
            )
    needed = [*further, *(["client_state"] if keeps else [])]
    for name in needed:
        if name not in known or name not in round.placements:
            what = "client_init= is given" if name == "client_state" else f"cohorts= has {name!r}"
            _refuse(
                f"{round.name}{round.signature}: {what}, so it takes {name!r}, at clients: "
                f"@fg.program(..., {name}=fg.CLIENTS) and def round(..., {name})."
            )
    for name, p in known.items():
        if name in (state, hyper, cohort, key, *needed) or p.default is not p.empty:
            continue
        if p.kind is p.VAR_KEYWORD:
            continue
        way = "client_init=" if name == "client_state" else f"cohorts={{{name!r}: population}}"
        _refuse(
            f"{round.name}{round.signature}: nobody gives it {name!r}. What clients keep comes "
            f"with client_init=, a further cohort with cohorts=: write {way}; what is always the "
            "same, bind with functools.partial."
        )


def _require_function(name: str, fun: Any, given: tuple[str, ...], gives: str) -> None:
    form = f"def {name}({', '.join(given)})"
    if not callable(fun):
        _refuse(f"{name}={fun!r} is no function. Write {form} {gives}.")
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # e.g. a builtin
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        called = getattr(fun, "__name__", name)
        _refuse(
            f"{name}= is called with ({', '.join(given)}), but {called}{signature}: {error}. Write "
            f"{form} {gives}."
        )


def _require_hyper(hyper: Any) -> None:
    if not isinstance(hyper, Mapping):
        _refuse(
            f"hyper={hyper!r}: give a dict of numbers by name, such as "
            '{"server": {"learning_rate": 1.0}}; {} if there are none.'
        )
    for name, leaf in names_of.paths(hyper).items():
        known = isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
        if not (known or callable(leaf) or hasattr(leaf, "dtype")):
            _refuse(
                f"the hyperparameter {name!r} is {type(leaf).__name__} {leaf!r}. Hyperparameters "
                "are numbers, or functions of the round number. Bind what is neither with "
                "functools.partial."
            )


def require_state(found: Any, name: str) -> State:
    """Return the result of `init`; refuse it if it is not a state."""
    # Do not read `params`: computing an average is work.
    if "params" not in getattr(found, "__dict__", {}) and not hasattr(type(found), "params"):
        _refuse(
            f"{name} gave {type(found).__name__}, which has no `params`: everybody reads the model "
            "there. Give a dataclass that is a pytree (@jax.tree_util.register_dataclass), with a "
            "field `params`; or that of another algorithm, fg.fed_avg(loss).init(params, hyper)."
        )
    leaves = jax.tree.leaves(found)
    if len(leaves) == 1 and leaves[0] is found:
        _refuse(
            f"{name} gave {type(found).__name__}, which is no pytree. Write "
            "@jax.tree_util.register_dataclass above @dataclass(frozen=True)."
        )
    return found


def checked_init(init: Callable[..., Any], params: Params, hyper: Hyper) -> State:
    """Return `init(params, hyper)`; refuse it if it is not a state."""
    return require_state(init(params, hyper), f"init= ({getattr(init, '__name__', 'init')})")


def checked(round: Program, keeps: bool) -> Program:
    """Return the round with checks of its results, which run while it is traced."""
    if getattr(round.fun, "checked", None) is keeps:
        return round
    # Cached on the round, so that another algorithm made of it compiles nothing again.
    looks = round.once(("checked", keeps), lambda: _looking(round, keeps))
    return looks.on(round.executor)


def _looking(round: Program, keeps: bool) -> Program:
    fun = getattr(round.fun, "unchecked", round.fun)

    @functools.wraps(fun)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        found = fun(*args, **kwargs)
        before = args[0] if args else next(iter(kwargs.values()))
        return _require_result(round.name, before, found, keeps)

    looked_at.checked = keeps  # type: ignore[attr-defined]
    looked_at.unchecked = fun  # type: ignore[attr-defined]
    look = functools.partial(_require_places, round.name)
    return replace(round, fun=looked_at, look=look)


def _require_result(name: str, before: State, found: Any, keeps: bool) -> Any:
    form = "(state, metrics, client_state)" if keeps else "(state, metrics)"
    if not isinstance(found, tuple) or len(found) != (3 if keeps else 2):
        got = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        why = "with a client_init, a" if keeps else "a"
        _refuse(f"{name}: {why} round gives {form}, not {got}.")
    require_state(found[0], name)
    require_metrics(found[1])
    require_same(f"{name}: the state", before, found[0])
    return found


def _require_places(name: str, places: Any) -> None:
    """Refuse a state or metrics placed at clients, and a client state placed at the server."""
    for i, what in enumerate(("state", "metrics", "client_state")[: len(places)]):
        named, _ = jax.tree_util.tree_flatten_with_path(places[i])
        for path, at in named:
            part = f"{name}: {what}{jax.tree_util.keystr(path)}"
            if what != "client_state" and is_client(at):
                _refuse(
                    f"{part} is at {at}, one for each client, but it is the server's. Sum it: "
                    "fg.mean(x) or fg.sum(x)."
                )
            if what == "client_state" and at == SERVER:
                _refuse(f"{part} is at the server, but clients keep it. Send it: fg.broadcast(x).")


def require_same(what: str, before: Any, after: Any) -> None:
    """Refuse a state whose structure, shapes or dtypes change: every round would be compiled again,
    and no checkpoint could be resumed."""
    old, new = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (before, after))
    tree: Any = jax.tree.structure(after)
    if tree != jax.tree.structure(before):
        missing, more = ({jax.tree_util.keystr(p) for p, _ in x} for x in (old, new))
        changes = {"without": missing - more, "with": more - missing}
        said = [f"{word} {', '.join(sorted(names))}" for word, names in changes.items() if names]
        _refuse(
            f"{what} has another structure after a round, {' and '.join(said) or tree}. Give "
            "back what init made: dataclasses.replace(state, params=...)."
        )
    for (path, a), (_, b) in zip(old, new, strict=True):
        was, now = ((jnp.shape(x), jnp.result_type(x)) for x in (a, b))
        if was != now:
            text = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in (was, now)]
            _refuse(
                f"{what}{jax.tree_util.keystr(path)} was {text[0]}, and is {text[1]} after a round."
                " Give it back as it was (x.astype(old.dtype)), or let init make it so."
            )


def _refuse(message: str) -> NoReturn:
    raise ArgumentError.here(f"fg.Algorithm: {message} {SEE}")
