"""Reports: what they say is what the folder holds, in one file, in a real browser."""

import base64
import hashlib
import json
import math
import re
import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from chromium import COMMAND, chromium
from fedgrad.reports import plans_section, run_source
from fedgrad.reports.chart_html import html as html_of
from fedgrad.reports.page import ReportError, picture
from fedgrad.reports.per_client_section import bins
from fedgrad.reports.runs import follow
from fedgrad.reports.top_section import verdict
from fedgrad.reports.words import ALGORITHMS as PROPER
from fedgrad.reports.words import algorithm, change
from fedgrad.reports.write import write_report, write_run_report
from fedgrad.show.axis import axis
from fedgrad.show.charts import Chart, Curve, Figure, alike
from fedgrad.show.markup import Html, element, join
from fedgrad.show.numbers import duration, memory, number, percent, short, tick
from fedgrad.training import live
from html_page import HOSTILE, Found

LIVE = '<html lang="en" data-live>'
# --- a run folder by hand -----------------------------------------------------------------

ROUNDS = 24
RATE = [0.5 + 0.01 * r for r in range(1, ROUNDS + 1)]
LOSS = {"learned": [2 / r + 0.1 for r in range(1, ROUNDS + 1)]}
LOSS["fixed"] = [2 / r + 0.3 for r in range(1, ROUNDS + 1)]


def plan_of(name):
    """Plans that differ: the learned round has a second cohort."""
    extra = {"other": fg.Placement("gradient")} if name == "learned" else {}

    @fg.program(cohort=fg.CLIENTS, **extra)
    def round(state, cohort, other=None):
        down = fg.mean(fg.broadcast(state) * cohort)
        if name == "fixed":
            return down
        at = fg.Placement("gradient")
        return down + fg.mean(jnp.sum(fg.broadcast(state, at=at) * other), at=at)

    floats = {"cohort": (5, 3), "other": (4, 3)}
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in floats.items()}
    shapes = {k: v for k, v in shapes.items() if k == "cohort" or name == "learned"}
    return fg.plan(round, jax.ShapeDtypeStruct((3,), jnp.float32), **shapes)


def write_run(folder, losses=LOSS, words="synthetic", name="server.learning_rate", with_plans=True):
    """What `fedgrad tune` leaves behind."""
    for kind, out in (("learned", folder), ("fixed", folder / "fixed")):
        if kind not in losses:
            continue
        out.mkdir(parents=True, exist_ok=True)
        lines = []
        for r, loss in enumerate(losses[kind], 1):
            row = {"round": r, "loss": loss, "seconds": 0.1}
            if kind == "learned":
                row |= {f"hyper.{name}": RATE[r - 1], f"hypergradient.{name}": -0.1 / r}
                row |= {"rejected": int(r == 3)}
            if r % 4 == 0:
                value = loss if isinstance(loss, str) else 2 * loss
                row |= {"eval.test.accuracy": 0.5 + r / 100, "eval.test.loss": value}
            lines.append(json.dumps(row) + "\n")
        (out / "history.jsonl").write_text("".join(lines))
    tune = {"task": words, "algorithm": words, "seed": 7, "learn": [words], "clip": None}
    tune["command"] = ["fedgrad", "tune", words]
    config = {"rounds": ROUNDS, "cohort_size": 5, "hyper": {name: 0.51}, "config": {"tune": tune}}
    config["versions"] = {"fedgrad": "1.2.3"}
    (folder / "config.json").write_text(json.dumps(config))
    if with_plans:
        plans_section.keep(folder, {kind: plan_of(kind) for kind in ("learned", "fixed")})
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


# --- parts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made, wanted",
    [
        (element("p", "a < b & c"), "<p>a &lt; b &amp; c</p>"),
        (element("p", Html("<b>x</b>")), "<p><b>x</b></p>"),
        (element("p", ["a", None, ["<"], 3]), "<p>a&lt;3</p>"),
        (element("p", class_='"x"', hidden=True, id=None), '<p class="&quot;x&quot;" hidden></p>'),
        (element("i", data_a="1 > 0", aria_b=False), '<i data-a="1 &gt; 0"></i>'),
        (element("br"), "<br>"),
        (element("path", d="M0"), '<path d="M0"/>'),
        (element("a", "<i>\"'&"), "<a>&lt;i&gt;\"'&amp;</a>"),
        (join("a", element("b", "&")), "a<b>&amp;</b>"),
    ],
)  # fmt: skip
def test_markup(made, wanted):
    assert made == wanted and isinstance(made, Html)


@pytest.mark.parametrize(
    "low, high",
    [
        (0, 1),
        (0.2, 0.73),
        (-3, 5),
        (1.23e-6, 1.31e-6),
        (0, 97.9e6),
        (-1e9, -0.99e9),
        (5, 5),
        (0, 0),
    ],
)
@pytest.mark.parametrize("most", [3, 5, 7])
def test_ticks_of_a_linear_axis(low, high, most):
    made = axis([low, high])
    ticks = made.ticks(most)
    assert made.low <= low <= high <= made.high and not made.logarithmic
    assert 1 <= len(ticks) <= most
    assert all(made.low - 1e-9 <= t <= made.high * (1 + 1e-9) + 1e-12 for t in ticks)
    if len(ticks) > 2:
        assert np.allclose(np.diff(ticks), np.diff(ticks)[0])
    assert len({made.label(t) for t in ticks}) == len(ticks)
    assert made.place(made.low) == 0 and made.place(made.high) == 1


@pytest.mark.parametrize("low, high", [(1e-3, 10), (0.5, 20), (1e-30, 1e30), (3, 3e5)])
def test_ticks_of_a_logarithmic_axis(low, high):
    made = axis([low, high])
    ticks = made.ticks()
    assert made.logarithmic and 2 <= len(ticks) <= 6
    assert all(made.low <= t <= made.high for t in ticks)
    middle = math.sqrt(made.low) * math.sqrt(made.high)
    assert math.isclose(made.place(middle), 0.5, rel_tol=1e-9)
    assert len({made.label(t) for t in ticks}) == len(ticks)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e4, 1e6, 1e8, 1e10, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_labels_of_an_axis_are_short(size, sign):
    """On a phone there is room for seven digits."""
    for low in (0.1 * size, 1e-5 * size):
        made = axis([sign * low, sign * size])
        assert max(len(made.label(t)) for t in made.ticks()) <= 8, made


