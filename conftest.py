"""Settings of the whole suite: double precision, nothing promoted unseen, quick compilation; and
which cases `make test` leaves to `make test-all` (the mark `full`).

What starts processes or browsers is left out whole; of other laws some cases are, by turns.
"""

import gc
import os
import re
import resource
from pathlib import Path

import jax
import pytest
from hypothesis import settings

import quick  # noqa: F401  (before JAX computes anything)

STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
RELAXED = {
    "dtype": ("jax_numpy_dtype_promotion", "standard"),
    "rank": ("jax_numpy_rank_promotion", "allow"),
}

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)
for name, value in STRICT.items():  # as careful users run it
    jax.config.update(name, value)

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ci")

# JAX makes many objects that live long; looking through all of them, often, costs a tenth.
gc.set_threshold(20_000, 20, 50)

# Long ones start first: at the end no worker is left alone with one.
LONGEST = (
    *("from_torch", "mesh", "docs", "flower", "flower_operating", "every_algorithm", "horizon"),
    *("derivatives",),
    *("federation", "self_tuning", "algorithms", "programs", "federation_faults", "checkpoint"),
    *("flower_torch", "flower_self_tuning", "notebooks"),
)

MOST, MORE = 1.0e9, 0.4e9  # bytes that a worker may keep, and may add before it forgets again
_kept = 0.0  # when it last forgot


def pytest_xdist_auto_num_workers(config):
    """One more than there are cores, because tests of a real federation mostly wait for it; as far
    as memory goes: a worker takes about 2 GB with the processes that it starts, as does the rest.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // 2_000_000_000 - 1))


# Files of which every case is for `make test-all`: they start processes, browsers or notebooks, or
# train whole experiments.
FULL_FILES = (
    *("house/test_notebooks.py", "house/test_release.py", "house/test_site.py"),
    *("federation/test_flower.py", "federation/test_flower_operating.py"),
    *("federation/test_flower_torch.py", "execution/test_mesh.py", "experiments/tests"),
)
QUICK_PAGES = {"README", "programs", "plans", "algorithms"}


def leave_to_full(items):
    """Mark cases as `full`: all of some files and most pages; and where a law has several cases on
    several executors, each case but on `local` and, by turns, on one of the others."""
    from laws import EXECUTORS  # which imports fedgrad: after JAX was set up

    others = [name for name in EXECUTORS if name != "local"]
    laws = {}
    for item in items:
        case = getattr(item, "callspec", None)
        page = item.name.startswith("test_page[") and case.id not in QUICK_PAGES
        if page or any(part in item.path.as_posix() for part in FULL_FILES):
            item.add_marker(pytest.mark.full)
        if case is None or "executor" not in case.params or len(case.params) < 2:
            continue
        parts = case.id.split("-")
        name = next((part for part in parts if part in others), None)
        if name is None:
            continue
        law, cases = laws.setdefault(item.nodeid.partition("[")[0], (len(laws), {}))
        turn = law + cases.setdefault(tuple(p for p in parts if p != name), len(cases))
        if others[turn % len(others)] != name:
            item.add_marker(pytest.mark.full)


def pytest_collection_modifyitems(items):
    leave_to_full(items)

    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_collection_finish():
    gc.freeze()  # modules and tests, which stay


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Whoever is marked `promotes("rank")` lets JAX do it, in all threads: mostly a formula over
    all clients at once, which a result is compared with."""
    asked = {kind for mark in item.iter_markers("promotes") for kind in mark.args}
    for kind in asked:
        jax.config.update(*RELAXED[kind])
    try:
        return (yield)
    finally:
        for kind in asked:
            jax.config.update(RELAXED[kind][0], STRICT[RELAXED[kind][0]])
        forget_what_was_compiled()


def forget_what_was_compiled():
    """Compiled programs end where they are many: a worker would hold gigabytes of them. (Where
    they are few, it is faster to keep JAX's own.)"""
    global _kept
    if _resident() > max(MOST, _kept + MORE):
        jax.clear_caches()
        gc.collect()
        _kept = _resident()


def _resident():
    try:
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    except OSError:  # not on this system: the most that it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
