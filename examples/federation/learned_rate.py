"""FedAvg that learns its server's learning rate, on three nodes and on this machine: the same.

    python -m examples.federation.learned_rate

starts a SuperLink and three nodes on loopback, trains there and in simulation with the same seeds,
and ends what it started.
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from examples.federation.sites import site

import fedgrad as fg
from fedgrad.federation.operate.local_federation import local_federation

SITES = 3


def loss(params: Any, batch: Any) -> Any:
    """One number per example."""
    return (batch["x"] @ params - batch["y"]) ** 2


def train(population: Any, executor: Any = None, rounds: int = 5, **how: Any) -> fg.Result:
    """The same call for a simulation and for a federation."""
    algorithm = fg.self_tuning(
        fg.fed_avg(loss, fg.local_training(0.05, batch_size=10), server_learning_rate=0.5),
        learn=["server.learning_rate"],
    )
    return fg.fit(
        algorithm if executor is None else algorithm.on(executor),
        population,
        params=jnp.zeros(3, jnp.float32),
        rounds=rounds,
        cohort_size=len(population),
        key=jax.random.key(0),
        **how,
    )


def main() -> None:
    """Train both ways and compare."""
    simulated = train(fg.population([site(i) for i in range(SITES)]))
    with (
        tempfile.TemporaryDirectory() as folder,
        local_federation(folder, "examples.federation.sites:data", SITES) as federation,
    ):
        executor = fg.executors.flower(federation.address, **federation.credentials)
        real = train(executor.population(), executor)
    for name, result in (("simulation", simulated), ("federation", real)):
        rate = result.hyper["server"]["learning_rate"]
        print(f"{name}: server learning rate {float(rate):.6f}, model {result.params}")


if __name__ == "__main__":
    main()
