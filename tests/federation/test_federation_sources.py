"""The server names where an input comes from; a node gives only what the program has declared.

Messages are made by hand here, as a server that means ill would make them.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.exported import programs
from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.memory import KEPT
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy
from fedgrad.federation.protocol.signing import is_signed, make_keys, sign
from fedgrad.federation.protocol.stage_program import read_program
from programs import assert_same, normal

REFERENCE = fg.executors.reference()
N, ROWS = 3, 4
DATA = [
    {
        "public": np.asarray(normal(i, ROWS)),
        "secret": np.asarray(normal(10 + i, ROWS, ROWS)),
        "examples": {"x": np.asarray(normal(20 + i, ROWS - 1, ROWS))},
    }
    for i in range(N)
]
X = normal(0, ROWS)


def stacked(part):
    return jnp.stack([jnp.asarray(own[part]) for own in DATA])


# --- programs, each with the data that it is allowed on ----------------------------------------


@fg.program(z=fg.CLIENTS)
def mean(z):
    return fg.mean(z)


@fg.program(z=fg.CLIENTS)
def total(z):
    return fg.sum(jnp.sum(z, 0))


@fg.program(z=fg.CLIENTS)
def two_rounds(x, z):
    """The second round reads what the first has kept."""
    s = jnp.tanh(fg.broadcast(x) * z)
    return fg.sum(fg.broadcast(fg.mean(s)) * s)


@fg.program(z=fg.CLIENTS)
def over_rows(x, z):
    """A round for each row of the client's data."""
    return jax.lax.scan(lambda x, row: (x + fg.mean(fg.broadcast(x) * row), None), x, z)[0]


@fg.program(z=fg.CLIENTS)
def last_row(x, z):
    """Rows leave the loop as its carry, and in another order as what it stacks."""

    def body(carry, row):
        x, before, last = carry
        x = x + fg.mean(fg.broadcast(x) * row)
        return (x, last, row), (before, row)

    (x, before, last), (stack, rows) = jax.lax.scan(body, (x, jnp.zeros(ROWS), z[1]), z)
    return x + fg.sum(before) + 2 * fg.sum(last) + fg.sum(stack[0] - stack[-1] + rows[2])


@fg.program(z=fg.CLIENTS)
def carried(x, z):
    """A state at clients that goes from iteration to iteration."""

    def body(carry, i):
        x, state = carry
        state = state * i + fg.broadcast(x) * z
        return (x + fg.mean(jnp.sin(state)), state), state

    (x, state), states = jax.lax.scan(body, (x, jnp.ones(ROWS)), jnp.arange(3.0), reverse=True)
    return x + fg.sum(state) + fg.sum(states[0])


@fg.program(z=fg.CLIENTS)
def decided(x, z):
    """The data decide how often, and which branch."""

    def body(carry):
        i, x, state = carry
        state = jax.lax.cond(jnp.sum(x) > 0, lambda: state + z, lambda: z - fg.broadcast(x))
        return i + 1, x + fg.mean(state), state

    start = (0, x, jnp.zeros(ROWS))
    _, x, state = jax.lax.while_loop(
        lambda c: c[0] < jnp.where(jnp.sum(c[1]) > 99, 3, 2), body, start
    )
    return x + fg.sum(state)


@fg.program(z=fg.CLIENTS)
def nested(x, z):
    """Loops in loops: rows of rows."""

    def outer(x, row):
        def inner(x, scalar):
            return x + fg.mean(fg.broadcast(x) * scalar), scalar

        return jax.lax.scan(inner, x, row)

    x, kept = jax.lax.scan(outer, x, z)
    return x + fg.sum(kept[1] + kept[:, 2])


@fg.program(z=fg.CLIENTS)
def indexed(key, z):
    return fg.sum(z * jax.random.uniform(fg.client_key(key)))


@fg.program(z=fg.CLIENTS)
def counted(z):
    return fg.sum(z.count.astype(float)), fg.sum(jnp.sum(z.batch(0, 2)[0]["x"]))


