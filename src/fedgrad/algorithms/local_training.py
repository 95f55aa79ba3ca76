"""Local training: the steps of a client's own optimizer on its own examples."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms.amount import Amount, how_much, most, require_bounded
from fedgrad.algorithms.objective import Loss, batch_loss, client_loss, takes_key
from fedgrad.algorithms.optimizer import (
    Optimizer,
    apply,
    as_optimizer,
    is_number,
    optimizer,
    start_of,
    widened,
)
from fedgrad.clients.examples import Examples
from fedgrad.core.errors import ArgumentError, known_arguments, known_fields, require_whole
from fedgrad.core.primitives import accumulator, promoting
from fedgrad.core.signature import asks_for
from fedgrad.core.types import Batch, Hyper, Key, Params

# (params, model of the server, batch, mask, hyper, key) -> (loss, gradient)
Gradient = Callable[[Any, Any, Any, jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]
# (model of the server, examples, hyper, key) -> (the update start - end, the loss)
Training = Callable[[Any, Examples, Any, jax.Array], tuple[Any, jax.Array]]


def plain_gradient(loss: Loss) -> Gradient:
    """Return the gradient of the mean loss of a batch."""

    def gradient(
        params: Params, start: Params, batch: Batch, mask: jax.Array, hyper: Hyper, key: Key | None
    ) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda p: batch_loss(loss, p, batch, mask, key))(params)

    return gradient


def plus(correction: Callable[[Params, Params, Hyper], Any]) -> Callable[[Loss], Gradient]:
    """Return the gradient of a batch plus a correction: a function of the model, of the model at
    the start of the round, and of the hyperparameters."""

    def corrected(loss: Loss) -> Gradient:
        plain = plain_gradient(loss)

        def gradient(
            params: Params, start: Params, batch: Batch, mask: jax.Array, hyper: Hyper, key: Any
        ) -> tuple[jax.Array, Any]:
            value, slope = plain(params, start, batch, mask, hyper, key)
            with promoting():
                more = correction(params, start, hyper)
                return value, jax.tree.map(lambda g, c: (g + c).astype(g.dtype), slope, more)

        return gradient

    return corrected


@known_fields
@dataclass(frozen=True, repr=False)
class LocalTraining:
    """The work of a client in a round, for `client=` of `fg.fed_opt` and its family.

    Attributes:
        optimizer: A learning rate of SGD (a number, one for each layer, or a schedule), an
            `fg.optimizer(optax.adam, learning_rate=0.1)`, whose floats are hyperparameters, or a
            plain optax optimizer. It starts anew in every round.
        batch_size: The batch size.
        epochs: Passes over a client's examples, by default 1; may be a schedule, a function of the
            round number.
        steps: The number of steps instead of `epochs`; may be a schedule.
        shuffle: Whether to shuffle the examples, by the round's key.
        gradient: A function from a loss to the gradient that steps follow instead of the batch's.

    Example:

        fg.fed_avg(loss, fg.local_training(0.1, batch_size=10, epochs=2))
    """

    optimizer: Any = 0.1
    _: KW_ONLY
    batch_size: int = 20
    epochs: Amount | None = None
    steps: Amount | None = None
    shuffle: bool = True
    gradient: Callable[[Loss], Gradient] = plain_gradient

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ArgumentError.here(
                f"epochs={self.epochs} and steps={self.steps}: give one of them, a client does "
                "either."
            )
        require_whole("batch_size", self.batch_size)
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None and name not in self.hyper:
                require_whole(name, getattr(self, name))
        object.__setattr__(self, "optimizer", _of_clients(self.optimizer))

    def __repr__(self) -> str:
        said = {"batch_size": self.batch_size, **self._amount}
        said |= {} if self.shuffle else {"shuffle": False}
        words = [f"{n}={'a schedule' if callable(v) else v}" for n, v in said.items()]
        return f"LocalTraining({', '.join([str(self.optimizer), *words])})"

    @property
    def hyper(self) -> dict[str, Any]:
        """The amount of work, if it is a schedule and thus a hyperparameter."""
        both = {"epochs": self.epochs, "steps": self.steps}
        return {name: value for name, value in both.items() if callable(value)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, in words and numbers."""
        told = {"batch_size": self.batch_size, "optimizer": self.optimizer.words}
        return {**told, **self._amount, "shuffle": self.shuffle}

    @property
    def _amount(self) -> dict[str, Any]:
        return {"epochs": self.epochs or 1} if self.steps is None else {"steps": self.steps}

    def require(self, hyper: Hyper) -> None:
        """Refuse more work than the loops were made for."""
        for name, schedule in self.hyper.items():
            require_bounded(name, hyper[name], most(name, schedule))

    def steps_of(self, examples: Examples, hyper: Hyper) -> Any:
        """Return how many steps a client with these examples takes."""
        batches = -(-examples.count // self.batch_size)
        if self.steps is None:
            return batches * how_much("epochs", self.epochs or 1, hyper)
        return how_much("steps", self.steps, hyper)

    def training(self, loss: Loss) -> Training:
        """Return the function that does all of a client's work in a round."""
        slope = self.gradient(loss)
        # A differentiable loop needs a bound on its length.
        bound = next((most(name, schedule) for name, schedule in self.hyper.items()), None)

        def train(
            start: Params, examples: Examples, hyper: Hyper, key: Key
        ) -> tuple[Any, jax.Array]:
            made = self.optimizer.build(hyper["client"])
            order, noise = jax.random.split(key)

            def step(carry: Any, batch: Batch, mask: jax.Array) -> Any:
                whole, state, total, seen, i = carry
                fresh = jax.random.fold_in(noise, i) if takes_key(loss) else None
                params = jax.tree.map(lambda x, like: x.astype(like.dtype), whole, start)
                value, g = slope(params, start, batch, mask, hyper, fresh)
                whole, state = apply(made, g, state, whole)
                here = jnp.sum(mask).astype(total.dtype)
                return whole, state, total + value.astype(total.dtype) * here, seen + here, i + 1

            zero = jnp.zeros((), accumulator(start))
            # In float16 small steps would be lost, and how far a client went is a difference.
            carry = (widened(start), start_of(made, start), zero, zero, jnp.int32(0))
            ordered = order if self.shuffle else None
            epochs = how_much("epochs", self.epochs or 1, hyper)
            steps = None if self.steps is None else how_much("steps", self.steps, hyper)
            end, _, total, seen, _ = examples.fold(
                step, carry, self.batch_size, epochs, ordered, steps, bound
            )
            far = jax.tree.map(lambda x, y: (x.astype(y.dtype) - y).astype(x.dtype), start, end)
            return far, total / seen

        return train


local_training = known_arguments(called="local_training")(LocalTraining)


@dataclass(frozen=True)
class WholeGradient:
    """The gradient of all of a client's examples, computed in batches, instead of local steps."""

    batch_size: int
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(optax.identity, {}))
    hyper: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("batch_size", self.batch_size)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings; there are no steps."""
        return {"batch_size": self.batch_size}

    def require(self, hyper: Hyper) -> None:
        """Accept all hyperparameters."""

    def training(self, loss: Loss) -> Training:
        """Return the function that computes the gradient and the loss of a client."""

        def train(
            start: Params, examples: Examples, hyper: Hyper, key: Key
        ) -> tuple[Any, jax.Array]:
            value, slope = jax.value_and_grad(
                lambda params: client_loss(loss, self.batch_size, params, examples, key)
            )(start)
            return slope, value

        return train


@runtime_checkable
class Work(Protocol):
    """The work of clients in a round."""

    @property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer, whose hyperparameters are named `client`."""

    @property
    def hyper(self) -> dict[str, Any]:
        """Further hyperparameters."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, in words and numbers: for config.json and reports."""

    def require(self, hyper: Hyper) -> None:
        """Refuse unusable initial hyperparameters."""

    def training(self, loss: Loss) -> Training:
        """Return the function that does all of a client's work in a round."""


