"""The top of a run's report: what it says in one look."""

import math
from collections.abc import Iterable

from fedgrad.report.run import FIXED, LEARNED, Run
from fedgrad.report.words import change, measure, title
from fedgrad.show.markup import Content, Html, element, join
from fedgrad.show.numbers import memory, number, short

NEGLIGIBLE = 0.01  # a smaller part of the value is not called better or worse


def top(run: Run) -> list[Content]:
    """The heading, a sentence, and the numbers that matter most."""
    return [
        element("p", _over(run), class_="over"),
        element("h1", heading(run)),
        element("p", verdict(run), class_="lead") if verdict(run) else None,
        element("div", _tiles(run), class_="tiles"),
    ]


def heading(run: Run) -> str:
    """`fedavgm that learns server.learning_rate on synthetic`."""
    algorithm, task = run.asked.get("algorithm"), run.asked.get("task")
    on = f" on {task}" if task else ""
    if not run.learned:
        return f"{algorithm or 'Federated training'}{on}"
    return f"{algorithm or 'An algorithm'} that learns {listed(run.learned)}{on}"


def verdict(run: Run) -> str:
    """How learned compares with fixed at the end, by the first thing that is measured."""
    if not run.compared or not run.measured:
        return ""
    key = run.measured[0]
    last, values = run.ends(key)
    if len(values) < 2:
        return ""
    ours, theirs = values[LEARNED], values[FIXED]
    start = (
        f"Training that learns its hyperparameters has a {title(key).lower()} of "
        f"{measure(key)(ours)} after {last:,} rounds"
    )
    same = "the same training with its hyperparameters fixed"
    if not math.isfinite(theirs):
        return f"{start}; {same} has diverged."
    words = change(key, ours, theirs)
    if not words or words == "the same":
        return f"{start}, {same} has {measure(key)(theirs)}."
    return f"{start}, {words} than the {measure(key)(theirs)} of {same}."


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _over(run: Run) -> str:
    parts = [f"{run.rounds:,} training rounds"]
    if "cohort_size" in run.config:
        parts.append(f"{run.config['cohort_size']} clients in each")
    if "seed" in run.asked:
        parts.append(f"seed {run.asked['seed']}")
    return " · ".join(parts)


def _tiles(run: Run) -> list[Html]:
    tiles = [_measured(run, key) for key in run.measured[:2]]
    for name in run.learned[:4]:
        values = run.metrics().hyper[name].values
        tiles.append(_tile(name, number(values[-1]), f"learned, from {short(values[0])}"))
    total = run.sent(run.main)
    if total is not None:
        fixed = run.sent(FIXED) if run.main == LEARNED else None
        aside = f"{total / fixed:.2g} times fixed ({memory(fixed)})" if fixed else "down and up"
        tiles.append(_tile("Sent in all", memory(total), aside))
    rejected = run.metrics().rejected
    if rejected and rejected.values.any():
        tiles.append(_tile("Steps rejected", number(rejected.values.sum()), "by the guard"))
    return tiles


def _measured(run: Run, key: str) -> Html:
    words = measure(key)
    last, values = run.ends(key)
    if FIXED not in values or len(values) < 2:
        return _tile(title(key), words(run.curves[run.main][key].values[-1]), "at the end")
    value, other = values[LEARNED], values[FIXED]
    what = title(key) if last == run.rounds else f"{title(key)}, round {last:,}"
    compared = change(key, value, other)
    tone = "better" if _better(key, value, other) else "worse"
    if compared and abs(value - other) < NEGLIGIBLE * abs(other):
        tone = "even"
    aside = join(
        f"fixed: {words(other)}",
        [element("br"), element("span", compared, class_=tone)] if compared else None,
    )
    return _tile(what, words(value), aside)


def _better(key: str, ours: float, theirs: float) -> bool:
    return ours > theirs if key.endswith("accuracy") else ours < theirs


def _tile(what: str, value: str, aside: Content) -> Html:
    return element(
        "div",
        element("p", what, class_="what"),
        element("p", value, class_="value"),
        element("p", aside, class_="aside"),
        class_="tile",
    )