# What is run: (program, its arguments at the server, the part of the data that clients' are).
LEGITIMATE = {
    "mean": (mean, (), "public"),
    "two rounds": (two_rounds, (X,), "public"),
    "over rows": (over_rows, (X,), "secret"),
    "last row": (last_row, (X,), "secret"),
    "carried": (carried, (X,), "public"),
    "decided": (decided, (jnp.abs(X),), "public"),
    "nested": (nested, (X,), "secret"),
    "indexed": (indexed, (jax.random.key(1),), "public"),
    "counted": (counted, (), "examples"),
}
DERIVED = {
    f"{name}, {mode}": (fg.value_and_grad(lambda_(program), 0, mode=mode), args, part)
    for name, (program, args, part) in LEGITIMATE.items()
    for mode in ("forward", "reverse", "mixed")
    if name in ("two rounds", "over rows", "last row", "carried", "nested")
    for lambda_ in [lambda p: fg.program(z=fg.CLIENTS)(lambda x, z: jnp.sum(jnp.sin(p(x, z))))]
}
EVERY = LEGITIMATE | DERIVED


def flower(transport, **options):
    return fg.executors.flower(transport, platforms=("cpu",), **options)


def client_arguments(executor, part):
    return executor.population(part).everyone if part == "examples" else executor.clients(part)


def allowed(program, args, part):
    """The digests that a site is given for this call."""
    asking = flower(InProcess.of(DATA))
    return asking.programs(program, *args, client_arguments(asking, part))


@pytest.mark.parametrize("name", EVERY)
def test_what_is_declared_is_what_is_run(name):
    """A site that allows the program on these data and nothing else gives what was asked for."""
    program, args, part = EVERY[name]
    digests = frozenset(stage.digest for stage in allowed(program, args, part))
    executor = flower(InProcess.of(DATA, Policy(programs=digests)))
    found = program.on(executor)(*args, client_arguments(executor, part))
    here = fg.cohort([own["examples"] for own in DATA]) if part == "examples" else stacked(part)
    assert_same(found, program.on(REFERENCE)(*args, here))


@pytest.mark.parametrize("name", EVERY)
def test_the_digest_covers_the_sources(name):
    """Also the signature: the same code on other data is another program."""
    program, args, part = EVERY[name]
    secret, public = make_keys()
    for stage in allowed(program, args, part):
        assert part in "".join(stage.reads) and part in str(stage)
        assert read_program(stage.content) == stage
        declared = stage.declared
        others = [["data", "other", 0] for _ in declared.arguments]
        moved = dataclasses.replace(declared, arguments=tuple(others))
        other = dataclasses.replace(stage, declared=moved)
        assert other.digest != stage.digest
        assert not is_signed(public, other.digest, sign(secret, stage.digest))


# --- a server that means ill --------------------------------------------------------------------


def site(*stages, **config):
    """A node that allows these stages and nothing else, and as many clients as one likes."""
    policy = Policy(programs=frozenset(stage.digest for stage in stages), minimum_cohort=100)
    return Node(lambda _: DATA[0], policy, context=Context(config))


def run(node, stage, inputs, at=(), keep=None, sent=None, **meta):
    """What a node answers to one stage with these inputs."""
    stays = len(stage.outputs) - stage.summed
    item = {
        "program": stage.digest,
        "at": at if isinstance(at, str) else list(at),
        "cohort": 100,
        "inputs": inputs,
        "keep": [f"k{i}" for i in range(stays)] if keep is None else keep,
        "free": [],
    }
    if sent is None:
        sent = [np.ones(a.shape, a.dtype) for a in stage.inputs[: stage.sent]]
    meta = {"work": json.dumps([item]), "signatures": [""], "names": [], "constants": [], **meta}
    constants = [np.ones(() if name == "number" else ROWS) for name in meta["constants"]]
    code = np.frombuffer(stage.content, np.uint8)
    return node.handle(Envelope("run", meta, (*sent, *constants, code)))


def refused(reply, *words):
    assert (reply.kind, reply.arrays) == ("refused", ()), reply
    for word in words:
        assert word in reply.reason, reply.reason


def stages(program, *args, part="public"):
    return allowed(program, args, part)


