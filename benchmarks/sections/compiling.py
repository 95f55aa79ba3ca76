"""Time until a program is ready to run: trace, plan and compile, against plain `jax.jit`."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import hyper_round
import jax
import jax.numpy as jnp
import softmax
from jax import lax
from report import ratio, table
from timing import Times, isolated, take_turns, timed

import fedgrad as fg

CLIENTS = 50
LR = hyper_round.HYPER["client lr"]


def run(quick: bool) -> dict[str, Any]:
    """By case: medians of the time to trace and to compile, and ratios of the sums."""
    results = {}
    for case in CASES:
        print(f"[compile] {case}", flush=True)
        results[case] = isolated(
            "sections.compiling", "measure", case=case, repetitions=3 if quick else 9
        )
    return results


def measure(case: str, repetitions: int) -> dict[str, Any]:
    """One case; every repetition makes its functions anew and with empty caches."""
    args = hyper_round.arguments(CLIENTS)
    both = dict(zip(("fedgrad", "jax"), CASES[case], strict=True))
    trace = {name: Times([], []) for name in both}

    def ready(name: str) -> None:
        def lower() -> Any:
            function = both[name]()
            return jax.jit(lambda *a: function(*a)).lower(*args)

        wall, cpu, lowered = timed(lower)
        trace[name].wall.append(wall)
        trace[name].cpu.append(cpu)
        lowered.compile()

    def empty() -> None:
        jax.clear_caches()
        gc.collect()

    calls = {name: functools.partial(ready, name) for name in both}
    whole = take_turns(calls, repetitions, warmup=0, before=empty)
    rest = {name: whole[name].minus(trace[name]) for name in both}
    parts = {"trace": trace, "compile": rest, "whole": whole}
    return {
        part: {
            **{name: t.summary() for name, t in times.items()},
            "ratio": times["fedgrad"].ratio(times["jax"]),
        }
        for part, times in parts.items()
    }


def _round_with_fedgrad() -> Callable:
    @fg.program(clients=fg.CLIENTS)
    def fed_avg(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> Any:
        x, y, n = clients
        start, rate = fg.broadcast((p, lr))
        update = fg.mean(_update(start, rate, x, y), weights=n)
        return jax.tree.map(lambda w, u: w + server_lr * u, p, update)

    return fed_avg


def _round_by_hand() -> Callable:
    def fed_avg(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> Any:
        x, y, n = clients
        updates = jax.vmap(lambda x, y: _update(p, lr, x, y))(x, y)
        share = n / n.sum()
        return jax.tree.map(lambda w, u: w + server_lr * jnp.tensordot(share, u, 1), p, updates)

    return fed_avg


def _update(p: Any, lr: Any, x: jax.Array, y: jax.Array) -> Any:
    steps = hyper_round.STEPS
    trained = lax.fori_loop(0, steps, lambda _, q: softmax.step(q, x, y, lr), p)
    return jax.tree.map(jnp.subtract, trained, p)


def _derived(mode: str) -> Callable[[], Callable]:
    return lambda: fg.value_and_grad(hyper_round.with_fedgrad(), LR, mode=mode)


def _forward_by_hand() -> Callable:
    return hyper_round.forward(hyper_round.by_hand(), LR)


def _reverse_by_hand() -> Callable:
    return hyper_round.reverse(hyper_round.by_hand(), LR)


# case: (fedgrad, plain JAX); auto tries several derivatives and plans each of them
CASES: dict[str, tuple[Callable[[], Callable], Callable[[], Callable]]] = {
    "FedAvg round": (_round_with_fedgrad, _round_by_hand),
    "client lr, forward": (_derived("forward"), _forward_by_hand),
    "client lr, mixed": (_derived("mixed"), _forward_by_hand),
    "client lr, reverse": (_derived("reverse"), _reverse_by_hand),
    "client lr, auto": (_derived("auto"), _forward_by_hand),
}


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = []
    for case, found in data.items():
        parts = found["trace"], found["compile"], found["whole"]
        pairs = [f"{part['fedgrad']['ms']:.0f} / {part['jax']['ms']:.0f}" for part in parts]
        rows.append([case, *pairs, *(ratio(part["ratio"]) for part in parts)])
    head = ["program", "trace + plan ms", "compile ms", "both ms"]
    head += ["trace ratio", "compile ratio", "ratio of both"]
    return "\n\n".join(
        [
            f"{CLIENTS} clients; fedgrad / plain `jax.jit` of the same work, medians, every time "
            "with new functions and empty caches. Ratios by the clock (of processor time). The "
            "goal is 1.3 in the explicit modes; `auto` traces and plans every choice it weighs.",
            table(head, rows),
        ]
    )
