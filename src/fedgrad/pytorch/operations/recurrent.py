"""Recurrent nets: LSTM, GRU and RNN, with all layers in one scan along the sequence.

Stacked layers form a chain, which one scan runs. In a bidirectional net each layer needs all
outputs of the one below, so each layer is a scan over two chains side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.types import Key
from fedgrad.pytorch.operations.linear import linear
from fedgrad.pytorch.operations.random import mask

State = tuple[Any, ...]  # the output comes first


@dataclass(frozen=True)
class _Layer:
    of_input: Any
    recurrent: Any
    input_bias: Any = None
    recurrent_bias: Any = None
    projection: Any = None  # projects the output where it is smaller than the memory


Cell = Callable[[_Layer, Any, State], State]  # (layer, input's share of the gates, state)


def _lstm_cell(layer: _Layer, from_input: Any, state: State) -> State:
    output, memory = state
    gates = from_input + linear(output, layer.recurrent, layer.recurrent_bias)
    into, forget, new, out = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
    output = jax.nn.sigmoid(out) * jnp.tanh(memory)
    return output if layer.projection is None else linear(output, layer.projection), memory


def _gru_cell(layer: _Layer, from_input: Any, state: State) -> State:
    (output,) = state
    here = jnp.split(from_input, 3, -1)
    before = jnp.split(linear(output, layer.recurrent, layer.recurrent_bias), 3, -1)
    reset, keep = (jax.nn.sigmoid(a + b) for a, b in zip(here[:2], before[:2], strict=True))
    new = jnp.tanh(here[2] + reset * before[2])
    return ((1 - keep) * new + keep * output,)


def _rnn_cell(bend: Callable[[Any], Any]) -> Cell:
    def cell(layer: _Layer, from_input: Any, state: State) -> State:
        return (bend(from_input + linear(state[0], layer.recurrent, layer.recurrent_bias)),)

    return cell


def _from_input(layer: _Layer, x: Any) -> Any:
    return linear(x, layer.of_input, layer.input_bias)


@dataclass(frozen=True)
class _Chain:
    """Stacked layers, their initial states, and the dropout masks between them."""

    layers: Sequence[_Layer]
    starts: Sequence[State]
    x: Any  # (time, example, feature)
    masks: Sequence[Any] = ()


def _scanned(cell: Cell, chains: Sequence[_Chain]) -> tuple[list[list[State]], list[Any]]:
    """Return, for each chain, the final states of all layers and the outputs of the top layer."""

    def step(states: list[list[State]], now: list[tuple[Any, Sequence[Any]]]) -> Any:
        ends, outputs = [], []
        for chain, before, (below, masks) in zip(chains, states, now, strict=True):
            after: list[State] = []
            for depth, (layer, state) in enumerate(zip(chain.layers, before, strict=True)):
                if depth:
                    output = after[-1][0] * masks[depth - 1] if masks else after[-1][0]
                    below = _from_input(layer, output)
                after.append(cell(layer, below, state))
            ends.append(after)
            outputs.append(after[-1][0])
        return ends, outputs

    start = [list(chain.starts) for chain in chains]
    # The first layer's input product is computed for all time steps at once.
    xs = [(_from_input(chain.layers[0], chain.x), chain.masks) for chain in chains]
    ends, outputs = jax.lax.scan(step, start, xs)
    return ends, outputs


def _net(cell: Cell, arrays: int) -> Callable[..., tuple[Any, ...]]:
    """Return a net of these cells, whose state consists of `arrays` arrays."""

    def net(
        x: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        noise: Key | None = None,
    ) -> tuple[Any, ...]:
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        hx = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
        ways = 2 if bidirectional else 1
        size = len(params) // (num_layers * ways)  # arrays per layer and direction
        layers = [
            _layer(params[i * size : (i + 1) * size], has_biases) for i in range(num_layers * ways)
        ]
        starts = [tuple(h[i] for h in hx) for i in range(len(layers))]

        def dropped(depth: int, like: Any) -> Any:
            return mask(jax.random.fold_in(noise, depth), dropout, like)  # type: ignore[arg-type]

        if not bidirectional:
            like = jnp.zeros((*x.shape[:2], hx[0].shape[-1]), x.dtype)
            masks = [dropped(i, like) for i in range(num_layers - 1)] if noise is not None else []
            (ends,), (x,) = _scanned(cell, [_Chain(layers, starts, x, masks)])
        else:
            ends = []
            for depth in range(num_layers):
                if depth and noise is not None:
                    x = x * dropped(depth, x)
                both = [2 * depth, 2 * depth + 1]
                ways_of_x = [x, jnp.flip(x, 0)]
                chains = [
                    _Chain([layers[i]], [starts[i]], way)
                    for i, way in zip(both, ways_of_x, strict=True)
                ]
                found, (there, back) = _scanned(cell, chains)
                ends += [*found[0], *found[1]]
                x = jnp.concatenate([there, jnp.flip(back, 0)], -1)
        out = jnp.swapaxes(x, 0, 1) if batch_first else x
        return out, *(jnp.stack([state[i] for state in ends]) for i in range(arrays))

    return net


def _layer(params: Sequence[Any], has_biases: bool) -> _Layer:
    weights = tuple(params[:4]) if has_biases else (*params[:2], None, None)
    more = params[4 if has_biases else 2 :]
    return _Layer(*weights, *more)


def _one(cell: Cell) -> Callable[..., Any]:
    """Return a single cell, for nets that write their own loop."""

    def step(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        layer = _Layer(w_ih, w_hh, b_ih, b_hh)
        several = isinstance(hx, list | tuple)
        new = cell(layer, _from_input(layer, x), tuple(hx) if several else (hx,))
        return new if several else new[0]

    return step


_CELLS = {
    "lstm": (_lstm_cell, 2),
    "gru": (_gru_cell, 1),
    "rnn_tanh": (_rnn_cell(jnp.tanh), 1),
    "rnn_relu": (_rnn_cell(jax.nn.relu), 1),
}

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}.input": _net(*cell) for name, cell in _CELLS.items()},
    **{f"{name}_cell.default": _one(cell) for name, (cell, _) in _CELLS.items()},
}


def _drops(
    x: Any, hx: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool, *_: Any
) -> bool:
    return train and dropout > 0 and layers > 1


DRAWS = {f"{name}.input": _drops for name in _CELLS}