(MEAN,) = stages(mean)
PUBLIC, SECRET = ["data", "public", 0], ["data", "secret", 0]
FEEDS = {
    "other data": SECRET,
    "a row of other data": ["row", SECRET, 1],
    "a row of its data": ["row", PUBLIC, 1],
    "a row of a row": ["row", ["row", SECRET, 0], 0],
    "a stack": ["stack", [["row", PUBLIC, i] for i in range(ROWS)]],
    "a stack of one": ["stack", [["row", ["row", SECRET, 0], 0]] * ROWS],
    "examples": ["rows", "public", 0, 2],
    "all of it": ["data", "", 1],
    "a part of a part": ["data", "examples", 0],
    "another leaf": ["data", "public", 1],
    "a leaf from the end": ["data", "public", -1],
    "a leaf that is no number": ["data", "public", False],
    "a count": ["count", "secret"],
    "an offset": ["offset"],
    "an index": ["index"],
    "a constant": ["constant", "c"],
    "what was kept": ["kept", "mine"],
    "a declaration": ["argument", 0],
    "a result": ["result", MEAN.declared.plan, 0, 0, [], []],
    "nothing": [],
    "a word": "data",
    "null": None,
    "more": [*PUBLIC, 0],
}


@pytest.mark.parametrize("feed", FEEDS)
def test_an_input_is_only_what_the_program_declares(feed):
    asked = site(MEAN)
    asked.memory.put(KEPT + "mine", np.ones(ROWS), MEAN.declared.origin(0, ()).text)
    reply = run(asked, MEAN, [FEEDS[feed]], constants=["c"])
    shown = f"input 0 comes from {json.dumps(PUBLIC)}"
    refused(reply, MEAN.digest, "mean", shown, f"has named {json.dumps(FEEDS[feed])}")
    good = run(asked, MEAN, [PUBLIC])
    assert good.kind == "ok"
    np.testing.assert_allclose(good.arrays[-1], DATA[0]["public"])


def test_no_row_of_a_secret_leaves_a_site_that_allows_a_mean_of_something_else():
    """As it was found: the allow-list and a minimum of 100 clients did not help."""
    asked = site(MEAN)
    for i in range(ROWS):
        refused(run(asked, MEAN, [["row", SECRET, i]]))


# Each stage that reads something else than its arguments, and what it must not be fed with.
OVER_ROWS = stages(over_rows, X, part="secret")[-1]
(TOTAL,) = stages(total, part="secret")
LAST_ROW = stages(last_row, X, part="secret")
COUNTED = stages(counted, part="examples")[-1]
(INDEXED,) = stages(indexed, jax.random.key(1))


def test_a_row_is_read_only_in_its_iteration():
    asked = site(OVER_ROWS)
    for i in range(ROWS):
        for row in range(-1, ROWS + 1):
            reply = run(asked, OVER_ROWS, [["row", SECRET, row]], at=[i])
            if row == i:
                assert reply.kind == "ok"
            else:
                refused(reply, f'comes from ["row", ["data", "secret", 0], {i}]')
        for bad in (
            ["row", PUBLIC, i],
            ["row", SECRET, float(i)],
            SECRET,
            ["row", SECRET, bool(i)],
        ):
            refused(run(asked, OVER_ROWS, [bad], at=[i]))
    for at in ([], [ROWS], [-1], [0, 0], [True], [0.0], "0", [None]):
        refused(run(asked, OVER_ROWS, [["row", SECRET, 0]], at=at), "is not run in iteration")


def test_outside_of_the_loop_a_row_is_only_the_one_that_the_loop_has_left():
    begin, _, end = LAST_ROW
    asked, rows = site(*LAST_ROW), [["row", SECRET, i] for i in range(ROWS)]
    assert run(asked, begin, [SECRET], keep=["begin"]).kind == "ok"
    start = [["constant", "c"], ["kept", "begin"]]
    right = [rows[2], rows[3], SECRET, ["stack", [*start, rows[0], rows[1]]]]
    assert run(asked, end, right, constants=["c"]).kind == "ok"
    for i, good in enumerate(right):
        stacks = [[*start, rows[1], rows[0]], [rows[0]] * ROWS, rows, [*start, *rows[:1]]]
        for feed in (*rows, SECRET, PUBLIC, *(["stack", stack] for stack in stacks)):
            if feed != good:
                wrong = [*right[:i], feed, *right[i + 1 :]]
                refused(run(asked, end, wrong, constants=["c"]), f"input {i} comes from")


