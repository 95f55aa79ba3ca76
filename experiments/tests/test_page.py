"""The report of an experiment: what it says, escaped, in a real browser."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from chromium import COMMAND, chromium
from fedgrad.show.charts import Chart, Curve, Figure, alike
from fedgrad_experiments.experiment import Experiment, Reproduction
from fedgrad_experiments.page import experiment_page, size_of
from fedgrad_experiments.results import Claim, Results, Table, score
from html_page import HOSTILE, Found


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


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@pytest.mark.skipif(COMMAND is None, reason="Chromium is not installed")
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
