"""The command `fedgrad`."""

import contextlib
import inspect
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
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

import fedgrad as fg
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.cli import main
from fedgrad.cli.dispatch import parse
from fedgrad.cli.train_command import Training
from fedgrad.cli.train_command import prepare as prepare_training
from fedgrad.cli.training_options import TRAINED
from fedgrad.cli.tuning_options import Tuning, prepare
from fedgrad.reports import write
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
    for command in (["-m", "fedgrad"], ["-c", "import fedgrad.cli as c; exit(c.main())"]):
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
    assert ".command." not in err
    assert tune(copied, "--quiet", "--no-compare", "--weighting", "uniform") == 1
    told = capsys.readouterr().err.partition("another run:\n")[2].splitlines()
    assert told[0] == "  weighting: examples in the checkpoint, uniform now."
    assert told[1].startswith("To go on"), "once, and not in the words of config.json too"
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
    asked = Tuning.of(parse(["tune", "synthetic", *flags]))
    again = Tuning.of(parse(asked.command()[1:]))
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
    asked = Tuning.of(parse(["tune", "synthetic", *flags]))
    assert asked.set == {"a": 1.0, "b": 3.0} and asked.bounds["b"] == (-1.0, float("inf"))


@pytest.mark.parametrize(
    "flags, raw",
    [
        ("", math.log(0.5)),
        ("--bounds server.learning_rate=0.1:2", math.log(0.5)),
        ("--parametrization server.momentum=logit", math.log(0.5)),
        ("--hyper-optimizer sgd", 0.5),
        ("--parametrization linear", 0.5),
    ],
)
def test_a_rate_is_learned_by_its_logarithm_unless_something_else_is_said(flags, raw):
    flags = f"tune synthetic --task-option clients=6 --set server.learning_rate=0.5 {flags}"
    prepared = prepare(Tuning.of(parse(flags.split())))
    state = prepared.runs["learned"].algorithm.init(prepared.task.init(jax.random.key(0)))
    assert float(state.learned["server.learning_rate"]) == pytest.approx(raw)


def test_options_reach_the_algorithm():
    flags = "--algorithm fedavg --learn client --set client.learning_rate=0.5 --cohort 4"
    flags += " --weighting power --parametrization log --task-option clients=6 --schedule serial"
    prepared = prepare(Tuning.of(parse(["tune", "synthetic", *flags.split()])))
    for one in prepared.runs.values():
        assert one.algorithm.hyper["client"]["learning_rate"] == 0.5
        assert "weight_exponent" in one.algorithm.hyper
    assert prepared.asked.learn == ["client.learning_rate"] and prepared.asked.cohort == 4
    params = prepared.task.init(jax.random.key(0))
    state = prepared.runs["learned"].algorithm.init(params)
    assert float(state.learned["client.learning_rate"]) == pytest.approx(math.log(0.5))
    plans = prepared.plans()
    assert plans["fixed"].rounds == 1 and plans["learned"].rounds == 2
    assert plans["learned"].clients == {"clients": 4, "gradient": 4}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_can_be_asked_for(name):
    """It starts, or says what of it can be learned, or that nothing can."""
    words = ["tune", "synthetic", "--task-option", "clients=4", "--algorithm", name]
    try:
        prepared = prepare(Tuning.of(parse(words)))
    except fg.ArgumentError as error:
        algorithm = ALGORITHMS[name](lambda p, b: 0.0)
        if algorithm.client_init is not None:
            assert "clients keep a state" in str(error)
            return
        assert "--learn" in str(error) and f"fedgrad train synthetic --algorithm {name}" in str(
            error
        )
        known = list(fg.hyper.paths(algorithm.hyper))
        assert known and all(path in str(error) for path in known)
    else:
        assert prepared.plans()["learned"].rounds == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["syntetic"], "(one of your own is module:name). Did you mean 'synthetic'?"),
        (["synthetic", "--algorithm", "fedavgmm"], "Did you mean 'fedavgm'?"),
        (["synthetic", "--algorithm", "fed_auto"], "finds its own rates, so there are none to"),
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
        (["--bounds", "server.learning_rate=0.01:0.5"], "starts at 1.0, outside of its bounds"),
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
    command = [sys.executable, "-m", "fedgrad", "tune", *TINY, "--out", str(folder), "--json"]
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


