"""FedAvg rounds against hand-written JAX and the other libraries, each a live process."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import interleave
import report as results
from table import competitors

ONE, TWO, TUNED = "fedgrad", "fedgrad, 2 devices", "fedgrad, 2 devices, tuned"


@dataclass(frozen=True)
class Rounds:
    """A workload, its sizes with the number of rounds to time, and who is compared with whom.

    `against`: (a configuration of fedgrad, what it is compared with, names of which the fastest
    counts). Everybody named there takes part; in a quick run only the first of each.
    """

    workload: str
    rounds: dict[int, int]  # clients: rounds; 0 stands for the workload's own number
    against: tuple[tuple[str, str, tuple[str, ...]], ...]
    text: str

    def run(self, quick: bool) -> dict[str, Any]:
        """By number of clients: everybody's medians, and the ratios."""
        against = [
            (ours, what, names[:1] if quick else names) for ours, what, names in self.against
        ]
        wanted = {name for ours, _, names in against for name in (ours, *names)}
        found: dict[str, Any] = {}
        for clients, rounds in list(self.rounds.items())[: 1 if quick else None]:
            chosen = competitors(self.workload, **({"clients": clients} if clients else {}))
            chosen = [c for c in chosen if c.name in wanted]
            of = f", {clients} clients" if clients else ""
            print(f"[{self.workload}] {len(chosen)} competitors{of}", flush=True)
            medians = interleave.run(chosen, *((2, 1) if quick else (rounds, 2)))
            ratios = [compare(ours, what, names, medians) for ours, what, names in against]
            for one in medians.values():
                del one["seconds"]
            found[str(clients)] = {"competitors": medians, "ratios": [r for r in ratios if r]}
        return found

    def report(self, data: dict[str, Any]) -> str:
        """The section of the results, in Markdown."""
        parts = [self.text]
        for clients, found in data.items():
            if clients != "0":
                parts.append(f"### {clients} clients")
            rows = [
                [r["fedgrad"], r["what"], r["other"], f"**{r['ratio']:.2f}**"]
                for r in found["ratios"]
            ]
            parts.append(results.table(["", "against", "the fastest of which is", "ratio"], rows))
            parts.append(interleave.table(found["competitors"]))
        return "\n\n".join(parts)


def compare(
    ours: str, what: str, names: tuple[str, ...], found: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """The ratio of a configuration of fedgrad and the fastest of these, of rounds in pairs."""
    present = [name for name in names if name in found]
    if ours not in found or not present:
        return None  # somebody could not be installed here; `interleave` has said so
    other = min(present, key=lambda name: found[name]["median_ms"])
    pairs = zip(found[ours]["seconds"], found[other]["seconds"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return {"fedgrad": ours, "what": what, "other": other, "ratio": ratio}


VMAPPED = ("jax vmap of fori_loop", "jax vmap of scan", "jax vmap, unrolled")
PFL = ("pfl", "pfl, 2 processes")
FEDJAX = ("fedjax jit, jax 0.4.25", "fedjax jit", "fedjax pmap, jax 0.4.25")

LOGISTIC = Rounds(
    "logistic",
    {50: 40, 500: 25, 5000: 9},
    (
        (ONE, "JAX by hand, vmap, 1 device", VMAPPED),
        (ONE, "DrJAX, 1 device", ("drjax",)),
        (TWO, "JAX by hand, the same model, 2 devices", ("jax dealt, 2 devices",)),
        (TWO, "DrJAX, 2 devices", ("drjax, 2 devices",)),
        (TUNED, "JAX by hand, the best found", ("jax best",)),
        (TUNED, "DrJAX, with the same tuned model", ("drjax, 2 devices, tuned",)),
    ),
    "FedAvg round on softmax regression 60 x 10, 100 examples a client, 10 full-batch steps. The "
    "goals: 1.05 of hand-written `vmap`, never slower than DrJAX.",
)
RAGGED = Rounds(
    "ragged",
    {0: 30},
    (
        (ONE, "JAX by hand, 1 device", ("jax blocks of 10", "jax sequential")),
        (TWO, "JAX by hand, the same model", ("jax dealt, 2 devices", "jax shard_map")),
        (TUNED, "JAX by hand, the best found", ("jax best",)),
        (TWO, "DrJAX", ("drjax padded, 2 devices", "drjax padded")),
        (TUNED, "DrJAX, with the same tuned model", ("drjax padded, 2 devices, tuned",)),
        (TWO, "FedJAX", FEDJAX[:2]),
        (TWO, "pfl", PFL),
    ),
    "1,000 clients of 50 to 1,000 examples (lognormal), cohorts of 50, one epoch in batches of 10, "
    "softmax regression 60 x 10. The goals: 1.2 of hand-written, several times faster than every "
    "peer. DrJAX pads every client to the longest.",
)
CNN = Rounds(
    "cnn",
    {0: 10},
    (
        (TWO, "JAX by hand, im2col", ("jax dealt, 2 devices",)),
        (TUNED, "JAX by hand, the best found", ("jax best",)),
        (TWO, "FedJAX", (FEDJAX[2], FEDJAX[1])),
        (TUNED, "FedJAX, with the same tuned model", ("fedjax pmap, tuned", "fedjax jit, tuned")),
        (TWO, "pfl", ("pfl, 2 threads", "pfl, 2 processes")),
    ),
    "The EMNIST CNN: 40 clients of 100 images, cohorts of 10, batches of 20. fedgrad is given the "
    "model with `lax.conv` as everybody writes it; by hand it is written as matrix products. "
    "The goals: 1.1 of hand-written, faster than every peer.",
)
