"""Training that needs no hyperparameter: which server, and which rates, is found out on the way.

This is the third recipe. docs/no-tuning.md says which tasks each of them had seen when it was
chosen, and how it did on those that it had not.
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

# After a quarter of all rounds it shows who ends best. Prodigy takes some twenty rounds to find its
# rate, however long training is.
DECIDED: When = (0.25, 30)
# Its estimate only grows, and where the loss goes to 0 it does so late, and without end.
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
    """Federated training without a hyperparameter: `fg.fit(fg.fed_auto(loss), clients, ...)`.

    Three servers race for a quarter of all rounds, at least thirty (`fg.race`), judged by examples
    that they do not train on: Prodigy, which estimates its own rate, with much and with little
    momentum, and FedAvgM with clients that take small steps. Then the best goes on alone; the model
    is an average of its late ones (`fg.averaged`). It sends about twice the bytes of one training
    of as many rounds.

    What clients do in a round is yours to choose: `batch_size`, `epochs` or `steps`; `weighting`
    as for `fed_opt`. If what you care about is not the loss, say so: `judge`, a function `(params,
    batch)` of which less is better, decides the race (as for `fg.race`).
    """

    def family(server: Any) -> Algorithm:
        work = LocalTraining(0.01, batch_size=batch_size, epochs=epochs, steps=steps)
        return averaged(fed_opt(loss, server=server, client=work, weighting=weighting))

    # Prodigy finds the server's rate, so that of its clients matters little. What is left are
    # kinds of models: with little momentum and larger steps of clients those learn faster that
    # have layers; where clients differ much, small steps and no adaptivity end best.
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
