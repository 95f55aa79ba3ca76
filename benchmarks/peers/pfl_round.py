"""One process of pfl: its own FederatedAveraging and SimulatedBackend on PyTorch.

Users are tensors in memory before the first round, no metrics are evaluated, SGD is the fused one.
What a round returns is its weights, or a function that gives them.
On its own as a script it is the second process of `with_pfl`: a round for every number on stdin.
"""

from __future__ import annotations

import json
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
from pfl_task import Task, User
from torch import nn
from torch.nn import functional as F
from workloads import BATCH, LR, SHAPES, cohort, first_weights, flatten, population, unflatten

Round = Callable[[int], Any]


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


class Given:
    """What `build_round` asks for, of `ragged` or `cnn`."""

    momentum = 0.0

    def __init__(self, workload: str) -> None:
        self.workload = workload
        self.rate, self.batch_size = LR[workload], BATCH[workload]
        self.module = {"ragged": Linear, "cnn": Cnn}[workload]()
        _load(self.module, unflatten(workload, first_weights(workload)))
        data, self.users = population(workload), []
        for c in range(len(data.count)):
            x, y = data.client(c)
            images = torch.from_numpy(np.ascontiguousarray(x))
            if workload == "cnn":
                images = images.permute(0, 3, 1, 2)
            self.users.append(PyTorchTensorDataset((images, torch.from_numpy(y).long()), str(c)))

    def cohort(self, i: int) -> list[User]:
        """Users are tensors already."""
        chosen = [self.users[c] for c in cohort(self.workload, i)]
        return [(len(user), lambda user=user: user) for user in chosen]

    def weights(self) -> np.ndarray:
        """The model, as one vector."""
        return flatten(self.workload, _weights(self.module))


class Cohorts(FederatedDatasetBase):
    """`chosen` says who is sampled next. Each process gets its part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[User] = []

    def __next__(self) -> tuple[PyTorchTensorDataset, int]:
        raise NotImplementedError("users are asked for by the cohort here")

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[PyTorchTensorDataset, int]]:
        """The users of this process: the longest first, each to the process with the least work."""
        context = pytorch_ops.distributed
        load, own = [0] * context.world_size, []
        for examples, user in sorted(self.chosen, key=lambda user: -user[0]):
            process = load.index(min(load))
            load[process] += examples
            if process == context.global_rank:
                own.append(user)
        return ((user(), 0) for user in own)


def build_round(workload: str, threads: int, **task: Any) -> Round:
    """A round, of which this process does its part. `task`: what a task of the paper is read from
    (`pfl_task.py`)."""
    torch.set_num_threads(threads)
    given: Any = Task(workload, **task) if task else Given(workload)
    model = PyTorchModel(
        given.module,
        local_optimizer_create=lambda p, lr: torch.optim.SGD(p, lr=lr, fused=True),
        central_optimizer=torch.optim.SGD(
            [p for p in given.module.parameters() if p.requires_grad], 1.0, given.momentum
        ),
    )
    cohorts = Cohorts()
    backend = SimulatedBackend(cohorts, cohorts, postprocessors=[WeightByDatapoints()])
    algorithm = FederatedAveraging()
    train = NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=given.rate,
        local_batch_size=given.batch_size,
    )

    def play(i: int) -> Any:
        cohorts.chosen = given.cohort(i)
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
        return given.weights()

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
    play = build_round(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
    for line in sys.stdin:
        play(int(line))
