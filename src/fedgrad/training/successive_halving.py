"""Successive halving: at each rung, the remaining trials are trained, scored, and reduced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.types import Params
from fedgrad.training.cohort_schedule import Course
from fedgrad.training.interrupt import Interrupts
from fedgrad.training.loop import Loop, Played
from fedgrad.training.progress import Display
from fedgrad.training.search_folder import SearchFolder, Standing

TOGETHER = 256 * 2**20  # bytes of state that side-by-side trials may share


@dataclass
class Climb:
    """The progress of the trials of a search."""

    course: Course  # of all trials, side by side
    tried: Mapping[str, jax.Array]
    order: Callable[[np.ndarray], np.ndarray]  # ranks scores from best to worst
    kept: SearchFolder
    display: Display
    interrupts: Interrupts
    rung: int = 0
    alive: np.ndarray = field(init=False)  # the remaining trials
    state: Any = field(init=False)  # of the remaining trials
    scores: np.ndarray = field(init=False)  # the latest of all trials; NaN before the first rung
    rounds: np.ndarray = field(init=False)
    ended: tuple[int, Params] | None = None  # the best dropped trial and its model

    def begin(self, params: Params) -> None:
        """Initialize all trials."""
        trials = len(next(iter(self.tried.values())))
        self.alive, self.state = np.arange(trials), self.course.first(params)
        self.scores, self.rounds = np.full(trials, np.nan), np.zeros(trials, int)

    def train(self, begin: int, end: int) -> None:
        """Train the remaining trials to the next rung, as many at once as fit into memory."""
        self.rung += 1
        size = max(1, int(TOGETHER // max(1, _bytes(self.state) // len(self.alive))))
        places = np.array_split(np.arange(len(self.alive)), -(-len(self.alive) // size))
        parts = [self._part(i, places[i], begin, end) for i in range(len(places))]
        self.state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        self.rounds[self.alive] = end

    def _part(self, number: int, places: np.ndarray, begin: int, end: int) -> Any:
        together, trials = self.course.algorithm, self.alive[places]
        hyper = _take(together.hyper, trials)
        course = replace(self.course, algorithm=replace(together, hyper=hyper))
        first = Played(begin, _take(self.state, places))
        name = f"rung-{self.rung}/part-{number + 1}"
        with self.kept.part(name, course, first, end, trials) as (keeping, at, history):
            loop = Loop(
                lambda round, state: course.play(round, state, hyper),
                at,
                end,
                history,
                kept=keeping,
                display=self.display,
                interrupts=self.interrupts,
                warned=True,  # some trials are expected to diverge
            )
            loop.run()
        return loop.at.state

    def judge(self, scores: Callable[[Any], np.ndarray]) -> None:
        """Score the models of the remaining trials."""
        self.scores[self.alive] = scores(self.state.params)

    def drop(self, left: int) -> None:
        """Continue with the best `left` trials. The best of the dropped ones is remembered, because
        the others may never become as good."""
        order = self.order(self.scores[self.alive])
        if left < len(order):
            place = int(order[left])
            trial = int(self.alive[place])
            ended = [trial] if self.ended is None else [self.ended[0], trial]
            if ended[self.order(self.scores[ended])[0]] == trial:
                self.ended = trial, jax.tree.map(lambda leaf: leaf[place], self.state.params)
        self.alive, self.state = self.alive[order[:left]], _take(self.state, order[:left])

    @property
    def best(self) -> tuple[int, Params]:
        """The trial with the best score and its model, after the last rung."""
        assert self.ended is not None
        return self.ended

    def standing(
        self, objective: str, maximize: bool, ends: list[int], logarithmic: Mapping[str, bool]
    ) -> Standing:
        """Return the state of the search for its folder."""
        tried = {name: np.asarray(values) for name, values in self.tried.items()}
        best = int(self.order(self.scores)[0])
        found = (tried, self.scores, self.rounds, best, tuple(ends), logarithmic)
        return Standing(objective, maximize, *found)


def _take(tree: Any, trials: Any) -> Any:
    """Select trials along the leading axis of every array; all trials share the scalars."""
    return jax.tree.map(lambda leaf: leaf[trials] if jnp.ndim(leaf) else leaf, tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
