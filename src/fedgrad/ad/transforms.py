"""`grad`, `value_and_grad`, `jacobian`, `hessian`: each maps a program to a program.

    grad: (x@server -> y@server) -> (x@server -> dy/dx@server)

The differentiated argument may also be at clients; then the derivative is there too, and stays
there.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedgrad.ad.derivative import Blocks, Rules, Subject, derivative
from fedgrad.ad.planner import CostModel, choose
from fedgrad.ad.rules import MODES, Mode, impossible, is_float
from fedgrad.clients.examples import Examples
from fedgrad.core.arguments import Arguments, read_inside
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError, known_arguments, nearest
from fedgrad.core.graph import is_client
from fedgrad.core.program import Program
from fedgrad.core.trace import Traced, struct, traced

T = TypeVar("T")
Argnums = int | str | Sequence[int | str]

REMEMBERED = 32  # cached choices of rules, one per set of argument shapes


@known_arguments()
def grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode | CostModel = "auto",
    has_aux: bool = False,
) -> Program:
    """Return the gradient of a program whose result is one number at the server, as a program.

        dx = fg.grad(loss)(x, cohort)

    Args:
        program: The program to differentiate.
        argnums: The arguments to differentiate by, by position or name.
        mode: "forward", "reverse", "mixed", or "auto" for the cheapest mix of them; a
            `fg.CostModel` defines what is cheap.
        has_aux: Whether the program returns (y, aux). The gradient then returns (dy, aux).

    Returns:
        A program with the same arguments. Leaves that are not floating have the derivative None.
    """
    return _derived("grad", program, argnums, mode, has_aux)


@known_arguments()
def value_and_grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode | CostModel = "auto",
    has_aux: bool = False,
) -> Program:
    """Return the value and the gradient of a program: (y, dy), or ((y, aux), dy) with `has_aux`.

    The arguments are those of `fg.grad`.
    """
    return _derived("value_and_grad", program, argnums, mode, has_aux)


@known_arguments()
def jacobian(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode | CostModel = "auto",
    has_aux: bool = False,
) -> Program:
    """Return the Jacobian of a program, in the form of `jax.jacobian`.

    It has the structure of the result, with the structure of the argument at each leaf. The
    arguments are those of `fg.grad`.
    """
    return _derived("jacobian", program, argnums, mode, has_aux)


@known_arguments()
def hessian(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode | CostModel = "auto",
    has_aux: bool = False,
) -> Program:
    """Return the Hessian of a program whose result is one number, in the form of `jax.hessian`.

    It is the Jacobian of the gradient. The arguments are those of `fg.grad`.
    """
    return jacobian(grad(program, argnums, mode, has_aux), argnums, mode, has_aux)


def _derived(
    name: str, program: Program, argnums: Argnums, mode: Mode | CostModel, has_aux: bool
) -> Program:
    """Return the derivative as a program; equal requests return the same object."""
    names, single = argument_names(program, argnums)
    scalar, with_value = name != "jacobian", name == "value_and_grad"
    request = Request(program.on(None), names, single, mode, has_aux, scalar, with_value, name)
    key = (name, names, single, mode, has_aux)
    made = program.once(key, lambda: Program(request, dict(program.placements), derived=True))
    return like_it(program, made)


def like_it(program: Program, made: Program) -> Program:
    """Run a derived program on the executor of the original. A program's cache holds no executor,
    which could keep a federation alive."""
    return made if program.executor is None else made.on(program.executor)


@dataclass(frozen=True, eq=False)
class Request:
    """A derivative of a program, as a function of its arguments. `scalar`: the program returns one
    number."""

    program: Program
    names: tuple[str, ...]  # the arguments to differentiate by
    single: bool  # one argument was given, not a sequence
    mode: Mode | CostModel  # a cost model chooses the rules
    has_aux: bool = False
    scalar: bool = False
    with_value: bool = False
    called: str = ""
    # The rules chosen for each kind of arguments, and whether clients recompute.
    choices: dict[Any, tuple[Rules, bool]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.auto and self.mode not in MODES:
            raise ArgumentError.here(
                f"unknown mode {self.mode!r}; it is a name or a fg.CostModel.",
                str(self.mode),
                ["auto", *MODES],
            )

    @property
    def __name__(self) -> str:
        return f"{self.called}({self.program.name})"

    @property
    def __signature__(self) -> inspect.Signature:
        return self.program.signature

    @property
    def auto(self) -> bool:
        """Whether the rules are chosen by their cost."""
        return self.mode == "auto" or isinstance(self.mode, CostModel)

    @property
    def cost(self) -> CostModel:
        """The cost model of that choice."""
        return self.mode if isinstance(self.mode, CostModel) else CostModel()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the derivative inside another program, as seen by the server and one client."""
        arguments = read_inside(self.program, self.program.bind(args, kwargs))
        inputs = [jnp.asarray(x) for x in arguments.leaves]
        found = self.trace(arguments, nested=True)
        known = self._known(found, arguments)
        if known is not None:
            fun = functools.partial(self._function, found, arguments)
            return self._by_rules(found, known[0], lambda rules, way: fun(rules, way)(*inputs))
        made = self._choose(found, arguments, nested=True)
        outputs = jax.core.eval_jaxpr(made.jaxpr.jaxpr, made.jaxpr.consts, *inputs)
        return jax.tree.unflatten(made.outputs, outputs)

    def derive(self, arguments: Arguments) -> Traced:
        """Trace the derivative for such arguments; it includes the plan if choosing the rules
        needed it."""
        found = self.trace(arguments, nested=False)
        known = self._known(found, arguments)
        if known is None:
            return self._choose(found, arguments, nested=False)
        rules, recompute = known
        make = functools.partial(self._made, found, arguments, False)
        return dataclasses.replace(self._by_rules(found, rules, make), recompute=recompute)

    def _function(
        self, found: Subject, arguments: Arguments, rules: Rules, forward: bool | None
    ) -> Callable[..., Any]:
        """Return the derivative by these rules as a function of flat values."""

        def fun(*leaves: Any) -> Any:
            outputs, blocks = derivative(found, list(leaves), rules, forward)
            result = jax.tree.unflatten(found.tree, outputs)
            y, aux = result if self.has_aux else (result, None)
            slope = self.assemble(y, arguments, blocks)
            if self.with_value:
                return result, slope
            return (slope, aux) if self.has_aux else slope

        return fun

    def _made(
        self,
        found: Subject,
        arguments: Arguments,
        nested: bool,
        rules: Rules,
        forward: bool | None = None,
    ) -> Traced:
        """Trace the derivative by these rules."""
        fun = self._function(found, arguments, rules, forward)
        made = traced(fun, arguments.values, found.placements, nested=nested, derived=True)
        return dataclasses.replace(made, rules=rules)

    def _known(self, found: Subject, arguments: Arguments) -> tuple[Rules, bool] | None:
        """Return the rules and whether clients recompute, or None if they have yet to be chosen."""
        if not self.auto:
            return (MODES[self.mode].name,) * len(found.units), False  # type: ignore[index]
        if not found.units and self.cost.client_memory is None:
            return (), False
        return self.choices.get((arguments.key, found.signature))

    def _choose(self, found: Subject, arguments: Arguments, nested: bool) -> Traced:
        make = functools.partial(self._made, found, arguments, nested)
        made = choose(found, self.cost, make)
        while len(self.choices) >= REMEMBERED:
            self.choices.pop(next(iter(self.choices)), None)
        self.choices[arguments.key, found.signature] = made.rules, made.recompute
        return made

    def _by_rules(self, found: Subject, rules: Rules, make: Callable[[Rules, bool], T]) -> T:
        """Call `make` with these rules and a direction, forward or not. Where only the server
        works, the mode's rule gives the direction; others leave it free."""
        forward = None if self.auto else MODES[self.mode].forward  # type: ignore[index]
        way = found.widens if forward is None else forward
        try:
            return make(rules, way)
        except (ValueError, TypeError) as error:
            why = impossible(error)
            if why is None:
                raise
            if self.auto and not rules:
                return make(rules, not way)
            other = "reverse" if self.mode == "forward" else "forward"
            use = "" if found.at_clients else f"Use mode={other!r}, or write it without: "
            raise PlanError.here(
                f"{self.program.name} {why}. {use or 'Use '}a scan (lax.fori_loop with a "
                "static trip count) instead of a while_loop, a custom_jvp instead of a "
                "custom_vjp."
            ) from error

    def trace(self, arguments: Arguments, nested: bool) -> Subject:
        """Trace the program to be differentiated. `nested`: as a part of another program."""
        wrt = floating(arguments, self.names)
        given = arguments.rebuild(arguments.leaves)
        for name in self.names:
            if any(map(_is_view, jax.tree.leaves(given[name], is_leaf=_is_view))):
                raise ArgumentError.here(
                    f"{self.program.name}: argument {name!r} is a cohort, whose clients are views "
                    "of one store; there is no derivative by that. Pass what you want to "
                    "differentiate by as stacked arrays."
                )
        if not wrt:
            raise ArgumentError.here(
                f"{self.program.name}: argument {', '.join(self.names)} has no floating "
                "leaf to differentiate by."
            )
        placements = self.program.client_placements
        made = traced(
            lambda *flat: self.program.call(arguments.rebuild(flat)),
            arguments.values,
            placements,
            nested=nested,
            to_derive=True,
            derived=self.program.derived,
        )
        y = jax.tree.unflatten(made.outputs, [struct(v) for v in made.graph.outputs])
        if self.has_aux:
            if not isinstance(y, tuple) or len(y) != 2:
                raise ArgumentError.here(f"has_aux=True: {self.program.name} must return (y, aux).")
            y = y[0]
        wanted = range(len(jax.tree.leaves(y)))
        found = Subject(self.program.name, placements, made.graph, made.outputs, wrt, wanted)
        self.check_result(found, y)
        return found

    def check_result(self, found: Subject, y: Any) -> None:
        if self.mode != "reverse" and found.complex:
            raise ArgumentError.here(
                f"{self.program.name} is differentiated by a complex argument, which needs "
                f"mode='reverse'; got mode={self.mode!r}."
            )
        if self.mode == "forward" and found.at_clients:
            raise PlanError.here(
                f"{self.program.name} is differentiated by an argument at clients. "
                "Every client has its own derivative, and pushing tangents forward only gives "
                "their sum. Use mode='reverse'."
            )
        leaves = jax.tree.leaves(y)
        values = [found.graph.outputs[i] for i in range(len(leaves))]
        for value in values:
            if is_client(value.at):
                raise PlacementError.here(
                    f"{self.program.name} returns a value at {value.at}; what is "
                    "differentiated is at the server. Return fg.mean(...) or fg.sum(...) of it, or "
                    "return it as aux."
                )
        if not self.scalar:
            return
        if len(leaves) != 1 or leaves[0].shape or not is_float(leaves[0]):
            shown = [f"{x.dtype}{list(x.shape)}" for x in leaves]
            raise ArgumentError.here(
                f"The gradient of {self.program.name}, which returns {shown}. It "
                "takes a program that returns one floating number (and aux with has_aux=True); "
                "use fg.jacobian for others."
            )

    def by_argument(self, row: Sequence[Any], arguments: Arguments) -> Any:
        """Arrange derivatives with respect to the floating leaves in the structure of the named
        arguments."""
        found = dict(zip(floating(arguments, self.names), row, strict=True))
        by_name = arguments.rebuild([found.get(i) for i in range(len(arguments.leaves))])
        chosen = tuple(by_name[name] for name in self.names)
        return chosen[0] if self.single else chosen

    def assemble(self, y: Any, arguments: Arguments, blocks: Blocks) -> Any:
        """Arrange the derivative in the structure of the result, with that of the arguments at each
        leaf."""
        flat, tree = jax.tree.flatten(y)
        rows = iter(blocks)
        per_leaf = [
            self.by_argument(next(rows), arguments) if is_float(leaf) else None for leaf in flat
        ]
        return per_leaf[0] if self.scalar else jax.tree.unflatten(tree, per_leaf)