@pytest.mark.promotes("rank")  # of the other shapes
def test_what_was_kept_is_only_for_the_stage_that_declares_it():
    """Not what another stage, iteration or program has kept, or the same on other data."""
    here, other = stages(two_rounds, X), stages(two_rounds, X, part="secret")
    loop = [s for s in stages(carried, X) if s.declared.loops]
    assert here[0].declared.plan != other[0].declared.plan  # other shapes, so other code
    second = next(s for s in here if [["kept", 0, 0, []]] in s.declared.choices([]))
    asked = site(*here, *other, *loop)
    assert run(asked, here[0], [PUBLIC], keep=["good"]).kind == "ok"
    assert run(asked, other[0], [SECRET], keep=["other"], sent=[np.ones((ROWS,))]).kind == "ok"
    assert run(asked, second, [["kept", "good"]]).kind == "ok"
    refused(run(asked, second, [["kept", "other"]]), '["kept", 0, 0, []]', "which is")
    for feed in (PUBLIC, SECRET, ["constant", "c"], ["row", ["kept", "good"], 0]):
        refused(run(asked, second, [feed], constants=["c"]), "declares")
    reply = run(asked, second, [["kept", "absent"]])
    assert reply.kind == "error" and reply.meta["lost"]


def test_the_same_code_on_other_data_keeps_other_values():
    @fg.program(z=fg.CLIENTS)
    def keeping(x, z):
        s = fg.broadcast(x) * z
        return fg.sum(fg.broadcast(fg.sum(s)) * s)

    plan = fg.plan(keeping, X, stacked("public"))
    a, b = (programs(plan, [source], ("cpu",)) for source in (PUBLIC, ["row", SECRET, 0]))
    assert a[0].declared.plan == b[0].declared.plan and a[0].digest != b[0].digest
    asked = site(*a, b[0])
    assert run(asked, a[0], [PUBLIC], keep=["a"]).kind == "ok"
    assert run(asked, b[0], [["row", SECRET, 0]], keep=["b"]).kind == "ok"
    refused(run(asked, a[1], [["kept", "b"]]))
    assert run(asked, a[1], [["kept", "a"]]).kind == "ok"


def test_a_carry_is_what_the_iteration_before_has_left():
    """In reverse: iteration 2 is the first, and begins with a constant."""
    body, end = stages(carried, X)
    asked, start = site(body, end), ["constant", "c"]

    def fed(i, state, name):
        inputs = [PUBLIC, state, ["constant", "number"]]
        return run(asked, body, inputs, at=[i], keep=[name], constants=["c", "number"])

    for i in (0, 1):
        refused(fed(i, start, "never"), f'["kept", 0, 0, [{i + 1}]]')
    before = start
    for i in (2, 1, 0):
        assert fed(i, before, f"at {i}").kind == "ok"
        before = ["kept", f"at {i}"]
        for j in {0, 1, 2} - {i - 1}:  # what iteration i has left is for no other than the next
            refused(fed(j, before, "never"), "which is")
    states = [["kept", f"at {i}"] for i in range(3)]
    assert run(asked, end, [states[0], ["stack", states]]).kind == "ok"
    for last, stack in ((1, states), (0, states[:1] * 3), (0, states[::-1]), (0, states[:2])):
        refused(run(asked, end, [states[last], ["stack", stack]]), "declares")


