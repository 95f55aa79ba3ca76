"""Translates the graph that `torch.export` made of a module into a `Model`.

This file does not import torch: it inspects torch objects but keeps none of them.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.core.trace import CAPTURE_LIMIT
from fedgrad.pytorch.model import Array, Call, Input, Model, Ref, fits, unknown
from fedgrad.pytorch.operations import DRAWS, OPERATIONS, computed
from fedgrad.pytorch.operations.long import long

KNOWN = {f"aten.{name}": fun for name, fun in OPERATIONS.items()}
BATCH_NORM = "_native_batch_norm_legit"  # prefix of operations that use the batch's statistics


def read(
    module: Any, exported: Any, operations: Mapping[str, Callable[..., Any]]
) -> tuple[dict[str, jax.Array], Model]:
    """Return the parameters of a module and its graph as a `Model`."""
    _require_pure(module, exported)
    _require_any_number(module, exported)
    arrays, params = _arrays(module, exported)
    table = KNOWN | dict(operations)
    name = type(module).__name__
    model = Model(
        name=name,
        training=module.training,
        arrays=arrays,
        inputs=_inputs(exported),
        constants=_constants(exported),
        calls=tuple(_calls(_live(exported.graph), table, name)),
        outputs=_outputs(module, exported),
    )
    _require_computed(model, params, exported)
    return params, model


def _require_computed(model: Model, params: dict[str, jax.Array], exported: Any) -> None:
    """Raise if a known operation does not support these arguments. All operations are traced with
    shapes only, so that every converted model runs."""
    (inputs, _) = exported.example_inputs
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _dtype(x.dtype)), inputs)
    key = jax.random.key(0) if any(call.draws for call in model.calls) else None
    jax.eval_shape(lambda params, inputs: model(params, *inputs, key=key), params, shapes)


def _require_pure(module: Any, exported: Any) -> None:
    name = type(module).__name__
    for node in exported.graph.nodes:
        target = str(node.target)
        if BATCH_NORM in target and "no_training" not in target:
            raise ArgumentError.here(
                f"{name} has BatchNorm in training mode ({where(node)}), or without running "
                "statistics: it normalizes by the other examples of a client's batch and changes "
                "running statistics, which are not parameters: they would never be averaged. Use "
                "torch.nn.GroupNorm, which needs neither; or, if it has running statistics, keep "
                "them as they are: module.eval()."
            )
        if "instance_norm" in target and node.args[3] is not None and node.args[5]:
            raise ArgumentError.here(
                f"{name} has InstanceNorm with track_running_stats=True in training mode "
                f"({where(node)}): it changes running statistics, which are not parameters: they "
                "would stay as they are. Leave track_running_stats out, or use "
                "torch.nn.GroupNorm."
            )
    signature = exported.graph_signature
    changed = {"buffer": signature.buffers_to_mutate, "parameter": signature.parameters_to_mutate}
    for kind, names in changed.items():
        for one in names.values():
            raise ArgumentError.here(
                f"{name} changes its {kind} {one!r} when it is called, and a model in JAX has no "
                "place to keep it. Make it an input and an output of the module, or do without."
            )


def _require_any_number(module: Any, exported: Any) -> None:
    """Raise if the graph only holds for some numbers of examples, because Python code depended on
    it."""
    wanted = set(exported.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in exported.graph.nodes if node.name in wanted]
    rows = {str(tensor.shape[0]) for tensor in inputs}  # strides have symbols, too
    seen = []
    for symbol, numbers in exported.range_constraints.items():
        least, most = str(numbers.lower), str(numbers.upper)
        if str(symbol) in rows and (least not in ("0", "1", "2") or most.isdigit()):
            seen.append(f"{least} to {most}" if most.isdigit() else f"{least} or more")
    known = [t.shape[0].node.shape_env for t in inputs if hasattr(t.shape[0], "node")]
    asked = [guard.expr for one in known for guard in one.guards]
    for one in asked:
        named = sorted(one.free_symbols, key=str)
        alike = str(one.subs({symbol: named[0] for symbol in named}))  # all have equally many
        if named and {*map(str, named)} <= rows and alike != "True":
            seen.append(f"numbers with {re.sub('|'.join(map(str, named)), 'examples', str(one))}")
    for shown in seen:
        raise ArgumentError.here(
            f"What {type(module).__name__} does depends on how many examples there are: with "
            f"this example, what is right for {shown}. Let it do the same for any number: "
            "no `if x.shape[0] > ...`, no table cut to that length (are examples along the "
            "first axis?)."
        )


def _arrays(module: Any, exported: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the parameters and buffers of the graph, and their values; tied ones appear once."""
    own = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    first = {id(tensor): name for name, tensor in (own | buffers).items()}
    every = dict(module.named_parameters(remove_duplicate=False))
    every |= dict(module.named_buffers(remove_duplicate=False))
    arrays, params = {}, {name: _value(name, tensor) for name, tensor in own.items()}
    number = next((p.dtype for p in params.values()), jnp.float32)  # the dtype for other arrays
    used = {node.name for node in exported.graph.nodes if node.users}
    signature = exported.graph_signature
    named = signature.inputs_to_parameters | signature.inputs_to_buffers
    for value, target in named.items():
        if value not in used:
            continue
        name = first[id(every[target])]
        tensor = every[name]
        params.setdefault(name, _value(name, tensor, number))
        arrays[value] = Array(
            name, tuple(tensor.shape), _dtype(tensor.dtype), name in own and tensor.requires_grad
        )
    return arrays, params


