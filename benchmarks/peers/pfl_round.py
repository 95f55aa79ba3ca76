"""One process of pfl: its own FederatedAveraging and SimulatedBackend on PyTorch.

Users are tensors in memory before the first round, no metrics are evaluated, SGD is the fused one.
On its own as a script it is the second process of `with_pfl`: a round for every number on stdin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population as Target
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F
from workloads import BATCH, LR, SHAPES, cohort, first_weights, flatten, population, unflatten

Round = Callable[[int], np.ndarray]


class Model(nn.Module):
    """What the two models share: pfl asks a module for `loss` and `metrics`."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of a batch."""
        return F.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """None: evaluation is not part of the benchmark."""
        return {}


class Linear(Model):
    """Softmax regression."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.empty(s)) for s in SHAPES["ragged"].values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return torch.addmm(self.b, x, self.w)


class Cnn(Model):
    """The EMNIST CNN; images stay channels-last in memory, as in the other competitors."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES["cnn"].items():
            if name.startswith("conv"):
                kernel = torch.empty(shape[3], shape[2], 3, 3)
                value = kernel.to(memory_format=torch.channels_last)
            else:
                value = torch.empty(shape)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = F.relu(F.conv2d(x, self.conv1, self.bias1))
        x = F.relu(F.max_pool2d(F.conv2d(x, self.conv2, self.bias2), 2))
        x = x.permute(0, 2, 3, 1).flatten(1)
        x = F.relu(torch.addmm(self.bias3, x, self.dense1))
        return torch.addmm(self.bias4, x, self.dense2)


class Cohorts(FederatedDatasetBase):
    """All users; `chosen` says who is sampled next. Each process gets its part of them."""

    def __init__(self, users: list[PyTorchTensorDataset]) -> None:
        super().__init__()
        self.users, self.chosen = users, np.arange(0)

    def __next__(self) -> tuple[PyTorchTensorDataset, int]:
        raise NotImplementedError("users are asked for by the cohort here")

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[PyTorchTensorDataset, int]]:
        """The users of this process: the longest first, each to the process with the least work."""
        context = pytorch_ops.distributed
        load, own = [0] * context.world_size, []
        for c in sorted(self.chosen.tolist(), key=lambda c: -len(self.users[c])):
            process = load.index(min(load))
            load[process] += len(self.users[c])
            if process == context.global_rank:
                own.append(c)
        return ((self.users[c], 0) for c in own)


def build_round(workload: str, threads: int) -> Round:
    """A round of `ragged` or `cnn`, of which this process does its part."""
    torch.set_num_threads(threads)
    module = {"ragged": Linear, "cnn": Cnn}[workload]()
    _load(module, unflatten(workload, first_weights(workload)))
    model = PyTorchModel(
        module,
        local_optimizer_create=lambda p, lr: torch.optim.SGD(p, lr=lr, fused=True),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    data, users = population(workload), []
    for c in range(len(data.count)):
        x, y = data.client(c)
        images = torch.from_numpy(np.ascontiguousarray(x))
        if workload == "cnn":
            images = images.permute(0, 3, 1, 2)
        users.append(PyTorchTensorDataset((images, torch.from_numpy(y).long()), str(c)))
    cohorts = Cohorts(users)
    backend = SimulatedBackend(cohorts, cohorts, postprocessors=[WeightByDatapoints()])
    algorithm = FederatedAveraging()
    train = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LR[workload], local_batch_size=BATCH[workload]
    )

    def play(i: int) -> np.ndarray:
        cohorts.chosen = cohort(workload, i)
        context = CentralContext(
            current_central_iteration=i,
            do_evaluation=False,
            cohort_size=len(cohorts.chosen),
            population=Target.TRAIN,
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=i + 1,
                evaluation_frequency=i + 1,
                train_cohort_size=len(cohorts.chosen),
                val_cohort_size=0,
            ),
            model_train_params=train,
        )
        statistics, metrics = backend.gather_results(model, algorithm, central_context=context)
        algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        return flatten(workload, _weights(module))

    return play


def _load(module: nn.Module, weights: dict[str, np.ndarray]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.from_numpy(weights[name].copy())
            parameter.copy_(value.permute(3, 2, 0, 1) if value.ndim == 4 else value)


def _weights(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: (p.permute(2, 3, 1, 0) if p.ndim == 4 else p).detach().numpy()
        for name, p in module.named_parameters()
    }


if __name__ == "__main__":
    play = build_round(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        play(int(line))