def test_a_result_is_of_the_call_that_was_declared():
    """State goes on from call to call; each that may is declared, by code and by data."""

    @fg.program(z=fg.CLIENTS, state=fg.CLIENTS)
    def step(x, z, state):
        state = 0.5 * state + fg.broadcast(x) * z
        return fg.mean(state), state

    @fg.program(state=fg.CLIENTS)
    def look(state):
        return fg.sum(state)

    asking = flower(InProcess.of(DATA))
    z = asking.clients("public")
    first = asking.programs(step, X, z, z)
    _, state = step.on(asking)(X, z, z)
    later = asking.programs(step, X, z, state)
    _, again = step.on(asking)(X, z, state)
    assert {s.digest for s in later} == {s.digest for s in asking.programs(step, X, z, again)}
    assert {s.digest for s in later} != {s.digest for s in first}
    seen = asking.programs(look, state)
    assert [s.digest for s in seen] == [s.digest for s in asking.programs(look, again)]
    assert seen[0].reads == (json.dumps(PUBLIC),)

    # With these three a site serves the whole training, and nothing of other data or programs.
    digests = frozenset(s.digest for s in (*first, *later, *seen))
    executor = flower(InProcess.of(DATA, Policy(programs=digests)))
    z, local = executor.clients("public"), stacked("public")
    state, here = z, local
    for _ in range(3):
        found, state = step.on(executor)(X, z, state)
        wanted, here = step.on(REFERENCE)(X, local, here)
        assert_same(found, wanted)
        assert_same(look.on(executor)(state), here.sum(0))

    plan = fg.plan(step, X, local, local)
    on_secret = programs(plan, [["row", SECRET, 0], ["row", SECRET, 1]], ("cpu",))[0]
    asked = site(*first, *later, *seen, on_secret)
    (look_stage,), first_stage = seen, first[0]
    assert run(asked, first_stage, _order(first_stage, PUBLIC, PUBLIC), keep=["good"]).kind == "ok"
    fed = _order(on_secret, ["row", SECRET, 0], ["row", SECRET, 1])
    assert run(asked, on_secret, fed, keep=["bad"]).kind == "ok"
    assert run(asked, look_stage, [["kept", "good"]]).kind == "ok"
    refused(run(asked, look_stage, [["kept", "bad"]]), "secret")
    for feed in (PUBLIC, SECRET, ["constant", "c"]):
        refused(run(asked, look_stage, [feed], constants=["c"]))


def _order(stage, *arguments):
    """The sources of a stage's own inputs, which may have them in another order."""
    (found,) = stage.declared.inputs[""]
    return [arguments[source[1]] for source in found]


def test_counts_and_examples_are_of_the_declared_part():
    asked = site(COUNTED)
    (right,) = COUNTED.declared.choices([])
    assert run(asked, COUNTED, right).kind == "ok"
    kinds = [source[0] for source in right]
    assert {"rows", "count"} <= set(kinds)
    rows, count = kinds.index("rows"), kinds.index("count")
    for where, feed in (
        (rows, ["rows", "secret", 0, right[rows][3]]),
        (rows, ["rows", "examples", 0, right[rows][3] + 1]),
        (rows, ["rows", "examples", 0]),
        (rows, ["stack", [["row", SECRET, 0]] * 2 * right[rows][3]]),
        (count, ["count", "secret"]),
        (count, ["offset"]),
        (count, ["index"]),
        (count, ["constant", "c"]),
    ):
        wrong = [*right[:where], feed, *right[where + 1 :]]
        refused(run(asked, COUNTED, wrong, constants=["c"]), "declares")


def test_a_client_that_knows_its_index_is_not_told_another():
    (sources,) = INDEXED.declared.choices([])
    assert ["index"] in sources
    knows = site(INDEXED, **{"partition-id": 2})
    refused(run(knows, INDEXED, sources, index=1), "this is client 2", "calls it 1")
    answers = [
        run(node, INDEXED, sources, **told).arrays[0].tolist()
        for node, told in ((knows, {}), (knows, {"index": 2}), (site(INDEXED), {"index": 2}))
    ]
    assert answers[0] == answers[1] == answers[2]
    at = sources.index(["index"])
    for feed in (["constant", "c"], ["count", "secret"], ["offset"]):
        wrong = [*sources[:at], feed, *sources[at + 1 :]]
        refused(run(knows, INDEXED, wrong, constants=["c"]), "declares")


def test_a_header_that_was_changed_is_another_program():
    """Also where only the declaration of an input is changed, and nothing of the code."""
    head, _, module = MEAN.content.partition(b"\n")
    for change in (
        (b'"public"', b'"secret"'),
        (b'["argument", 0]', b'["constant"]'),
        (b'"loops": []', b'"loops": [4]'),
        (b'"stage": 0', b'"stage": 1'),
    ):
        assert change[0] in head
        other = read_program(head.replace(*change) + b"\n" + module)
        assert other.digest != MEAN.digest
        reply = run(site(MEAN), other, [PUBLIC])
        refused(reply, "not on the list of allowed programs")


