"""Evaluations of a model: which metrics, on which clients, and how often."""

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedgrad.clients.held_out import HeldOut, require_rule
from fedgrad.clients.population import Population
from fedgrad.core.arguments import ClientData
from fedgrad.core.errors import ArgumentError, known_fields, require_whole
from fedgrad.core.graph import CLIENTS
from fedgrad.core.program import Executor, Program, program
from fedgrad.core.types import Params
from fedgrad.show.numbers import plural
from fedgrad.training import per_client as spreads
from fedgrad.training.means import Metric, means, of_portions

Progress = Callable[[int, int], None]  # (clients evaluated, clients in total)


@known_fields
class Evaluation:
    """A function of the model that returns metrics by name, evaluated every few rounds of training.

        fg.Evaluation({"loss": loss, "accuracy": is_right}, clients, every=5)
        fg.Evaluation(lambda params: {"norm": jnp.linalg.norm(params["w"])}, every=1)

    With `clients`, each metric is averaged over all their examples, by a program in which only sums
    leave a client. Clients on disk that do not fit on the device are evaluated in portions. Without
    `clients`, `metrics` is an arbitrary function of the model.

    Args:
        metrics: Functions `(params, batch)` by name, each returning one number per example, or an
            `fg.Ratio` of two such functions. Without `clients`, one function of the model that
            returns metrics by name.
        clients: A population, or a cohort such as `clients.sample(key, 1000)`, which is a fixed
            sample of the clients.
        batch_size: How many examples a client processes at a time. Defaults to the median number of
            examples per client, but at most 100.
        every: How many rounds lie between two evaluations.
        held_out: Evaluate only on this held-out split of each client, which
            `fg.holding_out(algorithm, held_out)` does not train on.
        per_client: Also report how the metrics are distributed over clients: `per_client.loss.mean`
            (in which every client counts equally), `.lowest_tenth` and `.highest_tenth` of clients,
            and `.percentiles`.

    Raises:
        ArgumentError: If the arguments do not fit together.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric] | Callable[[Any], Mapping[str, Any]],
        clients: Population | ClientData | None = None,
        batch_size: int | None = None,
        every: int = 10,
        held_out: HeldOut | None = None,
        per_client: bool = False,
    ) -> None:
        require_whole("every", every)
        self.every, self.per_client, self.held_out = every, per_client, held_out
        self.metrics = tuple(metrics) if isinstance(metrics, Mapping) else None  # names
        self.program: Program | None = None
        if clients is None:
            further = {"batch_size": batch_size, "held_out": held_out, "per_client": per_client}
            if not callable(metrics) or any(further.values()):
                given = ", ".join(f"{name}={value!r}" for name, value in further.items())
                raise ArgumentError.here(
                    "fg.Evaluation without clients takes a function of the model, and how often: "
                    f"got {metrics!r}, {given}. Give it the clients whose examples count: "
                    'fg.Evaluation({"loss": loss}, clients).'
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
            if isinstance(clients, Population):
                held_out.require_some("fg.Evaluation(held_out=)", clients)
        if per_client and self.metrics is not None:
            self.metrics += tuple(spreads.names(metrics))
        self.program, self.of = means(metrics, batch_size, held_out, per_client), clients

    def __repr__(self) -> str:
        of = f" of {self.of!r}" if self.program is not None else ""
        shown = [name for name in self.metrics or () if not name.startswith(f"{spreads.PREFIX}.")]
        what = ", ".join(shown) or getattr(self.function, "__name__", "a function of the model")
        each = ", also of each client" if self.per_client else ""
        return f"Evaluation({what}{of}, every {plural(self.every, 'round')}{each})"

    @property
    def clients(self) -> Any:
        """The cohort of all clients that are evaluated."""
        return self.of.everyone if isinstance(self.of, Population) else self.of

    def __call__(self, params: Params, progress: Progress | None = None) -> Mapping[str, Any]:
        """Return the metrics of a model.

        If the clients are evaluated in portions, `progress` is called with the number of clients
        evaluated so far and in total.
        """
        if self.program is None:
            return self.function(params)
        found, each = self._asked(self.program, params, progress)
        if not self.per_client:
            return found
        return {**found, **spreads.spread(each, getattr(self.of, "sharding", None))}

    def each_client(self, params: Params) -> dict[str, np.ndarray]:
        """Return the metrics of every client, in the order of the population.

        For example `{"loss": [0.3, 1.2, ...]}`, with NaN for clients without examples. Requires
        `per_client=True`.
        """
        if self.program is None or not self.per_client:
            raise ArgumentError.here(
                "each_client() is of an evaluation that looks at each of them: "
                "fg.Evaluation(..., per_client=True)."
            )
        return spreads.quotients(self._asked(self.program, params)[1])

    def _asked(
        self, program: Program, params: Params, progress: Progress | None = None
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the metrics and, with `per_client`, the sums of each client."""
        if not isinstance(self.of, Population):
            found = program(params, self.of)
            spreads.require_here(found[2])
            return found[0], found[2]
        with closing(self.of.portions()) as portions:
            first = next(portions)
            if len(first) == len(self.of):
                found = program(params, first)
                spreads.require_here(found[2])
                return found[0], found[2]
            sums, each, done = [], [], 0
            for portion in itertools.chain([first], portions):
                _, its_sums, its_clients = program(params, portion)
                sums.append(its_sums)
                each.append(its_clients)
                jax.block_until_ready(sums[-2:-1])  # at most one portion is in flight
                done += len(portion)
                if progress is not None:
                    progress(done, len(self.of))
            return of_portions(sums), jax.tree.map(lambda *parts: np.concatenate(parts), *each)

    def on(self, executor: Executor) -> "Evaluation":
        """Return the same evaluation, run by another executor."""
        if self.program is None:
            raise ArgumentError.here("Only an evaluation of clients can run on an executor.")
        return self._with(self.program.on(executor))

    def side_by_side(self) -> "Evaluation":
        """Return the evaluation of many models at once, stacked along a leading axis."""
        one = self.program
        if one is None:
            return self

        def evaluate_each(params: Params, clients: Any) -> Any:
            return jax.vmap(lambda p: one(p, clients))(params)

        each = one.once("side by side", lambda: program(evaluate_each, clients=CLIENTS))
        return self._with(each.on(one.executor))

    def _with(self, program: Program) -> "Evaluation":
        found = copy.copy(self)
        found.program = program
        return found