@pytest.mark.parametrize(
    "made, wanted",
    [
        (number(0.83123), "0.8312"),
        (number(12.44), "12.44"),
        (number(3120), "3,120"),
        (number(1.2e-7), "1.20e-7"),
        (number(-2.5e12), "-2.50e12"),
        (number(math.nan), "not finite"),
        (number(None), "–"),
        (short(float(np.float32(0.9))), "0.9"),
        (short(100.0), "100"),
        (tick(0), "0"),
        (tick(1e6), "1e6"),
        (tick(-2.5e7), "-2.5e7"),
        (tick(20_000), "20,000"),
        (tick(0.30000000000000004), "0.3"),
        (tick(2.5e-05), "2.5e-5"),
        (percent(0.69051), "69.1 %"),
        (memory(2449), "2.4 kB"),
        (duration(0.003), "0.01 s"),
        (duration(0.04), "0.04 s"),
        (duration(0.44), "0.4 s"),
        (duration(75.6), "1 min 16 s"),
        (duration(3725), "1 h 2 min"),
        (algorithm("fed_avgm"), "FedAvgM"),
        (algorithm("mine"), "mine"),
        (change("eval.test.loss", 0.72, 1.0), "28 % lower"),
        (change("loss", 1.011, 1.0), "1.1 % higher"),
        (change("loss", 1.0001, 1.0), "the same"),
        (change("eval.test.accuracy", 0.75, 0.5), "25 points higher"),
        (change("loss", 1.0, math.nan), ""),
        (change("loss", 1.0, 0.0), ""),
    ],
)
def test_words(made, wanted):
    assert made == wanted


# --- charts -------------------------------------------------------------------------------


def read_back(figure):
    """The points of each curve, by what the ticks of the chart say."""
    found = Found(figure)
    scales = []
    for kind, side in (("tick-x", "left"), ("tick-y", "bottom")):
        ticks = found.all("span", kind)
        places = [float(re.search(rf"{side}:(-?[\d.]+)%", t[1]["style"])[1]) / 100 for t in ticks]
        values = [float(t[2].replace("%", "").replace(",", "")) for t in ticks]
        slope = (values[-1] - values[0]) / (places[-1] - places[0])
        scales.append((slope, values[0] - slope * places[0]))
    (across, left), (up, low) = scales
    curves = []
    for path in [p for p in found.all("path", "curve") if p[1]["d"].count("L") > 1]:
        points = [tuple(map(float, p.split())) for p in re.split("[ML]", path[1]["d"])[1:]]
        curves.append(
            [(left + across * x / 1000, low + up * (1 - y / 500)) for x, y in points]
        )  # the drawing is 1000 x 500
    return curves


def chart(*curves):
    return html_of(Chart("Loss", curves, "round"))


def test_a_chart_shows_the_values():
    x = list(range(1, 41))
    ours, theirs = ([a * math.sin(i / 5) + 2 for i in x] for a in (1, 1.5))
    figure = chart(Curve("ours", x, ours), Curve("theirs", x, theirs))
    drawn = read_back(figure)  # the first one is painted last, so that it lies on top
    for curve, values in zip(drawn, (theirs, ours), strict=True):
        np.testing.assert_allclose(curve, np.c_[x, values], atol=0.06)
    data = json.loads(Found(figure).all("div", "plot")[0][1]["data-chart"])
    assert [c["name"] for c in data["curves"]] == ["ours", "theirs"]
    assert data["curves"][0]["y"] == [number(v) for v in ours]
    assert data["curves"][0]["x"] == [str(i) for i in x]


def test_gaps_and_remarks():
    x, values = [1, 2, 3, 4, 5, 6], [1.0, 2.0, math.nan, math.inf, 1.0, 2.0]
    figure = chart(Curve("ours", x, values))
    drawn = [p[1]["d"] for p in Found(figure).all("path", "curve")]
    assert max(d.count("M") for d in drawn) == 2
    assert "ours is not finite from round 3 (2 times)." in figure
    assert "NaN" not in figure and "Infinity" not in figure


def test_a_curve_that_runs_away_is_cut_and_said():
    x, calm, wild = [1, 2, 3, 4], [2.0, 1.5, 1.2, 1.0], [2.0, 3.0, 500.0, 1e30]
    figure = chart(Curve("calm", x, calm), Curve("wild", x, wild))
    assert "wild leaves this chart at round 3, up to 1.00e30." in figure
    shown = dict(zip(("wild", "calm"), read_back(figure), strict=True))
    np.testing.assert_allclose(shown["calm"], np.c_[x, calm], atol=0.02)
    # The other way round, the wild one is what the chart is about.
    assert "leaves" not in chart(Curve("wild", x, wild), Curve("calm", x, calm))


def test_charts_of_nothing_and_of_what_is_only_behind():
    nan, x = [math.nan] * 3, [1, 2, 3]
    for curves in (
        (),
        (Curve("empty", [], []),),
        (Curve("nan", x, nan, band=(nan, nan)),),
        (Curve("thin", x, [1, 20, 2], look="thin"), Curve("thin", x, [2, 1, 1], look="thin")),
        (Curve("twice", x, [1, 2, 3]), Curve("twice", x, [3, 2, math.inf], look="dots")),
    ):
        made = Chart("Loss", curves, "round")
        for shown in (chart(*curves), Figure([[made, made], [made]]).svg()):
            assert "nan" not in "".join(re.findall(r' d="(.*?)"', shown)).lower()
    drawn = read_back(chart(Curve("thin", x, [1, 20, 2], look="thin")))
    np.testing.assert_allclose(drawn[0], np.c_[x, [1, 20, 2]], atol=0.3)


def test_a_chart_of_one_point_and_of_constants():
    for curve in (Curve("one", [1], [3.0]), Curve("flat", [1, 2], [0.0, 0.0])):
        paths = Found(chart(curve)).all("path", "curve")
        assert all(re.fullmatch(r"[MLHh0-9. -]+", p[1]["d"]) for p in paths)


