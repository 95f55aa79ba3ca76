"""Training without hyperparameters: the server optimizer and the rates are chosen during the run.

This is the third recipe. docs/no-tuning.md lists the tasks on which each recipe was designed, and
its results on the others.
"""

from typing import Any

import optax

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import LocalTraining
from fedgrad.algorithms.objective import OF_THE_LOSS, Loss
from fedgrad.algorithms.optimizer import optimizer
from fedgrad.algorithms.settings import titled
from fedgrad.core.errors import known_arguments
from fedgrad.tuning.averaged import averaged
from fedgrad.tuning.cuts import When
from fedgrad.tuning.race import race

# A quarter of all rounds is enough to predict the best candidate. Prodigy needs about twenty rounds
# to find its rate, however long training is.
DECIDED: When = (0.25, 30)
# Prodigy's estimate never decreases; where the loss goes to 0 it grows late and without bound.
KEPT: When = 0.5
RATE = "learning_rate"
FOUND = ("client", "momentum", RATE, f"client_{RATE}", f"server_{RATE}")


@titled
@known_arguments(dict.fromkeys(FOUND, "It is found out: fed_auto needs no rates.") | OF_THE_LOSS)
def fed_auto(
    loss: Loss,
    *,
    batch_size: int = 20,
    epochs: int | None = None,
    steps: int | None = None,
    weighting: str = "examples",
    judge: Loss | None = None,
) -> Algorithm:
    """Federated training without hyperparameters: `fg.fit(fg.fed_auto(loss), clients, ...)`.

    Three servers race for a quarter of all rounds, at least thirty (`fg.race`), judged by examples
    that they do not train on: Prodigy, which estimates its own rate, with high and with low
    momentum, and FedAvgM with small client steps. The best one then goes on alone, and the model is
    an average of its late models (`fg.averaged`). The total traffic is about twice that of a single
    training of as many rounds.

    Args:
        loss: The loss `(params, batch)`, one number per example.
        batch_size: The batch size of local training.
        epochs: Local epochs per round; or give `steps`.
        steps: Local steps per round; or give `epochs`.
        weighting: How client updates are weighted, as for `fed_opt`.
        judge: What decides the race if not the loss: a function `(params, batch)`, lower is better
            (as for `fg.race`).

    Returns:
        An algorithm.

    Example:

        result = fg.fit(fg.fed_auto(loss), clients, params=params, rounds=200, cohort_size=10)
    """

    def family(server: Any) -> Algorithm:
        work = LocalTraining(0.01, batch_size=batch_size, epochs=epochs, steps=steps)
        return averaged(fed_opt(loss, server=server, client=work, weighting=weighting))

    # Prodigy finds the server's rate, so the clients' rate matters little. What remains are kinds
    # of models: models with several layers learn faster with low momentum and larger client steps;
    # where clients differ a lot, small steps without adaptivity end best.
    estimated = {"estim_lr0": 1e-3, "estim_lr_coef": 2.0, "betas": (0.9, 0.999)}
    prodigy = family(optimizer(optax.contrib.prodigy, learning_rate=1.0, **estimated))
    momentum = family(optimizer(optax.sgd, learning_rate=6.0, momentum=0.7))
    candidates = {
        "Prodigy, steady": prodigy,
        "Prodigy, nimble": prodigy.starting({"client.learning_rate": 0.1, "server.betas.0": 0.5}),
        "FedAvgM, gentle": momentum.starting({"client.learning_rate": 10**-2.5}),
    }
    kept = {n: {"server.estim_lr_coef": 0.0} for n in candidates if n.startswith("Prodigy")}
    return race(candidates, {DECIDED: 1}, changes={KEPT: kept}, judge=judge)
