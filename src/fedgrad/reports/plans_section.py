"""The plans of a run, kept in its folder as `plans.json` and one SVG for each."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedgrad.planning.plan import Plan, Traffic
from fedgrad.reports.page import ReportError

HEADINGS = {"fixed": "a training round", "learned": "a training round that learns"}


@dataclass(frozen=True)
class KeptPlan:
    """The plan of one training round: its traffic and its picture."""

    name: str
    rounds: int  # of communication
    clients: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    memory: Mapping[str, int]
    readdressed: tuple[str, ...]
    picture: str = ""  # stored in a separate file

    def sent(self) -> tuple[int, int]:
        """Return the bytes down and up in one training round, summed over all clients.

        A loop with a data-dependent trip count counts once, as in the plan.
        """
        counts = [(t, self.clients[t.placement] * (t.times or 1)) for t in self.traffic]
        return sum(t.down_bytes * n for t, n in counts), sum(t.up_bytes * n for t, n in counts)


def keep(folder: Path, plans: Mapping[str, Plan]) -> None:
    """Write what a report needs of the plans of a training round, by the name of their run."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {}
    for name, plan in plans.items():
        plan = replace(plan, name=HEADINGS.get(name, plan.name))
        plan.draw(str(folder / f"{name}-round.svg"))
        facts = (plan.name, plan.rounds, plan.clients, plan.traffic)
        words[name] = asdict(KeptPlan(*facts, plan.client_memory, plan.readdressed))
    text = json.dumps(words, indent=2, ensure_ascii=False)
    (folder / "plans.json").write_text(text + "\n", encoding="utf-8")


def kept(folder: Path) -> dict[str, KeptPlan]:
    """Read what `keep` wrote, or return an empty dict if there is nothing."""
    path = folder / "plans.json"
    if not path.exists():
        return {}
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        found = {}
        for name, plan in words.items():
            picture = (folder / f"{Path(name).name}-round.svg").read_text(encoding="utf-8")
            traffic = tuple(Traffic(**t) for t in plan["traffic"])
            found[name] = KeptPlan(**{**plan, "traffic": traffic, "picture": picture})
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError.here(
            f"{path} cannot be read: {error!r}. Run the command again."
        ) from error
