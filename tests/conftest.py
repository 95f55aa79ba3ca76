"""Settings of the whole suite: double precision, nothing promoted unseen, quick compilation."""

import gc
import math
import re
from pathlib import Path

import jax
import pytest
from hypothesis import settings

STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
RELAXED = {
    "dtype": ("jax_numpy_dtype_promotion", "standard"),
    "rank": ("jax_numpy_rank_promotion", "allow"),
}
# Files that nobody has looked at yet with nothing promoted.
NOT_YET = {
    *("algorithms", "cli", "derivatives", "docs", "every_algorithm", "executors", "experiments"),
    *("federation", "federation_faults", "federation_policy", "federation_present"),
    *("federation_sources", "federation_state", "flower", "flower_operating", "mesh", "report"),
    *("against_drjax", "convolutions", "jax_layout", "random_programs", "never_silent"),
}

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)
for name, value in STRICT.items():  # as careful users run it
    jax.config.update(name, value)

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ci")

MOST = 1.2e9  # bytes that a worker may keep from one file to the next


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Whoever is marked `promotes("rank")` lets JAX do it, in all threads: mostly a formula over
    all clients at once, which a result is compared with."""
    asked = {kind for mark in item.iter_markers("promotes") for kind in mark.args}
    if item.path.stem.removeprefix("test_") in NOT_YET:
        asked = set(RELAXED)
    for kind in asked:
        jax.config.update(*RELAXED[kind])
    try:
        return (yield)
    finally:
        for kind in asked:
            jax.config.update(RELAXED[kind][0], STRICT[RELAXED[kind][0]])


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled():
    """A file's compiled programs end with it where they are many: a worker would hold gigabytes of
    them. (Where they are few, it is faster to keep JAX's own.)"""
    yield
    gc.collect()
    if _resident() > MOST:
        jax.clear_caches()
        gc.collect()


def _resident():
    try:
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    except OSError:  # not on this system: better forget than run out
        return math.inf