def test_pictures_are_checked_and_their_ids_kept_apart():
    svg = """<?xml version="1.0"?><!DOCTYPE svg PUBLIC "x" "http://x/y">
        <svg xmlns="http://www.w3.org/2000/svg"><metadata>m</metadata><g id="a"/>
        <use href="#a" clip-path="url(#a)"/></svg>"""
    one, two = picture(svg, "one"), picture(svg, "two")
    assert one.startswith("<svg") and "metadata" not in one
    assert 'id="one-a"' in one and "url(#one-a)" in one and 'href="#one-a"' in one
    assert not set(re.findall('id="(.*?)"', one)) & set(re.findall('id="(.*?)"', two))
    for broken in ("<svg", "</svg><h1>x</h1>", "<html xmlns='http://www.w3.org/1999/xhtml'/>", ""):
        with pytest.raises(ReportError, match="not an SVG"):
            picture(broken, "x")


# --- the report of a run ------------------------------------------------------------------


def report_of(folder):
    path, found = write_run_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8"), found


def test_the_top_says_what_the_folder_holds(folder):
    text, found = report_of(folder)
    page = Found(text)
    tiles = dict(zip(
        (e[2] for e in page.all("p", "what")), (e[2] for e in page.all("p", "value")), strict=True
    ))  # fmt: skip
    assert tiles["Test loss"] == number(2 * LOSS["learned"][-1])
    assert tiles["Test accuracy"] == percent(0.5 + ROUNDS / 100)
    assert tiles["server.learning_rate"] == number(RATE[-1])
    assert tiles["Steps rejected"] == "1"
    ours, theirs = 2 * LOSS["learned"][-1], 2 * LOSS["fixed"][-1]
    assert f"{100 * (1 - ours / theirs):.0f} % lower than the {number(theirs)}" in verdict(found)
    assert "synthetic that learns server.learning_rate on synthetic" in text
    spans = [(e[1]["class"], e[2]) for e in page.all("span") if e[2].endswith((" lower", "same"))]
    assert spans[0] == ("better", f"{100 * (1 - ours / theirs):.0f} % lower")
    assert spans[1] == ("even", "the same")
    swapped = {"learned": LOSS["fixed"], "fixed": LOSS["learned"]}
    text, _ = report_of(write_run(folder, swapped))
    words = f"{100 * (theirs / ours - 1):.0f} % higher"
    assert [e[1]["class"] for e in Found(text).all("span") if e[2] == words] == ["worse"]
    assert "fedgrad tune synthetic --rounds 24" in text
    assert [e[2] for e in page.all("h2")] == [
        "Training", "Hyperparameters", "Traffic", "The round as a graph", "Configuration",
    ]  # fmt: skip


def test_traffic_is_the_plans(folder):
    text, found = report_of(folder)
    learned, fixed = plan_of("learned"), plan_of("fixed")
    # By hand: each of 5 clients gets 3 floats and adds 3 and a count; each of 4 others gets 3
    # floats and adds 1 and a count.
    per_round = {"fixed": 5 * (12 + 16), "learned": 5 * (12 + 16) + 4 * (12 + 8)}
    for name, plan in (("learned", learned), ("fixed", fixed)):
        by_plan = sum(plan.clients[t.placement] * (t.down_bytes + t.up_bytes) for t in plan.traffic)
        assert per_round[name] == by_plan == found.sent(name, 1)
        assert memory(by_plan * ROUNDS) in text
        words = plans_section.HEADINGS[name]
        assert picture(replace(plan, name=words).draw(), f"{name}-graph") in text
    assert f"{per_round['learned'] / per_round['fixed']:.2g} times fixed" in text


def test_one_file_and_nothing_from_elsewhere(folder):
    text, _ = report_of(folder)
    page = Found(text)
    for name, attributes, _ in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href", "xlink:href", "action", "srcset", "poster"):
                assert value.startswith("#"), (name, key, value)
    assert not {"link", "iframe", "object", "embed", "img", "base"} & {e[0] for e in page.elements}
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text) and "@import" not in text
    policy = next(e[1]["content"] for e in page.all("meta") if "http-equiv" in e[1])
    scripts = [e for e in page.all("script")]
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0][2].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"'sha256-{digest}'" in policy


def test_what_the_user_wrote_is_escaped(tmp_path):
    plain, _ = report_of(write_run(tmp_path / "plain"))
    hostile, _ = report_of(
        write_run(tmp_path / HOSTILE.replace("/", ""), words=HOSTILE, name=HOSTILE)
    )
    same = [[e[0] for e in Found(text).elements] for text in (plain, hostile)]
    assert same[0] == same[1]
    assert HOSTILE not in hostile and "&lt;script&gt;window.hacked" in hostile


def test_a_run_without_a_comparison(tmp_path):
    folder = write_run(tmp_path / "run", {"learned": LOSS["learned"]}, with_plans=False)
    text, found = report_of(folder)
    assert not found.compared and verdict(found) == ""
    assert "The round as a graph" not in text and "bytes sent" not in text
    first = number(2 * LOSS["learned"][3])
    assert [e[2] for e in Found(text).all("p", "aside")][:1] == [f"from {first} in round 4"]
    assert "Test loss, learned" not in text  # there is no other one


def test_a_run_that_learns_nothing(tmp_path):
    folder = write_run(tmp_path / "run")
    text, found = report_of(folder / "fixed")
    assert found.learned == () and found.main == "fixed"
    assert "Hyperparameters" not in [e[2] for e in Found(text).all("h2")]
    assert "Federated training" in text
    assert "curve stroke-p0" in text and "curve stroke-p2" not in text  # the color of one run
    assert "Written on " in text  # a run that nobody has dated