def argument_names(program: Program, argnums: Argnums) -> tuple[tuple[str, ...], bool]:
    """Return the names of the arguments to differentiate by, and whether a single one was given."""
    if not isinstance(program, Program):
        raise ArgumentError.here(
            f"derivatives are taken of a program, got {program!r}. Decorate it with "
            "@fg.program(...); jax.grad is there for functions."
        )
    single = isinstance(argnums, str) or not isinstance(argnums, Sequence)
    wanted = [argnums] if single else list(argnums)  # type: ignore[arg-type]
    parameters = list(program.signature.parameters)
    names = []
    for given in wanted:
        if isinstance(given, bool) or not (isinstance(given, str) or hasattr(given, "__index__")):
            raise ArgumentError.here(f"argnums are positions or names, got {given!r}.")
        argnum = given if isinstance(given, str) else operator.index(given)
        if isinstance(argnum, str) and argnum not in parameters:
            raise ArgumentError.here(
                f"{program.name} has no argument {argnum!r}." + nearest(argnum, parameters)
            )
        if isinstance(argnum, int) and not -len(parameters) <= argnum < len(parameters):
            raise ArgumentError.here(
                f"{program.name} has {len(parameters)} arguments, so there is no argument {argnum}."
            )
        names.append(argnum if isinstance(argnum, str) else parameters[argnum])
    if len(set(names)) != len(names) or not names:
        raise ArgumentError.here(f"name each argument to differentiate by once: {names}.")
    return tuple(names), single


def floating(arguments: Arguments, names: Sequence[str]) -> list[int]:
    """Return the positions of the floating leaves of some of the arguments."""
    named = zip(arguments.names, arguments.values, strict=True)
    return [i for i, (name, v) in enumerate(named) if name in names and is_float(v.aval)]


def _is_view(x: Any) -> bool:
    return isinstance(x, Examples)
