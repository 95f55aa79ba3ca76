"""A self-tuned round at real size: a million parameters, a hundred clients, and its memory."""

from __future__ import annotations

import math
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import table
from timing import isolated

import fedgrad as fg

FEATURES, CLASSES = 1000, 1000  # of a linear model: a million parameters
CLIENTS, COHORT, EXAMPLES = 100, 50, 20
LEARNED = ("client.learning_rate", "weight_exponent", "proximal_weight", "server.learning_rate")
SCHEDULES = ("parallel", "serial")
TWO = "client.learning_rate, server.learning_rate"
HORIZONS = {"": 1, "long horizon": math.inf, "server's part": fg.Horizon(through="server")}


def run(quick: bool) -> dict[str, Any]:
    """One round each, in a process of its own, so that its peak is its own."""
    rows = []
    for schedule in SCHEDULES:
        for name in (None, *LEARNED):
            print(f"[large] {schedule}, {name or 'nothing'} learned", flush=True)
            width = 100 if quick else FEATURES
            found = isolated("sections.large", "measure", name=name, schedule=schedule, width=width)
            rows.append(
                {"schedule": schedule, "learned": name or "nothing (a fixed round)"} | found
            )
    for horizon in HORIZONS:
        print(f"[large] two learned, {horizon or 'one round'}", flush=True)
        given = {"name": TWO, "schedule": "parallel", "horizon": horizon}
        found = isolated("sections.large", "measure", width=100 if quick else FEATURES, **given)
        rows.append({"schedule": f"parallel {horizon}".strip(), "learned": TWO} | found)
    return {"rows": rows, "clients": CLIENTS, "cohort": COHORT}


def measure(name: str | None, schedule: str, width: int, horizon: str = "") -> dict[str, float]:
    """Run a round; bytes as XLA and as the system see them, in models."""
    rng = np.random.default_rng(0)
    clients = [
        {
            "x": rng.normal(size=(EXAMPLES, width)).astype(np.float32),
            "y": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
        }
        for _ in range(CLIENTS)
    ]

    def loss(model: Any, batch: Any) -> jax.Array:
        scores = jax.nn.log_softmax(batch["x"] @ model)
        return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]

    algorithm = fg.fed_prox(
        loss,
        fg.local_training(0.1, batch_size=EXAMPLES),
        proximal_weight=0.01,
        weighting="power",
    )
    if name is not None:
        algorithm = fg.self_tuning(
            algorithm,
            learn=name.split(", "),
            schedule=schedule,  # type: ignore[arg-type]
            horizon=HORIZONS[horizon],
        )
    population = fg.population(clients)
    model = jnp.zeros((width, CLASSES), jnp.float32)
    cohort = population.sample(jax.random.key(0), COHORT)
    further = {n: population.sample(jax.random.key(1), COHORT) for n in algorithm.cohorts}
    args = (algorithm.init(model), algorithm.hyper, cohort, jax.random.key(2))
    compiled = jax.jit(algorithm.round.__call__).lower(*args, **further).compile()
    _, metrics = jax.block_until_ready(compiled(*args, **further))
    assert jnp.isfinite(metrics.loss)
    return {
        "temporary": compiled.memory_analysis().temp_size_in_bytes / model.nbytes,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / model.nbytes,
        "model": model.nbytes,
    }


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [row["schedule"], f"`{row['learned']}`", f"{row['temporary']:.0f}", f"{row['peak']:.0f}"]
        for row in data["rows"]
    ]
    model = data["rows"][0]["model"] / 1e6
    return "\n\n".join(
        [
            f"FedProx on a linear model of {model / 4:.0f} million parameters ({model:.0f} MB), "
            f"{data['cohort']} of {data['clients']} clients. Memory in models: what the compiled "
            "round needs beside its arguments and results, and the peak of the process (Python, "
            "JAX, the compiler and the data included).",
            table(["schedule", "learned", "temporary", "peak of the process"], rows),
        ]
    )