def as_work(client: Any) -> Work:
    """Return the work for `client=`; an optimizer or a learning rate means local training."""
    return client if isinstance(client, Work) else as_local(client)


def as_local(client: Any) -> LocalTraining:
    """Like `as_work`, for an algorithm that needs local training."""
    return client if isinstance(client, LocalTraining) else local_training(client)


def require_sgd(
    work: LocalTraining, name: str, why: str, known: Collection[str] = ("learning_rate",)
) -> None:
    """Refuse client optimizers other than SGD with these hyperparameters."""
    found = work.optimizer
    if found.make is not optax.sgd or not set(found.defaults) <= {*known} or found.fixed:
        raise ArgumentError.here(
            f"{name}: clients take steps of plain SGD, because {why} only then. Write "
            "client=fg.local_training(0.1, ...)."
        )


def following(client: Any, gradient: Callable[[Loss], Gradient]) -> LocalTraining:
    """Return local training whose steps follow another gradient."""
    made = as_local(client)
    if made.gradient is not plain_gradient:
        raise ArgumentError.here(
            "client=fg.local_training(..., gradient=): this algorithm has a gradient of its own. "
            "Leave it out, or give it to fg.fed_opt or fg.fed_avg."
        )
    return replace(made, gradient=gradient)


def _of_clients(given: Any) -> Optimizer:
    leaves = jax.tree.leaves(given)
    made = isinstance(given, optax.GradientTransformation)
    if leaves and not made and all(map(_is_rate, leaves)):
        return optimizer(optax.sgd, learning_rate=given)
    return as_optimizer(given, "client", " or a learning rate")


def _is_rate(leaf: Any) -> bool:
    """Return whether this is a number or a schedule, and not an optimizer factory."""
    if callable(leaf):
        return not asks_for(leaf, "learning_rate")
    return is_number(leaf) or type(leaf) is int
