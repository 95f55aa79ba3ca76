"""Checks of the arguments of a race."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError
from fedgrad.tuning.cuts import When, both, require_part


def require_known(name: str, candidates: Mapping[str, Any]) -> None:
    if name not in candidates:
        message = f"fg.race: there is no candidate {name!r}."
        raise ArgumentError.here(message, name, candidates)


def read_changes(
    given: Mapping[Any, Mapping[str, Mapping[str, Any]]], candidates: Mapping[str, Algorithm]
) -> dict[When, dict[str, dict[str, Any]]]:
    """Return the checked changes of hyperparameters by dotted name, in order of time."""
    found: dict[When, dict[str, dict[str, Any]]] = {}
    for part, change in given.items():
        require_part("changes", part)
        found[part] = {}
        for name, values in change.items():
            require_known(name, candidates)
            hyper = candidates[name].hyper
            names_of.replace(hyper, values)  # raises if there is no such hyperparameter
            found[part][name] = new = names_of.paths(values)
            scheduled = [n for n in new if callable(new[n]) or n in names_of.schedules(hyper)]
            if scheduled:
                raise ArgumentError.here(
                    f"fg.race(changes=): {scheduled[0]!r} of {name!r} is a schedule. Let the "
                    "schedule change it, or give numbers."
                )
    return dict(sorted(found.items(), key=lambda change: both(change[0])))


def read_candidates(candidates: Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    if not candidates or not isinstance(candidates, Mapping):
        raise ArgumentError.here('fg.race takes algorithms by name: {"fast": ..., "slow": ...}.')
    first = next(iter(candidates.values()))
    for name, one in candidates.items():
        if not isinstance(one, Algorithm):
            raise ArgumentError.here(
                f"fg.race: the candidate {name!r} is {type(one).__name__}. Give an algorithm, such "
                "as fg.fed_avg(loss)."
            )
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentError.here(
                f"fg.race: a candidate is called {name!r}. Give names without a dot, which "
                "separates the parts of a hyperparameter's name."
            )
        if one.loss is not first.loss:
            raise ArgumentError.here(
                f"fg.race: the candidate {name!r} minimizes another loss than the first one, so "
                "that they cannot be compared. Give all the same function."
            )
        one.require_stateless_clients("a race")
    return dict(candidates)


def shared_cohorts(candidates: Iterable[Algorithm]) -> dict[str, Population | None]:
    """Return the extra cohorts that the candidates need and share."""
    found: dict[str, Population | None] = {}
    for one in candidates:
        for argument, clients in one.cohorts.items():
            if argument in found and found[argument] is not clients:
                raise ArgumentError.here(
                    f"fg.race: two candidates draw their {argument!r} from different populations. "
                    "Let them share it."
                )
            found[argument] = clients
    return found


def round_signature(further: Iterable[str]) -> inspect.Signature:
    given, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, given) for name in ("state", "hyper", "cohort", "key")]
    return inspect.Signature([*own, *(inspect.Parameter(name, named) for name in further)])
