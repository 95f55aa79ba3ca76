"""Converts PyTorch modules to JAX models and back. This is the only file that imports torch.

`torch.export` turns a module into a graph of operations for any batch size. The graph is read once;
what runs afterwards is only JAX.
"""

import contextlib
import io
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedgrad.core.errors import (
    ArgumentError,
    FederatedError,
    is_users,
    known_arguments,
    nearest,
    needs,
)
from fedgrad.core.notebook import place
from fedgrad.core.types import Params
from fedgrad.pytorch.own_derivatives import (
    derivatives_checked,
    detach_without_grad,
    without_copies,
)
from fedgrad.pytorch.reading import KNOWN, read

_ONE_AT_A_TIME = threading.RLock()  # a conversion temporarily changes global settings of PyTorch


@known_arguments()
def from_torch(
    module: Any, example: Any, *, operations: Mapping[str, Callable[..., Any]] = {}
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """Convert a PyTorch module to JAX: its parameters by name, and a function `model(params, x)`.

        params, model = fg.from_torch(module, torch.zeros(2, 1, 28, 28))

        def loss(params, batch):
            scores = model(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])

    The module is converted in its current mode. In training mode, dropout needs a key:
    `model(params, x, key=key)`. For evaluation, convert `module.eval()` too; its parameters have
    the same names. The model works with all of JAX's transformations: `jit`, `grad`, `jvp`, `vmap`
    over the params of many clients, `jax.export`. Parameters with `requires_grad=False` and buffers
    are part of `params`, but no derivative goes through them.

    Args:
        module: A `torch.nn.Module`.
        example: An input, or a tuple of several, with examples along the first axis. The model
            accepts any number of examples.
        operations: JAX functions for operations that are not known, by their names:
            `{"aten.erfinv.default": jax.scipy.special.erfinv}`.

    Returns:
        A pair of `params`, a dict of arrays by name, and `model`.

    Raises:
        ArgumentError: The module has something that cannot be converted, which the message names:
            BatchNorm in training mode, a buffer that changes, behavior that depends on the number
            of examples, gradients of its own (a `torch.autograd.Function`, hooks, `torch.no_grad`
            inside of `torch.autocast` or around an in-place change), or an operation that is not
            known.
    """
    torch = _torch("fg.from_torch")
    _require_module(torch, module)
    inputs = example if isinstance(example, tuple) else (example,)
    known = {*KNOWN, *operations}
    with _ONE_AT_A_TIME:
        exported = _exported(torch, module, _examples(torch, inputs), known)
    return read(module, exported, operations)


@known_arguments()
def into_torch(module: Any, params: Params) -> Any:
    """Load trained parameters into a module in place, like `load_state_dict`, and return it.

    Args:
        module: The `torch.nn.Module` that was converted with `fg.from_torch`.
        params: Its parameters after training.

    Raises:
        ArgumentError: A name or a shape differs from the module's. Nothing is loaded then.
    """
    torch = _torch("fg.into_torch")
    _require_module(torch, module)
    trained = dict(module.named_parameters())
    have = trained | dict(module.named_buffers())
    name = type(module).__name__
    for missing in trained.keys() - dict(params).keys():
        raise ArgumentError.here(
            f"params has no {missing!r}, which {name} has: nothing was loaded."
        )
    for given, value in params.items():
        if given not in have:
            hint = nearest(given, list(have))
            raise ArgumentError.here(f"{name} has no {given!r}: nothing was loaded.{hint}")
        if tuple(have[given].shape) != np.shape(value):
            raise ArgumentError.here(
                f"{given!r} of {name} has shape {tuple(have[given].shape)}, but params has "
                f"{np.shape(value)}: nothing was loaded."
            )
    with torch.no_grad():
        for given, value in params.items():
            array = np.array(value)
            wide = array if array.dtype.kind != "V" else array.astype(np.float32)  # bfloat16
            have[given].copy_(torch.from_numpy(wide))
    return module


def _torch(what: str) -> Any:
    with needs(what, "torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch emits warnings of its own when it is first imported
        import torch

        return torch


def _require_module(torch: Any, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError.here(f"Give a torch.nn.Module, got {type(module).__name__}.")


def _examples(torch: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def one(x: Any) -> Any:
        if x is None:  # an optional input that is not given
            return None
        tensor = torch.as_tensor(x if isinstance(x, torch.Tensor) else np.asarray(x))
        if not tensor.ndim or not len(tensor):
            raise ArgumentError.here(
                f"The example has an input of shape {tuple(tensor.shape)}: give at least one "
                "example, along the first axis."
            )
        # torch.export would specialize on a batch size of 1 and treat it as a constant.
        return torch.cat([tensor, tensor]) if len(tensor) == 1 else tensor

    # Not jax.tree.map, which sorts dicts: the module may depend on their order.
    return tuple(torch.utils._pytree.tree_map(one, inputs))


def _exported(torch: Any, module: Any, inputs: tuple[Any, ...], known: Collection[str]) -> Any:
    """Export the graph of a module, without in-place changes, and with known operations as far as
    possible."""
    free = torch.export.ShapesCollection()
    for tensor in jax.tree.leaves(inputs):
        free[tensor] = {0: torch.export.Dim.DYNAMIC}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it fuses a transformer into one operation
    try:
        with _quietly(), torch.enable_grad(), derivatives_checked(torch, module):
            made = torch.export.export(module, inputs, dynamic_shapes=free)
            detach_without_grad(torch, module, made)
            made = _in_known_ones(torch, made.run_decompositions({}), known)
            without_copies(torch, made)
    except FederatedError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ArgumentError.here(
            f"torch.export cannot take {type(module).__name__}{_line(error)}: "
            f"{type(error).__name__}: {first} (all of it is above). Python must not branch on "
            "numbers (write torch.where) or fix how many examples there are, as x.view(4, -1) and "
            "len(x) do (write x.flatten(1) and x.shape[0]); x.data cannot be followed (write "
            "x.detach())."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return made


def _in_known_ones(torch: Any, made: Any, known: Collection[str]) -> Any:
    """Decompose unknown operations in the way PyTorch does when it differentiates them, so that
    their derivatives are PyTorch's as well."""
    ways, composite = torch.export.default_decompositions(), "CompositeImplicitAutograd"
    tried: set[Any] = set()  # an operation that decomposes into itself is left, and refused
    while found := {
        node.target
        for node in made.graph.nodes
        if str(node.target) not in known
        and node.target in ways
        and node.target not in tried
        and torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), composite)
    }:
        made = made.run_decompositions({target: ways[target] for target in found})
        tried |= found
    return made


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what torch.export prints about a module that it refuses: its graph, twice. The error
    says what is wrong."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was


def _line(error: Exception) -> str:
    """Return the line of the module's code that was refused, if it is known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f", {place(last.filename, last.lineno or 0)}, {last.line!r}"
