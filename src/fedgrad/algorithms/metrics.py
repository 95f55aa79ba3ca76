"""The metrics of a round, declared once for the algorithms that make them and all who read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from fedgrad.algorithms.hyper import paths
from fedgrad.core.errors import ArgumentError, known_fields


@known_fields
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """The metrics of a round; those that an algorithm does not have are None or empty.

    In a history, a log and a report each has a name: `loss`, `hyper.server.learning_rate`,
    `eval.test.accuracy`. Those in `extra` have no prefix.
    """

    loss: Any = None  # the training loss of the cohort
    gradient_loss: Any = None  # of the gradient cohort; hypergradients are its derivatives
    hyper: Mapping[str, Any] = field(default_factory=dict)  # learned, as used, by dotted name
    hypergradient: Mapping[str, Any] = field(default_factory=dict)  # the derivatives by these
    rejected: Any = None  # how often a guard intervened
    extra: Mapping[str, Any] = field(default_factory=dict)  # an algorithm's own, by name
    eval: Mapping[str, Any] = field(default_factory=dict)  # of evaluations; `fg.fit` adds them
    seconds: Any = None  # duration of the round; `fg.fit` adds it

    def named(self) -> dict[str, Any]:
        """Return all of them by name, in the order of the leaves of this pytree."""
        found: dict[str, Any] = {}
        for path, value in paths(self).items():
            name = path.removeprefix("extra.")
            if name in found or (name != path and name.partition(".")[0] in DECLARED):
                raise ArgumentError.here(
                    f"A metric in extra is called {name!r}, which is what another one is called."
                )
            found[name] = value
        return found

    @staticmethod
    def of(named: Mapping[str, Any]) -> "Metrics":
        """Return metrics from values by name: numbers, or columns of a history."""
        found: dict[str, Any] = {group: {} for group in GROUPS}
        for name, value in named.items():
            first, _, rest = name.partition(".")
            if rest and first in GROUPS:
                found[first][rest] = value
            elif name in DECLARED and name not in GROUPS:
                found[name] = value
            else:
                found["extra"][name] = value
        return Metrics(**found)


def require_metrics(found: Any) -> Metrics:
    """Return the metrics of a round; refuse anything else."""
    if not isinstance(found, Metrics):
        raise ArgumentError.here(
            f"A round gives (state, metrics); its metrics are {type(found).__name__}. Give "
            "fg.Metrics(loss=..., extra=...), with your own by name in extra."
        )
    return found


DECLARED = tuple(f.name for f in fields(Metrics))
GROUPS = ("hyper", "hypergradient", "extra", "eval")
