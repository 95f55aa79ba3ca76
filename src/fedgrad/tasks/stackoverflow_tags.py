"""Tag prediction for posts from their words, a client for each user: logistic regression."""

from collections import Counter
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.types import Batch, Key, Params
from fedgrad.tasks import layers, scores
from fedgrad.tasks.data import generated
from fedgrad.tasks.data.column_values import text
from fedgrad.tasks.data.dataset import DataSet, Origin
from fedgrad.tasks.data.source import Columns
from fedgrad.tasks.data.tokens import frequent
from fedgrad.tasks.from_data import FromData, Model
from fedgrad.training.means import Ratio

WORDS, TAGS = 10_000, 500
LENGTH, MOST_TAGS = 100, 5  # of one example; the rest is cut off
MOST = 1_000  # the most examples of a client
BATCH = 32
NONE = -1  # no word, or no tag
# The small model knows the 1,000 most frequent words and 50 most frequent tags of the same data.
SIZES = {"small": (1_000, 50), "paper": (WORDS, TAGS)}
RATES = {"small": 0.03, "paper": 100.0}  # client learning rates; the paper's for FedAvgM


def init(key: Key, form: tuple[int, int] = SIZES["paper"]) -> Params:
    """Return the initial model: 5,000,500 parameters in the paper's size."""
    return layers.dense_init(key, *form)


def logits(params: Params, words: jax.Array) -> jax.Array:
    """Return the scores of the tags from word frequencies.

    The weight rows of known words are summed and divided by the number of all words, which equals a
    product with the vector of 10,000 frequencies.
    """
    numbers = words.astype(jnp.int32)
    known = (numbers >= 0) & (numbers < len(params["kernel"]))
    there = jnp.maximum(jnp.sum(numbers != NONE, axis=-1), 1)
    rows = layers.embed(params["kernel"], numbers)
    summed = jnp.sum(jnp.where(known[..., None], rows, 0), axis=-2)
    return summed / there.astype(summed.dtype)[:, None] + jnp.broadcast_to(
        params["bias"], summed.shape
    )


def loss(params: Params, batch: Batch) -> jax.Array:
    """Return the cross-entropy, averaged over tags, times 32.

    The paper's loss is the sum over a batch, and its learning rate of 100 belongs to that. The mean
    over a batch of 32, times 32, is this sum; a smaller batch, a client's last, has full weight.
    """
    each = scores.binary_cross_entropy(logits(params, batch["x"]), _wanted(params, batch))
    return BATCH * jnp.mean(each, axis=-1)


def recalled(params: Params, batch: Batch) -> jax.Array:
    """Return how many tags of each example are among the five highest scores."""
    return scores.in_highest(logits(params, batch["x"]), _wanted(params, batch), 5)


def tags(params: Params, batch: Batch) -> jax.Array:
    """Return how many tags each example has, of those that the model knows."""
    return jnp.sum(_wanted(params, batch), axis=-1)


def _wanted(params: Params, batch: Batch) -> jax.Array:
    known = len(params["bias"])
    return jnp.sum(jax.nn.one_hot(batch["y"].astype(jnp.int32), known, dtype=jnp.float32), axis=-2)


def _words(columns: Columns, i: int) -> list[str]:
    title = text(columns["title"][i]).split() if "title" in columns else []
    return text(columns["x"][i]).split() + title


def _tags(columns: Columns, i: int) -> list[str]:
    return [tag for tag in dict.fromkeys(text(columns["y"][i]).split("|")) if tag]


def _vocabularies(clients: Iterable[Columns]) -> dict[str, dict[str, int]]:
    """Return the numbers of words and of tags, the most frequent first."""
    words: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for columns in clients:
        for i in range(min(len(columns["x"]), MOST)):
            words.update(_words(columns, i))
            tags.update(_tags(columns, i))
    return {"words": frequent(words, WORDS), "tags": frequent(tags, TAGS)}


def _examples(columns: Columns, known: dict[str, dict[str, int]]) -> dict[str, np.ndarray]:
    rows = min(len(columns["x"]), MOST)
    x, y = np.full((rows, LENGTH), NONE, np.int16), np.full((rows, MOST_TAGS), NONE, np.int16)
    for i in range(rows):
        words = [known["words"].get(word, WORDS) for word in _words(columns, i)][:LENGTH]
        tags = [known["tags"][t] for t in _tags(columns, i) if t in known["tags"]][:MOST_TAGS]
        x[i, : len(words)], y[i, : len(tags)] = words, tags
    return {"x": x, "y": y}


DATA = DataSet(
    name="stackoverflow_tags",
    columns={"x": ("tokens", "x"), "y": ("tags", "y"), "title": ("title",)},
    optional=("title",),
    convert=_examples,
    learn=_vocabularies,
    generate=generated.posts,
    about="Generated sentences in a made-up language, not Stack Overflow",
    origin=Origin("stackoverflow.sqlite.lzma"),
)

stackoverflow_tags = FromData(
    DATA,
    SIZES,
    RATES,
    batch_size=BATCH,
    model=lambda form: Model(
        lambda key: init(key, form), loss, {"recall_at_5": Ratio(recalled, tags)}
    ),
)