def _value(name: str, tensor: Any, number: Any = jnp.float32) -> jax.Array:
    """Return a float array. Integers and booleans become floats of the dtype `number`."""
    array = _numpy(tensor)
    if str(tensor.dtype) == "torch.float64" and _dtype(tensor.dtype) != np.float64:
        raise ArgumentError.here(
            f"{name!r} is a float64, which JAX does not have switched on. Convert module.float(), "
            "or jax.config.update('jax_enable_x64', True) before anything else."
        )
    if tensor.is_floating_point():
        return jnp.asarray(array, _dtype(tensor.dtype))
    if tensor.is_complex() or (array.astype(number).astype(array.dtype) != array).any():
        raise ArgumentError.here(
            f"{name!r} is a {tensor.dtype} that floats do not hold exactly, and params are floats."
        )
    if not fits(array, _dtype(tensor.dtype)):
        raise ArgumentError.here(
            f"{name!r} has whole numbers of 64 bits, which JAX does not have switched on: "
            "jax.config.update('jax_enable_x64', True) before anything else."
        )
    return jnp.asarray(array, number)


def _constants(exported: Any) -> dict[str, Any]:
    """Return the tensors that the module's code creates as constants."""
    found = {}
    for value, target in exported.graph_signature.inputs_to_lifted_tensor_constants.items():
        array = _numpy(exported.constants[target])
        if array.size > CAPTURE_LIMIT:
            raise ArgumentError.here(
                f"The module makes a constant of shape {array.shape} in its forward ({target}): "
                "too many numbers to be written into a program that is sent to clients. Keep "
                "it: self.register_buffer(...)."
            )
        kind = _dtype(array.dtype)
        found[value] = array.astype(kind) if fits(array, kind) else long(array)
    return found


