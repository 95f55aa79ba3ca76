"""Training through `fg.fit`: what its loop costs, and its rounds against everybody else's."""

from __future__ import annotations

import time
from typing import Any

import jax
import report as results
import with_fit
from timing import Times, isolated
from workloads import first_weights, unflatten

import fedgrad as fg
from fedgrad.training import loop, sampling
from sections.rounds import FEDJAX, PFL, Rounds

SIZE = 50  # clients a round
FIRST = 10  # rounds of each repetition that are not timed
FIT, TUNED = "fedgrad fit, 2 devices", "fedgrad fit, 2 devices, tuned"
AVGM = "fedgrad fit, FedAvgM, 2 devices"
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
    "Rounds of the ragged workload, asked for one by one. The goals: 1.2 of hand-written, faster "
    "than every peer. FedAvgM has momentum 0, so that its weights can be compared.",
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
    """The same compiled rounds in a plain loop and in `fit`, taking turns."""
    jax.config.update("jax_num_cpu_devices", devices)
    algorithm = with_fit.make_algorithm("ragged", "fed_avgm")
    everyone = with_fit.make_population("ragged")
    key, params = jax.random.key(0), unflatten("ragged", first_weights("ragged"))
    draw = sampling.draws({"cohort": everyone}, {"cohort": SIZE}, key)
    drawn = [draw(i) for i in range(1, rounds + 1)]
    sharding = sampling.sharding_of(everyone)
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

    def fit(**more: Any) -> Clock:
        clock = Clock()
        settings = {"params": params, "rounds": rounds, "cohort_size": SIZE, "key": key}
        fg.fit(algorithm, everyone, callbacks=[clock], **settings, **more)
        return clock

    ways = {
        "plain loop": plain,
        "fit, nothing on": lambda: fit(progress=False),
        "fit, log and progress": lambda: fit(**with_fit.everything_on()),
    }
    times = {name: Times([], []) for name in ways}
    for i in range(2 + repetitions):
        names = list(ways)
        for name in names[i % 3 :] + names[: i % 3]:
            clock = ways[name]()
            if i >= 2:
                times[name].wall.append(clock.wall(rounds))
                times[name].cpu.append(clock.cpu(rounds))
    return {
        name: {**t.summary(), "ratio": t.ratio(times["plain loop"])} for name, t in times.items()
    }


class Clock:
    """A callback that notes when rounds are over."""

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float]] = {}

    def __call__(self, round: int, state: Any, metrics: Any) -> None:
        """A round is over."""
        self.times[round] = time.perf_counter(), time.process_time()

    def wall(self, rounds: int) -> float:
        """Seconds a round in the steady state."""
        return self._mean(0, rounds)

    def cpu(self, rounds: int) -> float:
        """Seconds of all processors a round."""
        return self._mean(1, rounds)

    def _mean(self, which: int, rounds: int) -> float:
        first = min(i for i in self.times if i >= FIRST)
        return (self.times[rounds][which] - self.times[first][which]) / (rounds - first)


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [
            devices,
            name,
            f"{one['ms']:.2f}",
            f"{one['cpu_ms']:.2f}",
            f"**{one['ratio']['wall']:.3f}**",
            f"{one['ratio']['cpu']:.3f}",
        ]
        for devices, found in data["loop"].items()
        for name, one in found.items()
    ]
    head = ["devices", "", "ms a round", "ms of processors", "x plain loop", "x its processors"]
    return "\n\n".join(
        [
            "What the loop costs: FedAvgM on the ragged workload, 50 of 1,000 clients a round, in "
            "the steady state. The plain loop has its cohorts drawn and on the devices "
            "beforehand, and does nothing with the results. The goal: below 1.05 with everything "
            "on.",
            results.table(head, rows),
            "### The ragged workload",
            RAGGED.report(data["ragged"]),
            "### The CNN",
            CNN.report(data["cnn"]),
        ]
    )
