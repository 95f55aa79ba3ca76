"""A derivative that is wanted of a program: from arguments to the tree of the derivative."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad.activity import is_float
from fedgrad.ad.derivative import Blocks, derivative
from fedgrad.ad.local import impossible
from fedgrad.ad.planner import CostModel, choose
from fedgrad.ad.rules import MODES, Mode
from fedgrad.ad.subject import Subject, subject
from fedgrad.clients.examples import Examples
from fedgrad.core.arguments import Arguments, read_inside
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError, nearest
from fedgrad.core.graph import is_client
from fedgrad.core.primitives import ClosedJaxpr
from fedgrad.core.program import Program
from fedgrad.core.trace import Taken, struct

Argnums = int | str | Sequence[int | str]

REMEMBERED = 32  # choices for other shapes of the arguments


@dataclass(frozen=True, eq=False)
class Request:
    """Which derivative of which program. `scalar`: the program returns one number."""

    program: Program
    names: tuple[str, ...]  # of the arguments to differentiate by
    single: bool  # one argument was named, not a sequence of them
    mode: Mode | CostModel  # a cost model chooses the rules
    has_aux: bool
    scalar: bool
    with_value: bool = False
    choices: dict[Any, Taken] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.auto and self.mode not in MODES:
            raise ArgumentError.here(
                f"unknown mode {self.mode!r}; it is a name or a fg.CostModel.",
                str(self.mode),
                ["auto", *MODES],
            )

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, Any], Any, Taken]:
        """((y, aux), derivative, how it was taken) in the view of the server and one client."""
        arguments = read_inside(self.program, self.program.bind(args, kwargs))
        traced, shapes = self.trace(arguments)
        taken, made = self._choose(traced, arguments)
        inputs = [jnp.asarray(x) for x in arguments.leaves]
        if made is not None:
            outputs, blocks = _outputs(traced, made, inputs)
        else:
            outputs, blocks = self._derive(traced, inputs, taken.rules)
        result = jax.tree.unflatten(shapes, outputs)
        y, aux = result if self.has_aux else (result, None)
        return (y, aux), self.assemble(y, arguments, blocks), taken

    def _derive(
        self, traced: Subject, inputs: list[Any], rules: tuple[str, ...]
    ) -> tuple[list[Any], Blocks]:
        # Where only the server works, a rule's mode says how; the others leave it free.
        way = None if self.auto else MODES[self.mode].forward  # type: ignore[index]
        forward = traced.widens if way is None else way
        try:
            return derivative(traced, inputs, rules, forward)
        except (ValueError, TypeError) as error:
            why = impossible(error)
            if why is None:
                raise
            if not self.auto or rules:
                other = "reverse" if self.mode == "forward" else "forward"
                use = "" if traced.at_clients else f"Use mode={other!r}, or write it without: "
                raise PlanError.here(
                    f"{self.program.name} {why}. {use or 'Use '}a scan (lax.fori_loop with a "
                    "static trip count) instead of a while_loop, a custom_jvp instead of a "
                    "custom_vjp."
                ) from error
            return derivative(traced, inputs, rules, not forward)

    @property
    def auto(self) -> bool:
        """Is the way chosen by what it costs?"""
        return self.mode == "auto" or isinstance(self.mode, CostModel)

    def trace(self, arguments: Arguments) -> tuple[Subject, Any]:
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
        shapes: list[Any] = []

        def fun(*flat: Any) -> list[Any]:
            out = self.program.call(arguments.rebuild(flat))
            shapes[:] = [jax.tree.structure(out), out]
            return jax.tree.leaves(out)

        def pick(count: int) -> tuple[Sequence[int], Sequence[int]]:
            if not self.has_aux:
                return range(count), range(count if self.with_value else 0)
            if not isinstance(shapes[1], tuple) or len(shapes[1]) != 2:
                raise ArgumentError.here(f"has_aux=True: {self.program.name} must return (y, aux).")
            of_y = len(jax.tree.leaves(shapes[1][0]))
            return range(of_y), range(0 if self.with_value else of_y, count)

        placements = self.program.client_placements
        derived = self.program.derived
        traced = subject(self.program.name, fun, arguments.values, placements, wrt, pick, derived)
        self.check_result(traced, shapes[1][0] if self.has_aux else shapes[1])
        return traced, shapes[0]

    def check_result(self, traced: Subject, y: Any) -> None:
        if self.mode != "reverse" and traced.complex:
            raise ArgumentError.here(
                f"{self.program.name} is differentiated by a complex argument, which needs "
                f"mode='reverse'; got mode={self.mode!r}."
            )
        if self.mode == "forward" and traced.at_clients:
            raise PlanError.here(
                f"{self.program.name} is differentiated by an argument at clients. "
                "Every client has its own derivative, and pushing tangents forward only gives "
                "their sum. Use mode='reverse'."
            )
        leaves = jax.tree.leaves(y)
        values = [traced.graph.outputs[i] for i in range(len(leaves))]
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

    def _choose(self, traced: Subject, arguments: Arguments) -> tuple[Taken, ClosedJaxpr | None]:
        """How the derivative is taken; and the derivative, if it was made to find that out."""
        if isinstance(self.mode, str) and self.mode in MODES:
            return Taken((MODES[self.mode].name,) * len(traced.units)), None
        key = (arguments.key, traced.signature)
        if key in self.choices:
            return self.choices[key], None
        cost = self.mode if isinstance(self.mode, CostModel) else CostModel()
        choice = choose(traced, cost)
        while len(self.choices) >= REMEMBERED:
            self.choices.pop(next(iter(self.choices)), None)
        self.choices[key] = choice.taken
        return choice.taken, choice.jaxpr

    def by_argument(self, row: Sequence[Any], arguments: Arguments) -> Any:
        """Derivatives by the floating leaves, in the form of the arguments that were named."""
        found = dict(zip(floating(arguments, self.names), row, strict=True))
        by_name = arguments.rebuild([found.get(i) for i in range(len(arguments.leaves))])
        chosen = tuple(by_name[name] for name in self.names)
        return chosen[0] if self.single else chosen

    def assemble(self, y: Any, arguments: Arguments, blocks: Blocks) -> Any:
        """The derivative in the form of the result, and in that of the arguments at each leaf."""
        flat, tree = jax.tree.flatten(y)
        rows = iter(blocks)
        per_leaf = [
            self.by_argument(next(rows), arguments) if is_float(leaf) else None for leaf in flat
        ]
        return per_leaf[0] if self.scalar else jax.tree.unflatten(tree, per_leaf)


def _outputs(traced: Subject, made: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], Blocks]:
    """All outputs, and the blocks, of a derivative that has been made. Of outputs that are not
    returned there are only the shapes."""
    found = iter(jax.core.eval_jaxpr(made.jaxpr, made.consts, *inputs))
    outputs: list[Any] = [struct(v) for v in traced.graph.outputs]
    for i in traced.returned:
        outputs[i] = next(found)
    return outputs, [[next(found) for _ in traced.wrt] for _ in traced.results]


def argument_names(program: Program, argnums: Argnums) -> tuple[tuple[str, ...], bool]:
    """The names of the arguments to differentiate by, and whether it is just one."""
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
    """The floating leaves of some of the arguments."""
    named = zip(arguments.names, arguments.values, strict=True)
    return [i for i, (name, v) in enumerate(named) if name in names and is_float(v.aval)]


def _is_view(x: Any) -> bool:
    return isinstance(x, Examples)
