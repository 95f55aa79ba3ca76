"""What a derivative of one round costs: fedgrad against JAX's own by hand, and against DrJAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hyper_round
import jax
import jax.numpy as jnp
import numpy as np
from report import ratio, table
from timing import isolated, take_turns

import fedgrad as fg

SIZES = (50, 500, 5000)
# name: (hyperparameter, modes of fedgrad, ways by hand)
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "server lr": ("server lr", ("auto", "reverse"), ("forward", "reverse")),
    "weight exponent": ("weight exponent", ("auto", "forward", "mixed"), ("forward", "reverse")),
    "client lr, forward": ("client lr", ("auto", "forward", "mixed"), ("forward",)),
    "client lr, reverse": ("client lr", ("reverse",), ("reverse",)),
}
WAY: dict[str, Callable] = {"forward": hyper_round.forward, "reverse": hyper_round.reverse}
TOLERANCE = 1e-4  # relative, in float32


def run(quick: bool) -> dict[str, Any]:
    """By case and number of clients: medians, ratios, and how far the derivatives are apart."""
    results: dict[str, Any] = {}
    for clients in SIZES[:1] if quick else SIZES:
        repetitions = 5 if quick else {50: 60, 500: 25, 5000: 9}[clients]
        for case in CASES:
            print(f"[derivatives] {case}, {clients} clients", flush=True)
            results[f"{case}, {clients}"] = isolated(
                "sections.derivatives",
                "measure",
                case=case,
                clients=clients,
                repetitions=repetitions,
            )
    return results


def measure(case: str, clients: int, repetitions: int) -> dict[str, Any]:
    """One case at one size, in this process."""
    args = hyper_round.arguments(clients)
    functions = {name: jax.jit(f) for name, f in _functions(case, clients).items()}
    values = {name: np.asarray(jax.device_get(f(*args))) for name, f in functions.items()}
    truth = _truth(case, clients, args)
    off = {
        name: float(np.max(np.abs(value - truth) / np.abs(truth))) for name, value in values.items()
    }
    peers = max(error for name, error in off.items() if not name.startswith("fedgrad"))
    allowed = min(max(TOLERANCE, peers), 10 * TOLERANCE)
    calls = {
        name: lambda f=f: jax.block_until_ready(f(*args))  # type: ignore[misc]
        for name, f in functions.items()
    }
    times = take_turns(calls, repetitions)
    medians = {name: t.summary() for name, t in times.items()}

    def best(kind: str) -> str:
        return min((n for n in times if n.startswith(kind)), key=lambda n: medians[n]["cpu_ms"])

    ours, hand, drjax = best("fedgrad"), best("jax"), best("drjax")
    return {
        "case": case,
        "clients": clients,
        "medians": medians,
        "off": off,
        "agree": all(error <= allowed for error in off.values()),
        "ratios": {
            name: {"hand": t.ratio(times[hand]), "drjax": t.ratio(times[drjax])}
            for name, t in times.items()
            if name.startswith("fedgrad")
        },
        "best": {"fedgrad": ours, "hand": hand, "drjax": drjax},
    }


def _truth(case: str, clients: int, args: tuple[Any, ...]) -> np.ndarray:
    """The same in double precision. In single precision everybody is some 1e-4 away from the
    derivative by the exponent, in which large terms cancel: nobody may be further than peers are.
    """
    hyper, _, ways = CASES[case]
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, args
        )
        loss = next(iter(hyper_round.BY_HAND.values()))()
        found = jax.jit(WAY[ways[0]](loss, hyper_round.HYPER[hyper]))(*wide)
        return np.asarray(jax.device_get(found))


def _functions(case: str, clients: int) -> dict[str, Callable]:
    hyper, modes, ways = CASES[case]
    argnum = hyper_round.HYPER[hyper]
    found: dict[str, Callable] = {}
    for mode in modes:
        found[f"fedgrad {mode}"] = fg.value_and_grad(hyper_round.with_fedgrad(), argnum, mode=mode)
    for way in ways:
        found[f"drjax {way}"] = WAY[way](hyper_round.with_drjax(clients), argnum)
        for name, loss in hyper_round.BY_HAND.items():
            found[f"{name}, {way}"] = WAY[way](loss(), argnum)
    return found


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = []
    for found in data.values():
        hand, drjax = found["best"]["hand"], found["best"]["drjax"]
        for name, ratios in found["ratios"].items():
            rows.append(
                [
                    found["case"],
                    str(found["clients"]),
                    name,
                    *(f"{found['medians'][n]['ms']:.2f}" for n in (name, hand, drjax)),
                    ratio(ratios["hand"]),
                    ratio(ratios["drjax"]),
                    hand,
                    "agree" if found["agree"] else f"DIFFER ({max(found['off'].values()):.0e})",
                ]
            )
    head = ["derivative by", "clients", "mode", "ms", "by hand ms", "DrJAX ms"]
    head += ["/ by hand", "/ DrJAX", "fastest by hand", "values"]
    return "\n\n".join(
        [
            "FedAvg on softmax regression 60 x 10, 100 examples a client, 10 local steps; a "
            "held-out loss after one round and its derivative, on one device. Against the fastest "
            "of the ways to write it by hand with `jax.jvp` or `jax.value_and_grad`, and the "
            "faster of DrJAX's two modes. Ratios by the clock (of processor time). The goals: "
            "1.1 of hand-written, never slower than DrJAX.",
            table(head, rows),
        ]
    )