@pytest.mark.parametrize(
    "was, becomes",
    [
        ('[["argument", 0]]', '[["argument", 0], ["argument", 0]]'),
        ('"plan"', '"plam"'),
        ('"fedgrad": 3', '"fedgrad": 2'),
        *(
            ('["argument", 0]', source)
            for source in (
                # Shown are the arguments: what is fed is one of them, or made of them.
                '["data", "secret", 0]',
                '["row", ["data", "secret", 0], 0]',
                '["stack", [["data", "secret", 0]]]',
                '["rows", "secret", 0, 4]',
                '["count", "secret"]',
                '["offset"]',
                '["result", "plan", 0, 0, [], []]',
                '["argument", -1]',
                '["argument", 1]',
                '["argument", 7]',
                '["argument", false]',
                '["argument", 0.0]',
                '["argument"]',
                '["argument", 0, 0]',
                '["row", ["argument", 0], -1]',
                '["row", ["argument", 0]]',
                '["stack", []]',
                '["stack", ["argument", 0]]',
                '["kept", 0, 0]',
                '["kept", 0, -1, []]',
                '["kept", 0, 0, [-2]]',
                '["constant", "c"]',
                '["index", 0]',
                '["bogus"]',
                "[]",
                "5",
                "null",
                '"argument"',
                '{"argument": 0}',
            )
        ),
        *(
            ('{"": [[["argument", 0]]]}', inputs)
            for inputs in (
                "[5]",
                "5",
                '{"": 5}',
                '{"": {}}',
                '{"": [5]}',
                '{"": [{}]}',
                '{"": [["argument", 0]]}',
                '{"": [[]]}',
                '{"": [[["argument", 0]], []]}',
                '{"": [[["argument", 0]]], "0": [[["argument", 0]]]}',
                '{"0": [[["argument", 0]]]}',
                '{"x": [[["argument", 0]]]}',
            )
        ),
        *(
            ('[["data", "public", 0]]', arguments)
            for arguments in (
                '[["dta", "public", 0]]',
                '[["data", "public"]]',
                '[["data", "public", -1]]',
                '[["data", 5, 0]]',
                '[["rows", "public", 0]]',
                '[["kept", 0, 0, []]]',
                '[["kept", "name"]]',
                '[["argument", 0]]',
                '[["result", "plan", 0, 0, [], ["root"]]]',
                '[["row", ["dta", "public", 0], 0]]',
                "[5]",
                "5",
                "{}",
            )
        ),
        ('"stage": 0', '"stage": -5'),
        ('"stage": 0', '"stage": "0"'),
        ('"stage": 0', '"stage": false'),
        ('"loops": []', '"loops": [-1, "x"]'),
        ('"loops": []', '"loops": [-1]'),
        ('"loops": []', '"loops": ["x"]'),
        ('"loops": []', '"loops": "ab"'),
        ('"loops": []', '"loops": [true]'),
        ('"loops": []', '"loops": 1'),
    ],
)
def test_a_header_that_makes_no_sense_is_no_program(was, becomes):
    """Before anybody is shown what it reads."""
    head, _, module = MEAN.content.partition(b"\n")
    assert was.encode() in head
    forged = head.replace(was.encode(), becomes.encode()) + b"\n" + module
    with pytest.raises(FederationError):
        read_program(forged)


def test_a_row_of_an_argument_that_has_fewer_is_no_program():
    plan = fg.plan(over_rows, X, stacked("secret"))
    rows = [["row", SECRET, i] for i in range(ROWS)]
    assert programs(plan, [["stack", rows]], ("cpu",))[-1].reads == (json.dumps(SECRET),)
    with pytest.raises(fg.ArgumentError, match=r"no row 3 in a stack of 3"):
        programs(plan, [["stack", rows[:3]]], ("cpu",))


def test_what_is_on_the_nodes_has_to_be_said():
    executor = flower(InProcess.of(DATA))
    with pytest.raises(fg.CohortError, match=r"on the nodes; got .*executor\.clients"):
        executor.programs(mean, stacked("public"))
    with pytest.raises(fg.ArgumentError, match="1 arrays at clients, and 2 sources"):
        programs(fg.plan(mean, stacked("public")), [PUBLIC, PUBLIC], ("cpu",))
    for wrong in (["dta", "public", 0], ["data", "public"], ["kept", "k"], ["argument", 0], 5):
        with pytest.raises(fg.ArgumentError, match=r'sources\.py:\d+: mean: source 0 is .*"train"'):
            programs(fg.plan(mean, stacked("public")), [wrong], ("cpu",))


