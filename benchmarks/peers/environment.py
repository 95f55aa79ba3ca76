"""One virtual environment per group of peers: they cannot share one, their pins exclude each other.

python benchmarks/peers/environment.py            # make all of them, say which were skipped
python benchmarks/peers/environment.py pfl        # or only some
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
VENVS = BENCHMARKS / ".venvs"

PROJECT = "project"  # the environment fedgrad itself is developed in; never created here

JAX = ("jax==0.10.2", "jaxlib==0.10.2", "numpy==2.4.6", "scipy==1.17.1", "ml_dtypes==0.6.0")
PINS: dict[str, tuple[str, ...]] = {
    "drjax": ("drjax==0.2.1", *JAX),
    # The latest FedJAX predates the removal of `jax.tree_map`; with_fedjax.py puts it back.
    "fedjax": ("fedjax==0.0.17", "dm-haiku==0.0.17", "optax==0.2.8", *JAX),
    # A JAX of FedJAX's own time, on which it needs no shim and is faster.
    "fedjax_old": (
        "fedjax==0.0.17",
        "jax==0.4.25",
        "jaxlib==0.4.25",
        "dm-haiku==0.0.12",
        "optax==0.2.2",
        "chex==0.1.86",
        "numpy==1.26.4",
        "scipy==1.12.0",
        "ml_dtypes==0.3.2",
    ),
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1"),
}


class PeerUnavailable(Exception):
    """A peer's environment cannot be made here; the message says why."""


def python_of(name: str) -> Path:
    """The interpreter of environment `name`, which is created on first use."""
    if name == PROJECT:
        return _project_python()
    if name not in PINS:
        known = ", ".join((PROJECT, *PINS))
        raise PeerUnavailable(f'no environment is called "{name}"; there are: {known}')
    folder = VENVS / name
    marker = (
        folder / "pins"
    )  # written last, so that a broken install is never taken for a whole one
    digest = hashlib.sha256("\n".join(PINS[name]).encode()).hexdigest()
    if not marker.exists() or marker.read_text() != digest:
        _create(name, folder)
        marker.write_text(digest)
    return folder / "bin" / "python"


def _project_python() -> Path:
    local = BENCHMARKS.parent / ".venv" / "bin" / "python"
    return local if local.exists() else Path(sys.executable)


def _create(name: str, folder: Path) -> None:
    print(f"[environment] creating {name}: {' '.join(PINS[name])}", file=sys.stderr, flush=True)
    VENVS.mkdir(exist_ok=True)
    (VENVS / ".gitignore").write_text("*\n")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PINS[name]]
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(pip, capture_output=True, text=True, env=quiet)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerUnavailable("; ".join(errors) or done.stderr.strip()[-500:])


def main(names: list[str]) -> None:
    """Make the named environments (all of them by default)."""
    for name in names or list(PINS):
        try:
            print(f"[environment] {name}: {python_of(name)}", flush=True)
        except PeerUnavailable as error:
            print(f"[environment] {name}: SKIPPED, {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
