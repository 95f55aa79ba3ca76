"""Records that travel with a client's model: its loss, gradient and tangents."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgrad.core.errors import ArgumentError, needs
from fedgrad.federation.protocol.federation_errors import FederationError

with needs("A Flower app that tunes itself", "flower"):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

Arrays = dict[str, np.ndarray]

ABOUT, GRADIENT, TANGENT = "fedgrad", "fedgrad.gradient", "fedgrad.tangent."
"""The names of the records. Whatever the strategy aggregates has other names."""

ASKED = "fedgrad.learn"
"""Where the server says, in the config, that it tunes itself: the names of what clients learn."""


def derivatives(
    gradient: Mapping[str, np.ndarray],
    loss: float,
    examples: int,
    tangents: Mapping[str, Mapping[str, np.ndarray]] = {},
) -> dict[str, ArrayRecord | MetricRecord]:
    """Return a client's records for a server that tunes itself, with any framework.

    Args:
        gradient: The gradient of the client's mean loss at the model that was broadcast, by the
            names of its arrays; arrays that are not trained are left out.
        loss: The mean loss over the client's examples.
        examples: The number of examples.
        tangents: For each hyperparameter that the client learns, the derivative of its trained
            model with respect to it.

    Returns:
        Records to add to the reply:
        `RecordDict({"arrays": ..., "metrics": ..., **derivatives(...)})`.

    Raises:
        ArgumentError: If a tangent has other arrays than the gradient.
    """
    about = MetricRecord({"loss": float(loss), "examples": float(examples)})
    for name, tangent in tangents.items():
        if set(tangent) != set(gradient):
            raise ArgumentError.here(
                f"The tangent by {name!r} has other arrays than the gradient: "
                f"{sorted(set(tangent) ^ set(gradient))}."
            )
    return {ABOUT: about, GRADIENT: record(gradient), **tangent_records(tangents)}


def tangent_records(tangents: Mapping[str, Mapping[str, Any]]) -> dict[str, ArrayRecord]:
    """Return the records of tangents alone."""
    return {TANGENT + name: record(tangent) for name, tangent in tangents.items()}


def record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a record of arrays."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def numpy(arrays: ArrayRecord, names: Iterable[str]) -> Arrays:
    """Return the named arrays of a record."""
    return {name: arrays[name].numpy() for name in names}


@dataclass(frozen=True)
class Told:
    """Loss and derivatives of a round: of the broadcast model and of local training."""

    loss: float
    gradient: Arrays  # the mean over all examples
    tangents: Mapping[str, Sequence[ArrayRecord | None]]  # by name; one per reply, None for errors


def told(replies: Sequence[Message], names: Iterable[str]) -> Told | None:
    """Extract our records from the replies, which leaves the strategy the one record of arrays and
    one of metrics that it expects. Return None if no client answered."""
    tangents: dict[str, list[ArrayRecord | None]] = {name: [] for name in names}
    gradients: dict[int, tuple[float, ArrayRecord]] = {}  # by node, with the number of examples
    loss = 0.0
    for reply in replies:
        if reply.has_error():
            for found in tangents.values():
                found.append(None)
            continue
        node = reply.metadata.src_node_id
        own = {name: reply.content.pop(name) for name in [*reply.content] if _is_ours(name)}
        about, gradient = _required(own, ABOUT, node), _required(own, GRADIENT, node)
        for name, found in tangents.items():
            found.append(_required(own, TANGENT + name, node))
        gradients[node] = about["examples"], gradient
        loss += about["examples"] * about["loss"]
    examples = sum(count for count, _ in gradients.values())
    if not examples > 0:
        return None
    _require_same_arrays({node: gradient for node, (_, gradient) in gradients.items()})
    shapes = {name: array.shape for name, array in next(iter(gradients.values()))[1].items()}
    total = {name: np.zeros(shape) for name, shape in shapes.items()}  # double: sums of many terms
    for count, gradient in gradients.values():
        for name, array in gradient.items():
            total[name] += count * array.numpy()
    return Told(loss / examples, {n: x / examples for n, x in total.items()}, tangents)


def _is_ours(name: str) -> bool:
    return name == ABOUT or name.startswith(ABOUT + ".")


def _required(own: dict[str, Any], name: str, node: int) -> Any:
    if name in own:
        return own[name]
    what = "gradient"
    if name.startswith(TANGENT):
        what = f"tangent by {name.removeprefix(TANGENT)!r}"
    raise FederationError.here(
        f"The reply of node {node} has no {what}. Train there with fedgrad.federation.torch_sgd "
        "and reply with its records: trained = torch_sgd(model, loss, batches, "
        'message.content["config"]), RecordDict({"arrays": ..., "metrics": ..., '
        "**trained.records}). Other frameworks: fedgrad.federation.derivatives."
    )


def _require_same_arrays(gradients: Mapping[int, ArrayRecord]) -> None:
    """Refuse a gradient whose arrays differ from those of most nodes. Flower returns replies in any
    order, so the first one is not a reliable reference."""
    shapes = {
        node: {name: tuple(array.shape) for name, array in sorted(gradients[node].items())}
        for node in sorted(gradients)
    }
    ((usual, _),) = Counter(map(str, shapes.values())).most_common(1)
    odd = next((node for node in shapes if str(shapes[node]) != usual), None)
    if odd is not None:
        raise FederationError.here(
            f"The gradient of node {odd} has other names or shapes than those of most nodes: "
            f"{shapes[odd]} and {usual}. All clients train the same arrays of the model."
        )


def shifted(reply: Message, tangent: ArrayRecord | None = None, by: float = 0.0) -> Message:
    """Return a copy of a reply that shares no mutable state with it, with the client's model moved
    along a tangent."""
    if reply.has_error():
        return reply
    moved = copy.copy(reply)
    moved.content = RecordDict(
        {
            name: _moved(found, tangent, by) if isinstance(found, ArrayRecord) else found.copy()
            for name, found in reply.content.items()
        }
    )
    return moved


def _moved(arrays: ArrayRecord, tangent: ArrayRecord | None, by: float) -> ArrayRecord:
    found = {name: array for name, array in arrays.items()}
    for name, array in ({} if tangent is None else tangent).items():
        if name not in found:
            raise FederationError.here(f"There is a tangent of {name!r}, which the model has not.")
        value = found[name].numpy()
        found[name] = Array(np.asarray(value + by * array.numpy(), value.dtype))
    return ArrayRecord(found)


def inner(a: Arrays, b: Arrays) -> float:
    """Return the inner product of two models."""
    return math.fsum(float(np.vdot(x, b[name])) for name, x in a.items())


def finite(arrays: Iterable[np.ndarray]) -> bool:
    """Return whether all numbers are finite (neither NaN nor infinite)."""
    return all(bool(np.isfinite(x).all()) for x in arrays)
