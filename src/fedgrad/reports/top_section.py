"""The top of a run's report: the result at a glance."""

import math

from fedgrad.reports.race_section import won
from fedgrad.reports.run_source import FIXED, LEARNED, Run
from fedgrad.reports.series import tenth_of
from fedgrad.reports.words import algorithm, change, date, direction, listed, measure, title
from fedgrad.show.markup import Content, Html, element, join
from fedgrad.show.numbers import duration, memory, number, plural, short

NEGLIGIBLE = 0.01  # relative differences below this are neither better nor worse


def top(run: Run) -> list[Content]:
    """Return the heading, a summary, and tiles with the most important numbers."""
    said = [words for words in (verdict(run), won(run), stopped(run)) if words]
    return [
        element("p", _over(run), class_="over"),
        element("h1", heading(run)),
        _progress(run) if run.running else None,
        [element("p", words, class_="lead") for words in said],
        element("div", _tiles(run), class_="tiles"),
    ]


def heading(run: Run) -> str:
    """Return the heading, such as `FedAvgM that learns server.learning_rate on synthetic`."""
    name, on = _algorithm(run), f" on {run.asked['task']}" if run.asked.get("task") else ""
    if run.trials:
        return f"{plural(len(run.entries), 'trial')} of {name or 'federated training'}{on}"
    if run.compared and not run.tuned:
        return f"{listed(run.entries)}, compared"
    if not run.learned:
        return f"{name or 'Federated training'}{on}"
    return f"{name or 'Federated training'} that learns {listed(run.learned)}{on}"


def verdict(run: Run) -> str:
    """Return a sentence that compares the learned with the fixed run by the final value of the
    first metric; for several runs, one that names the best."""
    if not run.compared or not run.measured:
        return ""
    key = run.measured[0]
    last, values = run.ends(key)
    if len(values) < 2:
        return ""
    if not run.tuned:
        return _first_of(key, last, values)
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


def stopped(run: Run) -> str:
    """Return a sentence with the reason if training ended early."""
    status = run.status
    if status is None or not status.stopped:
        return ""
    # A result does not know how many rounds were requested.
    asked = f" of {status.rounds:,}" if status.rounds > run.rounds else ""
    return f"It ended after round {run.rounds:,}{asked}: {status.stopped}."


def best_first(key: str, values: dict[str, float]) -> list[str]:
    """Sort names from best to worst value; diverged ones come last."""
    sign = -1 if direction(key) > 0 else 1
    return sorted(values, key=lambda n: sign * values[n] if math.isfinite(values[n]) else math.inf)


def _first_of(key: str, last: int, values: dict[str, float]) -> str:
    if not direction(key):
        return ""
    first, second, *_ = best_first(key, values)
    words = change(key, values[first], values[second])
    start = f"After {last:,} rounds {first} has the {'highest' if direction(key) > 0 else 'lowest'}"
    start += f" {title(key).lower()}, {measure(key)(values[first])}"
    return f"{start}, {words} than {second}." if words and words != "the same" else f"{start}."


def _algorithm(run: Run) -> str:
    """Return the name of the algorithm, if known."""
    kept = run.config.get("algorithm")
    given = kept.get("name", "") if isinstance(kept, dict) else ""
    return algorithm(str(run.asked.get("algorithm") or given))


def _over(run: Run) -> str:
    status, seconds = run.status, run.entries[run.main].seconds
    parts = [date(status.began) if status else ""]
    rounds = plural(run.rounds, "training round") if run.rounds else ""
    alone = run.tuned or not run.compared
    parts.append(f"{rounds} in {duration(seconds)}" if seconds and alone else rounds)
    if "cohort_size" in run.config:
        of = "each" if rounds else "each round"  # the word "round" has not been used yet
        parts.append(f"{run.config['cohort_size']} clients in {of}")
    if status:
        parts.append(plural(status.parameters, "parameter"))
    if "seed" in run.asked:
        parts.append(f"seed {run.asked['seed']}")
    return " · ".join(filter(None, parts))


def _progress(run: Run) -> Html:
    """Return the progress of a running run; the page's script adds how old it is."""
    assert run.status is not None
    words = f"Running: round {run.rounds:,} of {run.status.rounds:,}"
    if not run.rounds:
        words = "Running: the first round is being compiled"
    return element(
        "div",
        element("p", words, " ", element("small", class_="age")),
        element("progress", value=run.rounds, max=max(run.status.rounds, 1)),
        class_="running",
        data_written=run.status.written,
    )


def _tiles(run: Run) -> list[Html]:
    tiles = [_measured(run, key) for key in run.measured[:2]]
    if not run.compared or run.tuned:
        tiles += [*_worst(run), *_learned(run)]
    total = run.sent(run.main)
    if total is not None:
        fixed = run.sent(FIXED) if run.main == LEARNED else None
        aside = f"{total / fixed:.2g} times fixed ({memory(fixed)})" if fixed else "down and up"
        tiles.append(_tile("Sent in all", memory(total), aside))
    rejected = run.metrics().rejected
    if rejected and rejected.values.any():
        tiles.append(_tile("Steps rejected", number(rejected.values.sum()), "by the guard"))
    return tiles


def _learned(run: Run) -> list[Html]:
    found = run.metrics().hyper
    ends = {name: found[name].values[[0, -1]] for name in run.learned[:4]}
    return [
        _tile(name, number(last), f"learned, from {short(first)}")
        for name, (first, last) in ends.items()
    ]


def _worst(run: Run) -> list[Html]:
    """Return a tile with the worst tenth of clients, by the first metric evaluated per client."""
    curves = run.entries[run.main]
    for name in curves.spreads:
        metric = name.rpartition(".")[2]
        tenth = tenth_of(curves, name, direction(metric) > 0) if direction(metric) else None
        if tenth is not None:
            words = measure(metric)
            mean = words(curves.series[f"{name}.mean"].values[-1])
            what = f"{metric.capitalize()}, worst tenth of clients"
            return [_tile(what, words(tenth.values[-1]), f"mean of all clients: {mean}")]
    return []


def _measured(run: Run, key: str) -> Html:
    words = measure(key)
    last, values = run.ends(key)
    if run.compared and not run.tuned and values:
        first = best_first(key, values)[0] if direction(key) else run.main
        return _tile(title(key), words(values[first]), first)
    if FIXED not in values or len(values) < 2:
        return _alone(run, key)
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


def _alone(run: Run, key: str) -> Html:
    """Return a tile with the last value and the first one."""
    name = next(name for name, series in run.curves.items() if key in series)
    series, words = run.curves[name][key], measure(key)
    start = f"from {words(series.values[0])} {_when(int(series.rounds[0]))}"
    aside = start if len(series.values) > 1 else _when(int(series.rounds[0]))
    return _tile(title(key), words(series.values[-1]), aside)


def _when(round: int) -> str:
    return f"in round {round:,}" if round else "before training"


def _better(key: str, ours: float, theirs: float) -> bool:
    return ours > theirs if direction(key) > 0 else ours < theirs


def _tile(what: str, value: str, aside: Content) -> Html:
    return element(
        "div",
        element("p", what, class_="what"),
        element("p", value, class_="value"),
        element("p", aside, class_="aside"),
        class_="tile",
    )