# The `evaluate=` of fit: an evaluation or a function of the model, or several by name.
Evaluate = Evaluation | Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run by name; one given without a name is called ""."""

    by_name: Mapping[str, Evaluation]

    @staticmethod
    def of(given: Evaluate | Mapping[str, Evaluate] | None) -> "Evaluations":
        """Check the `evaluate=` of the user and convert it to evaluations."""
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
        """Return the evaluations on the algorithm's executor, unless they have their own.

        With `stacked`, they evaluate several models side by side.
        """

        def prepared(one: Evaluation) -> Evaluation:
            if one.program and algorithm.executor and not one.program.executor:
                one = one.on(algorithm.executor)
            return one.side_by_side() if stacked else one

        return Evaluations({name: prepared(one) for name, one in self.by_name.items()})

    def names(self) -> list[str]:
        """Return the names of all metrics as they appear in a history.

        Metrics that are only known later are represented by their prefix, such as `eval.test.`.
        """
        return [
            f"eval.{name}.{metric}" if name else f"eval.{metric}"
            for name, one in self.by_name.items()
            for metric in one.metrics or [""]
        ]

    def due(self, round: int, last: bool = False) -> "Evaluations":
        """Return the evaluations due in this round; in the last one, all of them."""
        return Evaluations({n: e for n, e in self.by_name.items() if last or not round % e.every})

    def missed(self, round: int) -> "Evaluations":
        """Return the evaluations that are not due in this round."""
        return Evaluations({n: e for n, e in self.by_name.items() if round % e.every})

    def __call__(self, params: Params, progress: Progress | None = None) -> dict[str, Any]:
        """Return the metrics of a model, nested under the name of the evaluation if it has one."""
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
    """Return the median client size, so that half of the clients need one batch and few batches are
    mostly padding."""
    counts = clients.counts if isinstance(clients, Population) else getattr(clients, "count", None)
    return 100 if counts is None else int(np.clip(np.median(counts), 1, 100))