# --- where the data decide ----------------------------------------------------------------------


@fg.program(a=fg.CLIENTS, b=fg.CLIENTS)
def swap(x, a, b):
    """Sends a and 2 b, or b and 2 a, and never 3 b."""
    first = lambda: (x + fg.sum(jnp.sum(a)), a, b)
    second = lambda: (x + fg.sum(jnp.sum(a)), b, a)
    x, u, v = jax.lax.cond(x > 0, first, second)
    return x + jnp.sum(fg.sum(u + 2 * v))


def _rotated(x, rows, last):
    """Sums rows in a loop, and leaves them one further on."""

    def body(carry, row):
        x, before = carry
        return (x + fg.sum(0.1 * jnp.sum(jnp.abs(row))), row), before

    (x, last), rows = jax.lax.scan(body, (x, last), rows)
    return x, rows, last


@fg.program(z=fg.CLIENTS)
def once_or_twice(x, z):
    start = z[1]
    once = lambda: _rotated(x, z, start)
    x, rows, _ = jax.lax.cond(x > 0, once, lambda: _rotated(*once()))
    return x + jnp.sum(fg.sum(jnp.sum(rows, 0)))


@fg.program(z=fg.CLIENTS)
def often(x, z):
    more = lambda carry: _rotated(*carry)
    x, rows, _ = jax.lax.while_loop(lambda c: c[0] < 8.0, more, (x, z, z[1]))
    return x + jnp.sum(fg.sum(jnp.sum(rows, 0)))


ROW = ["row", SECRET, 0]


def test_alternatives_are_of_all_inputs_together():
    asking = flower(InProcess.of(DATA))
    a, b = asking.clients("public"), stacked("secret")[:, 0]
    plan = fg.plan(swap, jnp.float64(1), stacked("public"), b)
    last = programs(plan, [PUBLIC, ROW], ("cpu",))[-1]
    asked = site(last)
    for good in ([PUBLIC, ROW], [ROW, PUBLIC]):
        assert run(asked, last, good).kind == "ok"
    for bad in ([PUBLIC, PUBLIC], [ROW, ROW]):
        refused(run(asked, last, bad), "together", json.dumps([PUBLIC, ROW]))
    refused(run(asked, last, [PUBLIC, SECRET]), "input 1 comes from")
    both = asking.programs(swap, jnp.float64(1), a, a)
    executor = flower(InProcess.of(DATA, Policy(programs=frozenset(s.digest for s in both))))
    for x in (1.0, -1.0):
        z, local = executor.clients("public"), stacked("public")
        assert_same(swap.on(executor)(x, z, z), swap.on(REFERENCE)(x, local, local))


@pytest.mark.parametrize("program", [once_or_twice, often], ids=lambda p: p.name)
def test_rows_of_one_way_are_not_stacked_with_those_of_another(program):
    made = stages(program, jnp.float64(1), part="secret")
    last, begin = made[-1], next(s for s in made if not s.summed)
    asked, rows = site(*made), [["row", SECRET, i] for i in range(ROWS)]
    assert run(asked, begin, [SECRET], keep=["begin"]).kind == "ok"
    start = ["kept", "begin"]
    for turned in ([start, *rows[:3]], [rows[3], start, *rows[:2]]):
        assert run(asked, last, [["stack", turned]]).kind == "ok"
    for i in range(ROWS):
        refused(run(asked, last, [["stack", rows[i : i + 1] * ROWS]]))
        refused(run(asked, last, [["stack", [rows[3], *rows[:3]]]]))
        refused(run(asked, last, [["stack", [start, start, *rows[:2]]]]))
    executor = flower(InProcess.of(DATA, Policy(programs=frozenset(s.digest for s in made))))
    for x in (1.0, -1.0):
        found = program.on(executor)(jnp.float64(x), executor.clients("secret"))
        assert_same(found, program.on(REFERENCE)(jnp.float64(x), stacked("secret")))


