"""The paper's tasks for pfl: their models in PyTorch, and users from a file of `paper_tasks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from pfl.data.pytorch import PyTorchTensorDataset
from torch import nn
from torch.nn import functional as F

PAD = 0
# How many examples a user has, and a function that gives them.
User = tuple[int, Callable[[], PyTorchTensorDataset]]


class Emnist(nn.Module):
    """The convolutional net; images stay channels-last in memory."""

    def __init__(self, weights: dict[str, np.ndarray], dropout: bool) -> None:
        super().__init__()
        self.names = {n: n.replace("/", ".").replace("kernel", "weight") for n in weights}
        first, second = (weights[f"conv_{i}/kernel"].shape[-1] for i in (1, 2))
        wide, classes = weights["classes/kernel"].shape
        self.conv_1 = nn.Conv2d(1, first, 3).to(memory_format=torch.channels_last)
        self.conv_2 = nn.Conv2d(first, second, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(12 * 12 * second, wide)
        self.classes = nn.Linear(wide, classes)
        self.dropout = dropout

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of a batch."""
        x = F.relu(self.conv_1(x[:, None].float() / 255))
        # Pooling first is the same function, on a quarter of the numbers.
        x = F.relu(F.max_pool2d(self.conv_2(x), 2))
        x = F.dropout(x, 0.25, self.dropout).permute(0, 2, 3, 1).flatten(1)
        x = F.dropout(F.relu(self.hidden(x)), 0.5, self.dropout)
        return F.cross_entropy(self.classes(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """None: evaluation is not part of the benchmark."""
        return {}


class Shakespeare(nn.Module):
    """The LSTMs. PyTorch's have a second bias, which stays zero."""

    def __init__(self, weights: dict[str, np.ndarray], dropout: bool) -> None:
        super().__init__()
        deep = sum(name.endswith("recurrent") for name in weights)
        wide, tokens = weights["characters/kernel"].shape
        embedded = weights["embedding"].shape[1]
        self.embedding = nn.Embedding(tokens, embedded)
        self.lstm = nn.LSTM(embedded, wide, deep, batch_first=True)
        self.characters = nn.Linear(wide, tokens)
        self.names = {
            "embedding": "embedding.weight",
            "characters/kernel": "characters.weight",
            "characters/bias": "characters.bias",
        }
        for i in range(deep):
            second = getattr(self.lstm, f"bias_hh_l{i}")
            second.requires_grad_(False).zero_()
            self.names |= {
                f"lstm/{i}/input": f"lstm.weight_ih_l{i}",
                f"lstm/{i}/recurrent": f"lstm.weight_hh_l{i}",
                f"lstm/{i}/bias": f"lstm.bias_ih_l{i}",
            }

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over all places of a batch; padding counts as nothing."""
        logits = self.characters(self.lstm(self.embedding(x))[0])
        summed = F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum"
        )
        return summed / y.numel()

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """None: evaluation is not part of the benchmark."""
        return {}


MODELS: dict[str, Any] = {"emnist": Emnist, "shakespeare": Shakespeare}


class Task:
    """What `pfl_round` asks for, of a task."""

    def __init__(self, name: str, file: str, dropout: bool = True) -> None:
        read = np.load(file)
        self.names = read["names"].tolist()
        self.first = {n: read[f"weights/{n}"] for n in self.names}
        self.module = MODELS[name](self.first, dropout)
        self.rate, self.batch_size = float(read["rate"]), int(read["batch_size"])
        self.momentum = float(read["momentum"])
        self.cohorts, self.orders, self.counts = (read[n] for n in ("cohorts", "orders", "counts"))
        ends = np.cumsum(self.counts)[:-1]
        # Images stay bytes until the model casts them, as with everybody; indices are int64.
        x = read["x"] if name == "emnist" else read["x"].astype(np.int64)
        self.users = [
            tuple(map(torch.from_numpy, user))
            for user in zip(
                *(np.split(a, ends) for a in (x, read["y"].astype(np.int64))), strict=True
            )
        ]
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for n in self.names:
                parameters[self.module.names[n]].copy_(_turned(torch.from_numpy(self.first[n]), n))

    def cohort(self, i: int) -> list[User]:
        """The users of round i, their examples in the order of that round."""
        chosen = zip(self.cohorts[i].tolist(), self.orders[i], strict=True)
        return [(int(self.counts[c]), partial(self.user, c, order)) for c, order in chosen]

    def user(self, c: int, order: np.ndarray) -> PyTorchTensorDataset:
        """A user's examples in this order."""
        rows = torch.from_numpy(order[: self.counts[c]].astype(np.int64))
        return PyTorchTensorDataset(tuple(a[rows] for a in self.users[c]), str(c))

    def weights(self) -> Callable[[], np.ndarray]:
        """How far the model has come, laid out as everybody's."""
        return self._change

    def _change(self) -> np.ndarray:
        parameters = dict(self.module.named_parameters())
        ends = {n: _turned_back(parameters[self.module.names[n]].detach(), n) for n in self.names}
        return np.concatenate([np.ravel(ends[n].numpy() - self.first[n]) for n in self.names])


def _turned(weights: torch.Tensor, name: str) -> torch.Tensor:
    """In PyTorch's order of axes."""
    if weights.ndim == 4:
        return weights.permute(3, 2, 0, 1)
    return weights.T if weights.ndim == 2 and name != "embedding" else weights


def _turned_back(weights: torch.Tensor, name: str) -> torch.Tensor:
    if weights.ndim == 4:
        return weights.permute(2, 3, 1, 0)
    return weights.T if weights.ndim == 2 and name != "embedding" else weights
