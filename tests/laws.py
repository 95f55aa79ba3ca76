"""Where laws hold: every executor that runs in one process. A new one joins by being added here.

A mesh of several devices and processes is in `mesh_worker.py`, nodes are in `test_federation.py`:
both run every program of `programs.py` in every mode.
"""

import pytest

import fedgrad as fg

EXECUTORS = {
    "reference": fg.executors.reference(),
    "local": fg.executors.local(),
    "chunked": fg.executors.local(chunk=2),
    "mesh": fg.executors.mesh(),
}
every_executor = pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)
