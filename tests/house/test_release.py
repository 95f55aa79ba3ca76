"""The release: a wheel and an sdist are built and tried in an environment with nothing but what the
wheel asks for. Nothing is downloaded: what is installed already is lent to it.
"""

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from test_docs import blocks

import quick  # noqa: F401  (in the processes that are started here, too)
from where import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = re.search(r'__version__ = "(.*?)"', (ROOT / "src/fedgrad/__init__.py").read_text())[1]
NAME = re.compile(r"[\w.-]+")

# What asks for each extra, and is answered with its name.
WITHOUT = {
    "flower": "fg.executors.flower('127.0.0.1:9')",
    "huggingface": "fg.tasks.task('emnist', data='huggingface')",
    "mlflow": "fg.MLflow()",
    "pandas": "fg.History({'loss': ([1], [2.0])}).to_pandas()",
    "tasks": "fg.tasks.task('digits')",
    "tensorboard": "fg.TensorBoard('runs')(1, None, None)",
    "torch": "fg.from_torch(None, None)",
    "wandb": "fg.WandB('project')",
}
OURS = {"dev", "docs"}  # what is for those who work on fedgrad, and never asked for


def run(*command, folder, **more):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "110"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, **more
    )


def succeed(*command, folder):
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, out, *what):
    """Built by hatchling as pip would build it."""
    pytest.importorskip("hatchling", reason="hatchling builds the release: pip install hatchling")
    succeed(sys.executable, "-m", "hatchling", "build", "-d", out, *what, folder=folder)
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist)"""
    wheel, sdist = sorted(build(ROOT, tmp_path_factory.mktemp("dist")), key=lambda p: p.suffix)[
        ::-1
    ]
    assert (wheel.suffix, sdist.suffixes[-2:]) == (".whl", [".tar", ".gz"])
    return wheel, sdist


def distributions(asked):
    """All that these need, as it is installed here, without anybody's extras."""
    found = {}
    waiting = list(asked)
    while waiting:
        requirement, _, marker = waiting.pop().partition(";")
        name = NAME.match(requirement)[0].lower().replace("_", "-")
        if "extra" in marker or name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            assert marker, f"{name} is not installed"  # for another system or Python
            continue
        waiting += found[name].requires or []
    return found.values()


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """The programs of an environment into which pip has installed the wheel, without extras."""
    folder = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    scheme = "nt" if os.name == "nt" else "posix_prefix"
    packages = Path(sysconfig.get_path("purelib", scheme, {"base": str(folder)}))
    for distribution in distributions(PROJECT["dependencies"]):
        for top in {path.parts[0] for path in distribution.files if path.parts[0] != ".."}:
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    programs = folder / "bin"
    # pip sees what is lent, and would refuse what does not fit.
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install")
    succeed(*pip, "--no-index", "--no-cache-dir", built[0], folder=folder)
    return programs


# --- what is in it --------------------------------------------------------------------------------


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def test_metadata(built):
    found = metadata(built[0])
    assert (found["Name"], found["Version"]) == ("fedgrad", VERSION)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in found.get_payload()
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    known = pytest.importorskip("trove_classifiers", reason="comes with hatchling").classifiers
    assert set(found.get_all("Classifier")) <= known
    least = int(re.search(r"3\.(\d+)", found["Requires-Python"])[1])
    minors = [f"Programming Language :: Python :: 3.{n}" for n in range(least, 14)]
    assert set(minors) <= set(found.get_all("Classifier"))


def files_of(sdist):
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_sdist_has_what_tests_and_documentation_need(built):
    tracked = run("git", "ls-files", folder=ROOT)
    if tracked.returncode:
        pytest.skip("not a checkout of git, which knows what belongs to it")
    folders = r"^(?:src|tests|experiments|docs|examples)/.*"
    files = r"^\w+\.(?:md|cff|toml)$|^Makefile$|^conftest\.py$"
    needed = re.findall(f"{folders}|{files}", tracked.stdout, re.MULTILINE)
    assert len(needed) > 200
    assert not set(needed) - files_of(built[1])


def test_the_wheel_has_the_package_alone_and_can_be_built_from_the_sdist(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    (again,) = build(folder, tmp_path / "dist", "-t", "wheel")
    names = [zipfile.ZipFile(wheel).namelist() for wheel in (built[0], again)]
    assert sorted(names[0]) == sorted(names[1])
    assert {name.partition("/")[0].partition("-")[0] for name in names[0]} == {"fedgrad"}
    assert not [name for name in names[0] if "experiment" in name]
    assert "fedgrad/py.typed" in names[0] and "fedgrad/reports/page.css" in names[0]


# --- in a clean environment -----------------------------------------------------------------------


def test_what_is_installed_is_the_wheel_without_extras(clean, tmp_path):
    code = "import fedgrad; print(fedgrad.__version__, fedgrad.__file__)"
    version, file = succeed(clean / "python", "-W", "error", "-c", code, folder=tmp_path).split()
    assert Path(file).is_relative_to(clean.parent) and version == VERSION
    for absent in ("flwr", "sklearn", "tensorboardX", "pytest", "equinox", "matplotlib"):
        code = f"import {absent}"
        assert "ModuleNotFoundError" in run(clean / "python", "-c", code, folder=tmp_path).stderr


def test_the_first_snippet_of_the_readme(clean, tmp_path):
    code = next(code for kind, code, _ in blocks(ROOT / "README.md") if kind == "python")
    succeed(clean / "python", "-c", code, folder=tmp_path)


def test_tuning_from_a_shell(clean, tmp_path):
    command = "fedgrad tune synthetic --rounds 3 --quiet --out run --task-option clients=12"
    printed = succeed(clean / "fedgrad", *command.split()[1:], folder=tmp_path)
    assert (tmp_path / printed.strip()).read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("extra", sorted({*PROJECT["optional-dependencies"]} - OURS))
def test_a_missing_extra_is_named(clean, tmp_path, extra):
    code = f"import fedgrad as fg\ntry:\n    {WITHOUT[extra]}\nexcept fg.FederatedError as error:\n"
    code += "    print(type(error).__name__, error)"
    said = succeed(clean / "python", "-c", code, folder=tmp_path)
    assert said.startswith("MissingExtra ") and f"pip install 'fedgrad[{extra}]'" in said
