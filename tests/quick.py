"""How JAX compiles in the suite, and in every process that it starts: quickly, and for once.

Imported before JAX starts, which reads the environment only then. What is run is the same program
with less done for its speed.
"""

import os
from importlib.metadata import version

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false"  # a kernel's code is made in half the time
flags = os.environ.get("XLA_FLAGS", "")
if version("jaxlib").startswith("0.10.") and OLD_EMITTERS not in flags:  # later ones have no others
    os.environ["XLA_FLAGS"] = f"{OLD_EMITTERS} {flags}".strip()
