"""Training through `fg.fit`: what its loop costs, and its rounds against everybody else's."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import plain_ragged
import report as results
import softmax
import with_fit
from timing import Times, isolated
from workloads import cohort, first_weights, unflatten

import fedgrad as fg
from fedgrad.clients import sampling
from fedgrad.training import cohort_schedule, loop
from sections.rounds import FEDJAX, PFL, Rounds

SIZE = 50  # clients a round
FIRST = 10  # rounds of each repetition that are not timed
FIT, TUNED = "fedgrad fit, 2 devices", "fedgrad fit, 2 devices, tuned"
AVGM = "fedgrad fit, FedAvgM, 2 devices"
PLAIN, ALL, TUNED_ALL = "plain loop", "fit, log and progress", "fit, log and progress, tuned"
HANDS = {1: ("sequential", "blocks"), 2: ("dealt", "shard_map", "best")}
BY_HAND = ("jax dealt, 2 devices", "jax shard_map")

RAGGED = Rounds(
    "ragged",
    {0: 30},
    (
        ("fedgrad fit", "JAX by hand, 1 device", ("jax sequential", "jax blocks of 10")),
        (FIT, "JAX by hand, the same model", BY_HAND),
        (AVGM, "JAX by hand, the same model", BY_HAND),
        (TUNED, "JAX by hand, the best found", ("jax best",)),
        (FIT, "DrJAX", ("drjax padded, 2 devices", "drjax padded")),
        (FIT, "FedJAX", FEDJAX[:2]),
        (FIT, "pfl", PFL),
    ),
    "Rounds of the ragged workload, asked for one by one: `fit` cannot start any ahead. The goals: "
    "1.2 of hand-written, faster than every peer. FedAvgM has momentum 0, so that its weights can "
    "be compared.",
)
CNN = Rounds(
    "cnn",
    {0: 8},
    (
        (FIT, "JAX by hand, im2col", ("jax dealt, 2 devices",)),
        (AVGM, "JAX by hand, im2col", ("jax dealt, 2 devices",)),
        (TUNED, "JAX by hand, the best found", ("jax best",)),
        (FIT, "FedJAX", (FEDJAX[2], FEDJAX[1])),
        (FIT, "pfl", ("pfl, 2 threads", "pfl, 2 processes")),
    ),
    "Rounds of the CNN. The goals: 1.1 of hand-written, faster than every peer.",
)


def run(quick: bool) -> dict[str, Any]:
    """The cost of the loop on one and two devices, then the rounds of both workloads."""
    sizes = {"rounds": 20 if quick else 70, "repetitions": 2 if quick else 15}
    found: dict[str, Any] = {"loop": {}}
    for devices in (1, 2):
        print(f"[fit] the loop on {devices} devices", flush=True)
        found["loop"][str(devices)] = isolated("sections.fit", "measure", devices=devices, **sizes)
    return {**found, "ragged": RAGGED.run(quick), "cnn": CNN.run(quick)}


def measure(devices: int, rounds: int, repetitions: int) -> dict[str, Any]:
    """The same rounds in a plain loop, in `fit` and by hand, taking turns of many rounds each."""
    jax.config.update("jax_num_cpu_devices", devices)
    by_hand = {name: plain_ragged.build("ragged", name) for name in HANDS[devices]}
    sampling.positions = lambda words, i, *_: cohort("ragged", i - 1).astype(np.int32)
    algorithm = with_fit.make_algorithm("ragged", "fed_avgm")
    everyone = with_fit.make_population("ragged")
    key, params = jax.random.key(0), unflatten("ragged", first_weights("ragged"))
    draw = cohort_schedule.draws({"cohort": everyone}, {"cohort": SIZE}, key)
    drawn = [draw(i) for i in range(1, rounds + 1)]
    sharding = everyone.sharding
    start = jax.device_put((algorithm.init(params), algorithm.hyper), sharding)

    def plain() -> Clock:
        """Nothing but rounds; as many are under way at a time as in `fit`."""
        clock, (state, hyper), started = Clock(), start, []
        for i, d in enumerate(drawn, 1):
            state, metrics = algorithm.round(state, hyper, d.cohorts["cohort"], d.key)
            started.append(metrics)
            if len(started) > loop.AHEAD[1]:
                half = len(started) // 2 + 1
                jax.block_until_ready(started[:half])
                del started[:half]
                clock(i - len(started), state, metrics)
        jax.block_until_ready(state)
        clock(rounds, state, None)
        return clock

    def hand(play: Callable[[int], Any]) -> Clock:
        clock = Clock()
        for i in range(rounds):
            play(i)
            clock(i + 1, None, None)
        return clock

    def fit(trained: Any = algorithm, clients: Any = everyone, first: Any = params) -> Clock:
        return _fit(trained, clients, first, rounds, key, **with_fit.everything_on())

    ways: dict[str, Callable[[], Clock]] = {
        PLAIN: plain,
        "fit, nothing on": lambda: _fit(algorithm, everyone, params, rounds, key, progress=False),
        ALL: fit,
        **{f"by hand: {name}": partial(hand, play) for name, play in by_hand.items()},
    }
    if "best" in by_hand:
        tuned = (
            with_fit.make_algorithm("ragged", "fed_avgm", tuned=True),
            with_fit.make_population("ragged", tuned=True),
            softmax.tuned_weights(first_weights("ragged")),
        )
        ways[TUNED_ALL] = lambda: fit(*tuned)
    times = {name: Times([], []) for name in ways}
    for i in range(2 + repetitions):
        names, turn = list(ways), i % len(ways)
        for name in names[turn:] + names[:turn]:
            clock = ways[name]()
            if i >= 2:
                times[name].wall.append(clock.seconds(0, rounds))
                times[name].cpu.append(clock.seconds(1, rounds))
    natural = [f"by hand: {name}" for name in by_hand if name != "best"]
    fastest = min(natural, key=lambda name: times[name].summary()["ms"])
    pairs = [("fit, nothing on", PLAIN), (ALL, PLAIN), (ALL, fastest)]
    if TUNED_ALL in ways:
        pairs.append((TUNED_ALL, "by hand: best"))
    return {
        "times": {name: t.summary() for name, t in times.items()},
        "ratios": [[a, b, times[a].ratio(times[b])] for a, b in pairs],
    }


def _fit(algorithm: Any, clients: Any, params: Any, rounds: int, key: Any, **options: Any) -> Clock:
    clock = Clock()
    settings = {"params": params, "rounds": rounds, "cohort_size": SIZE, "key": key}
    fg.fit(algorithm, clients, callbacks=[clock], **settings, **options)
    return clock


class Clock:
    """A callback that notes when rounds are over."""

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float]] = {}

    def __call__(self, round: int, state: Any, metrics: Any) -> None:
        """A round is over."""
        self.times[round] = time.perf_counter(), time.process_time()

    def seconds(self, which: int, rounds: int) -> float:
        """A round in the steady state: by the clock (0), or of all processors (1)."""
        first = min(i for i in self.times if i >= FIRST)
        return (self.times[rounds][which] - self.times[first][which]) / (rounds - first)


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    ratios = [
        [devices, ours, other, f"**{r['wall']:.3f}**", f"{r['cpu']:.3f}"]
        for devices, found in data["loop"].items()
        for ours, other, r in found["ratios"]
    ]
    times = [
        [devices, name, f"{one['ms']:.2f}", f"{one['cpu_ms']:.2f}"]
        for devices, found in data["loop"].items()
        for name, one in found["times"].items()
    ]
    return "\n\n".join(
        [
            "FedAvgM on the ragged workload, 50 of 1,000 clients a round, in the steady state: "
            "everybody runs many rounds in a row. The plain loop runs the same compiled rounds as "
            "`fit`, with cohorts that are drawn and on the devices beforehand, and does nothing "
            "with the results. By hand it is FedAvg. The goals: below 1.05 of the plain loop with "
            "everything on, 1.2 of hand-written.",
            results.table(["devices", "", "against", "ratio", "of processors"], ratios),
            results.table(["devices", "", "ms a round", "ms of processors"], times),
            "### The ragged workload",
            RAGGED.report(data["ragged"]),
            "### The CNN",
            CNN.report(data["cnn"]),
        ]
    )
