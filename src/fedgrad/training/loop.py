"""The training loop.

Rounds are dispatched before the results of earlier ones are available, so that recording, display
and checkpoints overlap with the computation of the next rounds.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.core.errors import ArgumentError, warn
from fedgrad.core.types import State
from fedgrad.training.best import Best, after, keeping
from fedgrad.training.evaluation import Evaluations
from fedgrad.training.history import History
from fedgrad.training.interrupt import Interrupts, interrupted
from fedgrad.training.live import Live
from fedgrad.training.progress import Display
from fedgrad.training.run_folder import Keeping
from fedgrad.training.stopping import Callback, Stop

# How many rounds may be in flight: the bounds of their number, the age of their results in seconds,
# and the bytes of their states. If a single state exceeds the bytes, such as one with the state of
# all clients, no round is started ahead. Without a limit, XLA can deadlock on several CPU devices,
# with about 30 programs with collectives in the queue.
AHEAD, SECONDS, BYTES = (2, 8), 0.1, 64 * 2**20


@dataclass(frozen=True)
class Played:
    """A round that was started, the state after it, and its metrics, which may still be pending."""

    round: int
    state: State
    metrics: Any = None


@dataclass
class Loop:
    """Runs rounds from the current one, `at`, to the last one."""

    play: Callable[[int, Any], tuple[Any, Any]]  # (round, state) -> (state, metrics)
    at: Played
    rounds: int
    history: History = field(default_factory=History)
    evaluations: Evaluations = field(default_factory=lambda: Evaluations({}))
    callbacks: Sequence[Callback] = ()
    kept: Keeping = field(default_factory=Keeping)
    display: Display = field(default_factory=Display)
    interrupts: Interrupts = field(default_factory=Interrupts)
    best: Best | None = None  # if fg.keep_best is among the callbacks
    live: Live = field(default_factory=Live)
    stopped: str | None = None
    warned: bool = False
    ahead: int = field(default_factory=lambda: AHEAD[0])
    settled: float = field(default_factory=time.perf_counter)
    names: dict[Any, list[str]] = field(default_factory=dict)  # of metrics, by tree structure

    def run(self) -> None:
        """Run the remaining rounds, or until a callback stops training; save on any exit."""
        try:
            self._play()
        except BaseException as error:
            self.kept.rescue(self.at.round, self.at.state, self.history, error, self.best)
            self.live.end(self.history, _why(error))
            raise
        self.kept.save(self.at.round, self.at.state, self.history, self.best)
        self.live.end(self.history, self.stopped)

    def _play(self) -> None:
        self.stopped = self._reason()  # a run that had stopped stays stopped when it is resumed
        if self.stopped:
            return
        self._begin()
        started: deque[Played] = deque()
        state, first = self.at.state, self.at.round + 1
        for round in range(first, self.rounds + 1):
            state, metrics = self.play(round, state)
            metrics = require_metrics(metrics)
            due = self.evaluations.due(round, last=round == self.rounds)
            if due.by_name:
                metrics = replace(metrics, eval=due(state.params, self.display.evaluating))
            _send_home(metrics)
            started.append(Played(round, state, metrics))
            if round == first or len(started) > self.ahead:  # the first round compiles
                # Wait for half of them: the other half keeps the devices busy, and processing
                # several rounds in a row is faster than waking up for each.
                jax.block_until_ready(started[(len(started) - 1) // 2].metrics)
            # When training stops, rounds that were started ahead are discarded. A real federation
            # has none, because its rounds return only when their results are there.
            if self._settle_ready(started):
                return
        jax.block_until_ready([one.metrics for one in started])
        self._settle_ready(started)

    def _begin(self) -> None:
        """Evaluate the initial model, before the first round."""
        if self.at.round or self.history or not self.evaluations.by_name:
            return
        found = self._evaluated(self.evaluations, self.at)
        self.kept.write(0, found)
        self.settled = time.perf_counter()

    def _evaluated(self, evaluations: Evaluations, one: Played) -> dict[str, np.ndarray]:
        """Evaluate the model of a completed round, and record the metrics."""
        metrics = evaluations(one.state.params, self.display.evaluating)
        found = self._fetch(Metrics(eval=metrics))
        self._record(one, found)
        return found

    def _record(self, one: Played, found: dict[str, np.ndarray]) -> None:
        self.history.record(one.round, found)
        self.best = after(keeping(self.callbacks), self.best, one.round, found, one.state.params)

    def _settle_ready(self, started: deque[Played]) -> bool:
        """Record all completed rounds, and return whether to stop."""
        ready = list(itertools.takewhile(lambda one: _is_ready(one.metrics), started))
        if not ready:
            return False
        now = time.perf_counter()
        seconds, self.settled = (now - self.settled) / len(ready), now
        self.ahead = _ahead(seconds, ready[0].state)
        for one in ready:
            started.popleft()
            if self._settle(one, seconds):
                return True
        return False

    def _settle(self, one: Played, seconds: float) -> bool:
        found = {**self._fetch(one.metrics), "seconds": np.asarray(seconds)}
        self._record(one, found)
        self.at = one
        told = _told(found)
        try:
            self._warn(one.round, told)
            asked = [_asks(c, one, told) for c in self.callbacks if callable(c)]
            self.stopped = self._reason() or next(filter(None, asked), None)
            if self.stopped and one.round < self.rounds:
                found |= self._evaluated(self.evaluations.missed(one.round), one)
        finally:
            self.kept.write(one.round, found)
        self.display.show(one.round, told)
        self.kept.save_if_due(one.round, one.state, self.history, self.best)
        self.live.show(self.history)
        self.interrupts.survived()
        return self.stopped is not None

    def _fetch(self, metrics: Metrics) -> dict[str, np.ndarray]:
        leaves, tree = jax.tree.flatten(metrics)
        if tree not in self.names:
            self.names[tree] = list(metrics.named())
        return {
            name: _host(name, leaf) for name, leaf in zip(self.names[tree], leaves, strict=True)
        }

    def _reason(self) -> str | None:
        # Before the first round the history holds only evaluations, and other metrics are missing.
        stops = [c for c in self.callbacks if isinstance(c, Stop)] if self.at.round else []
        return next(filter(None, (stop.reason(self.history) for stop in stops)), None)

    def _warn(self, round: int, metrics: Metrics) -> None:
        # An algorithm that rejects non-finite rounds reports them itself.
        if self.warned or metrics.loss is None or metrics.rejected is not None:
            return
        bad = np.count_nonzero(~np.isfinite(metrics.loss))
        if not bad:
            return
        self.warned = True
        trials = f" in {bad} of {np.size(metrics.loss)} trials" if np.ndim(metrics.loss) else ""
        warn(
            f"The loss of round {round} is not finite{trials}. A smaller learning "
            "rate may help; callbacks=[fg.non_finite()] ends such a run."
        )


def _why(error: BaseException) -> str:
    """Return a word for the status; the exception itself is raised."""
    return "interrupted" if interrupted(error) else type(error).__name__


def _asks(callback: Callable[..., Any], one: Played, metrics: Metrics) -> str | None:
    """Call a callback, and return its reason to stop, if any."""
    found = callback(one.round, one.state, metrics)
    name = getattr(callback, "__name__", type(callback).__name__)
    return found if isinstance(found, str) else f"{name} asked for it" if found else None


def _ahead(seconds: float, state: State) -> int:
    size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))
    most = min(AHEAD[1], SECONDS / max(seconds, 1e-6), BYTES / max(size, 1))
    return int(max(AHEAD[0], most)) if size <= BYTES else 0


def _is_ready(metrics: Any) -> bool:
    return all(x.is_ready() for x in jax.tree.leaves(metrics) if hasattr(x, "is_ready"))


def _send_home(metrics: Any) -> None:
    """Start copying metrics to the host asynchronously."""
    if jax.default_backend() != "cpu":
        for leaf in jax.tree.leaves(metrics):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()


def _told(found: Mapping[str, np.ndarray]) -> Metrics:
    """Convert metrics to what callbacks receive: numbers, or arrays for side-by-side trials."""
    return Metrics.of({name: v.item() if v.ndim == 0 else v for name, v in found.items()})


def _host(name: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)  # faster than reading from all devices
    array = np.asarray(leaf)
    if array.dtype.kind in "biuf":
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError.here(
            f"The metric {name!r} is {type(leaf).__name__} of {array.dtype}. Metrics are numbers."
        )
    return array.astype(np.float32)  # such as bfloat16
