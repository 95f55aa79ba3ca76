"""The report of an experiment: its claims, figures and tables."""

import webbrowser
from pathlib import Path

from fedgrad.reports.chart_html import html
from fedgrad.reports.page import Section, again, listing, page, table, versions
from fedgrad.reports.runs import NAME
from fedgrad.reports.words import said
from fedgrad.show.charts import Figure
from fedgrad.show.markup import Content, Html, element
from fedgrad.training.files import write_whole
from fedgrad_experiments.experiment import Experiment, Reproduction, show
from fedgrad_experiments.registry import experiment as find
from fedgrad_experiments.results import Claim, load, score

# The CSS class of a claim, by whether it holds.
TONES = {True: "held", False: "failed", None: "untested"}


def write_report(folder: Path, open: bool = False) -> Path:
    """Write the report of an experiment's folder again and return its path."""
    results = load(folder)
    experiment = find(results.experiment, results.facts.get("task"))
    path = write_page(folder, experiment, show(experiment, results, folder))
    if open:
        webbrowser.open(path.resolve().as_uri())
    return path


def write_page(folder: Path, experiment: Experiment, shown: Reproduction) -> Path:
    """Write the report of an experiment that has been run and return its path."""
    path = folder / NAME
    write_whole(path, experiment_page(experiment, shown).encode())
    return path


def experiment_page(experiment: Experiment, shown: Reproduction) -> str:
    """Return the whole HTML document."""
    heading, _, about = experiment.description.partition(": ")
    size = size_of(experiment, shown)
    over = [f"fedgrad reproduce {experiment.name}", size and f"{size} size"]
    over += [f"{float(shown.results.facts['seconds']):,.0f} seconds"] * (
        "seconds" in shown.results.facts
    )
    head = [
        element("p", " · ".join(filter(None, over)), class_="over"),
        element("h1", heading),
        element("p", about[:1].upper() + about[1:], class_="lead") if about else None,
        element("p", f"{score(shown.claims)}.", class_="lead"),
    ]
    sections = [
        Section("Figures", [_figure(name, one) for name, one in shown.figures.items()]),
        Section(
            "Claims", element("ul", [_claim(claim) for claim in shown.claims], class_="claims")
        ),
        Section("Numbers", [_table(one) for one in shown.tables]),
        Section("Settings", _settings(experiment, shown, size)),
    ]
    foot = versions(shown.results.facts.get("versions", {}))
    return page(f"{experiment.name} · fedgrad", head, sections, foot)


def size_of(experiment: Experiment, shown: Reproduction) -> str:
    """Return the name of the size in which an experiment was run, or "" if it was none of them."""
    return experiment.size_of(shown.results.settings)


def _claim(claim: Claim) -> Html:
    return element(
        "li",
        element(
            "p", element("span", claim.verdict.capitalize(), class_="verdict"), claim.statement
        ),
        element("p", claim.evidence, class_="note"),
        class_=TONES[claim.holds],
    )


def _figure(name: str, figure: Figure) -> list[Html]:
    charts = [html(chart) for row in figure.rows for chart in row]
    heading = name.replace("-", " ").replace("_", " ").capitalize()
    many = " many" if max(map(len, figure.rows)) > 2 else ""
    return [element("h3", heading), element("div", charts, class_=f"charts{many}")]


def _table(one: Content) -> list[Html]:
    return [element("h3", one.title), table(one.header, one.rows)]


def _settings(experiment: Experiment, shown: Reproduction, size: str) -> list[Content]:
    words = ["fedgrad", "reproduce", experiment.name]
    words += [f"--{size}"] if size not in ("", "default") else []
    facts = [(name.replace("_", " "), said(v)) for name, v in shown.results.settings.items()]
    return [
        again(words) if size else None,
        listing(facts),
    ]