def test_many_hyperparameters_are_a_table(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "config.json"
    hyper = {f"Candidate {i}, slow.rate": i / 10 for i in range(9)}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hyper": hyper}))
    text, _ = report_of(folder)
    assert "Candidate 3, slow.rate" in [e[2] for e in Found(text).all("th")]
    assert "slow.rate = 0.3" not in text[: text.index("<details><summary>config.json")]


def test_runs_of_different_length_are_compared_where_both_are(tmp_path):
    losses = {"learned": LOSS["learned"], "fixed": LOSS["fixed"][:10]}
    text, found = report_of(write_run(tmp_path / "run", losses))
    assert found.ends("eval.test.loss")[0] == 8
    assert f"{number(2 * LOSS['learned'][7])} after 8 rounds" in verdict(found)
    assert "Test loss, round 8" in text


def write_race(folder, rounds, winner=None):
    """Seven candidates to round 4, of which three are left, and one after round 12."""
    folder.mkdir(exist_ok=True)
    lines = []
    for r in range(1, rounds + 1):
        live = "abcdefg" if r <= 4 else "bcd" if r <= 12 else ""
        row = {"round": r, "loss": 1 / r} | ({} if live else {f"race.won.{winner}": 1.0})
        for i, n in enumerate(live):
            # The first half of a stage does not count.
            row[f"race.rank.{n}"] = i + (10 if r in (1, 2) else 0)
            row[f"race.loss.{n}"] = "nan" if n == "g" and r > 2 else (i + 1) / r
        lines.append(json.dumps(row) + "\n")
    (folder / "history.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"rounds": rounds}))
    return folder


@pytest.mark.parametrize(
    "rounds, then",
    [
        (20, ["goes on alone", "dropped: those that stayed had 1.00"]),
        (9, ["leads", "is still in it"]),
    ],
    ids=["over", "going on"],
)
def test_a_race_shows_who_was_dropped_and_why(tmp_path, rounds, then):
    """The winner is not who had the best rank: it was there first, and chance may explain it."""
    text, _ = report_of(write_race(tmp_path, rounds, "c"))
    page = Found(text)
    assert "Race" in [e[2] for e in page.all("h2")]
    lead = ["c won the race of 7 and goes on alone since round 12."] if rounds == 20 else []
    assert [e[2] for e in page.all("p", "lead")] == lead
    section = text[text.index('id="race"') :]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", section[: section.index("</section>")], re.S)[1:]
    cells = [[re.sub("<[^>]*>", "", c) for c in re.findall(r"<t[hd].*?</t[hd]>", r)] for r in rows]
    found = {name: (until, rank, words) for name, until, _, rank, words in cells}
    last = str(min(rounds, 12))
    first, *others = ("c", "b", "d") if rounds == 20 else ("b", "c", "d")
    assert [*found] == [first, *others, "a", "e", "f", "g"]
    ranks = {"b": "0.00", "c": "1.00", "d": "2.00"}
    assert found[first] == (last, ranks[first], then[0])
    assert all(found[n] == (last, ranks[n], then[1]) for n in others)
    # What those had that stayed is of the stage in which the others were dropped.
    assert found["a"] == ("4", "0.00", "dropped: those that stayed had 1.00 to 3.00")
    assert found["g"] == ("4", "6.00", "dropped: diverged")


def test_a_winner_that_went_back_says_when(tmp_path):
    folder = write_race(tmp_path, 20, "c")
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for row in rows[12:]:
        row["race.pace.c"] = 1.0 if row["round"] < 15 else 0.5 if row["round"] < 18 else 0.25
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, _ = report_of(folder)
    words = "Its loss rose, so in rounds 15 and 18 it went back, to go on with half the rate."
    (lead,) = [e[2] for e in Found(text).all("p", "lead")]
    assert lead == f"c won the race of 7 and goes on alone since round 12. {words}"
    assert f"goes on alone. {words}" in text


def test_whose_race_it_is_where_runs_are_compared(tmp_path):
    runs = {"auto": write_race(tmp_path / "a", 20, "c"), "plain": write_run(tmp_path / "b")}
    text = fg.compare(runs, tmp_path / "compare.html").read_text()
    assert "Of auto. Candidates are trained" in text and "won the race" not in text


def test_a_race_that_begins_later_has_its_own_half(tmp_path):
    lines = []
    for r in range(1, 14):
        row = {"round": r, "loss": 1.0} | ({"race.won.x": 1.0} if r > 6 else {"race.rank.x": 0.0})
        row |= {"race.loss.x": 1.0} if r <= 6 else {}
        if 6 < r <= 12:  # of six rounds the last three count
            row |= {"race.rank.x.s": 0.0 if r > 9 else 1.0, "race.loss.x.s": 1.0}
        lines.append(json.dumps(row) + "\n")
    (tmp_path / "history.jsonl").write_text("".join(lines))
    (tmp_path / "config.json").write_text(json.dumps({"rounds": 13}))
    text, _ = report_of(tmp_path)
    assert ">0.00<" in text[text.index("Inside of x") :] and "had the best rank" in text


def test_a_race_in_a_race_is_shown_apart(tmp_path):
    rows = [
        {f"race.{kind}.{n}": float(i) for kind in ("rank", "loss") for i, n in enumerate(names)}
        for names in (("x", "y", "x.s", "x.t"), ("x", "y"))
    ]
    rows[1]["race.won.x.s"] = 1.0
    lines = [json.dumps({"round": r, "loss": 1.0} | row) + "\n" for r, row in enumerate(rows, 1)]
    (tmp_path / "history.jsonl").write_text("".join(lines))
    (tmp_path / "config.json").write_text(json.dumps({"rounds": 2}))
    text, _ = report_of(tmp_path)
    assert "Inside of x" in [e[2] for e in Found(text).all("h3")]
    assert text.count("goes on alone") == 1 and text.count("leads") == 1


def test_a_run_that_diverges(tmp_path):
    losses = {"learned": LOSS["learned"], "fixed": [3.0, 9e9] + ["NaN"] * (ROUNDS - 2)}
    text, found = report_of(write_run(tmp_path / "run", losses))
    assert verdict(found).endswith("has diverged.")
    assert "fixed: not finite" in text and "is not finite from round" in text


def test_a_line_that_is_being_written_is_left_out(folder):
    with open(folder / "history.jsonl", "a") as file:
        file.write('{"round": 25, "lo')
    assert report_of(folder)[1].rounds == ROUNDS


def test_trials_side_by_side_are_called_by_what_they_differ_in(folder):
    rows = [{"round": r, "loss": [2.0 / r, 1.0 / r], "hyper.rate": [0.1, "NaN"]} for r in (1, 2, 3)]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hyper = {"rate": [0.1, 0.3], "momentum": [0.9, 0.9], "other": 1.0}
    (folder / "config.json").write_text(json.dumps({"rounds": 3, "hyper": hyper}))
    text, found = report_of(folder)
    assert found.trials and list(found.entries) == ["rate 0.1", "rate 0.3"]
    assert tuple(found.curves["rate 0.1"]["loss"].values) == (2.0, 1.0, 2 / 3)
    assert found.learned == ("rate",)
    assert "After 3 rounds rate 0.3 has the lowest training loss, 0.3333" in text
    words = " ".join(e[2] for e in Found(text).elements if e[0] != "script")
    assert "[0]" not in words and "[1]" not in words
    # Where nothing tells them apart, they are counted.
    (folder / "config.json").write_text(json.dumps({"rounds": 3}))
    assert list(run_source.read(folder).entries) == ["trial 1", "trial 2"]


def test_a_vector_that_is_not_of_trials_is_shown_entry_by_entry(folder):
    rows = [{"round": r, "loss": 1.0 / r, "eval.w": [1.0 * r, 2.0]} for r in (1, 2, 3)]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, found = report_of(folder)
    assert found.measured == ("eval.w, entry 1", "eval.w, entry 2", "loss")
    assert "W, entry 2" in text


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / "history.jsonl").unlink(), "no history.jsonl"),
        (lambda f: (f / "history.jsonl").write_text("x\n"), "not the history of a run"),
        (lambda f: (f / "history.jsonl").write_text(""), "no rounds yet"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[1]"), "not an object"),
        (lambda f: (f / "plans.json").write_text('{"learned": {}}'), "plans.json cannot be read"),
        (lambda f: (f / "fixed-round.svg").unlink(), "plans.json cannot be read"),
        (lambda f: (f / "fixed-round.svg").write_text("<p>"), "not an SVG"),
    ],
)
def test_a_folder_that_cannot_be_read(folder, spoil, message):
    spoil(folder)
    with pytest.raises(ReportError, match=message):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ReportError, match="no folder"):
        write_report(tmp_path / "nothing")


