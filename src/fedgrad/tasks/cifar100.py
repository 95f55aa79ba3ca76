"""Small color images in 100 classes: the pre-activation ResNet-18 with GroupNorm."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.types import Batch, Key, Params
from fedgrad.tasks import layers, scores, split
from fedgrad.tasks.data import generated
from fedgrad.tasks.data.column_values import images, whole
from fedgrad.tasks.data.dataset import DataSet, Origin
from fedgrad.tasks.data.source import Columns
from fedgrad.tasks.from_data import FromData, Model
from fedgrad.tasks.task_checks import TaskError

CLASSES = 100
CROP, SIDE = slice(4, 28), 24  # the middle 24 x 24


@dataclass(frozen=True)
class Form:
    """The configuration of a residual net."""

    window: int  # of the first convolution
    stride: int  # of the first convolution
    pooled: bool  # max pooling after it
    channels: tuple[int, ...]  # of each stage
    blocks: int  # in each stage
    groups: int  # of a normalization
    averaged: bool  # average over positions before the classifier; else flatten


# The small form learned best in single runs on 12,000 images: 15 % in 60 rounds. With a residual
# block it reached 11 %, and a residual net of two stages with averaging 2 % after 40 rounds.
SIZES = {
    "small": Form(4, 4, False, (32,), blocks=0, groups=4, averaged=False),
    "paper": Form(7, 2, True, (64, 128, 256, 512), blocks=2, groups=32, averaged=True),
}
# The superclass of each class, as in CIFAR-100.
# fmt: off
SUPERCLASS = np.array([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15,
    3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4,
    2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
])
# fmt: on
RATES = {"small": 0.01, "paper": 10**-1.5}  # client learning rates; the paper's for FedAvgM


def init(key: Key, form: Form = SIZES["paper"]) -> Params:
    """Return the initial model: 11,227,812 parameters in the paper's size."""
    channels = form.channels
    keys = iter(jax.random.split(key, 2 + 3 * form.blocks * len(channels)))
    stages: list[list[dict[str, Any]]] = []
    inputs = channels[0]
    for outputs in channels:
        stage: list[dict[str, Any]] = []
        for _ in range(form.blocks):
            block: dict[str, Any] = {
                "conv_1": _he(next(keys), 3, inputs, outputs),
                "norm_2": layers.group_norm_init(outputs),
                "conv_2": _he(next(keys), 3, outputs, outputs),
            }
            if stages or stage:  # the first block follows a normalization
                block["norm_1"] = layers.group_norm_init(inputs)
            if inputs != outputs:
                block["shortcut"] = _he(next(keys), 1, inputs, outputs)
                block["shortcut_norm"] = layers.group_norm_init(outputs)
            stage.append(block)
            inputs = outputs
        stages.append(stage)
    features = inputs if form.averaged else inputs * (SIDE // form.stride) ** 2
    return {
        "stem": _he(next(keys), form.window, 3, channels[0]),
        "stem_norm": layers.group_norm_init(channels[0]),
        "stages": stages,
        "last_norm": layers.group_norm_init(inputs),
        "classes": {
            "kernel": 0.01 * jax.random.normal(next(keys), (features, CLASSES), jnp.float32),
            "bias": jnp.zeros(CLASSES, jnp.float32),
        },
    }


def logits(params: Params, images: jax.Array, form: Form = SIZES["paper"]) -> jax.Array:
    """Return the scores of the classes of byte images, each normalized to mean 0 and variance 1."""

    def norm_relu(layer: Params, x: jax.Array) -> jax.Array:
        return jax.nn.relu(layers.group_norm(layer, x, form.groups))

    x = layers.conv(params["stem"], _standardised(params, images), form.stride, "SAME")
    x = norm_relu(params["stem_norm"], x)
    if form.pooled:
        x = layers.max_pool(x, 3, 2, padding=1)
    for block in [block for stage in params["stages"] for block in stage]:
        y = norm_relu(block["norm_1"], x) if "norm_1" in block else x
        y = layers.conv(block["conv_1"], y, 1, "SAME")
        y = layers.conv(block["conv_2"], norm_relu(block["norm_2"], y), 1, "SAME")
        if "shortcut" in block:
            x = layers.conv(block["shortcut"], x)
            x = layers.group_norm(block["shortcut_norm"], x, form.groups)
        x = x + y
    x = norm_relu(params["last_norm"], x)
    x = jnp.mean(x, (1, 2)) if form.averaged else x.reshape(len(x), -1)
    return layers.dense(params["classes"], x)


def _he(key: Key, window: int, inputs: int, outputs: int) -> layers.Layer:
    initializer = jax.nn.initializers.he_normal()
    return {"kernel": initializer(key, (window, window, inputs, outputs), jnp.float32)}


def _standardised(params: Params, images: jax.Array) -> jax.Array:
    x = images.astype(params["stem"]["kernel"].dtype)
    x = x - jnp.mean(x, (1, 2, 3), keepdims=True)
    # TensorFlow's lower bound on the standard deviation: 1 / sqrt(number of values).
    least = 1 / np.sqrt(np.prod(images.shape[1:]))
    deviation = jnp.sqrt(jnp.mean(x**2, (1, 2, 3), keepdims=True) + 1e-12)
    return x / jnp.maximum(deviation, jnp.asarray(least, x.dtype))


def _examples(columns: Columns, _: Any) -> dict[str, np.ndarray]:
    x = images(columns["x"], (32, 32, 3))[:, CROP, CROP]
    return {"x": x, "y": whole(columns["y"], CLASSES, np.uint8)}


def _clients(
    columns: Columns, part: str, clients: int | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Split by Pachinko allocation: 500 training and 100 test clients of equal size."""
    labels = whole(columns["y"], CLASSES, np.int64)
    if clients is None:
        clients = min(500 if part == "train" else 100, max(1, len(labels) // 20))
    if clients > len(labels):
        raise TaskError.here(f"There are {len(labels)} images, too few for {clients} clients.")
    return split.pachinko(labels, SUPERCLASS[labels], clients, rng)


DATA = DataSet(
    name="cifar100",
    columns={"x": ("image", "img", "x"), "y": ("label", "fine_label", "y")},
    convert=_examples,
    generate=generated.textures,
    divide=_clients,
    about="Generated patterns in 20 classes, not CIFAR-100",
    origin=Origin("cifar100.sqlite.lzma", hugging_face="uoft-cs/cifar100"),
)


def _model(form: Form) -> Model:
    def loss(params: Params, batch: Batch) -> jax.Array:
        """Return the cross-entropy of each example."""
        return scores.cross_entropy(logits(params, batch["x"], form), batch["y"])

    def accuracy(params: Params, batch: Batch) -> jax.Array:
        """Return 1 for each example whose class scores highest, else 0."""
        return scores.is_right(logits(params, batch["x"], form), batch["y"])

    return Model(lambda key: init(key, form), loss, {"accuracy": accuracy})


cifar100 = FromData(DATA, SIZES, RATES, batch_size=20, model=_model)
