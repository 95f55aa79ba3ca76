"""The compared methods, each with its trials: their starts and seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import fedgrad as fg
from fedgrad_experiments.no_tuning import ablation
from fedgrad_experiments.no_tuning.rules import RATE, DeltaSgd, fathom, schedule_free
from fedgrad_experiments.no_tuning.tasks import TASKS
from fedgrad_experiments.server_optimizer.training import LEARN
from fedgrad_experiments.trials import Starts

# The search space of somebody without prior knowledge.
SPACE = {
    RATE: fg.log_uniform(1e-3, 10.0),
    "server.learning_rate": fg.log_uniform(1e-3, 10.0),
    "server.momentum": fg.uniform(0.0, 1.0),
}
BLIND = "fed_auto as it was frozen, blind"
FAR = (0.001, 0.1, 10.0)  # client rates from which a method should find the right one


@dataclass(frozen=True)
class Settings:
    """The number of runs of each kind; random starts are the same on all tasks."""

    tasks: tuple[str, ...] = tuple(TASKS)  # if none are named
    fixed: int = 50  # random starts of FedAvgM
    adam: int = 25  # random starts of FedAdam
    starts: int = 20  # how many of these starts the methods that learn use, too
    seeds: int = 20  # of methods that ignore the start
    others: int = 5  # seeds of all other methods
    searched: int = 27  # configurations in successive halving
    rounds: int | None = None  # None: the task's default
    evaluated_clients: int = 500  # at most


@dataclass(frozen=True)
class Trials:
    """The trials of a method, one entry each; adjacent trials with the same seed run side by
    side."""

    starts: Starts
    seeds: Sequence[int]


Found = Mapping[str, Mapping[str, np.ndarray]]  # records of finished methods
Make = Callable[[Any, int], fg.Algorithm]  # (loss, batch size) -> algorithm


@dataclass(frozen=True)
class Method:
    """A way to train, and the trials by which it is judged."""

    title: str
    make: Make
    trials: Callable[[Settings, Found], Trials]
    averages: bool = False  # its model is already an average
    searches: bool = False  # successive halving searches its hyperparameters
    rates: tuple[float, ...] = ()  # client rates, each a separate row
    only: tuple[str, ...] = ()  # its tasks, if not all
    times: int = 1  # multiple of the rounds, for methods that send less than fed_auto

    def algorithm(self, loss: Any, batch_size: int) -> fg.Algorithm:
        """Return the algorithm to train, whose model is an average of models."""
        made = self.make(loss, batch_size)
        return made if self.averages else fg.averaged(made)


def random_starts(n: int, names: Sequence[str] = tuple(SPACE)) -> dict[str, np.ndarray]:
    """Return the initial hyperparameters of `n` trials, always the same."""
    keys = jax.random.split(jax.random.key(0), len(SPACE))
    drawn = {name: SPACE[name](key, n) for name, key in zip(SPACE, keys, strict=True)}
    return {name: np.asarray(drawn[name], np.float32) for name in names}


def rungs(configurations: int) -> int:
    """Return the number of rungs of successive halving that keeps a third each time until one is
    left."""
    return 1 + max(1, round(math.log(configurations, 3)))


def _fixed(settings: Settings, _: Found) -> Trials:
    return Trials(random_starts(settings.fixed), [0] * settings.fixed)


def _fixed_adam(settings: Settings, _: Found) -> Trials:
    names = [RATE, "server.learning_rate"]
    return Trials(random_starts(settings.adam, names), [0] * settings.adam)


def _some_starts(settings: Settings, each_its_seed: bool) -> Trials:
    n = min(settings.starts, settings.fixed)
    some = {name: values[:n] for name, values in random_starts(settings.fixed).items()}
    return Trials(some, list(range(n)) if each_its_seed else [0] * n)


def _best_start(settings: Settings, found: Found) -> Trials:
    """Return the start of the best fixed run, with several seeds."""
    fixed = found["fedavgm"]
    best, n = int(np.argmax(fixed["accuracy"])), settings.others
    starts = {name: np.full(n, fixed[f"start/{name}"][best]) for name in SPACE}
    return Trials(starts, list(range(n)))


def _seeds(settings: Settings, _: Found) -> Trials:
    return Trials({}, list(range(settings.others)))


def _rates(settings: Settings, _: Found, rates: tuple[float, ...]) -> Trials:
    starts = np.tile(np.asarray(rates, np.float32), settings.others)
    return Trials({RATE: starts}, [s for s in range(settings.others) for _ in rates])


def _of(make: Callable[..., fg.Algorithm], rate: float = 0.1) -> Make:
    """Return a constructor of a library algorithm, with this client rate."""
    return lambda loss, batch_size: make(loss, fg.local_training(rate, batch_size=batch_size))


def _from_rates(title: str, make: Make, rates: tuple[float, ...]) -> Method:
    return Method(title, make, lambda s, found: _rates(s, found, rates), rates=rates)


def _paper(loss: Any, batch_size: int) -> fg.Algorithm:
    return fg.self_tuning(_of(fg.fed_avgm)(loss, batch_size), LEARN, optax.sgd(0.01), guard=None)


def _tuned(loss: Any, batch_size: int) -> fg.Algorithm:
    return fg.self_tuning(_of(fg.fed_avgm)(loss, batch_size))


def _followed(loss: Any, batch_size: int) -> fg.Algorithm:
    """Return FedAvgM with hypergradients of the server's rate: at the averaged model, on held-out
    examples, over twenty rounds, with a paired guard."""
    held_out = fg.HeldOut()
    algorithm = fg.holding_out(fg.averaged(_of(fg.fed_avgm)(loss, batch_size)), held_out)
    return fg.self_tuning(
        algorithm,
        {"server.learning_rate": fg.log()},
        optax.adam(0.03),
        gradient_from=fg.GradientCohort("same", held_out=held_out),
        guard="paired",
        horizon=fg.Horizon(20, through="server"),
    )


# In the order of training: some methods need the results of earlier ones.
METHODS: Mapping[str, Method] = {
    "fedavgm": Method("FedAvgM, random start", _of(fg.fed_avgm), _fixed),
    "fedadam": Method("FedAdam, random start", _of(fg.fed_adam), _fixed_adam),
    "auto": Method(
        "fed_auto",
        lambda loss, batch_size: fg.fed_auto(loss, batch_size=batch_size),
        lambda settings, _: Trials({}, list(range(settings.seeds))),
        averages=True,
    ),
    "blind": Method(
        BLIND,
        ablation.first,
        lambda settings, _: Trials({}, list(range(settings.seeds))),
        averages=True,
        only=tuple(name for name in TASKS if name not in ablation.UNSEEN),
    ),
    "frozen": Method(
        BLIND,
        partial(ablation.third, kept=None),
        lambda settings, _: Trials({}, list(range(settings.seeds))),
        averages=True,
        only=ablation.UNSEEN,
    ),
    "self-tuning": Method(
        "self_tuning(FedAvgM), random start",
        _tuned,
        lambda settings, _: _some_starts(settings, each_its_seed=True),
        averages=True,
    ),
    "paper": Method(
        "the paper's method, random start",
        _paper,
        lambda settings, _: _some_starts(settings, each_its_seed=False),
    ),
    "good": Method("FedAvgM, best start", _of(fg.fed_avgm), _best_start),
    "good-tuned": Method("self_tuning(FedAvgM), best start", _tuned, _best_start, averages=True),
    "good-followed": Method(
        "FedAvgM, best start, then hypergradients", _followed, _best_start, averages=True
    ),
    "prodigy": _from_rates("Prodigy", _of(fg.fed_prodigy), (0.01, 0.1)),
    "prodigy-longer": Method(
        "Prodigy, client rate 0.01, twice the rounds", _of(fg.fed_prodigy, 0.01), _seeds, times=2
    ),
    "dog": Method("DoG", _of(fg.fed_dog), _seeds),
    "mechanic": Method("Mechanic", _of(fg.fed_mechanic), _seeds),
    "schedule-free": Method("schedule-free SGD", _of(schedule_free), _seeds),
    "fedexp": Method("FedExP", _of(fg.fed_exp), _seeds),
    "fedhyper": _from_rates("FedHyper-G", _of(fg.fed_hyper), FAR),
    "fathom": _from_rates(
        "FATHOM's client rule",
        lambda loss, batch_size: fathom(_of(fg.fed_avg)(loss, batch_size)),
        FAR,
    ),
    "delta-sgd": Method(
        "Delta-SGD clients, FedAvgM",
        lambda loss, batch_size: fg.fed_avgm(loss, DeltaSgd(batch_size=batch_size)),
        _seeds,
    ),
    "halving": Method("successive halving of FedAvgM", _of(fg.fed_avgm), _seeds, searches=True),
    **{
        name: Method(title, make, _seeds, averages=True, only=ablation.tasks_of(name))
        for name, (title, make) in ablation.ABLATIONS.items()
    },
}
# Methods from the best start show what tuning does to a good setting; nobody could choose them in
# advance.
AT_BEST = ("good", "good-tuned", "good-followed")
OURS = ("auto", "blind", "self-tuning")
LONGER = tuple(name for name, one in METHODS.items() if one.times > 1)  # methods with more rounds
