"""Time until a program is ready to run: trace, plan and compile, against plain `jax.jit`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
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
PLAIN = ("jax vmap", "jax blocks")  # the second does what fedgrad does: a few clients at a time
LR = hyper_round.HYPER["client lr"]


def run(quick: bool) -> dict[str, Any]:
    """By case: medians of the time to trace and to compile, and ratios of the sums."""
    results = {}
    for case in CASES:
        print(f"[compile] {case}", flush=True)
        results[case] = isolated(
            "sections.compiling", "measure", case=case, repetitions=1 if quick else 9
        )
    return results


def measure(case: str, repetitions: int) -> dict[str, Any]:
    """One case; every repetition makes its functions anew and with empty caches."""
    args = hyper_round.arguments(CLIENTS)
    makers = dict(zip(("fedgrad", *PLAIN), CASES[case], strict=True))
    trace = {name: Times([], []) for name in makers}

    def ready(name: str) -> None:
        def lower() -> Any:
            function = makers[name]()
            return jax.jit(lambda *a: function(*a)).lower(*args)

        wall, cpu, lowered = timed(lower)
        trace[name].wall.append(wall)
        trace[name].cpu.append(cpu)
        lowered.compile()

    def empty() -> None:
        jax.clear_caches()
        gc.collect()

    calls = {name: partial(ready, name) for name in makers}
    whole = take_turns(calls, repetitions, warmup=0, before=empty)
    rest = {name: whole[name].minus(trace[name]) for name in makers}
    parts = {"trace": trace, "compile": rest, "whole": whole}
    return {
        part: {
            **{name: t.summary() for name, t in times.items()},
            "ratio": {name: times["fedgrad"].ratio(times[name]) for name in PLAIN},
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


def _round_by_hand(block: int | None) -> Callable:
    def fed_avg(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> Any:
        x, y, n = clients

        def one(client: Any) -> Any:
            return _update(p, lr, *client)

        updates = lax.map(one, (x, y), batch_size=block) if block else jax.vmap(one)((x, y))
        share = n / n.sum()
        return jax.tree.map(lambda w, u: w + server_lr * jnp.tensordot(share, u, 1), p, updates)

    return fed_avg


def _update(p: Any, lr: Any, x: jax.Array, y: jax.Array) -> Any:
    steps = hyper_round.STEPS
    trained = lax.fori_loop(0, steps, lambda _, q: softmax.step(q, x, y, lr), p)
    return jax.tree.map(jnp.subtract, trained, p)


def _derived(mode: str) -> Callable:
    return fg.value_and_grad(hyper_round.with_fedgrad(), LR, mode=mode)


def _by_hand(way: Callable, block: int | None) -> Callable:
    return way(hyper_round.by_hand(block=block), LR)


Maker = Callable[[], Callable]
BLOCKS = (None, hyper_round.BLOCK)  # of PLAIN


def _against(mode: str, way: Callable) -> tuple[Maker, ...]:
    return (partial(_derived, mode), *(partial(_by_hand, way, block) for block in BLOCKS))


# case: fedgrad, and plain JAX in the ways of PLAIN
CASES: dict[str, tuple[Maker, ...]] = {
    "FedAvg round": (_round_with_fedgrad, *(partial(_round_by_hand, b) for b in BLOCKS)),
    "client lr, forward": _against("forward", hyper_round.forward),
    "client lr, mixed": _against("mixed", hyper_round.forward),
    "client lr, reverse": _against("reverse", hyper_round.reverse),
    "client lr, auto": _against("auto", hyper_round.forward),
}


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = []
    for case, found in data.items():
        for part in ("trace", "compile", "whole"):
            times = found[part]
            ms = [f"{times[name]['ms']:.0f}" for name in ("fedgrad", *PLAIN)]
            ratios = [ratio(times["ratio"][name]) for name in PLAIN]
            if part == "whole":
                ratios = [f"**{shown}**" for shown in ratios]
            label = {"trace": "trace and plan", "whole": "both"}.get(part, part)
            rows.append([case, label, *ms, *ratios])
    head = ["program", "", *(f"{name} ms" for name in ("fedgrad", *PLAIN))]
    head += [f"/ {name}" for name in PLAIN]
    return "\n\n".join(
        [
            f"{CLIENTS} clients; the time until the program can run, for fedgrad and for plain "
            "`jax.jit` of the same work, every time with new functions and empty caches. fedgrad "
            "runs a few clients at a time, so that they stay in the cache; `jax vmap` does not, "
            "`jax blocks` does too. Ratios by the clock (of processor time). The goal is 1.3 in "
            "the explicit modes; `auto` traces and plans every choice that it weighs.",
            table(head, rows),
        ]
    )