def test_every_algorithm_has_its_proper_name():
    from fedgrad.algorithms.variants import ALGORITHMS

    assert set(ALGORITHMS) <= set(PROPER)
    assert PROPER["fedavgm"] == "FedAvgM" and PROPER["feddog"] == "DoG"


def test_algorithms_are_called_by_their_proper_names(tmp_path):
    text, _ = report_of(write_run(tmp_path / "run", words="fedavgm"))
    assert "FedAvgM that learns server.learning_rate on fedavgm" in text
    assert "<dt>algorithm</dt><dd>FedAvgM</dd>" in text


def test_no_round_is_twice_in_the_table(tmp_path):
    for rounds in range(1, 20):
        losses = {"learned": LOSS["learned"][:rounds]}
        text, _ = report_of(write_run(tmp_path / str(rounds), losses, with_plans=False))
        head = [e[2] for e in Found(text).all("th", "right")]
        assert len(head) == len(set(head)) <= 6


def test_a_training_round_is_drawn_in_words(tmp_path):
    """Of the library's own functions and states, not of their names in the code."""
    clients = fg.population([{"x": np.ones((2, 3)), "y": np.ones(2)}] * 3)
    tuned = fg.self_tuning(fg.fed_avgm(square), "server")
    state = tuned.init({"w": jnp.zeros(3)})
    key = jax.random.key(0)
    shapes = (state, tuned.hyper, clients.everyone, key)
    plan = fg.plan(tuned.round, *shapes, gradient_cohort=clients.everyone)
    plans_section.keep(tmp_path, {"learned": plan})
    svg = (tmp_path / "learned-round.svg").read_text()
    words = re.findall(">([^<>]+)</text>", svg)
    assert "a training round that learns" in words
    assert any(word.startswith("state · ") for word in words)
    assert not [w for w in words if re.search(r"result\[|follow|apply|self_tuning|^own$", w)]


# --- from Python --------------------------------------------------------------------------


def square(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def people(seed=0):
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(n, 3)), "y": random.normal(size=n)} for n in range(2, 22)]


CLIENTS = fg.population(people())
PLAIN = fg.fed_avg(square, 0.05)
TUNED = fg.self_tuning(PLAIN, "server")


def trained(algorithm=PLAIN, rounds=5, seed=0, **more):
    more.setdefault("evaluate", {"test": fg.Evaluation({"loss": square}, CLIENTS, every=2)})
    first = {"w": jnp.zeros(3)}
    key = jax.random.key(seed)
    return fg.fit(
        algorithm, CLIENTS, params=first, rounds=rounds, cohort_size=4, key=key, progress=False,
        **more,
    )  # fmt: skip


def test_the_report_of_a_result(tmp_path):
    result = trained(TUNED, callbacks=[fg.Stop("loss", lambda v: len(v) == 3 and "enough <b>")])
    path = fg.report(result, tmp_path / "new" / "here.html")  # in a folder that is made
    assert path == tmp_path / "new" / "here.html"
    text = path.read_text()
    page = Found(text)
    assert [e[2] for e in page.all("h1")] == ["FedAvg that learns server.learning_rate"]
    over = page.all("p", "over")[0][2]
    assert "3 training rounds in " in over and "3 parameters" in over
    assert "It ended after round 3: enough &lt;b&gt;." in text
    losses = result.history["eval.test.loss"]
    assert f"from {number(losses[0])} before training" in text  # round 0
    head = [e[2] for e in page.all("th", "right")]
    assert head[: len(losses)] == ["0", "2", "3"] and LIVE not in text
    folder = tmp_path / "run"
    trained(out=folder, rounds=3)
    assert fg.report(folder) == folder / "report.html"
    assert "3 training rounds" in fg.report(str(folder), tmp_path / "it.html").read_text()


def test_evaluations_are_marked(tmp_path):
    text = fg.report(trained(), tmp_path / "report.html").read_text()
    marks = [e[1]["d"] for e in Found(text).all("path", "curve") if e[1]["stroke-width"] == "6"]
    assert [d.count("h0") for d in marks] == [4]  # of rounds 0, 2, 4 and 5


