"""The arguments that a function still takes, however it was bound and decorated."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def left_to_pass(fun: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `fun` without the arguments that `functools.partial` has bound.

    For a decorated function (`functools.wraps`, `jax.jit`) it is the decorator's own signature if
    that names its arguments, and that of the wrapped function if it passes on `*args` and
    `**kwargs`.
    """
    if isinstance(fun, functools.partial):
        return _without_bound(fun)
    if inspect.ismethod(fun):
        found = left_to_pass(fun.__func__)
        return found.replace(parameters=[*found.parameters.values()][1:])
    inner, called = getattr(fun, "__wrapped__", None), getattr(fun, "__call__", None)  # noqa: B004
    if inner is not None and not (inspect.isfunction(fun) and _names_arguments(fun)):
        return left_to_pass(inner)
    if inspect.ismethod(called) and not hasattr(fun, "__signature__"):  # a callable object
        return left_to_pass(called)
    return inspect.signature(fun, follow_wrapped=False)


def asks_for(fun: Callable[..., Any], name: str) -> bool:
    """Whether `fun` still takes an argument `name`; False for C functions, whose signature is
    unknown."""
    try:
        return name in left_to_pass(fun).parameters
    except ValueError:
        return False


def _names_arguments(fun: Callable[..., Any]) -> bool:
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    own = inspect.signature(fun, follow_wrapped=False).parameters.values()
    return passes_on.isdisjoint(p.kind for p in own)


def _without_bound(fun: functools.partial[Any]) -> inspect.Signature:
    def below() -> None: ...

    below.__signature__ = inner = left_to_pass(fun.func)  # type: ignore[attr-defined]
    by_name = {name: value for name, value in fun.keywords.items() if name in inner.parameters}
    found = inspect.signature(functools.partial(below, *fun.args, **by_name))
    left = [p for name, p in found.parameters.items() if name not in by_name]
    return found.replace(parameters=left)