def _numpy(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    narrow = str(tensor.dtype) == "torch.bfloat16"  # NumPy has no bfloat16
    return np.array((tensor.float() if narrow else tensor).numpy())


def _dtype(dtype: Any) -> Any:
    """PyTorch's or NumPy's dtype as JAX has it now: int32 for int64, unless that is switched on."""
    name = str(dtype).removeprefix("torch.")
    found = jax.dtypes.canonicalize_dtype(name)
    if name == "uint64" and found != np.uint64:
        raise ArgumentError.here(
            "The module has whole numbers of type uint64, which JAX does not have switched on. "
            "Take int64, or jax.config.update('jax_enable_x64', True) before anything else."
        )
    return found


def _inputs(exported: Any) -> tuple[Any, ...]:
    nodes = {node.name: node for node in exported.graph.nodes}
    described: list[Any] = []
    for name in exported.graph_signature.user_inputs:
        if name is None:  # an optional input that is not given
            described.append(None)
            continue
        tensor = nodes[name].meta["val"]
        described.append(Input(name, tuple(map(int, tensor.shape[1:])), _dtype(tensor.dtype)))
    args, _ = exported.call_spec.in_spec.unflatten(described)
    return tuple(args)


def _outputs(module: Any, exported: Any) -> Any:
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    leaves = [_argument(leaf) for leaf in output.args[0]]
    tree = exported.call_spec.out_spec.unflatten(leaves)
    seen = jax.tree.leaves(tree)
    if any(isinstance(leaf, Ref) and leaf not in seen for leaf in leaves):
        raise ArgumentError.here(
            f"{type(module).__name__} returns a {type(tree).__name__}, or something with such in "
            "it, which JAX does not look into. Return a dict or a tuple."
        )
    return tree


def _live(graph: Any) -> list[Any]:
    """Return the calls that the outputs depend on."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    wanted = set(output.all_input_nodes)
    live = []
    for node in reversed(graph.nodes):
        if node in wanted and node.op == "call_function":
            wanted |= set(node.all_input_nodes)
            live.append(node)
    return live[::-1]


def _calls(nodes: list[Any], table: Mapping[str, Callable[..., Any]], name: str) -> Iterator[Call]:
    missing = {
        _name(node): where(node)
        for node in reversed(nodes)
        if not _is_python(node) and _name(node) not in table
    }
    if missing:
        raise unknown(dict(sorted(missing.items())), list(table), name)
    for node in nodes:
        args = tuple(_argument(a) for a in node.args)
        kwargs = {k: _argument(v) for k, v in node.kwargs.items() if k not in _OF_MEMORY}
        draws = DRAWS.get(_name(node).removeprefix("aten."))
        yield Call(
            node.name,
            _name(node),
            _operation(node, table),
            args,
            kwargs,
            *_dtype_and_shape(node.meta["val"]),
            draws is not None and draws(*args, **kwargs),
            where(node),
        )


def _operation(node: Any, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if _is_python(node):
        return node.target  # type: ignore[no-any-return]
    fun, value = table[_name(node)], node.meta["val"]
    if fun is not KNOWN.get(_name(node)):  # the user's own
        return fun
    is_long = str(getattr(value, "dtype", "")) == "torch.int64"
    return computed(_name(node).removeprefix("aten."), _dtype_and_shape(value)[0], is_long)


def _dtype_and_shape(value: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return the dtype of a tensor and its shape, with None for sizes that vary."""
    if not hasattr(value, "dtype"):
        return None, ()
    return _dtype(value.dtype), tuple(n if isinstance(n, int) else None for n in value.shape)


_OF_MEMORY = ("device", "layout", "memory_format", "non_blocking", "pin_memory", "requires_grad")


def _name(node: Any) -> str:
    """Return a name like `aten.relu.default`, or the function's name if it is not a PyTorch
    operation."""
    target = node.target
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _is_python(node: Any) -> bool:
    """Whether a node is Python arithmetic on sizes, or takes one of several results."""
    return getattr(node.target, "__module__", "") == operator.add.__module__


_DTYPES = {
    *(f"torch.{kind}" for kind in ("bool", "float16", "bfloat16", "float32", "float64")),
    *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("torch.complex64", "torch.complex128"),
}


def _argument(value: Any) -> Any:
    if hasattr(value, "all_input_nodes"):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return [_argument(one) for one in value]
    return _dtype(value) if str(value) in _DTYPES else value


def where(node: Any) -> str:
    """Return the user's line that called an operation, from PyTorch's stack trace."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith("File ")]
    own = [i for i in places if "site-packages" not in lines[i]] or places
    if not own:
        return "in its forward"
    file, _, rest = lines[own[-1]].strip().removeprefix("File ").partition(", line ")
    after = [line.strip() for line in lines[own[-1] + 1 :][:1]]
    code = "".join(f": {line}" for line in after if not line.startswith("File "))  # may be missing
    return f"{file.strip(chr(34)).rpartition('/')[2]}:{rest.partition(',')[0]}{code}"
