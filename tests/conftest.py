"""Settings of the whole suite: double precision, nothing promoted unseen, quick compilation."""

import jax
import pytest
from hypothesis import settings

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


@pytest.fixture(autouse=True)
def promotion(request):
    """Whoever is marked `promotes("rank")` lets JAX do it, in all threads: mostly a formula over
    all clients at once, which a result is compared with."""
    asked = {kind for mark in request.node.iter_markers("promotes") for kind in mark.args}
    for kind in asked:
        jax.config.update(*RELAXED[kind])
    yield
    for kind in asked:
        jax.config.update(RELAXED[kind][0], STRICT[RELAXED[kind][0]])
