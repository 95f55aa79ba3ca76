"""The settings in which compared runs differ."""

from collections.abc import Mapping
from typing import Any

from fedgrad.algorithms.hyper import paths
from fedgrad.reports.page import Section, listing, table
from fedgrad.reports.run_source import Run
from fedgrad.reports.words import said
from fedgrad.show.markup import Content, element
from fedgrad.show.numbers import plural
from fedgrad.training.config import called

# Not shown: digests, versions, and what the curves show.
SILENT: tuple[str, ...] = ("state", "versions", "first_state", "first_key", "planned", "config")
SILENT += ("populations", "evaluations")
DIGESTS = ("program", "schedules", "round")


def differences(runs: Mapping[str, Run]) -> list[Section]:
    """Return a table of the settings in which runs differ, and a list of those in common."""
    facts = {name: _facts(run) for name, run in runs.items()}
    names = list(dict.fromkeys(key for found in facts.values() for key in found))
    values = {key: [found.get(key, "–") for found in facts.values()] for key in names}
    differ = {key: row for key, row in values.items() if len(set(row)) > 1}
    common = [(key, row[0]) for key, row in values.items() if key not in differ]
    parts: list[Content] = []
    if differ:
        parts.append(table(("", *facts), [(key, *row) for key, row in differ.items()]))
    if common:
        parts += [element("h3", "In common"), listing(common)]
    return [Section("What differs" if differ else "Configuration", parts)] if parts else []


def _facts(run: Run) -> dict[str, str]:
    plain: dict[str, Any] = {k: v for k, v in run.config.items() if k not in SILENT}
    kept = plain.pop("algorithm", {})
    if isinstance(kept, Mapping):
        plain["algorithm"] = {k: v for k, v in kept.items() if k not in DIGESTS and v != ""}
    hyper = plain.pop("hyper", {})
    found = {_called(name): said(v) for name, v in _named(plain).items()}
    found |= {str(name): said(v) for name, v in _named(hyper).items()}
    if "algorithm" in found:  # listed first
        found = {"algorithm": found["algorithm"], **found}
    if run.status is not None:
        found["model"] = plural(run.status.parameters, "parameter")
    return found


def _called(name: str) -> str:
    if name == "algorithm.name":
        return "algorithm"
    return called(name) if name.startswith("algorithm.") else name.replace("_", " ")


def _named(tree: Any) -> dict[str, Any]:
    """Flatten to dotted names; a list stays one value."""
    if not isinstance(tree, Mapping):
        return {}
    return paths({k: v if isinstance(v, Mapping) else _Whole(v) for k, v in tree.items()})


class _Whole:
    """A value that is not flattened."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return said(self.value)
