"""What a round tells about itself: declared once, for algorithms and for everybody who reads it."""

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
    """The metrics of a round; what an algorithm does not have is None or empty.

    In a history, a log and a report each has a name: `loss`, `hyper.server.learning_rate`,
    `eval.test.accuracy`. Those in `extra` have no prefix.
    """

    loss: Any = None  # of the cohort, while it trains
    gradient_loss: Any = None  # of the gradient cohort, which is what hypergradients are of
    hyper: Mapping[str, Any] = field(default_factory=dict)  # learned, as used, by dotted name
    hypergradient: Mapping[str, Any] = field(default_factory=dict)  # the derivatives by these
    rejected: Any = None  # how often a guard stepped in
    extra: Mapping[str, Any] = field(default_factory=dict)  # an algorithm's own, by name
    eval: Mapping[str, Any] = field(default_factory=dict)  # of evaluations; `fg.fit` adds them
    seconds: Any = None  # that the round took; `fg.fit` adds it

    def named(self) -> dict[str, Any]:
        """All of them by name, in the order of the leaves of this pytree."""
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
        """Metrics from what each name has: a number, or a column of a history."""
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
    """What a round gave, if it is that."""
    if not isinstance(found, Metrics):
        raise ArgumentError.here(
            f"A round gives (state, metrics); its metrics are {type(found).__name__}. Give "
            "fg.Metrics(loss=..., extra=...), with your own by name in extra."
        )
    return found


DECLARED = tuple(f.name for f in fields(Metrics))
GROUPS = ("hyper", "hypergradient", "extra", "eval")
