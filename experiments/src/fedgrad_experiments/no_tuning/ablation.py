"""Frozen versions of fed_auto, fixed before the tasks were looked at; and ablations of its parts.

A frozen recipe stays as it was, whatever `fg.fed_auto` becomes, so it is written out again here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optax

import fedgrad as fg

TASKS = ("digits", "synthetic")  # the tasks of the ablations
UNSEEN = ("cifar100", "words")  # tasks on which nobody had trained when the third recipe was frozen
Make = Callable[[Any, int], fg.Algorithm]


def first(loss: Any, batch_size: int) -> fg.Algorithm:
    """Return the first recipe, as of commit 6cc309a: it had seen digits and Synthetic."""
    prodigy = _estimated(loss, batch_size)
    momentum = _averaged(loss, batch_size, _momentum())
    rates = {"1e-3": 1e-3, "3e-3": 10**-2.5, "1e-2": 1e-2, "3e-2": 10**-1.5, "1e-1": 1e-1}
    candidates = {
        f"{name}, clients {words}": one.starting({"client.learning_rate": rate})
        for name, one, some in (
            ("Prodigy", prodigy, {"1e-2": 1e-2, "1": 1.0}),
            ("FedAvgM", momentum, rates),
        )
        for words, rate in some.items()
    }
    cuts: Mapping[Any, Any] = {0.05: {"Prodigy": 1, "FedAvgM": 2}, 0.25: 1}
    return fg.race(candidates, cuts, changes={0.125: _kept(candidates)})


def third(
    loss: Any,
    batch_size: int,
    only: str = "",
    decided: Any = (0.25, 30),
    kept: float | None = 0.5,
    average: bool = True,
    **more: Any,
) -> fg.Algorithm:
    """Return the third recipe, or a part of it. In its frozen form (commit 9739e1b) Prodigy's
    estimate is never fixed: `kept=None`."""
    prodigy = _estimated(loss, batch_size, average)
    momentum = _averaged(loss, batch_size, _momentum(), average)
    all = {
        "Prodigy, steady": prodigy,
        "Prodigy, nimble": prodigy.starting({"client.learning_rate": 0.1, "server.betas.0": 0.5}),
        "FedAvgM, gentle": momentum.starting({"client.learning_rate": 10**-2.5}),
    }
    some = {name: one for name, one in all.items() if name.startswith(only)}
    changes = {kept: _kept(some)} if kept is not None else None
    race = fg.race(some, {decided: 1}, changes=changes, **more)
    return race if average else fg.averaged(race)


def judged_by_recall(loss: Any, batch_size: int) -> fg.Algorithm:
    """Return fed_auto judged by recall, for tags, where models of the same loss can be good or
    bad."""
    recall = fg.tasks.task("stackoverflow_tags").metrics["recall_at_5"]
    return fg.fed_auto(loss, batch_size=batch_size, judge=lambda p, batch: -recall(p, batch))


ABLATIONS: Mapping[str, tuple[str, Make]] = {
    "all of it": ("fed_auto", third),
    "steady alone": ("Prodigy, steady, alone", partial(third, only="Prodigy, steady")),
    "nimble alone": ("Prodigy, nimble, alone", partial(third, only="Prodigy, nimble")),
    "gentle alone": ("FedAvgM, gentle, alone", partial(third, only="FedAvgM")),
    "no FedAvgM": ("without FedAvgM", partial(third, only="Prodigy")),
    "estimate grows": ("Prodigy's estimate goes on growing", partial(third, kept=None)),
    "kept early": ("Prodigy's estimate is kept after an eighth", partial(third, kept=0.125)),
    "last models judged": (
        "the last models are judged, not the averages",
        partial(third, average=False),
    ),
    "training examples judge": (
        "judged by the examples that are trained on",
        partial(third, held_out=None),
    ),
    "shorter": ("decided after a tenth", partial(third, decided=0.1)),
    "longer": ("decided after a half", partial(third, decided=0.5)),
    "judged by recall": ("judged by recall (tags)", judged_by_recall),
}


def tasks_of(name: str) -> tuple[str, ...]:
    """Return the tasks on which an ablation is run."""
    return ("tags",) if ABLATIONS[name][1] is judged_by_recall else TASKS


def _estimated(loss: Any, batch_size: int, average: bool = True) -> fg.Algorithm:
    estimated = {"estim_lr0": 1e-3, "estim_lr_coef": 2.0, "betas": (0.9, 0.999)}
    server = fg.optimizer(optax.contrib.prodigy, learning_rate=1.0, **estimated)
    return _averaged(loss, batch_size, server, average)


def _momentum() -> fg.Optimizer:
    return fg.optimizer(optax.sgd, learning_rate=6.0, momentum=0.7)


def _averaged(loss: Any, batch_size: int, server: Any, average: bool = True) -> fg.Algorithm:
    made = fg.fed_opt(loss, server=server, client=fg.local_training(0.01, batch_size=batch_size))
    return fg.averaged(made) if average else made


def _kept(candidates: Mapping[str, fg.Algorithm]) -> dict[str, dict[str, float]]:
    """Return the changes that fix Prodigy's estimates at their current values."""
    return {n: {"server.estim_lr_coef": 0.0} for n in candidates if n.startswith("Prodigy")}
