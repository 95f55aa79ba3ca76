"""Notebooks run, and show what they show. `make notebooks` stores their outputs anew.

A cell is executed as Jupyter does it: what it prints, then the value of its last expression in the
richest form it has. That takes no kernel, and no package.
"""

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import pytest
from test_docs import NOTEBOOKS, in_new_process, same_page, tidy  # which finds `quick`

import quick  # noqa: F401  (here and in the processes of the notebooks)

FORMS = {"_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}


def lines(text):
    return text.splitlines(keepends=True)


def shown(value):
    """The data of a value that a cell ends with; beside a picture its kind alone."""
    for method, kind in FORMS.items():
        if hasattr(value, method):
            rich = lines(getattr(value, method)())
            return {kind: rich, "text/plain": [f"<{type(value).__name__}>"]}
    return {"text/plain": lines(repr(value))}


def run_cell(source, name, namespace):
    """The outputs of a cell."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = []
    if printed.getvalue():
        text = lines(tidy(printed.getvalue()) + "\n")
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        kind = {"output_type": "execute_result", "execution_count": None, "metadata": {}}
        outputs.append({"data": shown(value), **kind})
    return outputs


def run(path):
    """Runs in a process of its own: prints the notebook with its outputs."""
    book, namespace = json.loads(Path(path).read_text(encoding="utf-8")), {"__name__": "__main__"}
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code":
            name = f"{Path(path).stem} cell {number}"
            cell["outputs"] = run_cell("".join(cell["source"]), name, namespace)
    print(json.dumps(book))


def outputs(book):
    return [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path):
    found = json.loads(in_new_process(path, folder=tmp_path, script=__file__))
    stored = json.loads(path.read_text(encoding="utf-8"))
    for now, then in zip(outputs(found), outputs(stored), strict=True):
        assert len(now) == len(then), "`make notebooks` stores what it shows now"
        for a, b in zip(now, then, strict=True):
            assert {*a.get("data", ["text"])} == {*b.get("data", ["text"])}
            same_page(*("".join(x.get("text") or x["data"]["text/plain"]) for x in (a, b)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_pictures(path):
    stored = [output for cell in outputs(json.loads(path.read_text())) for output in cell]
    assert any(FORMS["_repr_svg_"] in output.get("data", {}) for output in stored)


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"first-hour", "derivatives", "self-tuning"}


def test_a_cell_shows_what_jupyter_would():
    (printed, value) = run_cell("print(1)\n2 + 3", "cell", {})
    assert (printed["text"], value["data"]) == (["1\n"], {"text/plain": ["5"]})
    assert run_cell("x = 1", "cell", {}) == []


def update():
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            book = json.loads(in_new_process(path, folder=Path(folder), script=__file__))
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    run(sys.argv[1]) if sys.argv[1:] else update()