# --- train --------------------------------------------------------------------------------

OWN = """
import fedgrad as fg, numpy as np, jax.numpy as jnp

clients = [{"x": np.full((4, 2), 1 + i, np.float32)} for i in range(5)]

def loss(params, batch):
    return (batch["x"] @ params - 1) ** 2

def init(key):
    return jnp.zeros(2, jnp.float32)

task = fg.tasks.Task(train=fg.population(clients), init=init, loss=loss)

def some(n: int = 5):
    if n > 5:
        raise LookupError("only five")
    return fg.tasks.Task(train=fg.population(clients[:n]), init=init, loss=loss)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a user's module, entered."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    sys.modules.pop("own_tasks", None)


def train(*words, rounds=3):
    return main(["train", *words, "--rounds", str(rounds)])


def test_a_task_of_ones_own_is_trained_with_nothing_else_said(own, capsys):
    assert train("own_tasks:task", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["command"] == "train" and said["rounds"] == 3
    assert said["folder"] == "out/own_tasks.task-fedauto"
    last = history(own / said["folder"])[-1]
    assert said["final"] == {k: last[k] for k in ("loss", "eval.train.loss")}
    assert last["eval.train.loss"] < 1  # the loss of the first model
    report = (own / said["report"]).read_text()
    assert "fedgrad train own_tasks:task --rounds 3" in report
    # The bytes of a race are those of its phases, which have fewer and fewer candidates.
    made = prepare_training(Training("own_tasks:task"))
    planned = fg.explain(made.algorithm, made.first(), made.cohort(), rounds=3)
    assert said["bytes"] == made.asked.cohort * planned.bytes


def test_a_function_makes_the_task(own, capsys):
    words = ["own_tasks:some", "--algorithm", "fedsgd", "--quiet", "--task-option"]
    assert train(*words, "n=3") == 0
    folder = own / "out" / "own_tasks.some-fedsgd"
    assert capsys.readouterr().out == f"{(folder / 'report.html').relative_to(own)}\n"
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["train"]["cohort"] == 3  # all that there are
    assert (folder / "fixed-round.svg").exists()  # of a round that is always the same
    assert train(*words, "n=9", "--restart") == 2
    assert re.search(
        r"some fails: LookupError: only five \(.*own_tasks.py:\d+\)", capsys.readouterr().err
    )


def test_training_goes_on(own, capsys):
    words = ["own_tasks:task", "--algorithm", "fedsgd"]
    assert train(*words, "--quiet") == 0
    before = history(own / "out/own_tasks.task-fedsgd")
    capsys.readouterr()
    assert train(*words, rounds=5) == 0
    out, err = capsys.readouterr()
    assert "Train loss" in out and "Sent in all" in out and "FedSGD, in out" in err
    after = history(own / "out/own_tasks.task-fedsgd")
    assert [row["round"] for row in after] == [0, 1, 2, 3, 4, 5]  # 0 is evaluated alone
    assert [row["loss"] for row in after[1:4]] == [row["loss"] for row in before[1:]]


def test_training_goes_on_with_other_data_if_that_is_meant(own, capsys):
    words = ["own_tasks:task", "--algorithm", "fedsgd", "--quiet"]
    assert train(*words) == 0
    (own / "own_tasks.py").write_text(OWN.replace("1 + i", "1.5 + i"))
    sys.modules.pop("own_tasks")
    assert train(*words, rounds=4) == 1
    err = capsys.readouterr().err
    assert "clients have other examples than those of the checkpoint" in err
    assert "clients of the evaluation 'train' have other examples" in err and "--other-data" in err
    assert train(*words, "--other-data", rounds=4) == 0
    assert [row["round"] for row in history(own / "out/own_tasks.task-fedsgd")] == [0, 1, 2, 3, 4]
    with pytest.raises(SystemExit, match="2"):
        train(*words, "--other-data", "--restart")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_every_algorithm_trains(own, capsys, name):
    """Those, too, of which nothing can be learned."""
    trained = prepare_training(Training.of(parse(["train", "own_tasks:task", "--algorithm", name])))
    usual = inspect.signature(TRAINED[name]).parameters["weighting"].default
    assert trained.asked.weighting == usual
    planned = fg.explain(trained.algorithm, trained.first(), trained.cohort(), rounds=4)
    assert planned.rounds == 4
    if name in ("fedexp", "fedhyper", "fedmechanic", "scaffold"):
        assert train("own_tasks:task", "--algorithm", name, "--quiet") == 0


@pytest.mark.parametrize(
    "flags",
    [[], ["--algorithm", "fed_exp", "--weighting", "examples"], ["--seed", "3", "--epochs", "2"]],
    ids=" ".join,
)
def test_a_training_asks_for_itself(flags):
    asked = Training.of(parse(["train", "synthetic", *flags]))
    assert Training.of(parse(asked.command()[1:])) == asked
    assert asked.command()[:3] == ["fedgrad", "train", "synthetic"]
    assert asked.algorithm == ("fedexp" if flags[:1] == ["--algorithm"] else "fedauto")


@pytest.mark.parametrize(
    "words, message",
    [
        (["own_tasks.py:task"], "names a file. Write the module: own_tasks:task."),
        (["./own_tasks.py:task"], "names a file. Write the module: own_tasks:task."),
        (["own_tasks:tsk"], "Did you mean 'task'?"),
        (["own_task:task"], "There is no module 'own_task' here"),
        (["own_task:task"], "Did you mean 'own_tasks'?"),
        (["own_tasks:clients"], "neither a Task nor a function that gives one, but list"),
        (["own_tasks:task", "--algorithm", "fedsgd", "--epochs", "2"], "--epochs has no effect"),
        (["own_tasks:task", "--cohort", "6"], "1 to 5"),
        (["needs:task"], "needs fails to import: No module named 'no_such_package'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_trained(own, capsys, words, message):
    (own / "needs.py").write_text("import no_such_package")
    assert train(*words, "--quiet") == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    assert not (own / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits"],
        ["tune", "digits"],
        ["reproduce", "server-optimizer", "--quick"],
        ["reproduce", "client-weighting", "--quick", "--task", "digits"],
    ],
    ids=" ".join,
)
def test_a_missing_package_is_named_before_anything_is_trained(own, capsys, monkeypatch, words):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*words, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "pip install 'fedgrad[tasks]'" in err and "Traceback" not in err
    assert not [path for path in own.glob("out/**/*") if path.suffix != ".json" and path.is_file()]


def test_which_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fedgrad {version('fedgrad')} (JAX {jax.__version__}, Python 3.")


# --- without the experiments --------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["client-weighting", "--quick"], ["--help"]], ids=str)
def test_reproduce_says_what_to_install(monkeypatch, capsys, words):
    monkeypatch.setattr(write, "EXPERIMENTS", "fedgrad.nobody")
    assert main(["reproduce", *words]) == 1
    assert "pip install ./experiments" in capsys.readouterr().err


def test_the_report_of_an_experiment_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(write, "EXPERIMENTS", "fedgrad.nobody")
    (tmp_path / "results.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 1
    assert "pip install ./experiments" in capsys.readouterr().err


def test_folders_without_a_run(tmp_path, capsys):
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
    for word in (
        "train",
        "tune",
        "reproduce",
        "report",
        "explain",
        "node",
        "federation",
        "exit codes",
    ):
        assert word in top
    tuning = help_of("tune")
    assert all(name in tuning for name in [*ALGORITHMS, *TASKS])
    training = help_of("train")
    assert all(name in training for name in [*TRAINED, *TASKS, "fg.tasks.Task(", "module:name"])
    # The examples are right: each is understood.
    for text in (
        top,
        training,
        tuning,
        help_of("reproduce"),
        help_of("report"),
        help_of("explain"),
    ):
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
