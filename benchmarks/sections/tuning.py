"""What self-tuning costs: a self-tuned round against hand-written JAX, and trials side by side.

The workload is `ragged` (1,000 clients of 50 to 1,000 examples, cohorts of 50, softmax regression
60 x 10, one epoch in batches of 10), on one device. By hand, a round of FedAvgM and one pass for
the gradient of the loss of another cohort are one jit; the client's learning rate goes by
`jax.jvp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report as results
import softmax
from jax import lax
from timing import isolated, take_turns
from workloads import BATCH, LR, cohort, first_weights, population, unflatten

import fedgrad as fg

RATE, B, BLOCK = LR["ragged"], BATCH["ragged"], 5
GRADIENT_BATCHES = (20, 50, 100)  # the fastest of them is what we compare with
TRIALS = 50


def per_example(p: Any, batch: Any) -> jax.Array:
    """The loss as a user of fedgrad writes it."""
    log_p = jax.nn.log_softmax(batch["x"] @ p["w"] + p["b"])
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1)[:, 0]


class ByHand:
    """FedAvgM, its derivative by the client's learning rate, and a loss gradient, in plain JAX."""

    def __init__(self) -> None:
        data = population("ragged")
        # Spare rows at the end, so that a slice there is not shifted back.
        spare = max(GRADIENT_BATCHES)
        self.x = jnp.asarray(np.concatenate([data.x, data.x[:spare]]))
        self.y = jnp.asarray(np.concatenate([data.y, data.y[:spare]]))
        self.offset, self.count = data.offset, data.count

    def cohort(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(offsets, counts) of round i, the largest client first."""
        chosen = cohort("ragged", i)
        order = chosen[np.argsort(-self.count[chosen])]
        return self.offset[order].astype(np.int32), self.count[order].astype(np.int32)

    def rows(self, offset: jax.Array, start: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """A batch of each client of a block: slices, which a CPU does faster than a gather."""
        cut = [
            jnp.stack([lax.dynamic_slice_in_dim(a, o + start, size) for o in offset])
            for a in (self.x, self.y)
        ]
        return cut[0], cut[1]

    def trained(self, p: Any, rate: Any, offset: jax.Array, count: jax.Array) -> Any:
        """The example-weighted mean of how far a cohort went."""

        def block(total: Any, i: jax.Array) -> tuple[Any, None]:
            mine = lax.dynamic_slice_in_dim(offset, i * BLOCK, BLOCK)
            sizes = lax.dynamic_slice_in_dim(count, i * BLOCK, BLOCK)

            def step(t: jax.Array, q: Any) -> Any:
                x, y = self.rows(mine, t * B, B)
                lr = jnp.where(t * B < sizes, rate, 0.0)
                return jax.vmap(softmax.step)(q, x, y, lr)

            start = jax.tree.map(lambda w: jnp.broadcast_to(w, (BLOCK, *w.shape)), p)
            end = lax.fori_loop(0, sizes.max() // B, step, start)
            weight = sizes.astype(jnp.float32)
            part = jax.tree.map(lambda s, e: jnp.tensordot(weight, s - e, 1), start, end)
            return jax.tree.map(jnp.add, total, part), None

        zero = jax.tree.map(jnp.zeros_like, p)
        total, _ = lax.scan(block, zero, jnp.arange(len(offset) // BLOCK))
        return jax.tree.map(lambda t: t / count.sum(), total)

    def gradient(self, p: Any, offset: jax.Array, count: jax.Array, size: int) -> Any:
        """The loss of all examples of a cohort, and its gradient."""

        def total(p: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
            flat = {"x": x.reshape(-1, x.shape[-1]), "y": y.reshape(-1)}
            return jnp.sum(jnp.where(mask.reshape(-1), per_example(p, flat), 0))

        def block(carry: Any, i: jax.Array) -> tuple[Any, None]:
            mine = lax.dynamic_slice_in_dim(offset, i * BLOCK, BLOCK)
            sizes = lax.dynamic_slice_in_dim(count, i * BLOCK, BLOCK)

            def step(t: jax.Array, carry: Any) -> Any:
                mask = t * size + jnp.arange(size) < sizes[:, None]
                found = jax.value_and_grad(total)(p, *self.rows(mine, t * size, size), mask)
                return jax.tree.map(jnp.add, carry, found)

            return lax.fori_loop(0, -(-sizes.max() // size), step, carry), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        sums, _ = lax.scan(block, zero, jnp.arange(len(offset) // BLOCK))
        return jax.tree.map(lambda s: s / count.sum(), sums)

    def server_round(self, size: int) -> Callable[..., Any]:
        """A round of FedAvgM and a loss gradient at another cohort."""

        def play(p: Any, m: Any, hyper: Any, mine: Any, others: Any) -> Any:
            update = self.trained(p, hyper["client"]["learning_rate"], *mine)
            eta, mu = hyper["server"]["learning_rate"], hyper["server"]["momentum"]
            m = jax.tree.map(lambda a, u: mu * a + u, m, update)
            new = jax.tree.map(lambda w, a: w - eta * a, p, m)
            return new, m, self.gradient(p, *others, size)

        return jax.jit(play)

    def client_round(self, size: int) -> Callable[..., Any]:
        """The same, and the derivative of the new model by the client's learning rate."""

        def play(p: Any, m: Any, hyper: Any, mine: Any, others: Any) -> Any:
            eta, mu = hyper["server"]["learning_rate"], hyper["server"]["momentum"]

            def after(rate: jax.Array) -> Any:
                update = self.trained(p, rate, *mine)
                moved = jax.tree.map(lambda a, u: mu * a + u, m, update)
                return jax.tree.map(lambda w, a: w - eta * a, p, moved), moved

            rate = hyper["client"]["learning_rate"]
            new = jax.jvp(after, (rate,), (jnp.ones_like(rate),))
            return new, self.gradient(p, *others, size)

        return jax.jit(play)


def measure_rounds(repetitions: int) -> dict[str, Any]:
    """Self-tuned rounds and hand-written ones, taking turns: medians and ratios."""
    hand = ByHand()
    data = population("ragged")
    everyone = fg.population([dict(zip("xy", data.client(c), strict=True)) for c in range(1000)])
    p = jax.tree.map(jnp.asarray, unflatten("ragged", first_weights("ragged")))
    m = jax.tree.map(jnp.zeros_like, p)
    fed_avgm = fg.fed_avgm(per_example, fg.local_training(RATE, batch_size=B, shuffle=False))
    hyper = jax.tree.map(jnp.float32, fed_avgm.hyper)
    now = {"i": 0}

    def turn() -> None:
        now["i"] += 1

    def ours(learn: str) -> Callable[[], Any]:
        tuned = fg.self_tuning(fed_avgm, learn, optax.sgd(0.01))
        state, key = tuned.init(p), jax.random.key(0)

        def play() -> Any:
            mine = everyone.select(cohort("ragged", now["i"]))
            others = everyone.select(cohort("ragged", now["i"] + 1))
            out = tuned.round(state, hyper, mine, key, gradient_cohort=others)
            return jax.block_until_ready(out)

        return play

    def theirs(jitted: Callable[..., Any]) -> Callable[[], Any]:
        def play() -> Any:
            cohorts = hand.cohort(now["i"]), hand.cohort(now["i"] + 1)
            return jax.block_until_ready(jitted(p, m, hyper, *cohorts))

        return play

    found = {}
    for what, learn, by_hand in (
        ("server lr and momentum", "server", hand.server_round),
        ("client lr", "client", hand.client_round),
    ):
        names = {f"by hand, gradient in batches of {n}": by_hand(n) for n in GRADIENT_BATCHES}
        calls = {"fedgrad": ours(learn), **{n: theirs(f) for n, f in names.items()}}
        _check(calls)
        times = take_turns(calls, repetitions, turn=turn)
        medians = {name: t.summary() for name, t in times.items()}
        best = min(names, key=lambda name: medians[name]["ms"])
        ratio = times["fedgrad"].ratio(times[best])
        found[what] = {"medians": medians, "best": best, "ratio": ratio}
    return found


def _check(calls: dict[str, Callable[[], Any]]) -> None:
    """The new models must be the same, or the times mean nothing."""
    state, _ = calls["fedgrad"]()
    mine = state.params["w"]
    for name, call in calls.items():
        if name != "fedgrad":
            new = call()[0]
            new = new[0][0] if isinstance(new, tuple) else new
            np.testing.assert_allclose(mine, new["w"], rtol=1e-4, atol=1e-6)


def measure_trials(rounds: int) -> dict[str, float]:
    """Seconds for trials of FedAvgM side by side, and one after another, without compilation."""
    data = population("ragged")
    everyone = fg.population([dict(zip("xy", data.client(c), strict=True)) for c in range(1000)])
    p = jax.tree.map(jnp.asarray, unflatten("ragged", first_weights("ragged")))
    algorithm = fg.fed_avgm(per_example, fg.local_training(RATE, batch_size=B, shuffle=False))
    rates = 10 ** np.random.default_rng(0).uniform(-3, 0, TRIALS).astype(np.float32)
    hyper = jax.tree.map(jnp.float32, algorithm.hyper)
    stacked = fg.hyper.replace(hyper, {"server.learning_rate": jnp.asarray(rates)})
    together = fg.side_by_side(algorithm, stacked)
    cohorts = [everyone.select(cohort("ragged", i)) for i in range(rounds)]
    key = jax.random.key(0)

    def all_at_once() -> Any:
        state = together.init(p)
        for one in cohorts:
            state, _ = together.round(state, stacked, one, key)
        return jax.block_until_ready(state.params)

    def in_turn() -> Any:
        ends = []
        for rate in rates:
            own = fg.hyper.replace(hyper, {"server.learning_rate": jnp.float32(rate)})
            state = algorithm.init(p)
            for one in cohorts:
                state, _ = algorithm.round(state, own, one, key)
            ends.append(state.params)
        return jax.block_until_ready(jax.tree.map(lambda *x: jnp.stack(x), *ends))

    a, b = all_at_once(), in_turn()
    np.testing.assert_allclose(a["w"], b["w"], rtol=2e-4, atol=1e-6)
    times = take_turns({"side by side": all_at_once, "one after another": in_turn}, 3, warmup=0)
    medians = {name: t.summary()["ms"] / 1e3 for name, t in times.items()}
    gain = times["one after another"].ratio(times["side by side"])
    return {**medians, "gain": gain["wall"], "rounds": rounds}


def run(quick: bool) -> dict[str, Any]:
    """Both, each in a process of its own."""
    return {
        "rounds": isolated("sections.tuning", "measure_rounds", repetitions=3 if quick else 40),
        "trials": isolated("sections.tuning", "measure_trials", rounds=2 if quick else 10),
    }


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [
            f"learn {what}",
            f"{found['medians']['fedgrad']['ms']:.1f}",
            f"{found['medians'][found['best']]['ms']:.1f} ({found['best']})",
            f"**{found['ratio']['wall']:.2f}**",
            f"{found['ratio']['cpu']:.2f}",
        ]
        for what, found in data["rounds"].items()
    ]
    header = ["self-tuned parallel round", "fedgrad ms", "by hand ms", "ratio", "CPU ratio"]
    trials = data["trials"]
    words = (
        f"{TRIALS} trials of {trials['rounds']} rounds: {trials['side by side']:.2f} s side by "
        f"side, {trials['one after another']:.2f} s one after another: **{trials['gain']:.1f}x**."
    )
    return "\n\n".join([__doc__.split("\n\n", 1)[1], results.table(header, rows), words])
