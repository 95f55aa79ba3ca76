"""Checked values of columns: images, labels, texts. Wrong values raise a ValueError."""

import math
from typing import Any

import numpy as np


def images(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return images as bytes, from arrays of this shape or flat; floats are from 0 to 1."""
    if not len(values):
        return np.zeros((0, *shape), np.uint8)
    found = np.asarray([np.asarray(value) for value in values])
    its = tuple(n for n in found.shape[1:] if n > 1)  # drop a single channel
    if its not in (shape, (math.prod(shape),)):
        raise ValueError(f"images of shape {found.shape[1:]}, not {shape}")
    if np.issubdtype(found.dtype, np.floating):
        found = np.round(255 * found)
    elif not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"images are numbers, got {found.dtype}")
    if not (found.min() >= 0 and found.max() <= 255):
        raise ValueError("images with values out of range")
    return found.reshape(len(values), *shape).astype(np.uint8)


def whole(values: Any, below: int, dtype: Any) -> np.ndarray:
    """Return labels: integers from 0 to `below` - 1."""
    found = np.asarray(values)
    if found.shape == (0,):
        return found.astype(dtype)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"labels are whole numbers, got {found.dtype} of shape {found.shape}")
    if not (found.min() >= 0 and found.max() < below):
        raise ValueError(f"labels from {found.min()} to {found.max()}, not from 0 to {below - 1}")
    return found.astype(dtype)


def text(value: Any) -> str:
    """Return text, which TFF stores as bytes."""
    if isinstance(value, list | np.ndarray) and not len(value):
        return ""
    if not isinstance(value, str | bytes):
        raise ValueError(f"texts are expected, got {type(value).__name__}")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
