"""The command `fedgrad`."""

import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

import pytest

import fedgrad as fg
from fedgrad.cli import main

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
