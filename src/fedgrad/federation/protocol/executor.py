"""The executor for real federations: data stay on the nodes, client stages travel to them."""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.handles import handles
from fedgrad.core.arguments import Arguments, parts, read_arguments
from fedgrad.core.errors import ArgumentError, CohortError, PlanError, known_fields_of
from fedgrad.core.graph import is_client
from fedgrad.core.program import Program
from fedgrad.federation.protocol.call import Call
from fedgrad.federation.protocol.call_report import Report
from fedgrad.federation.protocol.delivery import Terms
from fedgrad.federation.protocol.envelope import Transport, connect
from fedgrad.federation.protocol.federation import Federation
from fedgrad.federation.protocol.federation_errors import CohortMismatch, NoAnswer
from fedgrad.federation.protocol.messages import BeginAgain, Group, Messages
from fedgrad.federation.protocol.node_population import NodePopulation
from fedgrad.federation.protocol.node_values import NodeValue, Place, Versions, choose
from fedgrad.federation.protocol.prepared_plan import Prepared
from fedgrad.federation.protocol.quorum import Attendance, examples, values
from fedgrad.federation.protocol.signing import sign
from fedgrad.federation.protocol.stage_program import PLATFORMS, StageProgram
from fedgrad.planning.plan import ready_plan


@known_fields_of("flower")
class Flower:
    """Runs programs on a federation.

    `federation`: the address of a SuperLink (`connection` goes to
    `fedgrad.federation.flower.driver.connect`), a transport, or another executor's federation.
    `deadline`: seconds that clients have to answer each message. `missing`: what it means if they
    do not, or not with what was asked of them: "fail"; "drop", which leaves them out of everything,
    and fails if they were in a sum that the server has seen already; or "restart", which begins
    again without them then, and so shows the server what they had sent. `non_finite`: "missing"
    takes NaN and infinity for no answer, "allow" for an answer.
    `at_least`: fewer clients are no result. `recompute`: clients compute again what they would have
    to remember. `aggregator`: how sums are computed. `signing_key`: the operator's Ed25519 key
    (PEM, or a path), for sites that allow what is signed. `platforms`: what the stages are compiled
    for.
    """

    remembers = True

    def __init__(
        self,
        federation: str | Transport | Federation,
        *,
        deadline: float = 60.0,
        missing: str = "fail",
        non_finite: str = "missing",
        at_least: int = 1,
        recompute: bool = False,
        aggregator: Aggregator = plain,
        signing_key: bytes | str | Path | None = None,
        platforms: tuple[str, ...] = PLATFORMS,
        **connection: Any,
    ) -> None:
        _one_of("missing", missing, ["fail", "drop", "restart"])
        _one_of("non_finite", non_finite, ["missing", "allow"])
        if deadline <= 0 or at_least < 1:
            raise ArgumentError.here(
                f"flower(deadline={deadline}, at_least={at_least}): a deadline is positive, and "
                "there is at least 1 client."
            )
        if isinstance(signing_key, (str, Path)):
            signing_key = Path(signing_key).read_bytes()
        if signing_key is not None:
            sign(signing_key, "")  # says now if that is no key
        self.terms = Terms(
            deadline=deadline,
            drop=missing != "fail",
            restart=missing == "restart",
            allow_non_finite=non_finite == "allow",
            at_least=at_least,
            signing_key=signing_key,
        )
        self.recompute, self.aggregator, self.platforms = recompute, aggregator, platforms
        self.federation = _federation(federation, deadline, connection)
        self._reports = threading.local()
        # What was prepared of a program, by its function: it ends with the program, or with us.
        self._ready: weakref.WeakKeyDictionary[Any, dict[Any, Prepared]]
        self._ready = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Leave the federation; what nodes remember of us expires there."""
        close = getattr(self.federation.transport, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- who takes part -------------------------------------------------------------------

    def clients(
        self, part: str = "", which: Any = None, *, expect: Any = None, wait: float = 0.0
    ) -> Any:
        """The clients' data as they are, for a client argument: a tree of handles.

        `part`: an entry of the dict of data that nodes have. `which`: clients by index; else all.
        `expect`: how many have to be there, chosen or not, or a list of who; fewer are an error.
        `wait`: seconds to wait for them. With missing="fail", a node that is connected and cannot
        say who it is or what it has is an error, and so is one that lacks the part if neither
        `which` nor `expect` is given; else it is left out.
        """
        return values(self.federation, part, self._attendance(which, expect, wait))

    def population(
        self, part: str = "", *, over_select: float = 1.0, expect: Any = None, wait: float = 0.0
    ) -> NodePopulation:
        """All clients, with examples of which each has its own number: for `fg.fit`, and for
        cohorts by `population.sample(key, size)`. `expect` and `wait` as in `clients`.
        `over_select`: ask so many times as many clients as a cohort wants, and take the first."""
        if over_select < 1:
            raise ArgumentError.here(f"population(over_select={over_select}): it is at least 1.")
        everyone = examples(self.federation, part, self._attendance(None, expect, wait))
        return NodePopulation(everyone, self, over_select)

    def _attendance(self, which: Any, expect: Any, wait: float) -> Attendance:
        return Attendance.read(self.terms.drop, which, expect, wait)

    @property
    def report(self) -> Report | None:
        """Who took part in the last call that this thread made, and what was sent."""
        return getattr(self._reports, "last", None)

    def programs(self, program: Program, *args: Any, **kwargs: Any) -> tuple[StageProgram, ...]:
        """What nodes would be sent for this call, for a site to read and to allow by digest."""
        named = program.bind(args, kwargs)
        _check_arguments(program, named)
        arguments = read_arguments(program, named)
        places, exported = _at_clients(arguments), self._prepared(program, arguments).exported
        clients = {c for place in places if isinstance(place, Versions) for c in place.remotes}
        found = [
            program
            for client in sorted(clients) or [0]
            for program in exported.programs([x.of(client).declared for x in places]).values()
        ]
        return tuple({program.digest: program for program in found}.values())

    # --- running --------------------------------------------------------------------------

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""

        def run(arguments: dict[str, Any]) -> Any:
            _check_arguments(program, arguments)
            report = self._reports.last = Report(program.name)
            groups = self._groups(program, arguments)
            report.asked = {p: len(group.clients) for p, group in groups.items()}
            args = read_arguments(program, _chosen(program, arguments, groups))
            prepared = self._prepared(program, args)
            while True:
                messages = Messages(self.federation, groups, self.terms, report)
                try:
                    outputs = _outputs(Call(prepared, messages, _at_clients(args)), args)
                except BeginAgain:  # each time with fewer clients
                    groups = {p: Group(group.clients) for p, group in groups.items()}
                    continue
                report.answered = {p: len(group.clients) for p, group in groups.items()}
                results = [
                    NodeValue(x, v.aval.shape, v.aval.dtype, tuple(groups[v.at].clients))
                    if is_client(v.at)
                    else jnp.asarray(x)
                    for v, x in zip(prepared.plan.graph.outputs, outputs, strict=True)
                ]
                return jax.tree.unflatten(prepared.plan.outputs, results)

        return run

    def _prepared(self, program: Program, arguments: Arguments) -> Prepared:
        ready = self._ready.setdefault(program.fun, {})
        x64 = jax.dtypes.canonicalize_dtype(float)
        # All of a program but what runs it: `dataclasses.replace` may have made it of another one.
        key = (arguments.key, x64, program.client_placements, program.derived, program.look)
        if key not in ready:
            made = ready_plan(program, arguments, self.recompute, self.aggregator)
            ready[key] = Prepared(made, self.platforms)
        return ready[key]

    def _groups(self, program: Program, arguments: dict[str, Any]) -> dict[str, Group]:
        """The clients of each placement: those of which all its arguments are."""
        groups: dict[str, Group] = {}
        for name, placement in program.placements.items():
            for handle in handles(arguments[name]):
                new = list(handle.clients)
                group = groups.setdefault(placement.name, Group(new, handle.wanted))
                common = [client for client in group.clients if client in new]
                needed = max(group.needed, len(handle))
                if len(common) < needed and not self.terms.drop:
                    raise CohortMismatch.here(
                        f"{program.name}: arguments at {placement.name} are on different clients, "
                        f"{group.clients} and {new}. Give all of them the same clients; with "
                        "missing='drop' those that have all take part."
                    )
                if not common:
                    raise NoAnswer.here(
                        f"{program.name}: no client has all arguments at {placement.name}."
                    )
                group.clients = common
                wanted = [w for w in (group.wanted, handle.wanted) if w is not None]
                group.wanted = min(wanted) if wanted and min(wanted) < len(common) else None
        return groups


def _at_clients(args: Arguments) -> list[Place]:
    """Where clients find the arguments that are theirs."""
    pairs = zip(args.values, args.leaves, strict=True)
    return [leaf.remote for v, leaf in pairs if is_client(v.at)]


def _outputs(call: Call, args: Arguments) -> list[Any]:
    inputs = [
        leaf.remote if is_client(v.at) else jnp.asarray(leaf)
        for v, leaf in zip(args.values, args.leaves, strict=True)
    ]
    outputs = call.run(call.prepared.graph, inputs)
    call.send()  # what clients compute for themselves, without a message so far
    return outputs


def _chosen(program: Program, arguments: dict[str, Any], groups: dict[str, Group]) -> Any:
    """The arguments of the clients that take part."""
    groups_of = {name: groups[at.name] for name, at in program.placements.items()}
    chosen = {n: choose(arguments[n], g.clients, g.wanted) for n, g in groups_of.items()}
    return arguments | chosen


def _check_arguments(program: Program, arguments: dict[str, Any]) -> None:
    for name, argument in arguments.items():
        leaves = jax.tree.leaves(argument)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise PlanError.here(
                f"{program.name} runs on a federation, so jax.jit, jax.grad and the like cannot go "
                f"through it (argument {name!r}). Its derivative is fg.grad({program.name})."
            )
        if name not in program.placements:
            continue
        data = [part.store if isinstance(part, Cohort) else part for part in parts(argument)]
        wrong = [x for x in jax.tree.leaves(data) if not isinstance(x, NodeValue)]
        if wrong or not handles(argument):
            got = type(wrong[0]).__name__ if wrong else repr(argument)
            raise CohortError.here(
                f"{program.name}: argument {name!r} is at {program.placements[name].name}, so on "
                f"a federation it is on the nodes; got {got}. Pass executor.clients(...), a cohort "
                "of executor.population(...), or a client-placed result of another call."
            )


def _federation(given: Any, deadline: float, connection: dict[str, Any]) -> Federation:
    if isinstance(given, Federation):
        return given
    if isinstance(given, str):
        return Federation(connect(given, **connection), deadline)
    if connection or not hasattr(given, "exchange"):
        raise ArgumentError.here(
            f"flower({given!r}, {', '.join(connection)}): give the address of a SuperLink (and how "
            "to connect to it), a transport, or the federation of another executor."
        )
    return Federation(given, deadline)


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise ArgumentError.here(f"flower({name}={value!r}):", value, known)
