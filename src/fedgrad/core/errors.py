"""Typed errors. A message says where in the user's code, what is wrong, and how to fix it."""

import contextlib
import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import jax
import numpy as np

from fedgrad.core.notebook import cell, place

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class FederatedError(Exception):
    """Base class of every error that fedgrad raises on purpose."""

    @classmethod
    def here(cls, message: str, name: str | None = None, known: Iterable[str] = ()) -> Self:
        """Return the error with the line of the user's code that is calling us now; for a `name`
        that is not `known`, also with the nearest known one."""
        return cls(f"{caller()}: {message}" + ("" if name is None else nearest(name, list(known))))


class PlacementError(FederatedError):
    """A value is used at another placement than its own."""


class CohortError(FederatedError):
    """The clients passed to a program do not fit together: there are none, or different numbers."""


class StoreError(FederatedError):
    """A folder of clients cannot be written, opened or read."""


class ArgumentError(FederatedError, TypeError):
    """An argument of a program is missing, unknown, or of a kind that cannot be placed."""


class PlanError(FederatedError):
    """A program cannot be planned, or cannot be run in the requested way."""


class MissingExtra(FederatedError):
    """A package that something needs is not installed: one of fedgrad's extras."""


@contextlib.contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Wrap imports: a missing package raises an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        message = f"{what} needs what is not installed ({error}): pip install 'fedgrad[{extra}]'."
        raise MissingExtra.here(message) from error


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the closest known one, and all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}."


def known_arguments(
    advice: Mapping[str, str] = {}, further: type | None = None, called: str | None = None
) -> Callable[[F], F]:
    """Make a function answer an unknown argument with the nearest known one, or with the `advice`
    for that name. `further` is the TypedDict of its `**kwargs`, `called` the name by which users
    call it if that differs from its own."""

    def wrap(fun: F) -> F:
        signature = inspect.signature(fun)
        if further is not None:
            signature = _with_further(signature, further)
        name = called or fun.__name__
        require = _requires(name, signature, advice)

        @functools.wraps(fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            require(*args, **kwargs)
            return fun(*args, **kwargs)

        if called is not None:
            checked.__name__ = checked.__qualname__ = called
        return cast(F, public(checked))

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
    """Apply `known_arguments` to the constructor of a class."""
    return known_fields_of(cls.__name__)(cls)


def known_fields_of(called: str) -> Callable[[C], C]:
    """Apply `known_arguments` to the constructor of a class that users know by another name."""

    def wrap(cls: C) -> C:
        require = _requires(called, inspect.signature(cls), {})
        made: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(made)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            require(*args, **kwargs)
            made(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[misc]
        return public(cls)

    return wrap


def _requires(
    what: str, signature: inspect.Signature, advice: Mapping[str, str]
) -> Callable[..., None]:
    """Return a function that refuses arguments which this signature does not have."""
    known, kinds = list(signature.parameters), list(signature.parameters.values())
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    simple = all(p.kind in usual for p in kinds)
    positions = [p.name for p in kinds if p.kind is usual[0]]
    needed = {p.name for p in kinds if p.default is p.empty}

    def require(*args: Any, **kwargs: Any) -> None:
        # A fast path: usually nothing is wrong, and this is about ten times as fast as to bind.
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
    """Raise unless the value is an integer of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ArgumentError.here(f"{name}={value!r}: give a whole number of at least {least}.")


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_THE_USER = (
    _OURS,
    *(os.path.dirname(path) + os.sep for path in (jax.__file__, os.__file__)),  # jax, Python
    "<",  # generated code; notebook cells are handled separately
)


def is_users(file: str) -> bool:
    foreign = os.path.sep + "site-packages" + os.path.sep in file
    return cell(file) is not None or not (foreign or file.startswith(_NOT_THE_USER))


def caller() -> str:
    """Return the line of the user's code that is calling us: `file.py:41`, or `cell 3, line 4` in a
    notebook."""
    frame = _users_frame()
    return place(frame.f_code.co_filename, frame.f_lineno)


def warn(message: str) -> None:
    """Emit a warning that shows the user's line, as errors do, and none of ours. The line is also
    in the message, because notebooks name cells by temporary files."""
    frame = _users_frame()
    message = f"{place(frame.f_code.co_filename, frame.f_lineno)}: {message}"
    where = (frame.f_code.co_filename, frame.f_lineno)
    seen = frame.f_globals.setdefault("__warningregistry__", {})  # where Python keeps track of them
    warnings.warn_explicit(message, RuntimeWarning, *where, registry=seen)


def _users_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


# --- errors show the user's lines, and none of ours ---------------------------------------------


def public(value: T) -> T:
    """Decorate a function, or a class and its methods, that users call: tracebacks of its errors
    show the user's lines, and none of ours. `FEDGRAD_TRACEBACK=full` in the environment shows
    all."""
    if inspect.isfunction(value):
        return cast(T, _without_our_frames(value))
    for name, member in list(vars(value).items()):
        if inspect.isfunction(member) and (name[0] != "_" or name in ("__init__", "__call__")):
            setattr(value, name, _without_our_frames(member))
    return value


def _without_our_frames(fun: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(fun)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fun(*args, **kwargs)
        except BaseException as error:
            if os.environ.get("FEDGRAD_TRACEBACK") != "full":
                _cut(error)
            raise  # with the traceback that it has now

    return called


def _cut(error: BaseException) -> None:
    """Remove our frames, and whatever runs between them, from a traceback where they are of no use:
    where the message says it all, and where the user's own code fails."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [t.tb_frame.f_code.co_filename for t in frames]
    first = next((i for i, file in enumerate(files) if file.startswith(_OURS)), len(files))
    users = [i for i, file in enumerate(files) if i >= first and is_users(file)]
    after = range(users[-1] + 1 if users else first, len(files))
    if not isinstance(error, FederatedError | KeyboardInterrupt):
        if any(files[i].startswith(_OURS) for i in after):
            return  # a bug of ours, or what looks like one
        users += after
    else:
        if error.__cause__ is not None:
            error.__cause__.__traceback__ = None  # our message restates the cause
        if notes := getattr(error, "__notes__", None):  # JAX's hint about its frames does not apply
            error.__notes__ = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
    chain: TracebackType | None = None
    for i in reversed([*range(first), *users]):
        chain = TracebackType(chain, frames[i].tb_frame, frames[i].tb_lasti, frames[i].tb_lineno)
    error.__traceback__ = chain
