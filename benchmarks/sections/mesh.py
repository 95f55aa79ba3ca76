"""The mesh executor on one and two devices: the same clients (strong), or twice as many (weak)."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

from interleave import GAP_SECONDS, TOLERANCE, Competitor, Live
from report import table

SHARE = 240  # clients of one device in the weak case; of two in the strong one
ONE, TWO, PROCESSES = "1 device", "2 devices", "2 processes of 1 device"
SETUPS: dict[str, dict[str, int]] = {
    ONE: {"devices": 1},
    TWO: {"devices": 2},
    PROCESSES: {"processes": 2},
}


def run(quick: bool) -> dict[str, Any]:
    """By setup: milliseconds of a round with few and many clients, and the efficiencies; of
    medians and of the shortest rounds."""
    share, rounds, warmup = (24, 2, 1) if quick else (SHARE, 100, 3)
    seconds: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        live: dict[tuple[str, int], Live] = {}
        for name, setup in SETUPS.items():
            for clients in (share, 2 * share):
                size = {"clients": clients, **setup}
                print(f"[mesh] {name}, {clients} clients", flush=True)
                live[name, clients] = Live(Competitor(name, "with_mesh", "logistic", size=size))
                stack.callback(live[name, clients].close)
                live[name, clients].wait()
        names = list(live)
        for i in range(warmup + rounds):
            answers = {}
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(GAP_SECONDS)
                answers[name] = live[name].play(i)
                if i >= warmup:
                    seconds.setdefault(name, []).append(answers[name]["seconds"])
            _require_agreement(answers)
    results = {}
    for name in SETUPS:
        two, same, half = (seconds[k] for k in ((name, 2 * share), (ONE, 2 * share), (ONE, share)))
        results[name] = {
            "ms": [statistics.median(seconds[name, n]) * 1e3 for n in (share, 2 * share)],
            "best": [min(seconds[name, n]) * 1e3 for n in (share, 2 * share)],
            "strong": [_ratio(same, two) / 2, min(same) / min(two) / 2],
            "weak": [_ratio(half, two), min(half) / min(two)],
        }
    return {"share": share, "setups": results}


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    share, rows = data["share"], []
    for name, found in data["setups"].items():
        pairs = zip(found["ms"], found["best"], strict=True)
        times = [f"{median:.1f} ({best:.1f})" for median, best in pairs]
        gain = [
            "" if name == ONE else "{:.0%} ({:.0%})".format(*found[kind])
            for kind in ("strong", "weak")
        ]
        rows.append([name, *times, *gain])
    head = ["", f"{share} clients, ms", f"{2 * share} clients, ms", "strong", "weak"]
    return "\n\n".join(
        [
            "A FedAvg round as in the first section, 6 clients at a time; every device has one "
            f"core. Strong: the time of one device for {2 * share} clients, over twice the time of "
            f"two devices. Weak: the time of one device for {share} clients, over that of two "
            f"devices for {2 * share}. Medians, in brackets of the shortest rounds: these say more "
            "where other work keeps the cores busy.",
            table(head, rows),
        ]
    )


def _ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def _require_agreement(answers: dict[tuple[str, int], dict[str, float]]) -> None:
    for (name, clients), answer in answers.items():
        other = answers[ONE, clients]
        if abs(answer["checksum"] - other["checksum"]) > TOLERANCE["logistic"] * other["norm"]:
            raise RuntimeError(f"{name}, {clients} clients: other weights than on {ONE}")
