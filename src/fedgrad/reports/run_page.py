"""The report of a run: its training curves, learned hyperparameters and traffic."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from fedgrad.reports.curves_section import hyperparameters, training
from fedgrad.reports.page import Section, again, listing, page, picture, table, versions
from fedgrad.reports.per_client_section import clients, has_spread
from fedgrad.reports.plans_section import KeptPlan
from fedgrad.reports.race_section import has_race, race
from fedgrad.reports.run_source import FIXED, LEARNED, Run
from fedgrad.reports.top_section import heading, top
from fedgrad.reports.words import algorithm, listed, said, written
from fedgrad.show.markup import Content, element, join
from fedgrad.show.numbers import memory, plural

GRAPHS = {
    FIXED: "A training round as it is.",
    LEARNED: "The round and its derivative: what is added in order to learn.",
}


FEW = 6  # hyperparameters on one line, at most


def run_page(run: Run, more: Sequence[Section] = ()) -> str:
    """Return the HTML document, with further sections from the caller."""
    sections = [Section("Training", training(run))] if run.measured else []
    if has_spread(run):
        sections.append(Section("Clients", clients(run)))
    if has_race(run):
        sections.append(Section("Race", race(run)))
    if run.learned:
        sections.append(Section("Hyperparameters", hyperparameters(run)))
    if run.plans:
        sections.append(Section("Traffic", _traffic(run)))
        sections.append(Section("The round as a graph", _graphs(run)))
    sections += more
    if configuration := [part for part in _configuration(run) if part is not None]:
        sections.append(Section("Configuration", configuration))
    made = versions(run.config.get("versions") or {"fedgrad": version("fedgrad")})
    if run.status is None or not run.status.began:  # no start is known, show a date anyway
        made = f"{written()} {made}"
    foot = f"Made from the folder {run.folder.resolve().name}. {made}" if run.folder else made
    return page(f"{heading(run)} · fedgrad", top(run), sections, foot, run.running)


def _traffic(run: Run) -> list[Content]:
    about = (
        "Read off the plan of a training round, the same plan that is executed. Bytes of arrays; "
        "a transport adds its own."
    )
    return [
        element("p", about, class_="note"),
        [_sent(name, plan, run.rounds) for name, plan in run.plans.items()],
    ]


def _sent(name: str, plan: KeptPlan, rounds: int) -> Content:
    rows = []
    for t in plan.traffic:
        clients = plan.clients[t.placement]
        n = clients * (t.times or 1)
        cells = (t.down_bytes, t.up_bytes, t.down_bytes * n, t.up_bytes * n)
        rows.append((f"{t.placement} ×{clients:,}, round {t.round}", *map(memory, cells)))
    down, up = plan.sent()
    total = ("", "", memory(down * rounds), memory(up * rounds))
    rows.append((f"{rounds:,} training rounds", *total))
    keeps = sum(plan.memory.values())
    again = (
        f"the same {listed(plan.readdressed)} are addressed again"
        if plan.readdressed
        else "no client is addressed twice"
    )
    return [
        element("h3", name.capitalize()),
        element(
            "p",
            f"{plural(plan.rounds, 'round')} of communication for each training round; {again}; "
            f"between rounds a client keeps {memory(keeps) if keeps else 'nothing'}.",
        ),
        table(("clients", "to each", "from each", "to all", "from all"), rows, last_is_total=True),
    ]


def _graphs(run: Run) -> list[Content]:
    return [
        join(
            element("h3", name.capitalize()),
            element("p", about, class_="note"),
            element("div", picture(run.plans[name].picture, f"{name}-graph"), class_="scroll"),
        )
        for name, about in GRAPHS.items()
        if name in run.plans
    ]


def _configuration(run: Run) -> list[Content]:
    command = run.asked.get("command")
    rounds = ["--rounds", run.config.get("rounds", run.rounds)]
    asked = {k: v for k, v in run.asked.items() if k != "command" and v not in (None, {}, [])}
    asked |= {"algorithm": algorithm(str(asked["algorithm"]))} if "algorithm" in asked else {}
    start = run.config.get("hyper")
    many = start if isinstance(start, Mapping) and len(start) > FEW else {}
    asked |= {"hyperparameters at the start": start} if "hyper" in run.config and not many else {}
    facts = [(k.replace("_", " "), said(v)) for k, v in asked.items()]
    whole = element("pre", element("code", json.dumps(run.config, indent=1, ensure_ascii=False)))
    rows = [(name, said(value)) for name, value in many.items()]
    return [
        again([*command, *rounds]) if isinstance(command, list) else None,
        listing(facts) if facts else None,
        table(("hyperparameter", "at the start"), rows) if rows else None,
        element("details", element("summary", "config.json"), whole) if run.config else None,
    ]
