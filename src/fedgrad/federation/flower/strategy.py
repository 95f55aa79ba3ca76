"""A Flower strategy around any other, whose hyperparameters follow their hypergradients."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optax

from fedgrad.core.errors import ArgumentError, needs
from fedgrad.core.loss_limit import ran_away
from fedgrad.federation.flower import finite_differences
from fedgrad.federation.flower.coordinates import Bounds
from fedgrad.federation.flower.derivatives import ASKED, Arrays, Told, finite, inner, numpy, told
from fedgrad.federation.flower.learn_arguments import asked, attribute, setting
from fedgrad.federation.flower.learned_numbers import Learned
from fedgrad.federation.protocol.federation_errors import FederationError

with needs("A Flower app that tunes itself", "flower"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvgM, Result, Strategy

_LOG = logging.getLogger("flwr")
_SEEN = 2  # rounds after which what has had no effect will have none: momentum needs the second

Names = Iterable[str] | Mapping[str, Bounds]
Made = tuple[ArrayRecord | None, MetricRecord | None]


class SelfTuning(Strategy):
    """`SelfTuning(FedAvgM(...), server=("server_learning_rate",), client=("lr",))`: the strategy,
    with some of its attributes and of its clients' settings following their hypergradients.

    `server`: names of attributes of the strategy. `client`: names in the `train_config` that
    `start` gets, from where they take their first values; clients receive the learned ones there,
    and reply with the derivatives that `torch_sgd` finds (or `derivatives`, without PyTorch). Both
    may say within which bounds: `client={"lr": (1e-4, 1.0)}`. A rate moves by factors; what has a
    lower bound of 0 moves between its bounds, as momentum does without being asked.

    The clients of the next round tell the gradient of their loss at the new model. Its inner
    product with the derivative of that model by a hyperparameter is the hypergradient. What the
    strategy does need not be known for that: copies of it aggregate the same replies with the
    number nudged. `optimizer`: of the numbers' coordinates, an optax optimizer.

    `guard`: a round after which the model is not finite, or its loss not finite or above the first
    one (that is not 0) by more than so many times its size, is undone and the learned numbers are
    halved. None only undoes what is not finite. The metrics of each round have the numbers it used,
    as "hyper.lr", and how often something was undone so far, as "fedgrad.rejected".
    """

    def __init__(
        self,
        strategy: Strategy,
        server: Names = (),
        client: Names = (),
        optimizer: optax.GradientTransformation | None = None,
        guard: float | None = 10.0,
    ) -> None:
        _require_strategy(strategy)
        self.strategy = strategy
        self.guard = math.inf if guard is None else guard
        self._server, self._client = asked(server, "server"), asked(client, "client")
        if not {**self._server, **self._client}:
            raise ArgumentError.here(
                "SelfTuning learns nothing. Say what: server=('server_learning_rate',) for an "
                "attribute of the strategy, client=('lr',) for a setting of train_config."
            )
        if both := [*{*self._server} & {*self._client}]:
            raise ArgumentError.here(f"{both[0]!r} is in server= and in client=: one of them.")
        learned = Learned(optax.adam(0.1) if optimizer is None else optimizer)
        for name, bounds in self._server.items():
            where = f"{_kind(strategy)}.{name}"
            learned = learned.begin(name, attribute(strategy, name), bounds, where)
        if isinstance(strategy, FedAvgM) and self._server:
            strategy.server_opt = True  # else it is a plain mean, whatever is learned
        finite_differences.copied(strategy)
        self._learned, self._rejected = learned, 0
        self._forget()

    @property
    def hyper(self) -> dict[str, float]:
        """The learned numbers as they are now, by name."""
        return dict(self._learned.values)

    def _forget(self) -> None:
        """Nothing is known of the model that is broadcast next."""
        self._sensitivity: dict[str, Arrays] = {}  # of that model, by each coordinate
        self._before: tuple[Any, ArrayRecord] | None = None  # to go back to: strategy and model
        self._first: float | None = None
        self._used: dict[str, float] = {}
        self._effective: set[str] = set()
        self._rounds = 0

    # --- what Flower calls ----------------------------------------------------------------------

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Train: the loop of the strategy's own `start`, with the arguments that it takes."""
        self._forget()
        own = ("configure_train", "aggregate_train", "summary")
        kind: Any = type(
            f"SelfTuning({_kind(self.strategy)})",
            (type(self.strategy),),
            {name: _forwarded(getattr(self, name)) for name in own},
        )
        loop = object.__new__(kind)
        loop.__dict__ = vars(self.strategy)  # one set of attributes, whoever changes them
        result: Result = loop.start(*args, **kwargs)
        return result

    def summary(self) -> None:
        """Log what is learned, and the strategy's own summary."""
        _LOG.info("\t├──> Self-tuning: %s", ", ".join([*self._server, *self._client]))
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages; their config has the learned numbers of the clients."""
        for name, bounds in self._client.items():
            if name not in self._learned.values:
                value, where = setting(config, name), f"train_config[{name!r}]"
                self._learned = self._learned.begin(name, value, bounds, where)
            config[name] = self._used[name] = self._learned.values[name]
        config[ASKED] = [*self._client]
        self._broadcast = arrays
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Made:
        """Learn from the replies, and aggregate them as the strategy does with what is learned."""
        replies = list(replies)
        found = told(replies, self._client)
        if found is None:
            return self.strategy.aggregate_train(server_round, replies)
        if self._ran_away(found.loss):
            back = self._gone_back(f"The loss of the model is {found.loss:g}")
            return back, self._metrics(found)
        gradient = self._learn(found)
        sensitivity = self._derivatives(server_round, replies, found)
        before = finite_differences.copied(self.strategy), self._broadcast
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays is None:
            return arrays, metrics
        self._before, self._sensitivity = before, sensitivity
        if finite(numpy(arrays, found.gradient).values()):
            self._require_effect(arrays, found)
        else:
            arrays = self._gone_back("The new model is not finite")
        return arrays, self._metrics(found, metrics, gradient)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the strategy does."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    # --- a step ---------------------------------------------------------------------------------

    def _learn(self, found: Told) -> dict[str, float]:
        """Move the learned numbers; their hypergradient, by coordinates, as far as it is known."""
        known = self._sensitivity.items()
        gradient = {name: inner(found.gradient, direction) for name, direction in known}
        if all(map(math.isfinite, gradient.values())):
            self._learned = self._learned.stepped(gradient) if gradient else self._learned
        else:
            self._reject("A hypergradient is not finite: that step is left out")
        self._hand_over()
        self._used |= {name: self._learned.values[name] for name in self._server}
        return gradient

    def _hand_over(self) -> None:
        for name in self._server:
            setattr(self.strategy, name, self._learned.values[name])

    def _derivatives(
        self, server_round: int, replies: Sequence[Message], found: Told
    ) -> dict[str, Arrays]:
        """The derivative of the model that is made now, by each coordinate; one after the other,
        so that few models are in memory."""
        arrays, kind = list(found.gradient), finite_differences.precision(replies)
        known = {}
        for name, coordinate in self._learned.coordinates.items():
            made = finite_differences.Nudged(self.strategy, server_round, replies)
            if name in self._server:
                nudged = made.by_attribute(name, partial(self._learned.nudged, name))
            else:
                slope = coordinate.slope(self._used[name])
                nudged = made.by_tangents(found.tangents[name], slope)
            result = finite_differences.derivative(nudged, arrays, kind)
            if result is not None and finite(result.values()):
                known[name] = result
        return known

    # --- what must not happen -------------------------------------------------------------------

    def _ran_away(self, loss: float) -> bool:
        if not self._first:  # one of 0 says nothing about others
            if self._first is None and not math.isfinite(loss):
                raise FederationError.here(
                    f"The loss of the first model is {loss}, so there is nothing to learn from."
                )
            self._first = loss
        return self._before is not None and bool(ran_away(loss, self._first, self.guard))

    def _gone_back(self, why: str) -> ArrayRecord:
        """The model before the last round, with its strategy. The same numbers would lead there
        again, so they are halved."""
        assert self._before is not None
        strategy, arrays = self._before
        vars(self.strategy).clear()
        vars(self.strategy).update(vars(strategy))
        self._learned = self._learned.halved()
        self._hand_over()
        self._before, self._sensitivity = None, {}
        self._reject(f"{why}: the round is undone, and training goes on with {self.hyper}")
        return arrays

    def _reject(self, why: str) -> None:
        self._rejected += 1
        _LOG.warning("self-tuning: %s.", why)

    def _require_effect(self, arrays: ArrayRecord, found: Told) -> None:
        """Raise where something is learned in vain: the model moves, whatever its number is."""
        known = self._sensitivity
        self._effective |= {
            n for n, direction in known.items() if any(map(np.any, direction.values()))
        }
        new, old = (numpy(record, found.gradient) for record in (arrays, self._broadcast))
        self._rounds += any(np.any(new[name] != old[name]) for name in new)
        vain = sorted({*known} - self._effective)
        if self._rounds < _SEEN or not vain:
            return
        if vain[0] in self._client:
            raise FederationError.here(
                f"The tangents by {vain[0]!r} of all clients are zero: they do not train with it."
            )
        raise ArgumentError.here(
            f"{_kind(self.strategy)} does not use {vain[0]!r} where it aggregates: its models are "
            "the same whatever that is. Leave it out of server=."
        )

    def _metrics(
        self, found: Told, metrics: MetricRecord | None = None, gradient: Mapping[str, float] = {}
    ) -> MetricRecord:
        """Those of the strategy and ours: what this round used, and found."""
        ours = {f"hyper.{name}": value for name, value in self._used.items()}
        ours |= {f"hypergradient.{name}": value for name, value in gradient.items()}
        ours |= {"fedgrad.loss": found.loss, "fedgrad.rejected": self._rejected}
        return MetricRecord({**(metrics or {}), **ours})


def _forwarded(method: Any) -> Any:
    return lambda _, *args, **kwargs: method(*args, **kwargs)


def _kind(strategy: Any) -> str:
    return type(strategy).__name__


def _require_strategy(strategy: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise ArgumentError.here(
            f"SelfTuning takes a strategy of flwr.serverapp.strategy, such as FedAvgM(...), got "
            f"{strategy!r}."
        )
    if any(kind.__name__.startswith("DifferentialPrivacy") for kind in type(strategy).__mro__):
        raise ArgumentError.here(
            f"{_kind(strategy)} protects the models that clients send. Their gradients would go "
            "beside them unprotected, and its guarantee would not hold. Tune first, on data that "
            "may be seen."
        )
