"""Settings of the whole suite: double precision, and quick compilation of tiny programs."""

import gc

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ci")


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled():
    """A file's compiled programs end with it: a worker would hold gigabytes of them."""
    yield
    jax.clear_caches()
    gc.collect()
