"""Handwritten characters in 62 classes, a client for each writer: a small convolutional net."""

from typing import Any

import jax
import numpy as np

from fedgrad.core.types import Batch, Key, Params
from fedgrad.tasks import layers, scores
from fedgrad.tasks.data import generated
from fedgrad.tasks.data.column_values import images, whole
from fedgrad.tasks.data.dataset import DataSet, Origin
from fedgrad.tasks.data.source import Columns
from fedgrad.tasks.from_data import FromData, Model

CLASSES = 62
# Channels of both convolutions, and the size of the hidden layer.
SIZES = {"small": (8, 16, 64), "paper": (32, 64, 128)}
RATES = dict.fromkeys(SIZES, 10**-1.5)  # client learning rates; the paper's for FedAvgM


def init(key: Key, wide: tuple[int, int, int] = SIZES["paper"]) -> Params:
    """Return the initial model: 1,206,590 parameters in the paper's size."""
    keys = jax.random.split(key, 4)
    first, second, hidden = wide
    return {
        "conv_1": layers.conv_init(keys[0], 3, 1, first),
        "conv_2": layers.conv_init(keys[1], 3, first, second),
        "hidden": layers.dense_init(keys[2], 12 * 12 * second, hidden),
        "classes": layers.dense_init(keys[3], hidden, CLASSES),
    }


def logits(params: Params, images: jax.Array, key: Key | None = None) -> jax.Array:
    """Return the class scores of byte images (255 is white), with dropout if there is a key."""
    keys = (None, None) if key is None else jax.random.split(key)
    x = images.astype(params["conv_1"]["kernel"].dtype)[..., None] / 255
    x = jax.nn.relu(layers.conv(params["conv_1"], x))
    x = jax.nn.relu(layers.conv(params["conv_2"], x))
    x = layers.dropout(layers.max_pool(x, 2, 2), 0.25, keys[0])
    x = jax.nn.relu(layers.dense(params["hidden"], x.reshape(len(x), -1)))
    return layers.dense(params["classes"], layers.dropout(x, 0.5, keys[1]))


def loss(params: Params, batch: Batch, key: Key | None = None) -> jax.Array:
    """Return the cross-entropy of each example, with dropout."""
    return scores.cross_entropy(logits(params, batch["x"], key), batch["y"])


def plain_loss(params: Params, batch: Batch) -> jax.Array:
    """Return the cross-entropy of each example, without dropout."""
    return scores.cross_entropy(logits(params, batch["x"]), batch["y"])


def accuracy(params: Params, batch: Batch) -> jax.Array:
    """Return 1 for each example whose class scores highest, else 0."""
    return scores.is_right(logits(params, batch["x"]), batch["y"])


def _examples(columns: Columns, _: Any) -> dict[str, np.ndarray]:
    x = images(columns["x"], (28, 28))
    return {"x": x, "y": whole(columns["y"], CLASSES, np.uint8)}


DATA = DataSet(
    name="emnist",
    columns={"x": ("pixels", "image", "x"), "y": ("label", "character", "y")},
    convert=_examples,
    generate=generated.characters,
    about="Generated drawings of ten made-up characters, not EMNIST",
    origin=Origin("emnist_all.sqlite.lzma", "FEMNIST of LEAF", "flwrlabs/femnist", "writer_id"),
)

emnist = FromData(
    DATA,
    SIZES,
    RATES,
    batch_size=20,
    model=lambda form: Model(
        lambda key: init(key, form), loss, {"accuracy": accuracy, "loss": plain_loss}
    ),
)
