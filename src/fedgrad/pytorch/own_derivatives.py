"""Handles modules that define their own derivatives, because `torch.export` captures only values.

`torch.no_grad` is preserved. Custom backward passes and gradient hooks are Python code that no
graph represents, so they are refused.

This file does not import torch; the caller passes it in.
"""

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any

import jax

from fedgrad.core.errors import ArgumentError
from fedgrad.pytorch.reading import where

_NO_GRAD = "wrap_with_set_grad_enabled"  # the operator for a region under torch.no_grad


@contextlib.contextmanager
def derivatives_checked(torch: Any, module: Any) -> Iterator[None]:
    """Raise if the module, when called inside this context, defines derivatives of its own.

    Its inputs are made differentiable too, so that everything between inputs and outputs is seen.
    """
    _require_no_hooks(module)
    name = type(module).__name__

    def differentiated(_: Any, inputs: Any) -> Any:
        def one(x: Any) -> Any:
            # A copy, because a module may change its inputs in place, but not leaf tensors.
            return x.requires_grad_().clone() if x.is_floating_point() else x

        # Not jax.tree.map, which sorts dicts: the module may depend on their order.
        return torch.utils._pytree.tree_map_only(torch.Tensor, one, inputs)

    def look(_: Any, __: Any, outputs: Any) -> None:
        tensors = [x for x in jax.tree.leaves(outputs) if isinstance(x, torch.Tensor)]
        for own in _own_functions([x.grad_fn for x in tensors]):
            raise ArgumentError.here(
                f"{name} has a torch.autograd.Function, {own.__qualname__}, with a backward pass "
                "in Python, which JAX cannot call. Write what it does with others: a "
                "straight-through estimator of f is x + (f(x) - x).detach(), a gradient times a "
                "is a * x + ((1 - a) * x).detach(), a checkpoint has use_reentrant=False."
            )

    was, here = torch.Tensor.register_hook, threading.get_ident()

    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:  # another thread, which trains something meanwhile
            return was(*args, **kwargs)
        raise ArgumentError.here(f"{name} calls register_hook on a tensor. {_INSTEAD_OF_HOOKS}")

    outer = _regions(torch)

    class Grad(torch.overrides.TorchFunctionMode):
        """Detects torch.no_grad inside of torch.autocast: the graph keeps only the latter."""

        def __torch_function__(self, fun: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            switched = fun is torch._C._set_grad_enabled and args[0] != torch.is_grad_enabled()
            if switched and _regions(torch) > outer:
                raise ArgumentError.here(
                    f"{name} has torch.no_grad inside of torch.autocast, where torch.export "
                    "forgets it: derivatives would go through. Write x.detach() there, or "
                    "torch.no_grad around torch.autocast."
                )
            return fun(*args, **(kwargs or {}))

    before = module.register_forward_pre_hook(differentiated, prepend=True)
    after = module.register_forward_hook(look)
    torch.Tensor.register_hook = refused
    try:
        with Grad():
            yield
    finally:
        torch.Tensor.register_hook = was
        before.remove()
        after.remove()


def _regions(torch: Any) -> int:
    """Return the nesting depth of torch.autocast; disabled ones count, too."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


_INSTEAD_OF_HOOKS = (
    "JAX cannot call a hook on gradients. Remove it; what it does to them is an optimizer's work: "
    "fg.local_training(optax.chain(optax.clip(1.0), optax.sgd(0.1)))."
)


def _require_no_hooks(module: Any) -> None:
    name = type(module).__name__
    own = {
        f"its parameter {n!r}": [p._backward_hooks, p._post_accumulate_grad_hooks]
        for n, p in module.named_parameters()
    }
    for n, part in module.named_modules():
        kind = f"its part {n!r}" if n else "it"
        own[kind] = [part._backward_hooks, part._backward_pre_hooks]
    for what, hooks in own.items():
        if any(hooks):
            raise ArgumentError.here(
                f"{name} has a hook on gradients, of {what}. {_INSTEAD_OF_HOOKS}"
            )


def _own_functions(left: list[Any]) -> Iterator[Any]:
    """Yield the functions with a Python backward pass among the ancestors of these nodes."""
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        own = getattr(node, "_forward_cls", None)
        # A torch.library operation is also a node of the graph, which operations= can define.
        if own is not None and not own.__name__.startswith("GeneratedBackwardFor_"):
            yield own


def detach_without_grad(torch: Any, module: Any, exported: Any) -> None:
    """Detach the results of `torch.no_grad` regions, which the exported graph would otherwise let
    derivatives through."""
    held = exported.graph_signature
    kept = {**held.inputs_to_parameters, **held.inputs_to_buffers}
    for node in exported.graph.nodes:
        if _NO_GRAD not in str(node.target) or node.args[0]:
            continue
        _, part, *given = node.args
        graph = getattr(exported.graph_module, part.target).graph
        outside = dict(zip((n for n in graph.nodes if n.op == "placeholder"), given, strict=True))
        for inside in graph.nodes:
            if _views(inside) and inside.args[0] in outside:  # changing a view changes its base
                outside[inside] = outside[inside.args[0]]
            changed = outside.get(inside.args[0]) if _changes(inside) else None
            if changed is not None and changed.name not in kept:  # these have their own error
                raise ArgumentError.here(
                    f"{type(module).__name__} changes a value in place under torch.no_grad "
                    f"({where(inside)}): its derivative would be that of the value before. Write "
                    "what you mean: y = x + (f(x) - x).detach()."
                )
        (output,) = [n for n in graph.nodes if n.op == "output"]
        with graph.inserting_before(output):
            output.args = (tuple(_detached(torch, graph, n) for n in output.args[0]),)
        graph.owning_module.recompile()


def without_copies(torch: Any, exported: Any) -> None:
    """Remove the copies of inputs that `derivatives_checked` added: random operations are numbered
    by their position."""
    for node in list(exported.graph.nodes):
        copy = node.target is torch.ops.aten.clone.default
        if (
            copy
            and node.args[0].op == "placeholder"
            and node.args[0].name in set(exported.graph_signature.user_inputs)
        ):
            node.replace_all_uses_with(node.args[0])
            exported.graph.erase_node(node)


def _detached(torch: Any, graph: Any, node: Any) -> Any:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    found = graph.call_function(torch.ops.aten.detach.default, (node,))
    found.meta = dict(node.meta)
    return found


def _views(node: Any) -> bool:
    """Whether the result of a call shares memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    returns = [] if schema is None else schema.returns
    one_of_several = node.target is operator.getitem
    return one_of_several or any(one.alias_info is not None for one in returns)


def _changes(node: Any) -> bool:
    """Whether a call modifies its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