def test_how_the_model_is_for_each_client(tmp_path):
    checked = fg.Evaluation({"loss": square}, CLIENTS, every=2, per_client=True)
    result = trained(evaluate={"test": checked})
    text = fg.report(result, tmp_path / "report.html").read_text()
    page = Found(text)
    assert "Clients" in [e[2] for e in page.all("h2")]
    charts = [json.loads(e[1]["data-chart"]) for e in page.all("div", "plot")]
    (bars,) = [chart for chart in charts if chart["x"] == "test loss"]
    assert [c["name"] for c in bars["curves"]] == ["after round 5", "before training"]
    for curve in bars["curves"]:
        shares = [float(y.removesuffix(" %")) for y in curve["y"]]
        assert sum(shares) == pytest.approx(100, abs=0.5)
    # Twenty clients: the worst tenth are two.
    worst = np.sort(checked.each_client(result.params)["loss"])[-2:].mean()
    tiles = dict(zip(
        (e[2] for e in page.all("p", "what")), (e[2] for e in page.all("p", "value")), strict=True
    ))  # fmt: skip
    assert tiles["Loss, worst tenth of clients"] == number(worst)
    # It is not one of the metrics of the model.
    assert not any("per client" in e[2].lower() for e in page.all("figcaption"))


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([0.0, 1.0], (0, 1)),
        ([0.31, 0.74], (0.3, 0.75)),
        ([5.0, 5.0], (4.75, 5.25)),
        ([-3.0, math.nan, 17.0, math.inf], (-4, 18)),
    ],
)
def test_bins_are_round_and_hold_everything(values, wanted):
    edges = bins([np.asarray(values)])
    assert (edges[0], edges[-1]) == pytest.approx(wanted)
    assert len(edges) <= 18 and np.allclose(np.diff(edges), np.diff(edges)[0])


def test_runs_are_compared_by_name(tmp_path):
    several = [trained(TUNED, seed=seed) for seed in range(3)]
    one = trained(PLAIN, rounds=4, out=tmp_path / "one")
    runs = {HOSTILE: several, "plain": tmp_path / "one"}
    path = fg.compare(runs, tmp_path / "compare.html")
    text = path.read_text()
    page = Found(text)
    assert HOSTILE not in text and text.count("&lt;script&gt;window.hacked") > 2
    # Means over seeds, with a band from the lowest to the highest.
    last = [r.history["eval.test.loss"][-1] for r in several]
    ends = (number(v) for v in (np.mean(last), min(last), max(last)))
    assert "{} ({} to {})".format(*ends) in text
    assert number(one.history["eval.test.loss"][-1]) in text
    bands = [e for e in page.all("path", "fill-p0") if e[1].get("opacity") == "0.18"]
    assert len(bands) == 3 and "means over seeds" in text  # losses, and the learning rate
    assert "Both runs start from the same model" not in text
    assert "What differs" not in text or "In common" in text


def test_trials_and_what_differs_are_compared(tmp_path):
    rates = {"server.learning_rate": jnp.asarray([0.5, 1.0])}
    trials = fg.side_by_side(PLAIN, fg.hyper.replace(PLAIN.hyper, rates))
    other = PLAIN.starting({"client.learning_rate": 0.01})
    runs = {"trials": trained(trials), "slow": trained(other)}
    text = fg.compare(runs, tmp_path / "compare.html").read_text()
    assert "trials, server.learning_rate 0.5" in text and "trials, server.learning_rate 1" in text
    section = text[text.index('id="what-differs"') :]
    section = section[: section.index("In common")]
    assert "client.learning_rate" in section and "0.01" in section and "0.05" in section
    assert "algorithm.name" not in text
    assert "3 parameters" not in section


def an_experiment():
    folder = Path(tempfile.mkdtemp())
    (folder / "results.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda: fg.report(3), "takes what fg.fit gave, or the folder of a run, got int"),
        (lambda: fg.report("nowhere"), "no folder nowhere"),
        (lambda: fg.report(an_experiment()), "fedgrad report .* writes its report"),
        (lambda: fg.report([1, 2]), "got list. Several runs are compared: fg.compare"),
        (lambda: fg.compare([1, 2]), "takes runs by name"),
        (lambda: fg.compare({}), "takes runs by name"),
        (lambda: fg.compare({"a": 3}), "'a' is int"),
        (lambda: fg.run_folder("x", open=True, report=False), "report=False leaves out"),
    ],
)
def test_what_cannot_be_reported(ask, message):
    with pytest.raises(fg.FederatedError, match=message):
        ask()


# --- while it goes on ---------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """A report after every round."""
    monkeypatch.setattr(live, "SECONDS", 0.0)
    monkeypatch.setattr(live, "SHARE", 0)


def test_a_run_leaves_its_report_from_its_first_rounds_on(tmp_path, at_once):
    seen = []

    def watch(round, state, metrics):
        text = (tmp_path / "report.html").read_text()
        seen.append(re.search("Running: [^<]*", text)[0].strip())
        assert LIVE in text and (tmp_path / "status.json").exists()
        assert ("4 clients in each round" in text) == (len(seen) == 1)

    result = trained(rounds=4, out=tmp_path, callbacks=[watch])
    # What a callback sees is the report of the rounds before.
    assert seen[0] == "Running: the first round is being compiled"
    assert seen[1:] == [f"Running: round {r} of 4" for r in (1, 2, 3)]
    text = (tmp_path / "report.html").read_text()
    assert "Running:" not in text and LIVE not in text
    assert number(result.history["eval.test.loss"][-1]) in text
    assert not list(tmp_path.glob("*.tmp"))