def test_the_same_number_chooses_the_same_branch():
    @fg.program(a=fg.CLIENTS, b=fg.CLIENTS)
    def twice(x, a, b):
        way = x > 0
        keep, turn = lambda u, v: (u, v, fg.sum(u[0])), lambda u, v: (v, u, fg.sum(v[0]))
        u, v, s = jax.lax.cond(way, keep, turn, a, b)
        u, v, t = jax.lax.cond(way, keep, turn, u, v)
        return s + t + fg.sum(u[0] + 2 * v[1])

    plan = fg.plan(twice, X[0], stacked("public"), stacked("public"))
    last = programs(plan, [PUBLIC, ROW], ("cpu",))[-1]
    (only,) = last.declared.choices([])
    assert PUBLIC in only and ROW in only


def test_ways_that_come_to_the_same_are_one():
    """In a long loop that turns two values in each iteration there are two, and not 2 ** 20."""

    @fg.program(a=fg.CLIENTS, b=fg.CLIENTS)
    def turning(x, a, b):
        def body(carry, i):
            x, u, v = carry
            stay, turn = lambda: (x + fg.sum(u[0]), u, v), lambda: (x + fg.sum(v[1]), v, u)
            return jax.lax.cond(x > i, stay, turn), None

        return jax.lax.scan(body, (x, a, b), jnp.arange(20.0))[0][0]

    @fg.program(a=fg.CLIENTS, b=fg.CLIENTS)
    def stacking(x, a, b):
        def body(x, i):
            x, u = jax.lax.cond(x > i, lambda: (x + fg.sum(a[0]), a), lambda: (x + fg.sum(b[0]), b))
            return x, u

        x, rows = jax.lax.scan(body, x, jnp.arange(20.0))
        return x + fg.sum(rows[3, 0])

    a = stacked("public")
    made = programs(fg.plan(turning, X[0], a, a), [PUBLIC, ROW], ("cpu",))
    assert max(len(some) for s in made for some in s.declared.inputs.values()) == 2
    with pytest.raises(fg.PlanError, match=r"sources\.py:\d+: stacking: .* 256 ways.*jnp\.where"):
        programs(fg.plan(stacking, X[0], a, a), [PUBLIC, PUBLIC], ("cpu",))


def test_results_are_of_the_same_data_argument_by_argument():
    """A site that allows a program on (a, b) and on (b, a) has two results, which are different."""

    @fg.program(a=fg.CLIENTS, b=fg.CLIENTS)
    def first(a, b):
        return fg.sum(jnp.sum(b) * 0.0), a * 1.0

    plan = fg.plan(first, stacked("public"), stacked("public"))
    ways = {
        name: pair
        for name, pair in zip(
            "xyzw", [(PUBLIC, ROW), (ROW, PUBLIC), (ROW, ROW), (PUBLIC, PUBLIC)], strict=True
        )
    }
    made = {name: programs(plan, list(pair), ("cpu",)) for name, pair in ways.items()}
    keeping = {name: next(s for s in of if s.summed < len(s.outputs)) for name, of in made.items()}
    result = keeping["x"].declared.origin(0, ()).result
    (look,) = programs(fg.plan(mean, stacked("public")), [result], ("cpu",))
    assert look.reads == (json.dumps(PUBLIC), json.dumps(SECRET))
    asked = site(look, *keeping.values())
    for name, stage in keeping.items():
        assert run(asked, stage, _order(stage, *ways[name]), keep=[name]).kind == "ok"
    assert run(asked, look, [["kept", "x"]]).kind == "ok"
    for name in "yzw":
        refused(run(asked, look, [["kept", name]]), "which is")


def test_a_row_that_is_not_there_is_not_the_last_one():
    """As JAX would have it; a node may be back with other data than those it has described."""
    fewer = Node(
        lambda _: {"secret": DATA[0]["secret"][:2]},
        Policy(programs=frozenset([OVER_ROWS.digest]), minimum_cohort=100),
        context=Context({}),
    )
    for i in range(ROWS):
        reply = run(fewer, OVER_ROWS, [["row", SECRET, i]], at=[i])
        assert reply.kind == ("ok" if i < 2 else "error"), reply
        assert i < 2 or f"has no row {i}" in reply.reason
