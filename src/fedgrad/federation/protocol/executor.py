"""The executor for real federations: data stay on the nodes, client stages are sent to them."""

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
    """An executor that runs programs on a federation, whose nodes keep their data.

    Args:
        federation: The address of a SuperLink, a transport, or another executor's federation.
        deadline: Seconds that clients have to answer each message.
        missing: How to treat clients that do not answer, or whose answer is not what was requested.
            "fail" raises an error. "drop" leaves them out of every sum, and fails if they are part
            of a sum that the server has already seen. "restart" begins again without them in that
            case, which reveals to the server what they had sent.
        non_finite: "missing" treats an answer with NaN or infinity as missing, "allow" accepts it.
        at_least: The fewest clients that a result may be computed from.
        recompute: Whether clients recompute values instead of keeping them between messages.
        aggregator: How sums are computed.
        signing_key: The operator's Ed25519 private key (PEM, or a path), for sites that allow
            signed programs.
        platforms: The platforms to compile client stages for.
        **connection: Options of `fedgrad.federation.flower.driver.connect`, with an address only.

    Raises:
        ArgumentError: If an option has an invalid value, or the signing key is not an Ed25519 key.

    Example:
        executor = fg.executors.flower(fg.federation.InProcess.of([np.ones(3), np.zeros(3)]))
        mean.on(executor)(executor.clients())
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
            sign(signing_key, "")  # fail now if this is not a valid key
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
        # Prepared plans by the program's function; freed with the program or with this executor.
        self._ready: weakref.WeakKeyDictionary[Any, dict[Any, Prepared]]
        self._ready = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Leave the federation. Values that nodes keep for this executor expire there."""
        close = getattr(self.federation.transport, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- participation --------------------------------------------------------------------

    def clients(
        self, part: str = "", which: Any = None, *, expect: Any = None, wait: float = 0.0
    ) -> Any:
        """Return the clients' data for a client argument, as a tree of handles.

        Args:
            part: An entry of the dict of data that nodes have; "" is all of it.
            which: Indices of the clients to take; all connected ones by default.
            expect: How many clients must be connected, whether chosen or not, or a list of their
                indices.
            wait: Seconds to wait for the expected clients.

        Raises:
            NoAnswer: If expected clients are missing. With missing="fail", also if a connected node
                cannot identify itself or describe its data, or if one lacks the part and neither
                `which` nor `expect` is given. Otherwise such a node is left out.
        """
        return values(self.federation, part, self._attendance(which, expect, wait))

    def population(
        self, part: str = "", *, over_select: float = 1.0, expect: Any = None, wait: float = 0.0
    ) -> NodePopulation:
        """Return all clients with their examples, of which each has its own number. Pass the result
        to `fg.fit`, or draw cohorts with `population.sample(key, size)`.

        Args:
            part: As in `clients`.
            over_select: Ask this many times as many clients as a cohort needs; the first to answer
                form the cohort.
            expect: As in `clients`.
            wait: As in `clients`.
        """
        if over_select < 1:
            raise ArgumentError.here(f"population(over_select={over_select}): it is at least 1.")
        everyone = examples(self.federation, part, self._attendance(None, expect, wait))
        return NodePopulation(everyone, self, over_select)

    def _attendance(self, which: Any, expect: Any, wait: float) -> Attendance:
        return Attendance.read(self.terms.drop, which, expect, wait)

    @property
    def report(self) -> Report | None:
        """The report of this thread's last call: which clients took part and what was sent."""
        return getattr(self._reports, "last", None)

    def programs(self, program: Program, *args: Any, **kwargs: Any) -> tuple[StageProgram, ...]:
        """Return the programs that this call would send, for a site to read and allow by digest."""
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
        """Return the program as a function of a dict of its arguments by name."""

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
        # The key covers all of a program except its executor: `dataclasses.replace` may have
        # derived it from another program with the same function.
        key = (arguments.key, x64, program.client_placements, program.derived, program.look)
        if key not in ready:
            made = ready_plan(program, arguments, self.recompute, self.aggregator)
            ready[key] = Prepared(made, self.platforms)
        return ready[key]

    def _groups(self, program: Program, arguments: dict[str, Any]) -> dict[str, Group]:
        """Return the clients of each placement: those that have all of its arguments."""
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
    """Return the places where clients find the arguments at clients."""
    pairs = zip(args.values, args.leaves, strict=True)
    return [leaf.remote for v, leaf in pairs if is_client(v.at)]


def _outputs(call: Call, args: Arguments) -> list[Any]:
    inputs = [
        leaf.remote if is_client(v.at) else jnp.asarray(leaf)
        for v, leaf in zip(args.values, args.leaves, strict=True)
    ]
    outputs = call.run(call.prepared.graph, inputs)
    call.send()  # stages that produced no message so far
    return outputs


def _chosen(program: Program, arguments: dict[str, Any], groups: dict[str, Group]) -> Any:
    """Restrict the arguments to the clients that take part."""
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
