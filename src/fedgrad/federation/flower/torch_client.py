"""PyTorch clients for a server that tunes itself. Only this module of the package imports torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedgrad.core.errors import ArgumentError, needs, require_whole
from fedgrad.federation.flower.derivatives import ASKED, derivatives, tangent_records

with needs("A client in PyTorch", "torch"):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = Sequence[Any]
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Trained:
    """The reply of a client, besides its model."""

    examples: int  # per epoch
    loss: float  # the mean over all steps
    records: Mapping[str, Any]  # for a server that tunes itself; otherwise empty


def torch_gradient(
    model: Any, loss: Loss, batches: Iterable[Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute the gradient records for a server that learns attributes of its strategy, for clients
    with their own training loop. Call it before training, on the model as received.

    Args:
        model: The model. Its buffers, such as BatchNorm's statistics, are left unchanged.
        loss: A function of (model, batch) that returns the mean over the batch. Examples are
            counted by the first axis of the batch's first tensor.
        batches: The batches over which to take the gradient.
        config: The server's config, which says whether the server tunes itself.

    Returns:
        The records to reply with; empty if the server does not tune itself.
    """
    return _found(model, loss, batches) if ASKED in config else {}


def torch_sgd(
    model: Any,
    loss: Loss,
    batches: Iterable[Any],
    config: Mapping[str, Any],
    *,
    lr: str = "lr",
    epochs: int = 1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    gradient_from: Iterable[Any] | None = None,
) -> Trained:
    """Train the model in place like `torch.optim.SGD`, with one step per batch, and compute the
    derivatives that a server which tunes itself needs.

    These are the gradient of the loss before training and, if the learning rate is learned, the
    tangent of the trained model with respect to it, for which each step takes a second backward
    pass. For any other server, this is plain training. As in PyTorch, a step leaves a parameter
    alone on which its loss does not depend: neither weight decay nor momentum moves it.

    Args:
        model: The model to train.
        loss: A function of (model, batch) that returns the mean over the batch.
        batches: The batches of an epoch; iterable more than once, such as a DataLoader.
        config: The server's config, which holds the learning rate.
        lr: The name of the learning rate in `config`.
        epochs: The number of passes over the batches.
        momentum: The momentum of SGD.
        weight_decay: The weight decay of SGD.
        gradient_from: Held-out batches for the gradient before training; `batches` by default.

    Returns:
        The number of examples, the mean loss, and the records to reply with.
    """
    require_whole("epochs", epochs)
    if lr not in config:
        message = f"The server's train_config has no {lr!r}."
        raise ArgumentError.here(message, lr, config)
    rate = config[lr]
    for name, number in {lr: rate, "momentum": momentum, "weight_decay": weight_decay}.items():
        if not isinstance(number, float | int) or not number >= 0:
            raise ArgumentError.here(
                f"{name} is {number!r}: torch.optim.SGD takes numbers from 0 on."
            )
    asked, params = config.get(ASKED), _trained(model)
    again = asked is not None and gradient_from is None
    if iter(batches) is batches and (again or epochs > 1):
        raise ArgumentError.here(
            "batches can be gone through only once, but are needed for the gradient, too, and for "
            "each epoch: give a DataLoader, or list(batches)."
        )
    before = batches if gradient_from is None else gradient_from
    found = {} if asked is None else _found(model, loss, before)
    weights, tangent = [*params.values()], asked is not None and lr in asked
    velocity, along, turning = (_zeros(weights) for _ in range(3))
    examples, total = 0, 0.0
    with _twice_differentiable(tangent):
        for batch in (batch for _ in range(epochs) for batch in batches):
            count, value = _examples(batch), _value(loss, model, batch)
            examples, total = examples + count, total + count * float(value.detach())
            gradient = _gradient(value, weights, again=tangent)
            bend = _product(gradient, weights, along) if tangent else []
            with torch.no_grad():
                for i, g in enumerate(gradient):
                    if g is None:  # as SGD does: no weight decay, no momentum step
                        continue
                    step = _decayed(g.detach(), weight_decay, weights[i])
                    velocity[i] = _carried(velocity[i], momentum, step)
                    if tangent:  # derivatives of velocity and weight by the rate
                        step = _decayed(bend[i], weight_decay, along[i])
                        turning[i] = _carried(turning[i], momentum, step)
                        along[i] = along[i] - velocity[i] - rate * turning[i]
                    weights[i].sub_(velocity[i], alpha=rate)
    if not examples:
        raise ArgumentError.here("There is no batch to train on.")
    if tangent:
        found |= tangent_records({lr: _numpy(dict(zip(params, along, strict=True)))})
    return Trained(examples // epochs, total / examples, found)


def _found(model: Any, loss: Loss, batches: Iterable[Any]) -> dict[str, Any]:
    """Return the gradient at the current model over all examples and the mean loss, as records."""
    params = _trained(model)
    total, mean, examples = _zeros(params.values()), 0.0, 0
    with _buffers_kept(model):
        for batch in batches:
            count, value = _examples(batch), _value(loss, model, batch)
            gradient = _gradient(value, [*params.values()])
            pairs = zip(total, gradient, strict=True)
            total = [t if g is None else t + count * g for t, g in pairs]
            mean, examples = mean + count * float(value.detach()), examples + count
    if not examples:
        raise ArgumentError.here("There is no batch, so there is no gradient.")
    found = {name: part / examples for name, part in zip(params, total, strict=True)}
    return derivatives(_numpy(found), mean / examples, examples)


def _trained(model: Any) -> dict[str, Any]:
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ArgumentError.here("The model has no parameter that trains (requires_grad).")
    return params


def _value(loss: Loss, model: Any, batch: Any) -> Any:
    value = loss(model, batch)
    if not isinstance(value, torch.Tensor) or value.ndim:
        raise ArgumentError.here(
            f"loss(model, batch) is the mean over the batch, a tensor with one number; got {value}."
        )
    return value


def _gradient(value: Any, params: Tensors, again: bool = False) -> Tensors:
    """Return the gradient; None for parameters that the value does not depend on."""
    return torch.autograd.grad(value, params, create_graph=again, allow_unused=True)


def _product(gradient: Tensors, params: Tensors, along: Tensors) -> Tensors:
    """Return the Hessian-vector product, as the gradient of the gradient along a direction."""
    both = zip(gradient, along, strict=True)
    pairs = [(g, s) for g, s in both if g is not None and g.requires_grad]
    if not pairs:  # the loss is linear
        return _zeros(params)
    slopes, directions = zip(*pairs, strict=True)
    found = torch.autograd.grad(slopes, params, directions, allow_unused=True)
    return [torch.zeros_like(p) if x is None else x for x, p in zip(found, params, strict=True)]


def _zeros(params: Iterable[Any]) -> list[Any]:
    return [torch.zeros_like(p) for p in params]


def _decayed(gradient: Any, weight_decay: float, weight: Any) -> Any:
    """Rounded once, as SGD does."""
    return gradient.add(weight, alpha=weight_decay) if weight_decay else gradient


def _carried(velocity: Any, momentum: float, step: Any) -> Any:
    return (velocity * momentum).add(step) if momentum else step  # which may be sparse


def _examples(batch: Any) -> int:
    left = [batch]
    while left:
        one = left.pop(0)
        if isinstance(one, torch.Tensor):
            return len(one)
        left += one.values() if isinstance(one, Mapping) else one if _is_list(one) else []
    raise ArgumentError.here(
        f"There is no tensor in a batch, a {type(batch).__name__}: a batch is a tensor, or a "
        "tuple, list or dict of tensors."
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _numpy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.detach().cpu().numpy() for name, x in tensors.items()}


@contextmanager
def _buffers_kept(model: Any) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def _twice_differentiable(needed: bool) -> Iterator[None]:
    """Use math attention where needed: its fast kernels have no second derivative."""
    if not needed:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield
