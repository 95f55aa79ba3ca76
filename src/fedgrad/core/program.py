"""A program: one function written from the view of the server and of one client."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fedgrad.core.errors import ArgumentError, PlacementError, nearest
from fedgrad.core.placement import Placement
from fedgrad.core.primitives import inside


class Executor(Protocol):
    """Runs a program on arguments. Executors are immutable and hashable, and programs keep what was
    compiled for them; one that has to end (because it has connections, say) sets `remembers`, and
    keeps what it compiled itself."""

    def compile(self, program: "Program") -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A federated computation. Make one with `@fg.program(...)`; call it like a function.

    Client arguments are stacked pytrees (a leading axis over clients) or cohorts. Called inside
    another program, it is simply a part of that program, and sees one client's values.
    """

    fun: Callable[..., Any]
    placements: dict[str, Placement]
    executor: Executor | None = None
    derived: bool = False  # it is a derivative of another program
    signature: inspect.Signature = dataclasses.field(repr=False, default=None)  # type: ignore[assignment]
    # What has been made of the program: shared by copies, so that `.on(...)` compiles only once.
    made: dict[Any, Any] = dataclasses.field(repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for attribute in (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"):
            value = self.fun if attribute == "__wrapped__" else getattr(self.fun, attribute, None)
            object.__setattr__(self, attribute, value)
        if self.signature is None:
            object.__setattr__(self, "signature", _signature(self.fun))
        parameters = self.signature.parameters
        for name, placement in self.placements.items():
            if name not in parameters:
                raise ArgumentError.here(
                    f"@fg.program({name}=...): {self.name} has no argument {name!r}."
                    + nearest(name, list(parameters))
                )
            if not isinstance(placement, Placement):
                raise ArgumentError.here(
                    f"@fg.program({name}={placement!r}): name a client placement, for example "
                    f"fg.CLIENTS. Arguments that are not named are at the server."
                )

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    @property
    def client_placements(self) -> tuple[str, ...]:
        """The placements of the arguments, by name."""
        return tuple(dict.fromkeys(p.name for p in self.placements.values()))

    def on(self, executor: Executor) -> "Program":
        """The same program, run by another executor."""
        return dataclasses.replace(self, executor=executor)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError.here(f"{self.name}{self.signature}: {error}.") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def call(self, arguments: dict[str, Any]) -> Any:
        """The function itself, on what one client and the server see."""
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        return self.fun(*bound.args, **bound.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.by_name(self.bind(args, kwargs))

    def by_name(self, arguments: dict[str, Any]) -> Any:
        """The result for all arguments by name, also those that can only be given by position."""
        if inside():
            self._require_placements()
            return self.call(arguments)
        executor = self.executor or default_executor()
        return self._compiled(executor)(arguments)

    def _compiled(self, executor: Executor) -> Callable[[dict[str, Any]], Any]:
        if getattr(executor, "remembers", False):
            return executor.compile(self)
        return self.once(executor, lambda: executor.compile(self))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, the first time; what it made, later."""
        found = self.made.get(key)
        # setdefault on a dict is atomic: two threads that make it at once end up with one.
        return found if found is not None else self.made.setdefault(key, make())

    def _require_placements(self) -> None:
        for name, placement in self.placements.items():
            if not inside(placement.name):
                raise PlacementError.here(
                    f"{self.name} is called inside of a program that has no clients "
                    f"{placement.name!r}, but its argument {name!r} is there. Give the outer "
                    f"program an argument at {placement!r}."
                )


def program(fun: Callable[..., Any] | None = None, /, **placements: Placement) -> Any:
    """Decorator: `@fg.program(z=fg.CLIENTS)`. Arguments that are not named are at the server."""
    if fun is not None and not callable(fun):
        raise ArgumentError.here(f"@fg.program decorates a function, got {fun!r}.")
    if fun is None:
        return lambda fun: program(fun, **placements)
    if next(iter(inspect.signature(fun).parameters), "") == "self":
        raise ArgumentError.here(
            f"{fun.__name__}: a method cannot be a program, because self is not data. Decorate a "
            "function inside of the method, which can use self."
        )
    return Program(fun, dict(placements))


def _signature(fun: Callable[..., Any]) -> inspect.Signature:
    """What is left to pass: a keyword that functools.partial has bound is no argument."""
    signature = inspect.signature(fun)
    bound = fun.keywords if isinstance(fun, functools.partial) else {}
    left = [p for name, p in signature.parameters.items() if name not in bound]
    return signature.replace(parameters=left)


_default: contextvars.ContextVar[Executor] = contextvars.ContextVar("fedgrad_executor")
_installed: list[Executor] = []


def install_default(executor: Executor) -> None:
    """Called once, by fedgrad.executors: the core does not know which executors there are."""
    _installed[:] = [executor]


def default_executor() -> Executor:
    """The executor of programs that were not given one by `.on(...)`."""
    return _default.get(_installed[0])


@contextlib.contextmanager
def default(executor: Executor) -> Iterator[None]:
    """`with fg.executors.default(fg.executors.reference()):` for programs without `.on(...)`."""
    token = _default.set(executor)
    try:
        yield
    finally:
        _default.reset(token)
