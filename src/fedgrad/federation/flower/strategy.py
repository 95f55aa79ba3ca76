"""A Flower strategy that wraps any other and learns its hyperparameters by hypergradients."""

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
_SEEN = 2  # rounds without effect after which there will be none: momentum needs the second

Names = Iterable[str] | Mapping[str, Bounds]
Made = tuple[ArrayRecord | None, MetricRecord | None]


class SelfTuning(Strategy):
    """A strategy that wraps another and learns attributes and client settings by hypergradients.

    The clients of the next round report the gradient of their loss at the new model. Its inner
    product with the derivative of that model with respect to a hyperparameter is the hypergradient.
    The strategy may be any: copies of it aggregate the same replies with the hyperparameter
    perturbed (central differences).

    The metrics of each round contain the values it used, such as "hyper.lr", and the number of
    rejected steps and rounds so far, "fedgrad.rejected".

    Args:
        strategy: The strategy to wrap.
        server: Names of attributes of the strategy to learn, or a dict from names to bounds.
        client: Names in the `train_config` given to `start`, which holds their initial values, or
            a dict from names to bounds such as `{"lr": (1e-4, 1.0)}`. Clients receive the learned
            values there and reply with the derivatives that `torch_sgd` computes (or
            `derivatives`, without PyTorch). A rate moves by factors; a number with a lower bound
            of 0 moves between its bounds, which is the default for momentum.
        optimizer: The optax optimizer of the coordinates; `optax.adam(0.1)` by default.
        guard: Undo a round and halve the learned values if the new model or its loss is not
            finite, or if the loss exceeds the first nonzero loss by more than `guard` times its
            size. None undoes only rounds that are not finite.

    Raises:
        ArgumentError: If nothing is learned, a value cannot be learned, or the strategy cannot be
            copied or adds differential privacy.

    Example:
        strategy = SelfTuning(FedAvgM(...), server=("server_learning_rate",), client=("lr",))
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
            strategy.server_opt = True  # otherwise it ignores them and takes a plain mean
        finite_differences.copied(strategy)
        self._learned, self._rejected = learned, 0
        self._forget()

    @property
    def hyper(self) -> dict[str, float]:
        """The current learned values, by name."""
        return dict(self._learned.values)

    def _forget(self) -> None:
        """Reset: nothing is known about the next model to broadcast."""
        self._sensitivity: dict[str, Arrays] = {}  # derivative of that model by each coordinate
        self._before: tuple[Any, ArrayRecord] | None = None  # strategy and model to roll back to
        self._first: float | None = None
        self._used: dict[str, float] = {}
        self._effective: set[str] = set()
        self._rounds = 0

    # --- called by Flower -----------------------------------------------------------------------

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Train with the loop of the strategy's own `start`, which defines the arguments."""
        self._forget()
        own = ("configure_train", "aggregate_train", "summary")
        kind: Any = type(
            f"SelfTuning({_kind(self.strategy)})",
            (type(self.strategy),),
            {name: _forwarded(getattr(self, name)) for name in own},
        )
        loop = object.__new__(kind)
        loop.__dict__ = vars(self.strategy)  # shared, so that both see every change
        result: Result = loop.start(*args, **kwargs)
        return result

    def summary(self) -> None:
        """Log what is learned, and the strategy's own summary."""
        _LOG.info("\t├──> Self-tuning: %s", ", ".join([*self._server, *self._client]))
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the strategy's messages, with the clients' learned values in their config."""
        for name, bounds in self._client.items():
            if name not in self._learned.values:
                value, where = setting(config, name), f"train_config[{name!r}]"
                self._learned = self._learned.begin(name, value, bounds, where)
            config[name] = self._used[name] = self._learned.values[name]
        config[ASKED] = [*self._client]
        self._broadcast = arrays
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Made:
        """Learn from the replies, then aggregate them with the strategy and the learned values."""
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
        """Delegate to the strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate to the strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    # --- one step of learning -------------------------------------------------------------------

    def _learn(self, found: Told) -> dict[str, float]:
        """Update the learned values; return their known hypergradients, by coordinates."""
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
        """Return the derivative of the new model by each coordinate. They are computed one after
        the other, so that few models are in memory."""
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

    # --- guards ---------------------------------------------------------------------------------

    def _ran_away(self, loss: float) -> bool:
        if not self._first:  # a loss of 0 gives no scale for others
            if self._first is None and not math.isfinite(loss):
                raise FederationError.here(
                    f"The loss of the first model is {loss}, so there is nothing to learn from."
                )
            self._first = loss
        return self._before is not None and bool(ran_away(loss, self._first, self.guard))

    def _gone_back(self, why: str) -> ArrayRecord:
        """Roll back to the model and strategy before the last round. The same values would lead
        there again, so they are halved."""
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
        """Raise if a learned value has no effect: the model moves, but not with that value."""
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
        """Return the strategy's metrics plus the values and hypergradients of this round."""
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