def test_reports_take_a_small_part_of_the_time(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(live, "_reports", [lambda seen: written.append(len(seen.history))])
    trained(rounds=40, out=tmp_path)
    assert len(written) == 3  # at the beginning, after the first round, and at the end


def test_what_ended_a_run_is_told_and_its_beginning_is_kept(tmp_path):
    def fail(round, state, metrics):
        if round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(out=tmp_path, callbacks=[fail])
    text = (tmp_path / "report.html").read_text()
    assert "It ended after round 3 of 5: interrupted." in text and LIVE not in text
    path = tmp_path / "status.json"
    status = json.loads(path.read_text())
    path.write_text(json.dumps(status | {"began": "2020-02-03T04:05:06+00:00"}))
    trained(out=tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "3 February 2020, 04:05" in text and "It ended" not in text


def test_a_report_that_fails_does_not_end_training(tmp_path, monkeypatch):
    def fail(seen):
        raise ZeroDivisionError

    monkeypatch.setattr(live, "_reports", [fail])
    with pytest.warns(RuntimeWarning, match="training goes on: ZeroDivisionError"):
        assert trained(out=tmp_path).rounds == 5


def test_the_browser_is_opened_once(tmp_path, monkeypatch, at_once):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    trained(out=fg.run_folder(tmp_path / "a", open=True))
    assert opened == [(tmp_path / "a" / "report.html").as_uri()]
    trained(out=fg.run_folder(tmp_path / "b", report=False))
    assert not (tmp_path / "b" / "report.html").exists()
    fg.report(tmp_path / "b", open=True)
    assert opened[1:] == [(tmp_path / "b" / "report.html").as_uri()]


def test_the_page_of_a_comparison_follows_its_second_run(tmp_path, at_once):
    trained(TUNED, out=tmp_path)
    seen = []

    def watch(round, state, metrics):
        seen.append((tmp_path / "report.html").read_text())

    trained(PLAIN, out=tmp_path / "fixed", callbacks=[watch])
    assert LIVE in seen[-1] and "Test loss, fixed" in seen[-1]
    text = (tmp_path / "report.html").read_text()
    assert LIVE not in text and "Test loss, fixed" in text


# --- in a browser -------------------------------------------------------------------------

in_browser = pytest.mark.skipif(COMMAND is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_in_a_browser(folder, browser, dark, width):
    path, _ = write_run_report(folder)
    page = browser.open(path, dark, width)
    assert page.problems == [] and page.requests == [path.resolve().as_uri()]
    # Every chart that is to be seen has a curve of some size.
    boxes = page.run(
        "[...document.querySelectorAll('.plot')].filter(p => p.checkVisibility())"
        ".map(p => [p.clientWidth, p.clientHeight, p.querySelectorAll('svg .curve').length])"
    )
    assert len(boxes) == 4  # test loss, test accuracy, training loss, learning rate
    assert all(w > 200 and h > 150 and n >= 1 for w, h, n in boxes)
    assert page.run("document.documentElement.scrollWidth") <= width
    paper, ink, curve = page.run(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('.plot .stroke-p0')).stroke]"
    )
    assert (sum(_rgb(paper)) < sum(_rgb(ink))) == dark
    assert _rgb(curve) == ((127, 176, 240) if dark else (43, 90, 155))
    # Words are readable: no label of an axis is smaller than 11 pixels.
    sizes = page.run(
        "[...document.querySelectorAll('.tick-x, .tick-y')].map(e => "
        "parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 11


@in_browser
@pytest.mark.parametrize("size", [1e-9, 1e10, -1e10])
def test_a_huge_or_tiny_loss_on_a_phone(size, tmp_path, browser):
    """No label of an axis is cut at the edge."""
    losses = {"learned": [size * 0.5**r for r in range(ROUNDS)]}
    path, _ = write_run_report(write_run(tmp_path, losses, with_plans=False))
    page = browser.open(path, False, 390)
    lefts = page.run(
        "[...document.querySelectorAll('.tick-y')].filter(e => e.checkVisibility())"
        ".map(e => e.getBoundingClientRect().left)"
    )
    assert len(lefts) > 8 and min(lefts) >= 4


@in_browser
def test_how_runs_tune_themselves_is_compared_in_words(tmp_path, browser):
    """A long optimizer has several lines, so that what differs is seen without scrolling."""
    asked = {"adam": {}, "sgd": {"optimizer": optax.sgd(0.1), "guard": None}}
    for name, more in asked.items():
        trained(fg.self_tuning(PLAIN, "server", **more), rounds=2, out=tmp_path / name)
    path = fg.compare({name: tmp_path / name for name in asked}, tmp_path / "compare.html")
    text = path.read_text()
    section = text[text.index('id="what-differs"') : text.index("In common")]
    for words in ("guard of self-tuning", "optimizer of self-tuning", "scale(step_size=-0.1)"):
        assert words in section
    assert "batch size of clients" in text and "algorithm.client" not in text
    script = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#what-differs .scroll'))"
    assert browser.open(path).run(script) == 0


@in_browser
def test_a_page_follows_the_run(tmp_path, browser, at_once):
    """From the file itself: it is loaded again as long as the run goes on, then no more."""
    folder = tmp_path / "run"
    result = trained(out=folder, rounds=2)
    status = live.Status("2026-11-17T18:00:00+00:00", 9, 3, written="2026-11-17T18:00:05+00:00")
    going = live.Seen(folder, result.history, {}, status)
    said = "document.querySelector('.running')?.innerText"
    follow(replace(going, history=fg.History()))
    page = browser.open(folder / "report.html", width=390)
    assert "compiled" in page.run(said) and "ended" not in page.run(said)  # it may take minutes
    follow(going)
    page = browser.open(folder / "report.html", width=390)
    assert "round 2 of 9" in page.run(said) and "may have been ended" in page.run(said)
    page.run("window.scrollTo(0, 300)")
    more = fg.History({"loss": (range(1, 6), [5.0, 4.0, 3.0, 2.0, 1.0])})
    follow(live.Seen(folder, more, {}, status))
    page.until(f"({said} ?? '').includes('round 5 of 9')")
    page.until("window.scrollY > 0")
    follow(live.Seen(folder, more, {}, replace(status, running=False)))
    page.until(f"{said} === undefined")
    assert page.problems == [] and set(page.requests) == {(folder / "report.html").as_uri()}


AROUND = {
    "Jupyter": 'data-jp-theme-light="{}"',
    "VS Code": 'class="vscode-{}"',
    "Colab": 'theme="{}"',
    "the site": 'data-md-color-scheme="{}"',
    "not trusted": 'style="color-scheme:{}"',  # Jupyter says so, and takes our styles away
}
SAID = {"Jupyter": ("true", "false"), "the site": ("default", "slate")}


@fg.program(z=fg.CLIENTS)
def distance(x, z):
    return fg.mean((fg.broadcast(x) - z) ** 2)


@in_browser
@pytest.mark.parametrize("what", ["result", "plan", "explanation", "figure"])
@pytest.mark.parametrize("where", ["nowhere", *AROUND])
def test_pictures_have_the_colors_of_the_notebook_around_them(where, what, tmp_path, browser):
    """Whatever those of the system are, which count where nothing is said."""
    made = {
        "result": lambda: trained(PLAIN),
        "plan": lambda: fg.plan(distance, 1.0, jnp.ones(2)),
        "explanation": lambda: fg.explain(distance, 1.0, jnp.ones(2)),
        "figure": lambda: Figure([[Chart("loss", [Curve("", [0, 1], [1, 0])], "round")]]),
    }
    picture = made[what]()._repr_html_()
    if where == "not trusted":
        picture = re.sub("<style>.*?</style>", "", picture, flags=re.DOTALL)
    colors = {False: (255, 255, 255), True: (15, 20, 26)}
    for system, notebook in ((False, True), (True, False)):
        said = SAID.get(where, ("light", "dark"))[notebook]
        path = tmp_path / "page.html"
        path.write_text(f"<body {AROUND.get(where, '').format(said)}>{picture}")
        page = browser.open(path, dark=system)
        page.until("[...document.images].length && [...document.images].every(i => i.complete)")
        box = page.run("(b => [b.x, b.y])(document.images[0].getBoundingClientRect())")
        paper = page.color(box[0] + 4, box[1] + 4)
        assert paper == colors[system if where == "nowhere" else notebook]


@in_browser
def test_an_odd_number_of_charts_leaves_no_hole(folder, browser):
    page = browser.open(write_run_report(folder)[0])
    boxes = page.run(
        "[...document.querySelectorAll('#training .chart')].filter(p => p.checkVisibility())"
        ".map(p => p.getBoundingClientRect()).map(b => [b.top, b.width])"
    )
    assert len(boxes) == 3 and boxes[0][0] == boxes[1][0] < boxes[2][0]
    assert boxes[2][1] == pytest.approx(boxes[0][1] + boxes[1][1] + 36, abs=2)


@in_browser
@pytest.mark.parametrize("width", [390, 1200])
def test_what_is_wider_than_the_page_says_so(folder, browser, width):
    page = browser.open(write_run_report(folder)[0], width=width)
    found = page.run(
        "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth > b.clientWidth + 4,"
        " b.classList.contains('after') || b.classList.contains('before'),"
        " b.previousElementSibling.checkVisibility(), b.scrollLeft])"
    )
    assert all(wide == faded == said for wide, faded, said, _ in found)
    assert any(wide for wide, *_ in found) == (width == 390)
    if width == 390:
        # A graph begins where the messages are, not with empty lanes.
        assert found[-1][3] > 50 and found[0][3] == 0


@in_browser
def test_values_under_the_pointer(folder, browser):
    page = browser.open(write_run_report(folder)[0])
    assert page.run("document.querySelector('.tip').hidden")
    page.point(".plot", 0.001)
    tips = "[...document.querySelectorAll('.plot:first-of-type .tip')][0].innerText"
    first = page.run(tips)
    assert first.splitlines() == [
        "round 4",
        f"learned {number(2 * LOSS['learned'][3])}",
        f"fixed {number(2 * LOSS['fixed'][3])}",
    ]
    page.point(".plot", 0.999)
    assert page.run(tips).splitlines()[0] == "round 24"
    page.run("document.querySelector('.plot').focus()")
    for key in ("ArrowLeft", "ArrowLeft"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert page.run(tips).splitlines()[0] == "round 16"
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.run("document.querySelector('.tip').hidden") and page.problems == []


@in_browser
def test_curves_over_bytes(folder, browser):
    path, found = write_run_report(folder)
    page = browser.open(path)
    names = "[...document.querySelectorAll('.x-name')]"
    seen = f"{names}.filter(e => e.checkVisibility()).map(e => e.innerText)"
    assert page.run(seen) == ["round"] * 4
    page.run("document.querySelector('[for=by-traffic]').click()")
    assert page.run(seen) == ["sent"] * 3 + ["round"]
    page.point(".by-traffic .plot", 0.999)
    tip = page.run("document.querySelector('.by-traffic .tip').innerText")
    # The fixed run has sent less: it has no value here.
    last = number(2 * LOSS["learned"][-1])
    assert tip.splitlines() == [f"sent {memory(found.sent('learned'))}", f"learned {last}"]
    page.point(".by-traffic .plot", 0.5)
    tip = page.run("document.querySelector('.by-traffic .tip').innerText")
    places = [found.sent("fixed", r) / found.sent("learned") for r in range(4, ROUNDS + 1, 4)]
    near = min(range(len(places)), key=lambda i: abs(places[i] - 0.5))
    at = memory(found.sent("fixed", 4 * (near + 1)))
    assert tip.splitlines()[0] == f"sent {at}" or tip.splitlines()[2].endswith(f" at {at}")


@in_browser
def test_hostile_words_do_nothing(tmp_path, browser):
    folder = write_run(tmp_path / "run", words=HOSTILE, name=HOSTILE)
    # Somebody else's folder may hold a picture with a script in it. It is shown, but cannot run.
    svg = (folder / "fixed-round.svg").read_text()
    svg = svg.replace("</svg>", "<script>window.hacked=1</script></svg>")
    (folder / "fixed-round.svg").write_text(svg)
    page = browser.open(write_run_report(folder)[0])
    assert page.run("window.hacked") is None
    assert page.run("document.querySelector('h1').innerText").count("<script>") == 3
    page.point(".plot", 0.5)
    assert page.run("window.hacked") is None and len(page.requests) == 1
    assert [p["source"] for p in page.problems] == ["security"]  # the script that was refused


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_figure_in_a_browser(tmp_path, browser, dark):
    path = tmp_path / "figure.svg"
    curve = Curve("words", [1, 2, 3], [3.0, 2.0, 1.5], band=([2, 1, 1], [4, 3, 2]))
    Figure([alike(Chart("words", [curve], "words", "words") for _ in range(4))]).save(path)
    page = browser.open(path, dark)
    assert page.problems == [] and page.requests == [path.as_uri()]
    paper, ink = page.run(
        "[getComputedStyle(document.querySelector('.fill-paper')).fill,"
        " getComputedStyle(document.querySelector('text.fill-ink')).fill]"
    )
    assert (sum(_rgb(paper)) < sum(_rgb(ink))) == dark
    # No words lie on others, nor outside.
    boxes = page.run(
        "[...document.querySelectorAll('text')].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.top, b.right, b.bottom])"
    )
    size = page.run("[document.documentElement.clientWidth, document.documentElement.clientHeight]")
    for i, a in enumerate(boxes):
        assert 0 <= a[0] < a[2] <= size[0] and 0 <= a[1] < a[3] <= size[1]
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 4 or b[3] <= a[1] + 4


def _rgb(text):
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
