"""From a module of PyTorch to a model in JAX, and back. The only file that imports torch.

`torch.export` gives a module as a graph of operations, for a batch of any size; the graph is read
once, and what runs afterwards is JAX alone.
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

_ONE_AT_A_TIME = threading.RLock()  # a conversion switches what is PyTorch's own, and back


@known_arguments()
def from_torch(
    module: Any, example: Any, *, operations: Mapping[str, Callable[..., Any]] = {}
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
    """A PyTorch module as a model in JAX: its parameters by name, and `model(params, x)`.

        params, model = fg.from_torch(module, torch.zeros(2, 1, 28, 28))

        def loss(params, batch):
            scores = model(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])

    `example` is an input, or a tuple of several, with examples along the first axis; the model
    takes any number of them. The module is taken in the mode it is in: in training mode dropout
    needs a key, `model(params, x, key=key)`; for evaluation convert `module.eval()` too, its params
    have the same names. Whatever JAX does with a function it does with the model: `jit`, `grad`,
    `jvp`, `vmap` over params of many clients, `jax.export`.

    Parameters with `requires_grad=False` and buffers are in `params` too, but no derivative goes
    through them. What does not work is refused here, by name: BatchNorm in training mode, modules
    that change their buffers, that do something else for another number of examples or that say
    themselves what their gradients are (a `torch.autograd.Function`, hooks, `torch.no_grad` inside
    of `torch.autocast` or around a change in place), and operations that are not known.
    `operations` says what those are: functions in JAX by their names,
    `{"aten.erfinv.default": jax.scipy.special.erfinv}`.
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
    """The module with these parameters, as training has left them: loaded in place, like
    `load_state_dict`, and returned. Names and shapes have to be those of the module."""
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
        warnings.simplefilter("ignore")  # torch's own, when it is first imported
        import torch

        return torch


def _require_module(torch: Any, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError.here(f"Give a torch.nn.Module, got {type(module).__name__}.")


def _examples(torch: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def one(x: Any) -> Any:
        if x is None:  # an input that is left out
            return None
        tensor = torch.as_tensor(x if isinstance(x, torch.Tensor) else np.asarray(x))
        if not tensor.ndim or not len(tensor):
            raise ArgumentError.here(
                f"The example has an input of shape {tuple(tensor.shape)}: give at least one "
                "example, along the first axis."
            )
        # A size of 1 would be taken for a fact about the module, and not for a batch of one.
        return torch.cat([tensor, tensor]) if len(tensor) == 1 else tensor

    # Not of jax.tree, which sorts a dict: its order may matter to the module.
    return tuple(torch.utils._pytree.tree_map(one, inputs))


def _exported(torch: Any, module: Any, inputs: tuple[Any, ...], known: Collection[str]) -> Any:
    """The graph of a module, in which nothing is changed in place, as far as can be of operations
    that are known."""
    free = torch.export.ShapesCollection()
    for tensor in jax.tree.leaves(inputs):
        free[tensor] = {0: torch.export.Dim.DYNAMIC}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for all of a transformer
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
    """The graph with operations that are not known written with others, as PyTorch itself writes
    them when it differentiates: so their derivatives are PyTorch's, too."""
    ways, composite = torch.export.default_decompositions(), "CompositeImplicitAutograd"
    tried: set[Any] = set()  # so that one that is written with itself is left, and refused
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
    """Without what torch.export prints of a module that it refuses: its own graph, twice. The error
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
    """The line of the module's own code in which it was refused, as far as that is known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f", {place(last.filename, last.lineno or 0)}, {last.line!r}"
