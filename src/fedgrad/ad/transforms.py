"""`grad`, `value_and_grad`, `jacobian`, `jvp`, `vjp`: each takes a program and gives a program.

    grad: (x@server -> y@server) -> (x@server -> dy/dx@server)

What is differentiated may also be at clients; then the derivative is there too, and stays there.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedgrad.ad.derivative import Blocks, Rules, Subject, derivative, subject
from fedgrad.ad.planner import Choice, CostModel, choose, impossible
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError, nearest
from fedgrad.core.graph import Value
from fedgrad.core.placement import SERVER, Placement, is_client
from fedgrad.core.program import Program

Mode = Literal["auto", "forward", "reverse", "mixed"]
Argnums = int | str | Sequence[int | str]

_RULE = {"forward": "push", "reverse": "pull", "mixed": "local"}


def grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """The gradient of a program whose result is one number at the server, as a program.

    `argnums`: which arguments, by position or name. `mode`: "forward", "reverse", "mixed", or
    "auto" for the cheapest mix of them by `cost`. `has_aux`: the program returns (y, aux), the
    gradient (dy, aux). `recompute`: in reverse mode, clients are sent again what they would
    otherwise have to remember. Leaves that are not floating get None.
    """
    request = _Request(program, argnums, mode, cost, has_aux, scalar="fg.grad")

    def fun(*args: Any, **kwargs: Any) -> Any:
        (_, aux), gradient = request.run(args, kwargs)
        return (gradient, aux) if has_aux else gradient

    return request.program_of(fun, "grad", recompute)


def value_and_grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """Like `fg.grad`, and the value: (y, dy), or ((y, aux), dy) with `has_aux`."""
    request = _Request(program, argnums, mode, cost, has_aux, scalar="fg.value_and_grad")

    def fun(*args: Any, **kwargs: Any) -> Any:
        (y, aux), gradient = request.run(args, kwargs)
        return ((y, aux) if has_aux else y), gradient

    return request.program_of(fun, "value_and_grad", recompute)


def jacobian(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """The Jacobian of a program, in the form of `jax.jacobian`: the tree of the result, with the
    tree of the argument at each leaf."""
    request = _Request(program, argnums, mode, cost, has_aux, scalar=None)

    def fun(*args: Any, **kwargs: Any) -> Any:
        (_, aux), jacobian = request.run(args, kwargs)
        return (jacobian, aux) if has_aux else jacobian

    return request.program_of(fun, "jacobian", recompute)


def jvp(program: Program, argnums: Argnums = 0) -> Program:
    """(*args, tangents) -> (y, dy): the derivative in one direction, by pushing it forward."""
    names, single = _names(program, argnums)

    def fun(*args: Any) -> Any:
        *args, tangents = args  # type: ignore[assignment]
        bound = program.bind(tuple(args), {})
        wanted = [bound[name] for name in names]
        directions = [tangents] if single else list(tangents)
        _check_like(directions, wanted, "fg.jvp", "tangents", "the argument")
        flat, tree = jax.tree.flatten(wanted)
        moves = [i for i, x in enumerate(flat) if _is_float(x)]
        tangent_leaves = jax.tree.leaves(directions)

        def of_floats(xs: list[Any]) -> Any:
            full = list(flat)
            for i, x in zip(moves, xs, strict=True):
                full[i] = x
            replaced = dict(zip(names, jax.tree.unflatten(tree, full), strict=True))
            return program.call({**bound, **replaced})

        primals = [jnp.asarray(flat[i]) for i in moves]
        return jax.jvp(
            of_floats,
            (primals,),
            ([_as(tangent_leaves[i], x) for i, x in zip(moves, primals, strict=True)],),
        )

    placements = {program.placements.get(name) for name in names}
    if len(placements) > 1:
        raise ArgumentError.here(
            f"fg.jvp by arguments at different placements: {names}. "
            "Differentiate by those of one placement at a time."
        )
    return _extended(program, fun, "jvp", "tangents", placements.pop())


def vjp(program: Program, argnums: Argnums = 0, recompute: bool = False) -> Program:
    """(*args, cotangent) -> (y, dx): pulls a cotangent of the result back, in reverse mode."""
    names, single = _names(program, argnums)

    def fun(*args: Any) -> Any:
        *args, cotangent = args  # type: ignore[assignment]
        bound = program.bind(tuple(args), {})
        flat, tree = jax.tree.flatten([bound[name] for name in names])
        moves = [i for i, x in enumerate(flat) if _is_float(x)]

        def of_floats(xs: list[Any]) -> Any:
            full = list(flat)
            for i, x in zip(moves, xs, strict=True):
                full[i] = x
            replaced = dict(zip(names, jax.tree.unflatten(tree, full), strict=True))
            return program.call({**bound, **replaced})

        y, pull = jax.vjp(of_floats, [jnp.asarray(flat[i]) for i in moves])
        _check_like(cotangent, y, "fg.vjp", "cotangent", "the result")
        (pulled,) = pull(jax.tree.map(_as, cotangent, y))
        gradient: list[Any] = [None] * len(flat)
        for i, x in zip(moves, pulled, strict=True):
            gradient[i] = x
        trees = jax.tree.unflatten(tree, gradient)
        return y, (trees[0] if single else tuple(trees))

    return _extended(program, fun, "vjp", "cotangent", None, recompute)


@dataclass(frozen=True, eq=False)
class _Request:
    """A derivative that is wanted of a program."""

    program: Program
    argnums: Argnums
    mode: str
    cost: CostModel | None
    has_aux: bool
    scalar: str | None  # the name of a transformation that wants one number; None: any result

    def __post_init__(self) -> None:
        _names(self.program, self.argnums)
        if self.mode not in ("auto", *_RULE):
            raise ArgumentError.here(
                f"unknown mode {self.mode!r}." + nearest(self.mode, ["auto", *_RULE])
            )
        if self.cost is not None and self.mode != "auto":
            raise ArgumentError.here(
                f'cost= chooses the mode, so it goes with mode="auto"; got mode={self.mode!r}.'
            )
        object.__setattr__(self, "_choices", {})

    def program_of(self, fun: Callable[..., Any], name: str, recompute: bool) -> Program:
        fun.__name__ = f"{name}({self.program.name})"
        return Program(
            fun,
            dict(self.program.placements),
            self.program.executor,
            recompute or self.program.recompute,
            self.choice,
            self.program.signature,
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
        """((y, aux), derivative) in the view of the server and one client."""
        arguments = self.program.bind(args, kwargs)
        leaves = jax.tree.leaves(list(arguments.values()))
        traced, shapes = self.trace(arguments)
        rules = self.rules(traced, arguments)
        inputs = [jnp.asarray(x) for x in leaves]
        try:
            outputs, blocks = derivative(traced, inputs, rules, self.mode == "forward")
        except (ValueError, TypeError) as error:
            why = impossible(error)
            if why is None:
                raise
            if self.mode != "auto" or rules:
                other = "reverse" if self.mode == "forward" else "forward"
                raise PlanError.here(
                    f"{self.program.name} {why}. Use mode={other!r}, or write it "
                    "without: a scan (lax.fori_loop with a static trip count) instead of a "
                    "while_loop, a custom_jvp instead of a custom_vjp."
                ) from error
            outputs, blocks = derivative(traced, inputs, rules, forward=True)
        result = jax.tree.unflatten(shapes, outputs)
        y, aux = result if self.has_aux else (result, None)
        return (y, aux), self.assemble(y, arguments, blocks)

    def trace(self, arguments: dict[str, Any]) -> tuple[Subject, Any]:
        names, _ = _names(self.program, self.argnums)
        tree = jax.tree.structure(list(arguments.values()))
        values: list[Value] = []
        wrt: list[int] = []
        for name, argument in arguments.items():
            placement = self.program.placements.get(name)
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                if name in names and _is_float(leaf):
                    wrt.append(len(values))
                label = f'"{name}{jax.tree_util.keystr(path)}"'
                values.append(Value(_aval(leaf), placement.name if placement else SERVER, label))
        if not wrt:
            raise ArgumentError.here(
                f"{self.program.name}: argument {', '.join(names)} has no floating "
                "leaf to differentiate by."
            )
        shapes: list[Any] = []

        def fun(*flat: Any) -> list[Any]:
            named = zip(arguments, jax.tree.unflatten(tree, flat), strict=True)
            out = self.program.call(dict(named))
            shapes[:] = [jax.tree.structure(out), out]
            return jax.tree.leaves(out)

        def results(count: int) -> Sequence[int]:
            if not self.has_aux:
                return range(count)
            if not isinstance(shapes[1], tuple) or len(shapes[1]) != 2:
                raise ArgumentError.here(f"has_aux=True: {self.program.name} must return (y, aux).")
            return range(len(jax.tree.leaves(shapes[1][0])))

        placements = self.program.client_placements
        traced = subject(self.program.name, fun, values, placements, wrt, results)
        self.check_result(traced, shapes[1][0] if self.has_aux else shapes[1])
        return traced, shapes[0]

    def check_result(self, traced: Subject, y: Any) -> None:
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
        if self.scalar is None:
            return
        if len(leaves) != 1 or leaves[0].shape or not _is_float(leaves[0]):
            shown = [f"{x.dtype}{list(x.shape)}" for x in leaves]
            raise ArgumentError.here(
                f"{self.scalar} of {self.program.name}, which returns {shown}. It "
                "takes a program that returns one floating number (and aux with has_aux=True); "
                "use fg.jacobian for others."
            )

    def rules(self, traced: Subject, arguments: dict[str, Any]) -> Rules:
        return self._choose(traced, arguments).rules

    def choice(self, arguments: dict[str, Any]) -> Choice:
        """How the derivative is taken for these arguments (as one client sees them)."""
        known = self._choices.get(_key(arguments))  # type: ignore[attr-defined]
        return known or self._choose(self.trace(arguments)[0], arguments)

    def _choose(self, traced: Subject, arguments: dict[str, Any]) -> Choice:
        choices: dict[Any, Choice] = self._choices  # type: ignore[attr-defined]
        key = _key(arguments)
        if key not in choices:
            if self.mode == "auto":
                choices[key] = choose(traced, self.cost or CostModel())
            else:
                choices[key] = Choice((_RULE[self.mode],) * len(traced.units))
        return choices[key]

    def assemble(self, y: Any, arguments: dict[str, Any], blocks: Blocks) -> Any:
        names, single = _names(self.program, self.argnums)

        def of_result(row: Sequence[Any]) -> Any:
            rest, trees = list(row), []
            for name in names_in_order:
                flat, tree = jax.tree.flatten(arguments[name])
                filled = [rest.pop(0) if _is_float(x) else None for x in flat]
                trees.append(jax.tree.unflatten(tree, filled))
            by_name = dict(zip(names_in_order, trees, strict=True))
            return by_name[names[0]] if single else tuple(by_name[name] for name in names)

        names_in_order = [name for name in arguments if name in names]
        flat, tree = jax.tree.flatten(y)
        rows = list(blocks)
        per_leaf = [of_result(rows.pop(0)) if _is_float(leaf) else None for leaf in flat]
        return per_leaf[0] if self.scalar else jax.tree.unflatten(tree, per_leaf)


def _names(program: Program, argnums: Argnums) -> tuple[list[str], bool]:
    """The names of the arguments to differentiate by, and whether it is just one."""
    if not isinstance(program, Program):
        raise ArgumentError.here(
            f"derivatives are taken of a program, got {program!r}. Decorate it with "
            "@fg.program(...); jax.grad is there for functions."
        )
    single = isinstance(argnums, int | str)
    wanted = [argnums] if isinstance(argnums, int | str) else list(argnums)
    parameters = list(program.signature.parameters)
    names = []
    for argnum in wanted:
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
    return names, single


def _extended(
    program: Program,
    fun: Callable[..., Any],
    name: str,
    extra: str,
    placement: Placement | None,
    recompute: bool = False,
) -> Program:
    """A program with one more argument at the end."""
    fun.__name__ = f"{name}({program.name})"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(p, kind) for p in (*program.signature.parameters, extra)]
    placements = dict(program.placements)
    if placement is not None:
        placements[extra] = placement
    return Program(
        fun,
        placements,
        program.executor,
        recompute or program.recompute,
        None,
        inspect.Signature(parameters),
    )


def _check_like(found: Any, wanted: Any, where: str, what: str, like: str) -> None:
    a, b = jax.tree.structure(found), jax.tree.structure(wanted)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(found)]
    expected = [jnp.shape(x) for x in jax.tree.leaves(wanted)]
    if str(a) != str(b) or shapes != expected:
        raise ArgumentError.here(
            f"{where}: the {what} must look like {like}: expected {b} with shapes "
            f"{expected}, got {a} with shapes {shapes}."
        )


def _as(x: Any, like: Any) -> Any:
    """A (co)tangent of the dtype that JAX wants for `like`."""
    like = jnp.asarray(like)
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.zeros(like.shape, jax.dtypes.float0)
    return jnp.asarray(x, like.dtype)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _aval(leaf: Any) -> Any:
    struct = jax.eval_shape(lambda x: x, leaf)
    return jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type)


def _key(arguments: dict[str, Any]) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)
