"""Training that needs no hyperparameter: which server, and which rates, is found out on the way.

A first recipe was chosen on two tasks (digits and Synthetic(1, 1), with their features scaled by
0.02, 1 and 50, and with few examples), frozen, and then tested on others. This is the second one,
which has seen those: docs/no-tuning.md has both.
"""

from collections.abc import Mapping

import optax

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.averaged import averaged
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import LocalTraining
from fedgrad.algorithms.objective import Loss
from fedgrad.algorithms.optimizer import optimizer
from fedgrad.algorithms.race import When, race
from fedgrad.algorithms.settings import titled
from fedgrad.core.errors import known_arguments

# Rates of the clients that race, by the family of the server. Prodigy finds the server's rate, so
# that of its clients matters little, unless features are very large or very small.
PRODIGY = {"1e-2": 1e-2, "1": 1.0}
MOMENTUM = {"1e-3": 1e-3, "3e-3": 10**-2.5, "1e-2": 1e-2, "3e-2": 10**-1.5, "1e-1": 1e-1}
# After a twentieth of all rounds the best rates of FedAvgM are known well enough, after a quarter
# who ends best. Prodigy starts slowly, so both stay until then.
CUTS: dict[When, int | Mapping[str, int]] = {
    (0.05, 10): {"Prodigy": 2, "FedAvgM": 2},
    (0.25, 20): 1,
}
# Prodigy's estimate only grows, and without end where the loss goes to 0: then it is kept. It takes
# some twenty rounds to grow to what it should be, however long training is.
SETTLED = (0.125, 25)


@titled
@known_arguments(
    {
        name: "It is found out: fed_auto needs no rates."
        for name in ("client", "client_learning_rate", "server_learning_rate", "momentum")
    }
)
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

    Servers with Prodigy (which estimates its own rate) and with momentum, each with clients of
    several rates, race for a quarter of all rounds (`fg.race`), judged by examples that they do not
    train on. Then the best goes on alone; the model is an average of its late ones
    (`fg.averaged`). It sends about two and a half times the bytes of one training of as many
    rounds.

    What clients do in a round is yours to choose: `batch_size`, `epochs` or `steps`; `weighting`
    as for `fed_opt`. If what you care about is not the loss, say so: `judge`, a function `(params,
    batch)` of which less is better, decides the race (as for `fg.race`).
    """

    def family(server: object) -> Algorithm:
        work = LocalTraining(0.01, batch_size=batch_size, epochs=epochs, steps=steps)
        return averaged(fed_opt(loss, server=server, client=work, weighting=weighting))

    prodigy = family(
        optimizer(optax.contrib.prodigy, learning_rate=1.0, estim_lr0=1e-3, estim_lr_coef=2.0)
    )
    momentum = family(optimizer(optax.sgd, learning_rate=6.0, momentum=0.7))
    candidates = {
        f"{name}, clients {words}": one.starting({"client.learning_rate": rate})
        for name, one, rates in (("Prodigy", prodigy, PRODIGY), ("FedAvgM", momentum, MOMENTUM))
        for words, rate in rates.items()
    }
    settled = {n: {"server.estim_lr_coef": 0.0} for n in candidates if n.startswith("Prodigy")}
    return race(candidates, CUTS, changes={SETTLED: settled}, judge=judge)
