"""A round of each of the paper's tasks, against JAX by hand and pfl with the same model."""

from __future__ import annotations

import math
from typing import Any

import interleave
import report as results
from table import competitors

from sections.rounds import compare

# Of each task: rounds to time, its clients, how many take part in a round, and the most examples of
# each, so that a round takes a few seconds.
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "emnist": (8, {"clients": 30, "cohort": 10}),
    "cifar100": (5, {"clients": 30, "cohort": 4, "most": 20}),
    "shakespeare": (6, {"clients": 30, "cohort": 10, "most": 12}),
    "stackoverflow_words": (6, {"clients": 30, "cohort": 10, "most": 64}),
    "stackoverflow_tags": (12, {"clients": 30, "cohort": 10}),
}
# In single precision models drift apart here, by rounding alone: by hand with XLA's convolutions
# ("jax loop") and with matrix products ("jax scan"), 9e-5 of the change after one round, 1e-3 after
# four, 9e-3 after six. In double precision, in the first four rounds: 5e-15 at most. So weights are
# judged in double precision, by section `weights`, and not in the rounds that are timed.
DRIFT = ("emnist",)
QUICK = (1, {"size": "small", "clients": 4, "cohort": 3, "most": 10})

ONE, TWO, PFL = "fedgrad", "fedgrad, 2 devices", ("pfl, 2 threads", "pfl, 2 processes")
BY_HAND = ("jax scan", "jax vmap", "jax loop")
BY_HAND_ON_TWO = ("jax dealt, 2 devices",)


def run(quick: bool) -> dict[str, Any]:
    """By task: medians and ratios, and whether everybody has the same model."""
    sizes = dict.fromkeys(SIZES, QUICK) if quick else SIZES
    return {name: _task(name, rounds, size, quick) for name, (rounds, size) in sizes.items()}


def _task(name: str, rounds: int, size: dict[str, Any], quick: bool) -> dict[str, Any]:
    groups = (BY_HAND, BY_HAND_ON_TWO, PFL)
    wanted = {ONE, TWO, *(n for group in groups for n in (group[:1] if quick else group))}
    chosen = [c for c in competitors(name, **size) if c.name in wanted]
    same = True
    if any(c.venv == "pfl" for c in chosen):
        # Its dropout draws numbers of its own, and it has single precision only.
        print(f"[tasks] {name}: the weights of pfl, without dropout", flush=True)
        plain = [c for c in competitors(name, **size, dropout=False) if c.name in wanted]
        plain = [c for c in plain if c.name == ONE or c.venv == "pfl"]
        same = all(one["agrees"] for one in interleave.run(plain, 1, 0).values())
    print(f"[tasks] {name}: {len(chosen)} competitors, {rounds} rounds", flush=True)
    tolerance = math.inf if name in DRIFT else None  # as for every workload
    found = interleave.run(chosen, rounds, 2, groups, tolerance)
    fastest = min((ONE, TWO), key=lambda ours: found[ours]["median_ms"])
    pairs = [
        (ONE, "JAX by hand, 1 device", BY_HAND),
        (TWO, "JAX by hand, 2 devices", BY_HAND_ON_TWO),
        (fastest, "JAX by hand, the best", (*BY_HAND, *BY_HAND_ON_TWO)),
        (fastest, "pfl", PFL),
    ]
    ratios = [compare(ours, what, names, found) for ours, what, names in pairs]
    for one in found.values():
        del one["seconds"]
    return {
        "size": size,
        "competitors": found,
        "ratios": [r for r in ratios if r],
        "same without dropout": same,
    }


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [name, ours, r["what"], r["other"], f"**{r['ratio']:.2f}**"]
        for name, found in data.items()
        for r in found["ratios"]
        for ours in [f"{r['fedgrad']}, {found['competitors'][r['fedgrad']]['median_ms']:.0f} ms"]
    ]
    parts = [
        TEXT,
        results.table(["task", "", "against", "the fastest of which is", "ratio"], rows),
    ]
    for name, found in data.items():
        size = ", ".join(f"{what} {many}" for what, many in found["size"].items())
        times = interleave.table(found["competitors"], weights=name not in DRIFT)
        parts += [f"### {name}", f"{size}.", times]
        if not found["same without dropout"]:
            parts.append("**Without dropout the weights of pfl differ.**")
    return "\n\n".join(parts)


TEXT = """\
A round of FedAvgM on each of the paper's five tasks, with the paper's models, batches and learning
rates and on data that the tasks make themselves; one epoch, shuffled. By hand are the clients' SGD
with masks, the weighted mean and the server; the loss and the random numbers are fedgrad's, so
that everybody arrives at the same model in every round (what is compared is how far it has come;
on EMNIST in section `weights`). There are one jit with the clients in a `scan` or side by side in
a `vmap`, convolutions as matrix products, and a loop of Python over a jitted step, convolutions as
they are; who was clearly slower in the second round than another of the same kind takes no further
part. pfl has the same models in PyTorch; its dropout draws numbers of its own, so its weights are
compared without, after one round. The goals: 1.1 of hand-written, faster than pfl."""
