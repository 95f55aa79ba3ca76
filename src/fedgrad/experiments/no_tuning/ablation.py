"""fed_auto as it was frozen before other tasks than digits and Synthetic were looked at (commit
6cc309a), and what each of its parts is worth: the same race without it, where it was chosen."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

import fedgrad as fg

TASKS = ("digits", "synthetic")  # but for what is about tags
PRODIGY = {"1e-2": 1e-2, "1": 1.0}
MOMENTUM = {"1e-3": 1e-3, "3e-3": 10**-2.5, "1e-2": 1e-2, "3e-2": 10**-1.5, "1e-1": 1e-1}
CUTS: Mapping[float, Any] = {0.05: {"Prodigy": 1, "FedAvgM": 2}, 0.25: 1}
SETTLED = 0.125
Make = Callable[[Any, int], fg.Algorithm]


def candidates(loss: Any, batch_size: int, average: bool = True) -> dict[str, fg.Algorithm]:
    """Those of fed_auto."""
    work = fg.local_training(0.01, batch_size=batch_size)
    estimated = {"learning_rate": 1.0, "estim_lr0": 1e-3, "estim_lr_coef": 2.0}
    families = (
        ("Prodigy", fg.optimizer(optax.contrib.prodigy, **estimated), PRODIGY),
        ("FedAvgM", fg.optimizer(optax.sgd, learning_rate=6.0, momentum=0.7), MOMENTUM),
    )
    found = {}
    for name, server, rates in families:
        made = fg.fed_opt(loss, server=server, client=work)
        one = fg.averaged(made) if average else made
        for words, rate in rates.items():
            found[f"{name}, clients {words}"] = one.starting({"client.learning_rate": rate})
    return found


def raced(
    loss: Any,
    batch_size: int,
    cuts: Mapping[float, Any] = CUTS,
    family: str = "",
    settles: bool = True,
    average: bool = True,
    **more: Any,
) -> fg.Algorithm:
    """fed_auto as it was frozen, or a part of it."""
    all = candidates(loss, batch_size, average)
    some = {name: one for name, one in all.items() if name.startswith(family)}
    kept = {n: {"server.estim_lr_coef": 0.0} for n in some if n.startswith("Prodigy")}
    race = fg.race(some, cuts, changes={SETTLED: kept} if settles else None, **more)
    return race if average else fg.averaged(race)


def judged_by_recall(loss: Any, batch_size: int) -> fg.Algorithm:
    """fed_auto on tags, where models of one loss can be good and bad."""
    recall = fg.tasks.task("stackoverflow_tags").metrics["recall_at_5"]
    return fg.fed_auto(loss, batch_size=batch_size, judge=lambda p, batch: -recall(p, batch))


ABLATIONS: Mapping[str, tuple[str, Make]] = {
    "judged by recall": ("fed_auto, judged by recall (tags)", judged_by_recall),
    "all of it": ("fed_auto as it was frozen", raced),
    "last models judged": (
        "the last models are judged, not the averages",
        lambda loss, batch_size: raced(loss, batch_size, average=False),
    ),
    "training examples judge": (
        "judged by the examples that are trained on",
        lambda loss, batch_size: raced(loss, batch_size, held_out=None),
    ),
    "Prodigy alone": (
        "Prodigy alone",
        lambda loss, batch_size: raced(loss, batch_size, {0.25: 1}, "Prodigy"),
    ),
    "FedAvgM alone": (
        "FedAvgM alone",
        lambda loss, batch_size: raced(loss, batch_size, {0.05: 2, 0.25: 1}, "FedAvgM", False),
    ),
    "estimate grows": (
        "Prodigy's estimate goes on growing",
        lambda loss, batch_size: raced(loss, batch_size, settles=False),
    ),
    "no families": (
        "three go on, of whatever family",
        lambda loss, batch_size: raced(loss, batch_size, {0.05: 3, 0.25: 1}),
    ),
    "shorter": (
        "the race ends after a tenth",
        lambda loss, batch_size: raced(
            loss, batch_size, {0.025: {"Prodigy": 1, "FedAvgM": 2}, 0.1: 1}
        ),
    ),
    "longer": (
        "all go on to a quarter",
        lambda loss, batch_size: raced(loss, batch_size, {0.25: 1}),
    ),
}


def tasks_of(name: str) -> tuple[str, ...]:
    """Where a row of the table was run."""
    return ("tags",) if ABLATIONS[name][1] is judged_by_recall else TASKS
