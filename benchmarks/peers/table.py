"""Who competes on what. A new competitor joins by a row here and a module beside this file."""

from __future__ import annotations

from typing import Any

from interleave import Competitor

# competitor: (peer module, environment, options of its build)
Row = tuple[str, str, dict[str, Any]]
FED_AVGM = {"devices": 2, "algorithm": "fed_avgm"}
TUNED = {"devices": 2, "tuned": True}
# On a current JAX the pmap backend is beyond a shim: `jax.device_put_replicated` is gone too.
PMAP = {"backend": "pmap", "devices": 2}
# Of the paper's tasks: in a loop, XLA's convolutions are best avoided by hand.
TASK: dict[str, Row] = {
    "fedgrad": ("task_with_fedgrad", "project", {}),
    "fedgrad, 2 devices": ("task_with_fedgrad", "project", {"devices": 2}),
    "jax loop": ("plain_task", "project", {"variant": "loop"}),
    "jax scan": ("plain_task", "project", {"variant": "scan", "conv": "im2col"}),
    "jax vmap": ("plain_task", "project", {"variant": "vmap", "conv": "im2col"}),
    "jax dealt, 2 devices": ("plain_task", "project", {"variant": "dealt", "conv": "im2col"}),
}
IN_PYTORCH: dict[str, Row] = {
    "pfl, 2 threads": ("with_pfl", "pfl", {"threads": 2}),
    "pfl, 2 processes": ("with_pfl", "pfl", {"processes": 2}),
}
ROWS: dict[str, dict[str, Row]] = {
    "emnist": TASK | IN_PYTORCH,
    "cifar100": TASK,
    "shakespeare": TASK | IN_PYTORCH,
    "stackoverflow_words": TASK,
    "stackoverflow_tags": TASK,
    "logistic": {
        "fedgrad": ("with_fedgrad", "project", {}),
        "fedgrad, 2 devices": ("with_fedgrad", "project", {"devices": 2}),
        "fedgrad, 2 devices, tuned": ("with_fedgrad", "project", {"devices": 2, "tuned": True}),
        "drjax": ("with_drjax", "drjax", {}),
        "drjax, 2 devices": ("with_drjax", "drjax", {"devices": 2}),
        "drjax, 2 devices, tuned": ("with_drjax", "drjax", {"devices": 2, "tuned": True}),
        "jax vmap of scan": ("plain_logistic", "project", {"variant": "scan"}),
        "jax vmap of fori_loop": ("plain_logistic", "project", {"variant": "fori"}),
        "jax vmap, unrolled": ("plain_logistic", "project", {"variant": "unrolled"}),
        "jax dealt, 2 devices": ("plain_logistic", "project", {"variant": "dealt"}),
        "jax best": ("plain_logistic", "project", {"variant": "best"}),
    },
    "ragged": {
        "fedgrad": ("with_fedgrad", "project", {}),
        "fedgrad, 2 devices": ("with_fedgrad", "project", {"devices": 2}),
        "fedgrad, 2 devices, tuned": ("with_fedgrad", "project", {"devices": 2, "tuned": True}),
        "fedgrad fit": ("with_fit", "project", {}),
        "fedgrad fit, 2 devices": ("with_fit", "project", {"devices": 2}),
        "fedgrad fit, 2 devices, tuned": ("with_fit", "project", TUNED),
        "fedgrad fit, FedAvgM, 2 devices": ("with_fit", "project", FED_AVGM),
        "pfl": ("with_pfl", "pfl", {}),
        "pfl, 2 processes": ("with_pfl", "pfl", {"processes": 2}),
        "fedjax pmap, jax 0.4.25": ("with_fedjax", "fedjax_old", PMAP),
        "fedjax jit": ("with_fedjax", "fedjax", {}),
        "fedjax jit, jax 0.4.25": ("with_fedjax", "fedjax_old", {}),
        "drjax padded": ("with_drjax", "drjax", {}),
        "drjax padded, 2 devices": ("with_drjax", "drjax", {"devices": 2}),
        "drjax padded, tuned": ("with_drjax", "drjax", {"tuned": True}),
        "drjax padded, 2 devices, tuned": ("with_drjax", "drjax", {"devices": 2, "tuned": True}),
        "jax loop": ("plain_ragged", "project", {"variant": "loop"}),
        "jax padded": ("plain_ragged", "project", {"variant": "padded"}),
        "jax sequential": ("plain_ragged", "project", {"variant": "sequential"}),
        "jax blocks of 10": ("plain_ragged", "project", {"variant": "blocks"}),
        "jax shard_map": ("plain_ragged", "project", {"variant": "shard_map"}),
        "jax dealt, 2 devices": ("plain_ragged", "project", {"variant": "dealt"}),
        "jax best": ("plain_ragged", "project", {"variant": "best"}),
    },
    "cnn": {
        "fedgrad": ("with_fedgrad", "project", {}),
        "fedgrad, 2 devices": ("with_fedgrad", "project", {"devices": 2}),
        "fedgrad, 2 devices, tuned": ("with_fedgrad", "project", {"devices": 2, "model": "tuned"}),
        "fedgrad fit": ("with_fit", "project", {}),
        "fedgrad fit, 2 devices": ("with_fit", "project", {"devices": 2}),
        "fedgrad fit, 2 devices, tuned": ("with_fit", "project", TUNED),
        "fedgrad fit, FedAvgM, 2 devices": ("with_fit", "project", FED_AVGM),
        "pfl": ("with_pfl", "pfl", {}),
        "pfl, 2 threads": ("with_pfl", "pfl", {"threads": 2}),
        "pfl, 2 processes": ("with_pfl", "pfl", {"processes": 2}),
        "fedjax jit": ("with_fedjax", "fedjax", {}),
        "fedjax jit, jax 0.4.25": ("with_fedjax", "fedjax_old", {}),
        "fedjax jit, tuned": ("with_fedjax", "fedjax", {"model": "tuned"}),
        "fedjax pmap, jax 0.4.25": ("with_fedjax", "fedjax_old", PMAP),
        "fedjax pmap, tuned": ("with_fedjax", "fedjax_old", {**PMAP, "model": "tuned"}),
        "jax loop": ("plain_cnn", "project", {"variant": "loop"}),
        "jax vmapped": ("plain_cnn", "project", {"variant": "vmapped"}),
        "jax dealt, 2 devices": ("plain_cnn", "project", {"variant": "dealt"}),
        "jax best": ("plain_cnn", "project", {"variant": "best"}),
    },
}
WORKLOADS = tuple(ROWS)
TASKS = tuple(name for name, rows in ROWS.items() if TASK.keys() <= rows.keys())


def competitors(workload: str, **size: Any) -> list[Competitor]:
    """All competitors of a workload at the given size."""
    if workload in ("logistic", *TASKS):
        size = {"clients": 50, **size}
    return [
        Competitor(
            name,
            peer,
            workload,
            venv,
            {**size, **options},
            own_noise=(workload, venv) == ("emnist", "pfl") and size.get("dropout", True),
        )
        for name, (peer, venv, options) in ROWS[workload].items()
    ]
