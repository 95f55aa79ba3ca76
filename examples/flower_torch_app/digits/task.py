"""The model, its loss, and the part of the data that a site has."""

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BATCH, HELD_OUT = 20, 300


def make_model() -> nn.Module:
    """The same model each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over a batch."""
    x, y = batch
    return cross_entropy(model(x), y)


def _examples() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])


def site(part: int, parts: int) -> DataLoader:
    """The examples of a site: half of them sorted by digit, so that sites differ."""
    x, y = (column[HELD_OUT:] for column in _examples())
    half = len(y) // 2
    order = torch.cat([torch.argsort(y[:half], stable=True), torch.arange(half, len(y))])
    mine = torch.cat([order[:half].chunk(parts)[part], order[half:].chunk(parts)[part]])
    shuffled = torch.Generator().manual_seed(part)
    return DataLoader(TensorDataset(x[mine], y[mine]), BATCH, shuffle=True, generator=shuffled)


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Examples that no site has."""
    x, y = _examples()
    return x[:HELD_OUT], y[:HELD_OUT]
