"""What a user sees of an error: the lines of the user, and none of ours; and which cell of a
notebook they are in."""

import os
import subprocess
import sys
import textwrap
import traceback
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

import fedgrad as fg
from fedgrad.core.notebook import cell, place
from line import FIRST, mean_square, points

CLIENTS = fg.population(points())
ROOT = str(Path(fg.__file__).parent)


@fg.program(z=fg.CLIENTS)
def mixed(x, z):
    return fg.sum(x * z)


def missing(params, batch):
    return batch["nope"]


def fit(loss=mean_square, **more):
    return fg.fit(fg.fed_avg(loss), CLIENTS, params=FIRST, rounds=1, progress=False, **more)


def interrupt(*_):
    raise KeyboardInterrupt


FAILURES = {
    "an argument": (lambda: fit(cohort_size=99), []),
    "a program": (lambda: mixed(jnp.ones(2), jnp.ones((3, 2))), []),
    "a decorator": (lambda: fg.program(q=fg.CLIENTS)(lambda x: x), []),
    "an option": (lambda: fg.local_training(batchsize=3), []),
    "a method": (lambda: CLIENTS.sample(0, 3), []),
    "a constructor": (lambda: fg.Evaluation({}, CLIENTS), []),
    "a task": (lambda: fg.tasks.Task(train=[], init=None, loss=None), []),
    "the name of a task": (lambda: fg.tasks.task("digit"), []),
    "the user's loss": (lambda: fit(missing), ["missing"]),
    "a callback": (lambda: fit(callbacks=[interrupt]), ["interrupt"]),
}


def frames(error):
    return [(f.filename, f.name) for f in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("name", FAILURES)
def test_only_the_users_lines_are_shown(name):
    call, inner = FAILURES[name]
    with pytest.raises(BaseException) as caught:
        call()
    found = frames(caught.value)
    assert [f for f, _ in found if f.startswith(ROOT)] == []
    assert [n for _, n in found if n in ("missing", "interrupt")] == inner
    assert "<lambda>" in {n for _, n in found}
    if isinstance(caught.value, fg.FederatedError):
        assert "test_tracebacks.py" in str(caught.value)
        assert not getattr(caught.value, "__notes__", [])


def test_all_lines_are_there_for_who_wants_them(monkeypatch):
    monkeypatch.setenv("FEDGRAD_TRACEBACK", "full")
    with pytest.raises(fg.ArgumentError) as caught:
        fit(cohort_size=99)
    assert len([f for f, _ in frames(caught.value) if f.startswith(ROOT)]) > 2


def test_a_bug_of_ours_shows_where_it_is(monkeypatch):
    monkeypatch.setattr("fedgrad.training.fit.check_callbacks", len)  # which takes one argument
    with pytest.raises(TypeError) as caught:
        fit()
    assert any(f.startswith(ROOT) for f, _ in frames(caught.value))


def test_what_a_missing_package_said_has_no_lines_either(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(fg.FederatedError) as caught:
        fg.TensorBoard("runs")
    assert isinstance(caught.value.__cause__, ImportError)
    assert caught.value.__cause__.__traceback__ is None


def test_in_a_process_of_its_own(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import fedgrad as fg\nfg.early_stop(patience=0)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("  File ")] == [
        f'  File "{script}", line 2, in <module>'
    ]
    assert f"{script}:2: patience=0" in lines[-1]


def test_a_warning_shows_the_users_line():
    with pytest.warns(RuntimeWarning, match="The loss of round .* is not finite") as caught:
        algorithm = fg.fed_avg(mean_square, 1e30)
        fg.fit(algorithm, CLIENTS, params=FIRST, rounds=4, progress=False)
    assert {w.filename for w in caught} == {__file__}


# Cells

NAMES = {
    "/tmp/ipykernel_123/456.py": "cell",
    "<ipython-input-3-abc>": "cell",
    "/home/me/rounds.py": None,
    "<stdin>": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_a_cell(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert cell(name) == NAMES[name]
    assert place(name, 4) == ("cell, line 4" if NAMES[name] else f"{name}:4")


CELLS = [
    """\
    import jax.numpy as jnp, numpy as np
    import fedgrad as fg
    clients = fg.population([{"x": np.ones((3, 2)), "y": np.ones(3)}] * 4)
    def loss(params, batch):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2
    """,
    """\

    result = fg.fit(fg.fed_avg(loss), clients, params={"w": jnp.zeros(2)}, rounds=3)
    result
    """,
    """\
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        y = jnp.sin(x)
        return fg.sum(y * z)
    f(jnp.ones(2), jnp.ones((3, 2)))
    """,
    """\
    fg.fit(fg.fed_avg(loss), clients, params={"w": jnp.zeros(2)}, rounds=3,
           cohort_size=99)
    """,
    """\
    @fg.program(z=fg.CLIENTS)
    def g(x, z):
        return fg.sum(jnp.sin(z))
    print(fg.plan(g, jnp.ones(2), jnp.ones((3, 2))))
    """,
]


def notebook():
    """The cells, run by a kernel."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat, nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbformat, nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbformat, nbclient and ipykernel")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(text)) for text in CELLS]
    made = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(made, timeout=300, kernel_name="python3", allow_errors=True).execute()
    return [one.outputs for one in made.cells]


def test_progress_in_a_notebook_is_a_line_that_changes(monkeypatch):
    written = []

    class Handle:
        def update(self, data, raw):
            written.append(data["text/plain"])

    def display(data, raw, display_id):
        written.append(data["text/plain"])
        return Handle()

    fake = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=fake))
    console = Console(force_jupyter=True)
    fg.fit(fg.fed_avg(mean_square), CLIENTS, params=FIRST, rounds=2, progress=console)
    assert written[0] == "round 0/2 · compiling" and written[-1].startswith("round 2/2 · loss ")


def test_a_real_notebook():
    _, trained, mixed, refused, planned = notebook()
    progress, shown = trained
    assert progress["data"]["text/plain"].startswith("round 3/3 · loss ")
    assert (
        "<img" in shown["data"]["text/html"] and "FedAvg: 3 rounds" in shown["data"]["text/plain"]
    )
    (mixed,), (refused,), (planned,) = mixed, refused, planned
    assert mixed["evalue"].startswith("cell 3, line 4 (f): mul: ")
    assert refused["evalue"].startswith("cell 4, line 1: cohort_size=99")
    for one in (mixed, refused):
        assert "fedgrad/" not in "".join(one["traceback"])
    assert ".py" not in planned["text"]


def test_a_shell_of_ipython(tmp_path):
    pytest.importorskip("IPython", reason="needs ipython")
    script = "import fedgrad as fg\n\nfg.early_stop(patience=0)\nfg.early_stop(\n patience=-1)\n"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "--simple-prompt"],
        input=script,
        capture_output=True,
        text=True,
        env=os.environ | {"IPYTHONDIR": str(tmp_path)},
    )
    assert "cell 2, line 1: patience=0" in done.stdout
    assert "fedgrad/training" not in done.stdout
