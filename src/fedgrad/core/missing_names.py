"""Names that people look for in fedgrad, and why they do not exist."""

from collections.abc import Collection
from typing import NoReturn

from fedgrad.core.errors import FederatedError

RECIPES = "docs/write-your-own-algorithm.md"
_ORDER = "it depends on how clients compare with each other, and only sums leave them"
_SEARCH = (
    "Count instead, as often as bits are wanted: fg.sum(x <= guess) says on which side of a guess "
    f'it is, and bisection ends at it: {RECIPES}, "Quantiles by bisection".'
)
_WHOSE = "it is about one client, and only sums leave clients, in which nobody can be told apart"
_ADD = "it follows from sums"

# name: (why it does not exist, what to write instead)
ABSENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("max", "min", "median", "quantile", "percentile"), (_ORDER, _SEARCH)),
    **dict.fromkeys(
        ("argmax", "argmin", "sort", "argsort", "top_k"),
        (_WHOSE, f"The value, though not whose it is, can be found: {RECIPES}."),
    ),
    **dict.fromkeys(
        ("gather", "stack", "concatenate", "collect", "all_gather", "unique"),
        (_WHOSE, "Sum what the server needs: fg.sum of a histogram, of moments, of updates."),
    ),
    "any": (_ADD, "Write fg.sum(x) > 0, of a bool."),
    "all": (_ADD, "Write fg.sum(~x) == 0, of a bool."),
    "count": (_ADD, "Write fg.sum(1)."),
    "var": (_ADD, "Write fg.mean(x**2) - fg.mean(x) ** 2."),
    "std": (_ADD, "Write jnp.sqrt(fg.mean(x**2) - fg.mean(x) ** 2)."),
    "prod": (_ADD, "Write jnp.exp(fg.sum(jnp.log(x))), of positive numbers."),
    "histogram": (_ADD, "Write fg.sum(jnp.histogram(x, edges)[0])."),
}


class AbsentError(FederatedError, AttributeError):
    """fedgrad has no attribute of this name."""


def refuse_name(name: str, known: Collection[str]) -> NoReturn:
    """Raise the error for an unknown attribute `fg.name`."""
    if name.startswith("_"):  # Python itself looks these up, and often
        raise AttributeError(f"module 'fedgrad' has no attribute {name!r}")
    if name in ABSENT:
        why, instead = ABSENT[name]
        raise AbsentError.here(f"There is no fg.{name}: {why}. {instead}")
    raise AbsentError.here(f"There is no fg.{name}.", name, known)
