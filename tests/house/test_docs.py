"""The documentation runs: its programs, its output, its pictures, its links, and the examples.

A page's python blocks are executed in order, in one namespace and in a process of its own. A text
block right after one holds what it prints; if the block raises one of our errors, that is its
message. `python tests/house/test_docs.py` writes these blocks and the pictures anew: read the diff.

Another JAX counts other operations, exports other code and rounds otherwise. With one that the
pages were not written with, numbers only have to be alike, and digests to be digests.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is also run as a script
import quick  # noqa: F401  (here and in the processes of the pages)
from where import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]  # which are read, not run
# What main() gets here, so that each example is quick.
EXAMPLES = {
    "class_one": {},
    "client_learning_rate": {"rounds": 6},
    "equinox_model": {"rounds": 3},
    "flax_model": {"rounds": 3},
    "distillation": {"sizes": [2, 64], "steps": 1},
    "first_program": {"rounds": 3},
    "newton_cg": {"steps": 1},
    "per_fedavg": {"rounds": 10},
    "ragged": {"rounds": 5},
    "recursion_and_branching": {},
}
WRITTEN_WITH = "0.10."  # the JAX of the pages
# Pages that are run where this is installed.
NEEDS = {"coming-from-flower": "torch", "coming-from-pytorch": "torch"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """(language, code, the match of the text block that holds its output or None)."""
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    for block, after in zip(found, [*found[1:], None], strict=False):
        follows = after is not None and after[1] == "text"
        if follows and text[block.end() : after.start()].strip():
            follows = False
        yield block[1], block[2], after if follows else None


def executed(page):
    """The blocks of a page that are run: python, and commands of ours."""
    return [
        block
        for block in blocks(page)
        if block[0] == "python" or (block[0] == "bash" and block[1].startswith("fedgrad "))
    ]


def missing(page):
    """Does a page need something that is not installed?"""
    return page.stem in NEEDS and importlib.util.find_spec(NEEDS[page.stem]) is None


def run_python(code, name, namespace):
    """What a block prints. Its lines are those of a file that is called like its page."""
    import fedgrad as fg

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, name, "exec"), namespace)
        except fg.FederatedError as error:
            message = f"{type(error).__name__}: {error}"
            print(textwrap.fill(message, 96, break_long_words=False, break_on_hyphens=False))
    return printed.getvalue()


def run_commands(code):
    from fedgrad.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for command in code.splitlines():
            main(command.split()[1:])
    return printed.getvalue()


def run_page(path):
    """Runs in a process of its own: prints a list of what each block printed."""
    namespace = {"__name__": "__main__"}
    name = Path(path).stem.lower().replace("-", "_") + ".py"
    outputs = [
        run_python(code, name, namespace) if language == "python" else run_commands(code)
        for language, code, _ in executed(Path(path))
    ]
    print(json.dumps([tidy(output) for output in outputs]))


def tidy(text):
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def in_new_process(*arguments, folder, script=__file__):
    (folder / "images").mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "src", "experiments/src")),
        "COLUMNS": "110",  # as wide as str(fg.explain(...))
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_outputs(page, outputs):
    """The page's text with these outputs in their places."""
    text = page.read_text(encoding="utf-8")
    pairs = list(zip(executed(page), outputs, strict=True))
    for (_, code, after), output in reversed(pairs):
        if after is not None:
            text = text[: after.start(2)] + output + "\n" + text[after.end(2) :]
        else:
            assert not output, (
                f"{page.name}: this prints, but the page does not show it:\n{code}{output}"
            )
    return text


def alike(found, wanted):
    """The same words in the same order, numbers about the same (of a few, one or two more or less),
    digests any."""
    found, wanted = (
        re.findall(r"\d[\d,]*\.?\d*(?:e-?\d+)?|[^\s\d]+", re.sub(r"\b[0-9a-f]{8,}\b", "digest", x))
        for x in (found, wanted)
    )
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if b[0].isdecimal() and a[0].isdecimal():
            x, y = (float(text.replace(",", "").rstrip(".")) for text in (a, b))
            assert abs(x - y) <= max(0.6 * abs(y), 2), f"{a} instead of {b}"
        else:
            assert a == b


def same_page(found, wanted):
    import jax

    if jax.__version__.startswith(WRITTEN_WITH):
        assert found == wanted
    else:
        alike(found, wanted)


@pytest.mark.parametrize("page", [*filter(executed, PAGES)], ids=lambda page: page.stem)
def test_page(page, tmp_path):
    if missing(page):
        pytest.skip(f"{page.name} needs {NEEDS[page.stem]}: make test-torch")
    outputs = json.loads(in_new_process("--page", page, folder=tmp_path))
    same_page(with_outputs(page, outputs), page.read_text(encoding="utf-8"))
    for drawn in (tmp_path / "images").iterdir():
        same_page(drawn.read_text(), (ROOT / "docs" / "images" / drawn.name).read_text())


def test_alike():
    alike(
        "round 1: 17 operations, 0.0281653, 0123456789abcdef",
        "round 1: 19 operations, 0.0281654, fedcba9876543210",
    )
    for wrong in ("round 1: 40 operations", "round 2x: 19 operations", "round 1: 19"):
        with pytest.raises(AssertionError):
            alike(wrong, "round 1: 19 operations")


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES}


def test_examples(tmp_path):
    printed = in_new_process("--examples", json.dumps(EXAMPLES), folder=tmp_path)
    for name in EXAMPLES:
        assert f"=== {name}" in printed
    assert (tmp_path / "out" / "class_one_reverse.svg").exists()
    assert (tmp_path / "out" / "distillation.svg").exists()


def run_examples(settings):
    import fedgrad as fg

    for name, arguments in settings.items():
        print(f"=== {name}")
        module = importlib.import_module(f"examples.{name}")
        module.main(**arguments)
        # What `fedgrad explain examples.name:program` looks for.
        assert fg.plan(module.program, *module.arguments()).rounds >= 1


def read(page):
    """What a page says; of a notebook, its words."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *NOTEBOOKS], ids=lambda page: page.stem)
def test_links(page):
    text = FENCE.sub("", read(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r'(?:src|href)="([^"]+)"', text
    ):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", read(there), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{page.name} links to {target}"


def test_pictures_are_all_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.name in text


def test_every_public_name_is_documented():
    import fedgrad as fg

    names = [n for n, v in vars(fg).items() if n[0] != "_" and not inspect.ismodule(v)]
    names += [f"executors.{n}" for n in fg.executors.__all__]
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [n for n in names if not re.search(rf"\bfg\.{n}\b", text)]


def update():
    """Write the outputs and the pictures of all pages (or of those named) anew."""
    wanted = [page for page in PAGES if not sys.argv[1:] or page.stem in sys.argv[1:]]
    for page in wanted:
        if missing(page):
            print(f"{page.relative_to(ROOT)}: needs {NEEDS[page.stem]}, not written")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if executed(page):
                outputs = json.loads(in_new_process("--page", page, folder=Path(folder)))
                page.write_text(with_outputs(page, outputs), encoding="utf-8")
            for drawn in (Path(folder) / "images").glob("*"):
                target = ROOT / "docs" / "images" / drawn.name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(drawn.read_bytes())
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        run_page(sys.argv[2])
    elif sys.argv[1:2] == ["--examples"]:
        run_examples(json.loads(sys.argv[2]))
    else:
        update()
