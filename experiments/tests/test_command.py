"""`fedgrad reproduce`, and `fedgrad report` of what it wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import fedgrad as fg
from fedgrad.cli import main
from fedgrad_experiments import EXPERIMENTS
from fedgrad_experiments.experiment import Experiment
from fedgrad_experiments.results import Claim, Results, Table


@dataclass(frozen=True)
class Settings:
    seeds: int


@pytest.fixture
def experiment(monkeypatch):
    """A made-up experiment, of which one claim holds, one does not, and one is not tested."""

    def run(out, settings, progress):
        arrays = {"loss": np.array([1.0, 0.5, 0.25])}
        return Results("made-up", {}, {}, arrays)

    def figures(results):
        loss = results.arrays["loss"]
        curve = fg.charts.Curve("loss", range(1, len(loss) + 1), loss)
        return {"loss": fg.charts.Figure([[fg.charts.Chart("Loss", [curve], "round")]])}

    made = Experiment(
        name="made-up",
        description="Made up: nothing is trained.",
        sizes={"quick": Settings(1), "default": Settings(3), "full": Settings(9)},
        run=run,
        figures=figures,
        tables=lambda results: [
            Table("Loss", ["", "end"], [["ours", str(results.arrays["loss"][-1])]])
        ],
        claims=lambda results: [
            Claim("It falls.", True, "0.25 < 1"),
            Claim("It is negative.", False, "0.25"),
            Claim("It is cheap.", None, "not measured"),
        ],
    )
    for module in ("fedgrad_experiments.command", "fedgrad_experiments.registry"):
        monkeypatch.setattr(f"{module}.EXPERIMENTS", {"made-up": made})
    return made


def test_reproduce(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["reproduce", "made-up"]) == 0
    out, _ = capsys.readouterr()
    for words in ("Loss", "0.25", "It falls.", "holds", "DOES NOT HOLD", "not tested"):
        assert words in out
    assert "1 of 2 tested claims hold" in out and "out/made-up/report.html" in out
    folder = tmp_path / "out" / "made-up"
    report = (folder / "report.html").read_text()
    assert "Does not hold" in report and "<svg" in report and 'class="plot"' in report
    # The report can be made again from the folder alone.
    (folder / "report.html").unlink()
    assert main(["report", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").read_text() == report


@pytest.mark.parametrize(
    "flags, folder, code",
    [
        (["--quick"], "made-up-quick", 0),
        (["--full"], "made-up-full", 0),
        (["--full", "--check"], "made-up-full", 3),
        (["--quick", "--check"], "made-up-quick", 0),  # what is not decided does not fail
        (["--out", "here"], "here", 0),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_sizes_and_exit_codes(experiment, tmp_path, capsys, monkeypatch, flags, folder, code):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "made-up", "--json", *flags]) == code
    said = json.loads(capsys.readouterr().out)
    assert (tmp_path / said["report"]).exists()
    assert said["report"] == str(
        Path(folder if "here" in folder else f"out/{folder}", "report.html")
    )
    small = "--quick" in flags  # it decides nothing, whatever its numbers are
    held = [None, None, None] if small else [True, False, None]
    assert [claim["holds"] for claim in said["claims"]] == held
    assert [claim["too_small"] for claim in said["claims"]] == [small, small, False]
    assert said["tables"][0]["rows"] == [["ours", "0.25"]]
    results = json.loads((tmp_path / said["folder"] / "results.json").read_text())
    assert results["settings"] == {"seeds": {"quick": 1, "full": 9}.get(said["size"], 3)}


def test_what_is_too_small_says_so(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "quick"
    assert main(["reproduce", "made-up", "--quick", "--check", "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "DOES NOT HOLD" not in out and out.count("too small to decide") == 2
    assert "Too small to decide 2 of 3 claims" in out and "0.25 < 1" in out  # with the numbers
    text = (folder / "results.txt").read_text()
    assert "[too small to decide] It is negative." in text and "[not tested] It is cheap." in text
    assert main(["report", str(folder), "--quiet"]) == 0  # made again, it still does not judge
    assert "Does not hold" not in (folder / "report.html").read_text()


def test_unknown_experiments(experiment, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "made-it-up"])
    assert caught.value.code == 2 and "Did you mean 'made-up'?" in capsys.readouterr().err


def test_help_lists_every_experiment(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in EXPERIMENTS)
