"""Whether fedgrad and JAX by hand arrive at the same model, where single precision cannot tell."""

from __future__ import annotations

from typing import Any

import interleave
import report as results
from table import competitors

from sections.tasks import BY_HAND, BY_HAND_ON_TWO, DRIFT, ONE, TWO

WHO = (ONE, TWO, *BY_HAND, *BY_HAND_ON_TWO)
# A few clients, of different sizes and of more than one batch.
FEW = {"clients": 6, "cohort": 3, "most": 50}
ROUNDS = 3  # from the second on, the server has momentum
TOLERANCE = 1e-9  # of how far the model has come


def run(quick: bool) -> dict[str, Any]:
    """By task: how far everybody is from most of the others."""
    size = FEW | ({"size": "small"} if quick else {}) | {"dtype": "float64"}
    return {name: _compared(name, size) for name in DRIFT}


def _compared(name: str, size: dict[str, Any]) -> dict[str, Any]:
    chosen = [c for c in competitors(name, **size) if c.name in WHO]
    print(f"[weights] {name}: {len(chosen)} competitors, {ROUNDS} rounds", flush=True)
    found = interleave.run(chosen, ROUNDS, 0, tolerance=TOLERANCE)
    return {n: {key: one[key] for key in ("agrees", "off")} for n, one in found.items()}


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [name, who, f"{one['off']:.0e}", interleave.verdict(one)]
        for name, found in data.items()
        for who, one in found.items()
    ]
    return "\n\n".join([TEXT, results.table(["task", "competitor", "off", "weights"], rows)])


TEXT = f"""\
FedAvgM as in section `tasks`, for {ROUNDS} rounds of a few clients with the paper's model, dropout
included, in double precision. Compared is how far a model has come (all begin with the same one)
with what most of the others have, as a share of its norm, in the worst round: what is only rounding
is tiny there, and at most {TOLERANCE:.0e} is allowed."""
