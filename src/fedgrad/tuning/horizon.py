"""The horizon of a hypergradient: how many rounds it looks back."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedgrad.ad.sensitivity import apart, carried
from fedgrad.core.errors import ArgumentError, known_fields
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import common
from fedgrad.core.types import Params, State

THROUGH = ("all", "server")


@known_fields
@dataclass(frozen=True)
class Horizon:
    """The number of rounds over which `fg.self_tuning` follows the effect of a hyperparameter.

    Every round propagates the sensitivity of the whole state, times `discount` = 1 - 1/rounds. An
    infinite horizon is therefore the derivative through all rounds so far: exact, unless one of
    them is at a corner (see docs/self-tuning.md).

    Attributes:
        rounds: About how many rounds; 1 is the last one alone.
        through: "all" differentiates through the clients too, which sends one more model down and
            up for each learned number; "server" treats the clients' answers as independent of the
            model and sends nothing more.
    """

    rounds: float = math.inf
    through: Literal["all", "server"] = "all"

    def __post_init__(self) -> None:
        number = isinstance(self.rounds, int | float) and not isinstance(self.rounds, bool)
        if not number or not self.rounds >= 1:
            raise ArgumentError.here(
                f"A horizon is a number of rounds, at least 1, got {self.rounds!r}. Write "
                "horizon=20, or horizon=math.inf for all rounds so far."
            )
        if self.through not in THROUGH:
            raise ArgumentError.here(
                f"fg.Horizon(..., through={self.through!r}): there is no such part of a round.",
                str(self.through),
                THROUGH,
            )
        if self.through == "server" and self.rounds == 1:
            raise ArgumentError.here(
                'fg.Horizon(1, through="server"): over one round nothing is carried, through '
                "whatever. Give more rounds, or leave the horizon out."
            )

    @property
    def discount(self) -> float:
        """The factor on a sensitivity after a round."""
        return 1.0 - 1.0 / self.rounds

    def followed(self, state: State) -> Any:
        """Return the part of a state that has a sensitivity.

        Over one round this is the model; otherwise all floating leaves, because values kept beside
        a model (momentum, an average) act on later models. None stands for the other leaves.
        """
        return state.params if self.rounds == 1 else jax.tree.map(_floating, state)

    def none_yet(self, state: State, learned: dict[str, Any]) -> dict[str, Any]:
        """Return the sensitivities before the first round, which are zero."""

        def zeros(raw: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jnp.zeros((*jnp.shape(leaf), *raw.shape), common(leaf, raw)),
                self.followed(state),
            )

        return {name: zeros(raw) for name, raw in learned.items()}

    def slope(self, state: State, gradient: Params) -> Any:
        """Return a gradient by the model as a gradient by the followed part of the state."""
        if self.rounds == 1:
            return gradient
        _, pull = jax.vjp(lambda part: _with(state, part).params, self.followed(state))
        return pull(gradient)[0]

    def through_round(
        self,
        round: Callable[[State], Any],
        state: State,
        learned: dict[str, Any],
        sensitivity: dict[str, Any],
    ) -> Any:
        """Run `round(state)` with a state that depends on the learned values by `sensitivity`."""
        if self.rounds == 1:
            return round(state)
        values, tree = jax.tree.flatten(self.followed(state))
        columns = [jax.tree.leaves(sensitivity[name]) for name in learned]
        slopes = [[self.discount * s for s in row] for row in zip(*columns, strict=True)]
        moved = carried(values, slopes, list(learned.values()))
        dependent = _with(state, jax.tree.unflatten(tree, moved))
        if self.through == "all":
            return round(dependent)
        return apart(round, state, dependent, (CLIENTS.name,))

    def usable(self, sensitivity: Any) -> Any:
        """Return the sensitivity without non-finite entries, which would never recover.

        A NaN is mostly a point where JAX has no derivative (a power of 0) but its value does not
        matter to the state; it is replaced by 0. A sensitivity that has grown to infinity is reset
        as a whole.
        """
        if self.rounds == 1 or sensitivity is None:
            return sensitivity
        return {name: _finite(one) for name, one in sensitivity.items()}


def _finite(sensitivity: Any) -> Any:
    grown = jnp.array([jnp.any(jnp.isinf(s)) for s in jax.tree.leaves(sensitivity)])
    lost = jnp.any(grown)
    return jax.tree.map(lambda s: jnp.where(lost | jnp.isnan(s), 0, s), sensitivity)


def as_horizon(horizon: Any) -> Horizon:
    """Convert a number of rounds to a horizon."""
    return horizon if isinstance(horizon, Horizon) else Horizon(horizon)


def _floating(leaf: Any) -> Any:
    return jnp.asarray(leaf) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else None


def _with(state: State, part: Any) -> State:
    """Return the state with its floating leaves replaced."""
    leaves, tree = jax.tree.flatten(state)
    others = iter(jax.tree.leaves(part))
    return jax.tree.unflatten(
        tree, [leaf if _floating(leaf) is None else next(others) for leaf in leaves]
    )
