"""Next-character prediction in the speeches of a role of a play: two LSTMs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.types import Batch, Key, Params
from fedgrad.tasks import layers, scores
from fedgrad.tasks.data import generated
from fedgrad.tasks.data.column_values import text
from fedgrad.tasks.data.dataset import DataSet, Origin
from fedgrad.tasks.data.source import Columns
from fedgrad.tasks.data.tokens import BOS, EOS, FIRST, OOV, PAD
from fedgrad.tasks.from_data import FromData, Model
from fedgrad.training.means import Ratio

LENGTH = 80
# The characters of TFF's data set, in our own order.
CHARACTERS = (
    "\n\r !\"#$%&'()*,-./0123456789:;?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
)
TOKENS = FIRST + len(CHARACTERS)
# The size of an embedding, the size of an LSTM, and the number of LSTMs.
SIZES = {"small": (8, 64, 1), "paper": (8, 256, 2)}
RATES = {"small": 1.0, "paper": 1.0}  # client learning rates; the paper's for FedAvgM


def init(key: Key, form: tuple[int, int, int] = SIZES["paper"]) -> Params:
    """Return the initial model: 820,522 parameters in the paper's size."""
    embedded, wide, deep = form
    first, last, *keys = jax.random.split(key, 2 + deep)
    inputs = [embedded] + [wide] * (deep - 1)
    return {
        "embedding": layers.embedding_init(first, TOKENS, embedded),
        "lstm": [layers.lstm_init(k, n, wide) for k, n in zip(keys, inputs, strict=True)],
        "characters": layers.dense_init(last, wide, TOKENS),
    }


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the scores of the next token, after each token."""
    x = layers.lstm(params["lstm"], layers.embed(params["embedding"], tokens))
    return layers.dense(params["characters"], x)


def loss(params: Params, batch: Batch) -> jax.Array:
    """Return the cross-entropy of each sequence, the mean over positions; padding counts as 0."""
    each = scores.cross_entropy(logits(params, batch["x"]), batch["y"])
    return jnp.mean(jnp.where(batch["y"] != PAD, each, 0), axis=-1)


def right(params: Params, batch: Batch) -> jax.Array:
    """Return how many tokens of each sequence are predicted correctly."""
    each = scores.is_right(logits(params, batch["x"]), batch["y"])
    return jnp.sum(jnp.where(batch["y"] != PAD, each, 0), axis=-1)


def places(params: Params, batch: Batch) -> jax.Array:
    """Return how many tokens of each sequence are not padding."""
    return jnp.sum(batch["y"] != PAD, axis=-1).astype(jnp.float32)


_NUMBER = {character: FIRST + i for i, character in enumerate(CHARACTERS)}


def _examples(columns: Columns, _: Any) -> dict[str, np.ndarray]:
    """Cut speeches into pieces of 80 characters and the next one, or read such pieces (LEAF's)."""
    pieces = []
    for i, speech in enumerate(columns["x"]):
        numbers = [_NUMBER.get(character, OOV) for character in text(speech)]
        if "y" in columns:
            numbers += [_NUMBER.get(character, OOV) for character in text(columns["y"][i])[:1]]
        else:
            numbers = [BOS, *numbers, EOS]
        for start in range(0, max(len(numbers) - 1, 1), LENGTH + 1):
            piece = numbers[start : start + LENGTH + 1]
            pieces.append(piece + [PAD] * (LENGTH + 1 - len(piece)))
    made = np.array(pieces, np.uint8).reshape(-1, LENGTH + 1)
    return {"x": made[:, :-1], "y": made[:, 1:]}


DATA = DataSet(
    name="shakespeare",
    columns={"x": ("snippets", "x"), "y": ("y",)},
    optional=("y",),
    convert=_examples,
    generate=generated.speeches,
    about="Generated sentences in a made-up language, not Shakespeare",
    origin=Origin(
        "shakespeare.sqlite.lzma", "Shakespeare of LEAF", "flwrlabs/shakespeare", "character_id"
    ),
)

shakespeare = FromData(
    DATA,
    SIZES,
    RATES,
    batch_size=4,
    model=lambda form: Model(lambda key: init(key, form), loss, {"accuracy": Ratio(right, places)}),
)
