"""JAX's control flow, built again around other bodies."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedgrad.core.primitives import Primitive, jax_primitives

Body = Callable[[list[Any]], list[Any]]


def rebuild(
    primitive: Primitive, params: dict[str, Any], inputs: Sequence[Any], bodies: Sequence[Body]
) -> list[Any]:
    """A scan, while_loop (condition, then body) or cond (its branches) with these bodies, each a
    function of the inputs of the jaxpr whose place it takes."""
    if primitive is jax_primitives.cond_p:
        branches = [lambda *xs, b=body: b(list(xs)) for body in bodies]
        return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
    if primitive is jax_primitives.while_p:
        cond, body = bodies
        n, m = params["cond_nconsts"], params["body_nconsts"]
        return list(
            jax.lax.while_loop(
                lambda carry: cond([*inputs[:n], *carry])[0],
                lambda carry: body([*inputs[n : n + m], *carry]),
                list(inputs[n + m :]),
            )
        )
    n, m = params["num_consts"], params["num_carry"]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = bodies[0]([*inputs[:n], *carry, *xs])
        return out[:m], out[m:]

    carry, ys = jax.lax.scan(
        step,
        list(inputs[n : n + m]),
        list(inputs[n + m :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


# Where the jaxprs of each kind of control flow are, in the order of `bodies`.
BODIES: dict[Primitive, Callable[[dict[str, Any]], list[Any]]] = {
    jax_primitives.scan_p: lambda params: [params["jaxpr"]],
    jax_primitives.while_p: lambda params: [params["cond_jaxpr"], params["body_jaxpr"]],
    jax_primitives.cond_p: lambda params: list(params["branches"]),
}
