"""Typed errors. A message says where in the user's code, what is wrong, and what is the fix."""

import contextlib
import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


class FederatedError(Exception):
    """Base class of every error that fedgrad raises on purpose."""

    @classmethod
    def here(cls, message: str, name: str | None = None, known: Iterable[str] = ()) -> Self:
        """The error, with the line of the user's code that is calling us now; of a `name` that is
        not `known`, with the nearest that is."""
        return cls(f"{caller()}: {message}" + ("" if name is None else nearest(name, list(known))))


class PlacementError(FederatedError):
    """A value is used at a placement where it is not."""


class CohortError(FederatedError):
    """The clients handed to a program do not fit together: none, or different numbers of them."""


class StoreError(FederatedError):
    """A folder of clients cannot be written, opened or read."""


class ArgumentError(FederatedError, TypeError):
    """An argument of a program is missing, unknown, or of a kind that cannot be placed."""


class PlanError(FederatedError):
    """A program cannot be planned, or cannot be run in the way that was asked for."""


class MissingExtra(FederatedError):
    """Something needs a package that is not installed: one of fedgrad's extras."""


@contextlib.contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Around imports: what is absent is named, with the extra to install."""
    try:
        yield
    except ImportError as error:
        message = f"{what} needs what is not installed ({error}): pip install 'fedgrad[{extra}]'."
        raise MissingExtra.here(message) from error


def nearest(name: str, known: list[str]) -> str:
    """A hint for an unknown name: the closest known one, and all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}."


def known_arguments(
    advice: Mapping[str, str] = {}, further: type | None = None
) -> Callable[[F], F]:
    """Answer an argument that a function does not have with the nearest one that it has, or with
    the `advice` for that name. `further`: the TypedDict that is its `**kwargs`."""

    def wrap(fun: F) -> F:
        signature = inspect.signature(fun)
        if further is not None:
            signature = _with_further(signature, further)
        require = _requires(fun.__name__, signature, advice)

        @functools.wraps(fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            require(*args, **kwargs)
            return fun(*args, **kwargs)

        return cast(F, checked)

    return wrap


def _with_further(signature: inspect.Signature, further: Any) -> inspect.Signature:
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in further.__required_keys__ else None,
        )
        for name in further.__annotations__
    ]
    return signature.replace(parameters=[*own, *more])


def known_fields(cls: C) -> C:
    """The same of a class, for what one of it is made with."""
    require = _requires(cls.__name__, inspect.signature(cls), {})
    made: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        require(*args, **kwargs)
        made(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _requires(
    what: str, signature: inspect.Signature, advice: Mapping[str, str]
) -> Callable[..., None]:
    """Refuses arguments that this signature does not have."""
    known, kinds = list(signature.parameters), list(signature.parameters.values())
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    simple = all(p.kind in usual for p in kinds)
    positions = [p.name for p in kinds if p.kind is usual[0]]
    needed = {p.name for p in kinds if p.default is p.empty}

    def require(*args: Any, **kwargs: Any) -> None:
        # Nearly always nothing is wrong, and this is some ten times as fast as to bind.
        if simple and len(args) <= len(positions):
            given = kwargs.keys() | positions[: len(args)]
            if len(given) == len(args) + len(kwargs) and needed <= given and given <= {*known}:
                return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                raise ArgumentError.here(f"{what}(): {error}.") from None
            meant = difflib.get_close_matches(unknown, [*advice, *known], n=1)
            hint = nearest(unknown, known)
            if unknown in advice:
                hint = f" {advice[unknown]}"
            elif meant and meant[0] not in known:
                hint = f" Did you mean {meant[0]!r}? {advice[meant[0]]}"
            raise ArgumentError.here(f"{what}() has no argument {unknown!r}.{hint}") from None

    return require


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no number of rounds, clients, examples ..."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError.here(f"{name}={value!r}: give a whole number of at least {least}.")


_NOT_THE_USER = tuple(
    os.path.dirname(path) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__, os.__file__)  # fedgrad, jax, Python
)


def caller() -> str:
    """`file.py:41` of the user's code that is calling us now."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if os.path.sep + "site-packages" + os.path.sep not in name:
            if not name.startswith(_NOT_THE_USER) and not name.startswith("<"):
                break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
