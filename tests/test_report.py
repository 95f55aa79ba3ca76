"""Reports: what they say is what the folder holds, in one file, in a real browser."""

import base64
import hashlib
import html.parser
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from chromium import COMMAND, chromium
from fedgrad.experiments.experiment import Experiment, Reproduction
from fedgrad.experiments.results import Claim, Results, Table, score
from fedgrad.report import plans, run
from fedgrad.report.charts import html as html_of
from fedgrad.report.experiment import experiment_page, size_of
from fedgrad.report.page import ReportError, picture
from fedgrad.report.top import verdict
from fedgrad.report.words import change
from fedgrad.report.write import write_report, write_run_report
from fedgrad.show.axis import axis
from fedgrad.show.charts import Chart, Curve, Figure, alike
from fedgrad.show.markup import Html, element, join
from fedgrad.show.numbers import memory, number, percent, short

HOSTILE = "<script>window.hacked=1</script>\"'&<img src=x onerror=window.hacked=1>"


class Found(html.parser.HTMLParser):
    """The elements of a page, in order: (name, attributes, the text directly in it)."""

    VOID = ("meta", "input", "br")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])
        if name not in self.VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, name, attributes):
        self.elements.append([name, dict(attributes), ""])

    def handle_endtag(self, name):
        assert self.open and self.open[-1][0] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def all(self, name=None, class_=None):
        return [
            e
            for e in self.elements
            if name in (None, e[0]) and (class_ is None or class_ in e[1].get("class", "").split())
        ]


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
        plans.keep(folder, {kind: plan_of(kind) for kind in ("learned", "fixed")})
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
        (percent(0.69051), "69.1 %"),
        (memory(2449), "2.4 kB"),
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
        assert picture(plan.draw(), f"{name}-graph") in text
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
    assert [e[2] for e in Found(text).all("p", "aside")][:1] == ["at the end"]


def test_a_run_that_learns_nothing(tmp_path):
    folder = write_run(tmp_path / "run")
    text, found = report_of(folder / "fixed")
    assert found.learned == () and found.main == "fixed"
    assert "Hyperparameters" not in [e[2] for e in Found(text).all("h2")]
    assert "Federated training" in text


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


def test_vectors_are_shown_entry_by_entry(folder):
    rows = [{"round": r, "loss": [1.0 / r, 2.0 / r], "hyper.rate": [0.1, "NaN"]} for r in (1, 2, 3)]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run.read(folder)
    assert found.learned == ("rate[0]", "rate[1]")
    assert tuple(found.curves["learned"]["loss[1]"].values) == (2.0, 1.0, 2 / 3)
    report_of(folder)


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


# --- the report of an experiment ----------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    starts: tuple[float, ...] = (1.0, 0.0)


def experiment_of(words="Made up: an experiment."):
    return Experiment(
        name="made-up",
        description=words,
        sizes={"quick": Settings(1), "default": Settings()},
        run=lambda out, settings, progress: None,
        figures=lambda results: {},
        tables=lambda results: [],
        claims=lambda results: [],
    )


def reproduction(words="x"):
    settings = json.loads(json.dumps({"seeds": 1, "starts": [1.0, 0.0]}))
    results = Results("made-up", settings, {"seconds": 12.3, "versions": {"fedgrad": words}}, {})
    claims = [Claim(f"{words} one", True, words), Claim("two", False, words), Claim("t", None, "")]
    table = Table(words, ["", words], [[words, "1.5"]])
    curve = Curve(words, [1, 2, 3], [3.0, 2.0, 1.5], band=([2, 1, 1], [4, 3, 2]))
    figure = Figure([alike(Chart(words, [curve], words, words) for _ in range(4))])
    return Reproduction(results, {"loss": figure}, [table], claims)


def test_the_report_of_an_experiment():
    shown = reproduction()
    page = Found(experiment_page(experiment_of(), shown))
    assert score(shown.claims) == "1 of 2 tested claims hold"
    assert size_of(experiment_of(), shown) == "quick"
    assert [e[2] for e in page.all("span", "verdict")] == ["Holds", "Does not hold", "Not tested"]
    classes = [e[1]["class"] for e in page.all("li") if "class" in e[1]]
    assert classes == ["held", "failed", "untested"]
    assert "fedgrad reproduce made-up --quick" in [e[2] for e in page.all("code")]
    assert [e[2] for e in page.all("h1")] == ["Made up"]
    assert any("12 seconds" in e[2] for e in page.all("p", "over"))


def test_an_experiment_is_escaped_too():
    elements = []
    for words in ("x", HOSTILE):
        text = experiment_page(experiment_of(f"{words}: {words}"), reproduction(words))
        elements.append([e[0] for e in Found(text).elements])
        assert HOSTILE not in text
    assert elements[0] == elements[1]


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
@pytest.mark.parametrize("width, beside", [(360, 1), (1200, 4), (2000, 4)])
def test_an_experiment_in_a_browser(tmp_path, browser, width, beside):
    path = Path(tmp_path / "report.html")
    path.write_text(experiment_page(experiment_of(), reproduction()), encoding="utf-8")
    page = browser.open(path, width=width)
    assert page.problems == [] and page.requests == [path.as_uri()]
    assert page.run("document.documentElement.scrollWidth") <= width
    # Four charts, as many beside each other as there is room for, and none too small to read.
    boxes = page.run(
        "[...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect())"
        ".map(b => [b.top, b.width, b.height])"
    )
    assert len(boxes) == 4 and sum(top == boxes[0][0] for top, _, _ in boxes) == beside
    assert all(w > 170 and h > 150 for _, w, h in boxes)
    page.point(".plot", 0.999)
    tip = page.run("document.querySelector('.tip').innerText")
    assert tip.splitlines() == ["x 3", "x 1.500"]


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_figure_in_a_browser(tmp_path, browser, dark):
    path = tmp_path / "figure.svg"
    reproduction("words").figures["loss"].save(path)
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
