"""Settings of the whole suite: double precision, and quick compilation of tiny programs."""

import gc
import math
import re
from pathlib import Path

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ci")


MOST = 1.2e9  # bytes that a worker may keep from one file to the next


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
