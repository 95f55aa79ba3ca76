"""Settings of the whole suite: double precision, and quick compilation of tiny programs."""

import jax
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ci")
