"""What a site does not allow does not run there, and the server is told why."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.exported import programs
from fedgrad.federation.protocol.federation_errors import FederationError, Refused
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy
from fedgrad.federation.protocol.signing import is_signed, make_keys, sign
from fedgrad.federation.protocol.stage_program import read_program
from programs import assert_same, normal, stateful, two_rounds, unweighted_mean

REFERENCE = fg.executors.reference()
X, Z = normal(0, 3), normal(1, 3, 3)
DATA = list(np.asarray(Z))


def flower(transport, **options):
    return fg.executors.flower(transport, platforms=("cpu",), **options)


OWN = [["data", "", 0]]  # what a client argument is on nodes whose data are one array


def digests(program, *args):
    return frozenset(p.digest for p in programs(fg.plan(program, *args), OWN, ("cpu",)))


ALLOWED = digests(two_rounds, X, Z)
KEYS = [make_keys() for _ in range(2)]


@fg.program(z=fg.CLIENTS)
def solve(z):
    return fg.sum(jnp.linalg.cholesky(jnp.eye(3) + jnp.outer(z, z)))


REFUSALS = {
    "nothing is allowed": (Policy(), two_rounds, "not on the list of allowed programs"),
    "another program": (Policy(programs=ALLOWED), unweighted_mean, "not on the list"),
    "not signed": (Policy(operators=(KEYS[0][1],)), two_rounds, "not signed by an allowed"),
    "few": (Policy(anything=True, minimum_cohort=4), two_rounds, "over 3 clients, at least 4"),
    "bytes down": (Policy(anything=True, maximum_bytes=16), two_rounds, "24 bytes .* received"),
    "array": (Policy(anything=True, maximum_size=2), two_rounds, "array of 3 scalars"),
    "memory": (Policy(anything=True, maximum_memory=8), stateful, "24 bytes would be kept"),
    "platform": (Policy(anything=True, platforms=("tpu",)), two_rounds, "nothing may run on cpu"),
    "host": (Policy(anything=True, custom_calls=()), solve, "calls lapack_dpotrf.* on the host"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("missing", ["fail", "drop"])
def test_a_refusal_reaches_the_server_with_its_reason(name, missing):
    policy, program, reason = REFUSALS[name]
    transport = InProcess.of(DATA, policy)
    executor = flower(transport, missing=missing)
    args = [executor.clients()] if program is solve else [X, executor.clients()]
    if name == "bytes down":  # the program's code is more than that, too
        reason = "bytes would be received in one message, at most 16 may"
    with pytest.raises(Refused, match=rf"policy\.py:\d+: .*client \d refuses: .*{reason}"):
        program.on(executor)(*args)
    for node in transport.handlers.values():
        kept = [n for n in node.memory.entries if n.startswith("kept/")]
        assert kept == []


def test_one_site_that_refuses_is_enough():
    transport = InProcess.of(DATA, Policy(programs=ALLOWED))
    transport.handlers[1001].policy = Policy()
    executor = flower(transport, missing="drop")
    with pytest.raises(Refused, match="client 1 refuses"):
        two_rounds.on(executor)(X, executor.clients())


def test_what_is_allowed_runs():
    solving = Policy(anything=True)
    for policy, program, args in (
        (Policy(programs=ALLOWED), two_rounds, (X,)),
        (solving, solve, ()),
    ):
        executor = flower(InProcess.of(DATA, policy))
        found = program.on(executor)(*args, executor.clients())
        assert_same(found, program.on(REFERENCE)(*args, Z))


def test_a_refused_program_does_not_run():
    calls = []

    class Counting(Node):
        def _find(self, *args):
            calls.append(args)
            return super()._find(*args)

    policies = [Policy(), Policy(anything=True, minimum_cohort=9)]
    for policy in policies:
        nodes = {i: Counting(lambda _, i=i: DATA[i], policy) for i in range(3)}
        executor = flower(InProcess(nodes))
        with pytest.raises(Refused):
            two_rounds.on(executor)(X, executor.clients())
    assert calls == []


# --- signatures ---------------------------------------------------------------------------------


def test_what_the_operator_signs_runs(tmp_path):
    (secret, public), (other, _) = KEYS
    transport = InProcess.of(DATA, Policy(operators=(public,)))
    wanted = two_rounds.on(REFERENCE)(X, Z)
    path = tmp_path / "key.pem"
    path.write_bytes(secret)
    for key in (secret, path, str(path)):
        executor = flower(transport, signing_key=key)
        assert_same(two_rounds.on(executor)(X, executor.clients()), wanted)
    fresh = InProcess.of(DATA, Policy(operators=(public,)))
    executor = flower(fresh, signing_key=other)
    with pytest.raises(Refused, match="not signed by an allowed operator"):
        two_rounds.on(executor)(X, executor.clients())
    with pytest.raises(fg.ArgumentError, match="no private key"):
        flower(fresh, signing_key=b"nonsense")


def test_a_signature_is_of_one_program_and_of_what_may_leave_it():
    (secret, public), _ = KEYS
    forward, back = programs(fg.plan(fg.grad(stateful, mode="reverse"), X, Z), OWN, ("cpu",))[:2]
    signature = sign(secret, forward.digest)
    assert is_signed(public, forward.digest, signature)
    assert not is_signed(public, back.digest, signature)
    assert not is_signed(public, forward.digest, b"")
    assert len(forward.outputs) > forward.summed  # something stays: who lets it leave
    leaking = dataclasses.replace(forward, summed=len(forward.outputs))
    assert not is_signed(public, leaking.digest, signature)


def test_what_stays_cannot_be_asked_for():
    """The server announces fewer names than there are outputs that stay, or takes a name twice."""
    node = Node(lambda _: DATA[0], Policy(anything=True, minimum_cohort=1))
    program = programs(fg.plan(stateful, X, Z), OWN, ("cpu",))[0]
    stays = len(program.outputs) - program.summed
    assert stays > 0
    for keep in ([], ["a"] * (stays + 1)):
        reply = node.handle(request(program, keep))
        assert (reply.kind, reply.arrays) == ("error", ())
    reply = node.handle(request(program, ["a"] * stays))
    assert reply.kind == "ok" and len(reply.arrays) == program.summed


def request(program, keep=(), inputs=(("data", "", 0),), cohort=3, **meta):
    item = {"program": program.digest, "at": [], "cohort": cohort, "inputs": inputs}
    item |= {"keep": keep, "free": []}
    meta = {"work": json.dumps([item]), "constants": [], "signatures": [""], "names": [], **meta}
    return Envelope("run", meta, (np.asarray(X), np.frombuffer(program.content, np.uint8)))


# --- a file -------------------------------------------------------------------------------------


def test_a_policy_from_a_file(tmp_path):
    (tmp_path / "operator.pem").write_bytes(KEYS[0][1])
    path = tmp_path / "policy.toml"
    path.write_text(
        f'programs = ["{min(ALLOWED)}"]\noperators = ["operator.pem"]\nminimum_cohort = 5\n'
        'maximum_bytes = 1000\nplatforms = ["cpu"]\n'
    )
    assert Policy.read(path) == Policy(
        programs=frozenset([min(ALLOWED)]),
        operators=(KEYS[0][1],),
        minimum_cohort=5,
        maximum_bytes=1000,
        platforms=("cpu",),
    )
    path.write_text("")
    assert Policy.read(path) == Policy()


@pytest.mark.parametrize(
    "text, words",
    [
        ("minimum_cohor = 3", "Did you mean 'minimum_cohort'"),
        ("minimum_cohort = true", "is a int"),
        ('anything = "yes"', "is a bool"),
        ('programs = "all"', "is a list"),
        ('operators = ["absent.pem"]', r"no key .*absent\.pem"),
        ("minimum_cohort", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_understood_is_an_error(tmp_path, text, words):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(fg.ArgumentError, match=words):
        Policy.read(path)
    with pytest.raises(fg.ArgumentError, match="cannot be read"):
        Policy.read(tmp_path / "absent.toml")


# --- requests from outside ----------------------------------------------------------------------

PROGRAM = programs(fg.plan(unweighted_mean, X, Z), OWN, ("cpu",))[0]


def node(**config):
    return Node(lambda _: DATA[0], Policy(anything=True), context=Context(config))


def good(**changes):
    return request(PROGRAM, **changes)


def replaced(kind="run", arrays=None, **meta):
    base = good()
    return Envelope(kind, {**base.meta, **meta}, base.arrays if arrays is None else arrays)


code = np.frombuffer(PROGRAM.content, np.uint8)
NONSENSE = {
    "kind": replaced("delete everything"),
    "nothing": Envelope("run", {}),
    "work": replaced(work="]["),
    "work is a number": replaced(work=7),
    "item": replaced(work='[{"program": 1}]'),
    "names": replaced(names="abc"),
    "signature": replaced(signatures=["xyz"]),
    "no arrays": replaced(arrays=()),
    "more arrays": replaced(arrays=(np.asarray(X), *good().arrays)),
    "wrong shape": replaced(arrays=(np.ones(4), code)),
    "wrong dtype": replaced(arrays=(np.ones(3, np.int64), code)),
    "not code": replaced(arrays=(np.asarray(X), np.arange(9, dtype=np.uint8))),
    "half the code": replaced(arrays=(np.asarray(X), code[: code.size // 2])),
    "one bit": replaced(arrays=(np.asarray(X), code ^ (np.arange(code.size) == 700))),
    "source": good(inputs=[["disk", "/etc/passwd"]]),
    "no part": good(inputs=[["data", "secret", 0]]),
    "no leaf": good(inputs=[["data", "", 5]]),
    "another value": good(inputs=[["count", ""]]),
    "row": good(inputs=[["row", ["data", "", 0], 99]]),
    "nested": good(inputs=[["stack", [["stack", "x"]]]]),
    "index": good(inputs=[["index"]]),
    "kept": good(inputs=[["kept", "a"]]),
    "part": Envelope("describe", {"part": "secret", "examples": False}),
    "describe": Envelope("describe", {"part": ""}),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_gets_an_error_and_nothing_else(name):
    asked = node()
    reply = asked.handle(NONSENSE[name])
    assert reply.kind in ("error", "unknown", "refused") and reply.arrays == ()
    assert reply.reason
    again = asked.handle(good())
    assert again.kind == "ok"  # and the node is as before
    np.testing.assert_allclose(again.arrays[1], ((np.asarray(X) - DATA[0]) ** 2).sum())


@pytest.mark.parametrize("name", ["content", "head", "module"])
def test_bytes_that_are_no_program(name):
    head, _, module = PROGRAM.content.partition(b"\n")
    bad = {
        "content": b"",
        "head": head.replace(b'"summed": 2', b'"summed": 200') + b"\n" + module,
        "module": head + b"\n" + module[:100],
    }[name]
    with pytest.raises(FederationError, match=r"not a program|does not fit"):
        read_program(bad)


def test_errors_do_not_quote_the_data():
    def load(context):
        raise ValueError("patient 4711 is not a number")

    reply = Node(load, Policy(anything=True)).handle(Envelope("describe", {}))
    assert reply.kind == "error" and "4711" not in str(reply) and "ValueError" in reply.reason


def test_data_of_other_kinds_are_refused():
    for data, words in ((np.array(["a"]), "dtype"), ({1: np.ones(2)}, "dict"), (object(), "dtype")):
        asked = Node(lambda _, d=data: d, Policy(anything=True))
        reply = asked.handle(Envelope("describe", {"part": "", "examples": False}))
        assert reply.kind == "error" and words in reply.reason


def test_a_constant_that_was_evicted_is_sent_again():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(carry, i):
            x, state = carry
            state = state + fg.broadcast(x) * z * i
            return (x + fg.mean(jnp.sin(state)), state), None

        start = (x, jnp.zeros(3))
        return jnp.sum(jax.lax.scan(body, start, jnp.arange(3.0))[0][0])

    transport = InProcess.of(DATA)
    executor = flower(transport)
    handle = executor.clients()
    first = f.on(executor)(X, handle)
    assert_same(first, f.on(REFERENCE)(X, Z))
    for asked in transport.handlers.values():
        asked.memory.forget([n for n in asked.memory.entries if n.startswith("constant/")])
    assert_same(f.on(executor)(X, handle), first)
    assert all(b.setup > 0 for b in executor.report.traffic.values())
