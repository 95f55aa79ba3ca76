"""The command `fedgrad`."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, fields
from pathlib import Path

import jax
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.cli import main
from fedgrad.cli.command import parse
from fedgrad.cli.tune import tuning
from fedgrad.cli.tuning import Tuning, prepare
from fedgrad.experiments import EXPERIMENTS
from fedgrad.experiments.experiment import Experiment
from fedgrad.experiments.results import Claim, Results, Table
from fedgrad.show.numbers import number
from fedgrad.tasks import TASKS

MODULE = """
import jax
import jax.numpy as jnp
import fedgrad as fg

def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

@fg.program(z=fg.CLIENTS)
def loss(x, y, z):
    return jnp.sum(y) * fg.mean(jnp.sum(jnp.tanh(fg.broadcast(jnp.sin(x)) * z)) ** 2) ** 2

@fg.program(z=fg.CLIENTS)
def wrong(x, y, z):
    return x * z

def arguments():
    return floats(3), floats(2), floats(4, 3)

larger = (floats(30), floats(2), floats(4, 30))
not_a_program = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"module_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def explained(module, options):
    """What the command should say."""
    m = sys.modules[module]
    return fg.explain(m.loss, *m.arguments(), **options)


def test_explain(module, capsys):
    assert main(["explain", f"{module}:loss"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    wanted = explained(module, {})
    assert "differentiating loss" in out and str(wanted.program).splitlines()[0] in out
    assert " ".join(wanted.reason.split()) in " ".join(out.split())
    for mode in ("forward", "reverse", "mixed", "auto"):
        assert any(line.split()[:1] == [mode] for line in out.splitlines())


@pytest.mark.parametrize(
    "flags, options",
    [
        (["--argnums", "y"], {"argnums": "y"}),
        (["--argnums", "x,y"], {"argnums": ["x", "y"]}),
        (["--argnums", "-2"], {"argnums": -2}),
        (["--up", "5", "--down", "0.5"], {"cost": fg.CostModel(0.5, 5)}),
        (["--round-trip", "9"], {"cost": fg.CostModel(round_trip=9)}),
        (
            ["--readdress", "--client-memory", "0"],
            {"cost": fg.CostModel(readdress=True, client_memory=0)},
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options(module, capsys, flags, options):
    assert main(["explain", f"{module}:loss", *flags]) == 0
    out = capsys.readouterr().out
    assert " ".join(explained(module, options).reason.split()) in " ".join(out.split())


def test_other_arguments_and_drawing(module, capsys, tmp_path):
    picture = tmp_path / "graph.svg"
    assert main(["explain", f"{module}:loss", "--arguments", "larger", "--draw", str(picture)]) == 0
    assert "30 floats" in capsys.readouterr().out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    "words, message",
    [
        (["{}:lost"], "has no 'lost'. Did you mean 'loss'?"),
        (["{}"], "module:name"),
        (["{}:not_a_program"], "not a program but int"),
        (["no_such_module:loss"], "no module 'no_such_module'"),
        (["{}:loss", "--arguments", "argument"], "Did you mean 'arguments'?"),
        (["{}:loss", "--argnums", "w"], "no argument 'w'"),
        (["{}:loss", "--up", "-1"], "number >= 0"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_call_exits_with_2(module, capsys, words, message):
    assert main(["explain", *(word.format(module) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("fedgrad: ")
    assert "Traceback" not in err


def test_wrong_program_exits_with_1(module, capsys):
    assert main(["explain", f"{module}:wrong"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fedgrad: PlacementError: ")
    assert f"{module}.py" in err and "fg.broadcast" in err


@pytest.mark.parametrize(
    "words, code",
    [(["--help"], 0), (["explain", "--help"], 0), ([], 2), (["explian"], 2), (["explain"], 2)],
)
def test_help_and_usage(capsys, words, code):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == code
    out, err = capsys.readouterr()
    assert "usage: fedgrad" in (out if code == 0 else err)
    if words == ["explain", "--help"]:
        flags = ("--argnums", "--up", "--down", "--round-trip", "--readdress", "--client-memory")
        assert all(flag in out for flag in flags)


def test_as_a_process(module):
    """The installed command, and `python -m`."""
    for command in (["-m", "fedgrad.cli"], ["-c", "import fedgrad.cli as c; exit(c.main())"]):
        run = subprocess.run(
            [sys.executable, *command, "explain", f"{module}:lost"], capture_output=True, text=True
        )
        assert run.returncode == 2 and "Did you mean 'loss'" in run.stderr


# --- tune ---------------------------------------------------------------------------------

# FedSGD compiles quickly; most of these tests are about everything around the training.
TINY = ["synthetic", "--task-option", "clients=6", "--cohort", "3", "--algorithm", "fedsgd"]


def tune(out, *more, rounds=4):
    return main(["tune", *TINY, "--rounds", str(rounds), "--out", str(out), *more])


def history(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run of four rounds, and what it printed as JSON."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert tune(folder, "--json") == 0
    return folder, printed.getvalue()


def test_a_run_folder(tuned):
    folder, _ = tuned
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "history.jsonl", "checkpoint.npz", "fixed", "report.html"}
    learned, fixed = history(folder), history(folder / "fixed")
    assert [row["round"] for row in learned] == [row["round"] for row in fixed] == [0, 1, 2, 3, 4]
    # Both see the same clients from the same model; then they go their own ways.
    assert learned[0] == fixed[0] and learned[1]["loss"] == fixed[1]["loss"]
    assert learned[-1]["eval.test.loss"] != fixed[-1]["eval.test.loss"]
    assert [k for k in learned[1] if k.startswith("hyper.")] == ["hyper.server.learning_rate"]
    assert not any(k.startswith("hyper") for k in fixed[1])


def test_json_is_all_that_is_printed(tuned):
    folder, printed = tuned
    said = json.loads(printed)  # and nothing else
    assert said["command"] == "tune" and said["rounds"] == 4
    assert said["folder"] == str(folder) and said["report"] == str(folder / "report.html")
    for name, out in (("learned", folder), ("fixed", folder / "fixed")):
        last = history(out)[-1]
        got = said["runs"][name]
        assert got["final"]["eval.test.loss"] == last["eval.test.loss"]
        assert got["hyper"] == {
            k.removeprefix("hyper."): v for k, v in last.items() if k.startswith("hyper.")
        }
    # FedSGD asks clients for the gradient, the loss and their number of examples. The gradient
    # cohort, of as many clients, is asked for the same.
    once, twice = (said["runs"][name]["bytes"] for name in ("fixed", "learned"))
    assert twice == 2 * once
    assert once > 4 * 3 * 2 * 610 * 4  # rounds, clients, down and up, 60 x 10 + 10 floats


@pytest.fixture
def copied(tuned, tmp_path):
    """The same run, to go on with."""
    return Path(shutil.copytree(tuned[0], tmp_path / "run"))


def test_tune_in_a_terminal(copied, capsys):
    assert tune(copied) == 0  # all rounds are there already
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    for wanted in ("learned fixed", "Test loss", "server.learning_rate", "Sent in all"):
        assert wanted in words
    last = history(copied)[-1]["eval.test.loss"]
    assert f"Test loss {number(last)}" in words
    assert str(copied / "report.html") in out.replace("\n", "")
    assert "learned, in" in err  # progress does not go where a script reads
    assert tune(copied, "--quiet") == 0
    assert capsys.readouterr() == (f"{copied / 'report.html'}\n", "")


def test_the_same_command_goes_on(copied, capsys):
    before = history(copied)
    shutil.rmtree(copied / "fixed")
    assert tune(copied, "--json", "--no-compare", rounds=5) == 0
    after = history(copied)
    assert after[:5] == before and [row["round"] for row in after] == [0, 1, 2, 3, 4, 5]
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["learned"]
    assert not (copied / "fixed").exists()
    assert (copied / "fixed-round.svg").exists()  # the round is drawn all the same
    assert tune(copied, "--quiet", "--no-compare", rounds=4) == 1
    assert "5 rounds already" in capsys.readouterr().err


def test_another_run_in_the_same_folder(copied, capsys):
    before = history(copied)
    again = ["--quiet", "--no-compare", "--seed", "1"]
    assert tune(copied, *again) == 1
    out, err = capsys.readouterr()
    assert out == "" and "another run" in err and "seed: 0" in err and "--restart" in err
    assert history(copied) == before
    assert tune(copied, *again, "--restart", rounds=1) == 0
    _, row = history(copied)
    assert row["loss"] != before[1]["loss"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm", "fedadam", "--learn", "server.learning_rate,server.b1"],
        ["--set", "server.learning_rate=0.5,server.momentum=0.0", "--seed", "3"],
        ["--cohort", "7", "--batch-size", "4", "--epochs", "2", "--weighting", "power"],
        ["--schedule", "serial", "--gradient-from", "same", "--mode", "forward"],
        ["--parametrization", "log", "--hyper-optimizer", "adam", "--hyper-learning-rate", "0.1"],
        ["--parametrization", "server.learning_rate=log,server.momentum=logit"],
        ["--bounds", "server.learning_rate=0.01:2.0", "--clip", "1.0", "--normalize"],
        ["--task-option", "clients=20,alpha=0.5"],
    ],
    ids=" ".join,
)
def test_a_command_asks_for_itself(flags):
    """What a report prints under "to run it again" means the same."""
    asked = tuning(parse(["tune", "synthetic", *flags]))
    again = tuning(parse(asked.command()[1:]))
    assert asked == again and asked.command() == again.command()
    given = {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
    changed = [
        f.name
        for f in fields(asked)
        if getattr(asked, f.name) != getattr(Tuning(asked.task), f.name)
    ]
    assert set(changed) == given


def test_options_given_twice_are_merged():
    flags = ["--set", "a=1,b=2", "--set", "b=3", "--bounds", "a=0:1", "--bounds", "b=-1:inf"]
    asked = tuning(parse(["tune", "synthetic", *flags]))
    assert asked.set == {"a": 1.0, "b": 3.0} and asked.bounds["b"] == (-1.0, float("inf"))


def test_options_reach_the_algorithm():
    flags = "--algorithm fedavg --learn client --set client.learning_rate=0.5 --cohort 4"
    flags += " --weighting power --parametrization log --task-option clients=6 --schedule serial"
    prepared = prepare(tuning(parse(["tune", "synthetic", *flags.split()])))
    for algorithm in prepared.algorithms.values():
        assert algorithm.hyper["client"]["learning_rate"] == 0.5
        assert "weight_exponent" in algorithm.hyper
    assert prepared.asked.learn == ["client.learning_rate"] and prepared.asked.cohort == 4
    params = prepared.task.init(jax.random.key(0))
    state = prepared.algorithms["learned"].init(params)
    assert float(state.learned["client.learning_rate"]) == pytest.approx(math.log(0.5))
    plans = prepared.plans()
    assert plans["fixed"].rounds == 1 and plans["learned"].rounds == 2
    assert plans["learned"].clients == {"clients": 4, "gradient": 4}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_can_be_asked_for(name):
    """It starts, or says what of it can be learned, or that nothing can."""
    words = ["tune", "synthetic", "--task-option", "clients=4", "--algorithm", name]
    try:
        prepared = prepare(tuning(parse(words)))
    except fg.ArgumentError as error:
        algorithm = ALGORITHMS[name](lambda p, b: 0.0)
        if algorithm.client_init is not None:
            assert "clients keep a state" in str(error)
            return
        assert "--learn" in str(error)
        known = list(fg.hyper.paths(algorithm.hyper))
        assert known and all(path in str(error) for path in known)
    else:
        assert prepared.plans()["learned"].rounds == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["syntetic"], "no task 'syntetic'. Did you mean 'synthetic'?"),
        (["synthetic", "--algorithm", "fedavgmm"], "Did you mean 'fedavgm'?"),
        (["synthetic", "--shedule", "serial"], "Did you mean '--schedule'?"),
        (["synthetic", "--schedule", "seriel"], "Did you mean 'serial'?"),
        (["synthetic", "--weighting", "uniforn"], "Did you mean 'uniform'?"),
        (["synthetic", "--gradient-from", "frehs"], "Did you mean 'fresh'?"),
        (["synthetic", "--mode", "mixt"], "Did you mean 'mixed'?"),
        (["synthetic", "--hyper-optimizer", "adma"], "Did you mean 'adam'?"),
        (["synthetic", "--rounds", "0"], "whole number"),
        (["synthetic", "--rounds", "ten"], "whole number"),
        (["synthetic", "--set", "server.momentum"], "not NAME=VALUE"),
        (["synthetic", "--set", "server.momentum=high"], "not a number"),
        (["synthetic", "--bounds", "server.momentum=1"], "not NAME=LOW:HIGH"),
        (["synthetic", "digits"], "Nothing more is expected"),
        (["synthetic", "--quiet", "--json"], "not allowed with"),
        ([], "TASK"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_words_exit_with_2_and_usage(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(["tune", *words])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert message in " ".join(err.split()) and "usage: fedgrad tune" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--learn", "server.learning_rat"], "Did you mean 'server.learning_rate'?"),
        (["--set", "server.momentun=0.5"], "Did you mean 'server.momentum'?"),
        (["--parametrization", "lgo"], "Did you mean 'log'?"),
        (["--parametrization", "logit"], "finite bounds"),
        (["--bounds", "client.learning_rate=0:1"], "not learned"),
        (["--algorithm", "fedexp"], "--learn: "),
        (["--task-option", "client=5"], "Did you mean 'clients'?"),
        (["--task-option", "clients=0"], "at least 1"),
        (["--cohort", "7"], "1 to 6"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_settings_exit_with_2(tmp_path, capsys, words, message):
    call = ["tune", "synthetic", "--task-option", "clients=6", "--cohort", "3", *words]
    assert main([*call, "--out", str(tmp_path / "run"), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    assert err.startswith("fedgrad: ") and __file__ not in err
    assert not (tmp_path / "run").exists()


def test_the_folder_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tune(tmp_path / "file", "--quiet", rounds=1) == 1
    assert "Cannot make the folder" in capsys.readouterr().err


def test_interrupted_and_continued(tmp_path):
    """Ctrl-C leaves a checkpoint and a report, and the same command goes on."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedgrad.cli", "tune", *TINY, "--out", str(folder), "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*command, "--rounds", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    log = folder / "history.jsonl"
    while process.poll() is None and not (log.exists() and '"round": 1' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "", err
    assert "interrupted" in err and "run it again" in err and "Traceback" not in err
    done = history(folder)[-1]["round"]
    assert done >= 1 and (folder / "report.html").exists()
    again = subprocess.run(
        [*command, "--rounds", str(done + 1), "--no-compare"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rounds"] == done + 1
    assert [row["round"] for row in history(folder)] == list(range(done + 2))


# --- reproduce ----------------------------------------------------------------------------


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
            Claim("It is negative.", results.settings["seeds"] == 1 and None, "0.25"),
            Claim("It is cheap.", None, "not measured"),
        ],
    )
    for module in ("fedgrad.cli.reproduce", "fedgrad.experiments.registry"):
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
        (["--quick", "--check"], "made-up-quick", 0),  # what is not tested does not fail
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
    assert [claim["holds"] for claim in said["claims"]][::2] == [True, None]
    assert said["tables"][0]["rows"] == [["ours", "0.25"]]
    results = json.loads((tmp_path / said["folder"] / "results.json").read_text())
    assert results["settings"] == {"seeds": {"quick": 1, "full": 9}.get(said["size"], 3)}


def test_unknown_experiments_and_folders(experiment, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "made-it-up"])
    assert caught.value.code == 2 and "Did you mean 'made-up'?" in capsys.readouterr().err
    for folder, message in ((tmp_path, "no history.jsonl"), (tmp_path / "x", "no folder")):
        assert main(["report", str(folder)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.startswith("fedgrad: ReportError: ")


# --- all commands -------------------------------------------------------------------------


def test_help_teaches(capsys):
    def help_of(*words):
        with pytest.raises(SystemExit) as caught:
            main([*words, "--help"])
        assert caught.value.code == 0
        return capsys.readouterr().out

    top = help_of()
    for word in ("tune", "reproduce", "report", "explain", "node", "federation", "exit codes"):
        assert word in top
    tuning = help_of("tune")
    assert all(name in tuning for name in [*ALGORITHMS, *TASKS])
    assert all(name in help_of("reproduce") for name in EXPERIMENTS)
    # The examples are right: each is understood.
    for text in (top, tuning, help_of("reproduce"), help_of("report"), help_of("explain")):
        examples = re.findall(r"^  fedgrad ((?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE)
        assert examples
        for example in examples:
            words = re.sub(r"\\\n", " ", example).partition("   ")[0]
            assert callable(parse(words.split()).run)


@pytest.mark.parametrize("word, known", [("tunne", "tune"), ("reprodcue", "reproduce")])
def test_unknown_command(capsys, word, known):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    assert f"There is no command '{word}'. Did you mean '{known}'?" in capsys.readouterr().err


def test_commands_of_the_federation(capsys, monkeypatch):
    """They are there if their module is; without it the others work."""
    assert callable(parse(["federation", "status"]).run)
    monkeypatch.setitem(sys.modules, "fedgrad.federation.operate.commands", None)
    with pytest.raises(SystemExit):
        main(["federation", "status"])
    assert "no command 'federation'" in capsys.readouterr().err
    assert callable(parse(["report", "x"]).run)
