"""Next-word prediction in questions and answers, a client for each user: an LSTM."""

from collections.abc import Iterable
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
from fedgrad.tasks.data.tokens import BOS, EOS, FIRST, OOV, PAD, frequent
from fedgrad.tasks.from_data import FromData, Model
from fedgrad.training.means import Ratio

LENGTH = 20
WORDS = 10_000
MOST = 1_000  # the most examples of a client
# The number of words, the size of an embedding, and the size of the LSTM. The small model knows
# only the 1,000 most frequent words of the same data.
SIZES = {"small": (1_000, 32, 64), "paper": (WORDS, 96, 670)}
RATES = {"small": 0.6, "paper": 10**-0.5}  # client learning rates; the paper's for FedAvgM


def init(key: Key, form: tuple[int, int, int] = SIZES["paper"]) -> Params:
    """Return the initial model: 4,050,748 parameters in the paper's size."""
    words, embedded, wide = form
    keys = jax.random.split(key, 4)
    return {
        "embedding": layers.embedding_init(keys[0], FIRST + words, embedded),
        "lstm": [layers.lstm_init(keys[1], embedded, wide)],
        "narrow": layers.dense_init(keys[2], wide, embedded),
        "words": layers.dense_init(keys[3], embedded, FIRST + words),
    }


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the scores of the next token, after each token."""
    x = layers.embed(params["embedding"], _known(params, tokens))
    x = layers.dense(params["narrow"], layers.lstm(params["lstm"], x))
    return layers.dense(params["words"], x)


def loss(params: Params, batch: Batch) -> jax.Array:
    """Return the cross-entropy of each sentence, the mean of 20 positions; padding counts as 0."""
    wanted = _known(params, batch["y"])
    each = scores.cross_entropy(logits(params, batch["x"]), wanted)
    return jnp.mean(jnp.where(wanted != PAD, each, 0), axis=-1)


def right(params: Params, batch: Batch) -> jax.Array:
    """Return how many tokens of each sentence are predicted correctly."""
    return _right(params, batch, lambda wanted: wanted != PAD)


def places(params: Params, batch: Batch) -> jax.Array:
    """Return how many tokens of each sentence are not padding."""
    return jnp.sum(batch["y"] != PAD, axis=-1).astype(jnp.float32)


def right_words(params: Params, batch: Batch) -> jax.Array:
    """Return how many known words of each sentence are predicted; its end does not count."""
    return _right(params, batch, lambda wanted: wanted >= FIRST)


def words(params: Params, batch: Batch) -> jax.Array:
    """Return how many words of each sentence are known."""
    return jnp.sum(_known(params, batch["y"]) >= FIRST, axis=-1).astype(jnp.float32)


def _right(params: Params, batch: Batch, counts: Any) -> jax.Array:
    wanted = _known(params, batch["y"])
    each = scores.is_right(logits(params, batch["x"]), wanted)
    return jnp.sum(jnp.where(counts(wanted), each, 0), axis=-1)


def _known(params: Params, tokens: jax.Array) -> jax.Array:
    """Replace words that are too rare for this model by OOV; frequent words come first."""
    tokens = tokens.astype(jnp.int32)
    return jnp.where(tokens < len(params["embedding"]), tokens, OOV)


def _vocabulary(clients: Iterable[Columns]) -> dict[str, int]:
    sentences = (text(one) for columns in clients for one in columns["x"][:MOST])
    return frequent((word for one in sentences for word in one.split()), WORDS, FIRST)


def _examples(columns: Columns, known: dict[str, int]) -> dict[str, np.ndarray]:
    made = np.full((min(len(columns["x"]), MOST), LENGTH + 1), PAD, np.int16)
    for row, sentence in zip(made, columns["x"], strict=False):
        numbers = [known.get(word, OOV) for word in text(sentence).split()]
        numbers = [BOS, *numbers, EOS][: LENGTH + 1]
        row[: len(numbers)] = numbers
    return {"x": made[:, :-1], "y": made[:, 1:]}


DATA = DataSet(
    name="stackoverflow_words",
    columns={"x": ("tokens", "x")},
    convert=_examples,
    learn=_vocabulary,
    generate=generated.posts,
    about="Generated sentences in a made-up language, not Stack Overflow",
    origin=Origin("stackoverflow.sqlite.lzma"),
)

stackoverflow_words = FromData(
    DATA,
    SIZES,
    RATES,
    batch_size=32,
    model=lambda form: Model(
        lambda key: init(key, form),
        loss,
        {"accuracy": Ratio(right, places), "accuracy_of_words": Ratio(right_words, words)},
    ),
)
