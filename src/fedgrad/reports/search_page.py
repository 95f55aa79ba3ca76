"""The report of a search: the score and the hyperparameters of each trial."""

import numpy as np

from fedgrad.reports.chart_html import html
from fedgrad.reports.page import Section, page, table, versions
from fedgrad.reports.words import measure, title, written
from fedgrad.show.axis import axis
from fedgrad.show.charts import Chart, Curve
from fedgrad.show.markup import Content, Html, element
from fedgrad.show.numbers import plural, short
from fedgrad.training.search_folder import Standing

MOST = 100  # trials in the table


def search_page(found: Standing, running: bool = False) -> str:
    """Return the HTML document of a search.

    `found` is `search.standing`, or `read(folder)` of training/search_folder.py. The page of a
    running search reloads itself.
    """
    trials, names = len(found.scores), ", ".join(found.tried)
    rungs = f"{len(found.rungs)} rungs, " if len(found.rungs) > 1 else ""
    head = [
        element(
            "p",
            f"{plural(trials, 'trial')} · {rungs}up to {plural(found.rungs[-1], 'round')}",
            class_="over",
        ),
        element("h1", f"A search over {names}"),
        element("p", _verdict(found), class_="lead"),
    ]
    sections = [Section("Trials", _table(found))]
    if np.isfinite(found.scores).any():
        charts = [html(_chart(found, name)) for name in found.tried]
        sections.insert(0, Section("Scores", element("div", charts, class_="charts")))
    foot = f"{written()} {versions(found.versions)}"
    return page(f"A search over {names} · fedgrad", head, sections, foot, running)


def _verdict(found: Standing) -> str:
    if not np.isfinite(found.scores[found.best]):
        begun = "every trial has diverged" if found.rounds.any() else "no trial is done yet"
        return f"So far {begun}."
    values = ", ".join(f"{name} {short(v[found.best])}" for name, v in found.tried.items())
    way = "highest" if found.maximize else "lowest"
    score = measure(found.objective)(found.scores[found.best])
    over = "" if found.over else " It is not over yet."
    return f"Trial {found.best} has the {way} {found.objective}, {score}: {values}.{over}"


def _chart(found: Standing, name: str) -> Chart:
    x, y = np.asarray(found.tried[name], float), found.scores
    best = np.arange(len(y)) == found.best
    curves = [
        Curve("best", x[best], y[best], "p1", "dots"),
        Curve("other trials", x[~best], y[~best], "p0", "dots"),
    ]
    unit = "percent" if found.objective.endswith("accuracy") else ""
    kept = np.isfinite(y)
    return Chart(
        f"{title(f'eval.{found.objective}')} by {name}",
        curves,
        name,
        x_axis=axis(x, logarithmic=found.logarithmic.get(name)),
        y_axis=axis(y[kept], unit=unit),  # type: ignore[arg-type]
        y_unit=unit,  # type: ignore[arg-type]
        note=f"{np.count_nonzero(~kept)} diverged" if not kept.all() else "",
    )


def _table(found: Standing) -> list[Content]:
    signed = -found.scores if found.maximize else found.scores
    order = np.argsort(np.where(np.isfinite(signed), signed, np.inf), kind="stable")
    rows = [_row(found, int(trial)) for trial in order[:MOST]]
    columns = ("trial", found.objective, *found.tried, "rounds")  # phones show the first columns
    more = len(order) - MOST
    note = element("p", f"The best {MOST}; {more} more are in search.json.", class_="note")
    return [table(columns, rows), note if more > 0 else None]


def _row(found: Standing, trial: int) -> list[Html | str]:
    score, trained = found.scores[trial], int(found.rounds[trial])
    words = measure(found.objective)(score) if np.isfinite(score) else "diverged"
    values = [short(v[trial]) for v in found.tried.values()]
    return [str(trial), words if trained else "not yet", *values, f"{trained:,}"]
