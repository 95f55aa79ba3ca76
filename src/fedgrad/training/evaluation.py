"""How good a model is: what is measured, of whom, and how often."""

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.objective import per_example, sent, takes_key
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut, require_rule
from fedgrad.clients.population import Population
from fedgrad.core.arguments import ClientData
from fedgrad.core.errors import ArgumentError, require_whole
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import accumulator
from fedgrad.core.program import Executor, Program, broadcast, program, sum
from fedgrad.core.types import Batch, Params

Progress = Callable[[int, int], None]  # (clients that are done, of how many)
# (params, batch) -> one number per example
Metric = Callable[..., Any]


@dataclass(frozen=True)
class Ratio:
    """A metric that is a ratio of two sums over all examples, such as tokens that are right over
    tokens: `Ratio(right, tokens)`, two functions `(params, batch)` with one number per example."""

    part: Metric
    whole: Metric

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        """The ratio of each example; 0 where there is nothing."""
        part, whole = self.part(params, batch), self.whole(params, batch)
        return part / jnp.where(whole == 0, 1, whole).astype(part.dtype)


class Evaluation:
    """A function of the model that gives metrics by name, every so many rounds of training.

        fg.Evaluation({"loss": loss, "accuracy": is_right}, clients, every=5)
        fg.Evaluation(lambda params: {"norm": jnp.linalg.norm(params["w"])}, every=1)

    With `clients`: the mean of metrics over all their examples. `metrics` are functions `(params,
    batch)` that give one number per example (or an `fg.Ratio` of two), by name. It is a program, in
    which only sums leave a client; `batch_size` is how many examples a client works on at a time,
    if nothing is said as many as half of the clients have, and at most 100. Clients on disk that
    are too many for the device are gone over portion by portion; a cohort, such as
    `clients.sample(key, 1000)`, is a sample of them, always the same. `held_out`: only of these
    examples of each client, which `fg.holding_out(algorithm, held_out)` does not train on. Without
    clients it is a function of the model, whatever that does.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric] | Callable[[Any], Mapping[str, Any]],
        clients: Population | ClientData | None = None,
        batch_size: int | None = None,
        every: int = 10,
        held_out: HeldOut | None = None,
    ) -> None:
        require_whole("every", every)
        self.every = every
        self.metrics = tuple(metrics) if isinstance(metrics, Mapping) else None  # by name
        self.program: Program | None = None
        if clients is None:
            if not callable(metrics) or batch_size is not None or held_out is not None:
                raise ArgumentError.here(
                    "fg.Evaluation without clients takes a function of the model, and how often: "
                    f"got {metrics!r}, {batch_size=}, {held_out=}. Give it the clients whose "
                    'examples count: fg.Evaluation({"loss": loss}, clients).'
                )
            self.function = metrics
            return
        if not isinstance(metrics, Mapping) or not metrics:
            raise ArgumentError.here(
                'fg.Evaluation takes functions by name, such as {"loss": loss}, got '
                f"{type(metrics).__name__}."
            )
        if not isinstance(clients, ClientData):
            raise ArgumentError.here(
                f"fg.Evaluation takes a population, got {type(clients).__name__}. Write "
                "fg.population([client_0, client_1, ...])."
            )
        batch_size = _usual_batch(clients) if batch_size is None else batch_size
        require_whole("batch_size", batch_size)
        if held_out is not None:
            require_rule("fg.Evaluation", held_out)
        self.program, self.of = _means(metrics, batch_size, held_out), clients

    @property
    def clients(self) -> Any:
        """The cohort of all whose examples count."""
        return self.of.everyone if isinstance(self.of, Population) else self.of

    def __call__(self, params: Params, progress: Progress | None = None) -> Mapping[str, Any]:
        """The metrics of a model. `progress` is told how many clients are done, of how many, where
        they are not all asked at once."""
        if self.program is None:
            return self.function(params)
        if not isinstance(self.of, Population):
            return self.program(params, self.of)[0]
        with closing(self.of.portions()) as portions:
            first = next(portions)
            if len(first) == len(self.of):
                return self.program(params, first)[0]
            sums, done = [], 0
            for portion in itertools.chain([first], portions):
                sums.append(self.program(params, portion)[1])
                jax.block_until_ready(sums[-2:-1])  # one is computed, and no more are in line
                done += len(portion)
                if progress is not None:
                    progress(done, len(self.of))
            return _quotients(sums)

    def on(self, executor: Executor) -> "Evaluation":
        """The same evaluation, run by another executor."""
        if self.program is None:
            raise ArgumentError.here("Only an evaluation of clients can run on an executor.")
        return self._with(self.program.on(executor))

    def side_by_side(self) -> "Evaluation":
        """The evaluation of many models at once, stacked along a leading axis."""
        one = self.program
        if one is None:
            return self

        def evaluate_each(params: Params, clients: Any) -> Any:
            return jax.vmap(lambda p: one(p, clients))(params)

        each = one.once("side by side", lambda: program(evaluate_each, clients=CLIENTS))
        return self._with(replace(each, executor=one.executor))

    def _with(self, program: Program) -> "Evaluation":
        found = copy.copy(self)
        found.program = program
        return found


# What fit takes: an evaluation or a function of the model, or several by name.
Evaluate = Evaluation | Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Evaluations:
    """Those of a run by name; one that was given without a name has the name ""."""

    by_name: Mapping[str, Evaluation]

    @staticmethod
    def of(given: Evaluate | Mapping[str, Evaluate] | None) -> "Evaluations":
        """What the user gave, checked."""
        named = given if isinstance(given, Mapping) else {} if given is None else {"": given}
        for one in named.values():
            if not callable(one):
                raise ArgumentError.here(
                    f"evaluate= takes a function of the model, or several by name, got {one!r}. "
                    "See fg.Evaluation."
                )
        return Evaluations(
            {n: e if isinstance(e, Evaluation) else Evaluation(e) for n, e in named.items()}
        )

    def like(self, algorithm: Program, stacked: bool) -> "Evaluations":
        """Where the algorithm runs, unless they were put elsewhere; of models side by side."""

        def prepared(one: Evaluation) -> Evaluation:
            if one.program and algorithm.executor and not one.program.executor:
                one = one.on(algorithm.executor)
            return one.side_by_side() if stacked else one

        return Evaluations({name: prepared(one) for name, one in self.by_name.items()})

    def names(self) -> list[str]:
        """What they give, as a history calls it; `eval.test.`, if that is known only later."""
        return [
            f"eval.{name}.{metric}" if name else f"eval.{metric}"
            for name, one in self.by_name.items()
            for metric in one.metrics or [""]
        ]

    def due(self, round: int, last: bool = False) -> "Evaluations":
        """Those of this round: all of them, if it is the last one."""
        return Evaluations({n: e for n, e in self.by_name.items() if last or not round % e.every})

    def missed(self, round: int) -> "Evaluations":
        """Those that are not due in this round."""
        return Evaluations({n: e for n, e in self.by_name.items() if round % e.every})

    def __call__(self, params: Params, progress: Progress | None = None) -> dict[str, Any]:
        """The metrics of a model, by the name of the evaluation where they have one."""
        found: dict[str, Any] = {}
        for name, evaluation in self.by_name.items():
            metrics = evaluation(params, progress)
            if not isinstance(metrics, Mapping):
                raise ArgumentError.here(
                    f"evaluate={name or ''} gave {type(metrics).__name__}. Give metrics by name, "
                    'such as {"loss": ...}.'
                )
            found |= {name: metrics} if name else metrics
        return found


def _usual_batch(clients: Any) -> int:
    """Half of the clients are done in one batch, so that few batches are mostly padding."""
    counts = clients.counts if isinstance(clients, Population) else getattr(clients, "count", None)
    return 100 if counts is None else int(np.clip(np.median(counts), 1, 100))


def _quotients(sums: list[dict[str, tuple[Any, Any]]]) -> dict[str, np.ndarray]:
    """The metrics of all portions together, of the sums of each."""

    def total(parts: Any) -> np.ndarray:
        return np.asarray(parts, np.float64).sum(0)

    def quotient(name: str) -> np.ndarray:
        tops, bottoms = zip(*(portion[name] for portion in sums), strict=True)
        with np.errstate(divide="ignore", invalid="ignore"):  # as on the device
            return np.asarray(total(tops) / total(bottoms), tops[0].dtype)

    return {name: quotient(name) for name in sums[0]}


def _means(
    metrics: Mapping[str, Metric], batch_size: int, held_out: HeldOut | None = None
) -> Program:
    summed = dict(metrics)
    for name, metric in metrics.items():
        if isinstance(metric, Ratio):
            summed |= {name: metric.part, _whole(name): metric.whole}

    @program(clients=CLIENTS)
    def evaluate(params: Params, clients: Any) -> Any:
        """The metrics by name, and of each the two sums whose quotient it is."""
        examples = Examples.of(clients)
        if held_out is not None:
            _, examples = held_out.split(examples)
        params, measured = broadcast(params), {n: sent(m) for n, m in summed.items()}

        def add(
            totals: dict[str, jax.Array], batch: Batch, mask: jax.Array
        ) -> dict[str, jax.Array]:
            return {
                name: totals[name] + _total(metric, params, batch, mask)
                for name, metric in measured.items()
            }

        zero = jnp.zeros((), accumulator(params))
        totals = examples.fold(add, dict.fromkeys(summed, zero), batch_size)
        for name in totals:
            with jax.named_scope(f"metric {name.replace('/', ' ')}"):
                totals[name] = sum(totals[name])
        count = sum(examples.count).astype(zero.dtype)
        sums = {name: (totals[name], totals.get(_whole(name), count)) for name in metrics}
        return {name: top / bottom for name, (top, bottom) in sums.items()}, sums

    return evaluate


def _whole(name: str) -> str:
    return f"{name}: whole"


def _total(metric: Metric, params: Params, batch: Batch, mask: jax.Array) -> jax.Array:
    # What is random in training (dropout) is drawn the same way in every evaluation.
    key = jax.random.key(0) if takes_key(metric) else None
    values = per_example(metric, params, batch, key)
    return jnp.sum(jnp.where(mask, values.astype(accumulator(params)), 0))
