"""The invariants of the house: what keeps it small enough for a head.

What does not hold yet is marked as expected to fail, with what has to come first; strict, so that
the mark goes when it holds.
"""

import ast
import collections
import functools
import gc
import inspect
import pathlib
import subprocess
import sys
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad
import fedgrad as fg
import size
from fedgrad.federation import InProcess
from programs import normal

ROOT = pathlib.Path(fg.__file__).parent
X, Z = normal(0, 3), normal(1, 4, 3)


# --- modules ------------------------------------------------------------------------------------


def modules():
    for path in ROOT.rglob("*.py"):
        parts = ("fedgrad", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def import_graph():
    """For each module those that it imports, anywhere in it."""
    known = dict(modules())
    graph = {}
    for name, path in known.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {x if x in known else node.module for x in full}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = {x for x in found if x in known and x != name}
    return graph


def cycles(graph):
    """Groups of modules that import each other."""
    reach = {name: set(direct) for name, direct in graph.items()}
    for _ in graph:
        longer = {n: r.union(*(reach[m] for m in r)) if r else r for n, r in reach.items()}
        if longer == reach:
            break
        reach = longer
    return {frozenset(m for m in reach[n] if n in reach[m]) for n in graph if n in reach[n]}


def test_the_search_for_cycles_finds_one():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_module_imports_itself_through_others():
    assert not cycles(import_graph())


def packages():
    between = {}
    for name, imported in import_graph().items():
        own = name.split(".")[1] if "." in name else ""
        for other in imported:
            there = other.split(".")[1] if "." in other else ""
            if own and there and own != there:
                between.setdefault(own, set()).add(there)
    return {own: there for own, there in between.items()}


def test_packages_are_in_strict_layers():
    graph = packages()
    graph = {
        name: graph.get(name, set()) for name in {*graph, *(x for v in graph.values() for x in v)}
    }
    assert not cycles(graph)


ROOMS = ["protocol", "flower", "operate"]


def test_rooms_of_the_federation_import_only_those_before_them():
    seen = set()
    for name, imported in import_graph().items():
        parts = name.split(".")
        if parts[:2] != ["fedgrad", "federation"] or len(parts) == 2:
            continue
        others = [other.split(".") for other in imported]
        there = {other[2] for other in others if other[1] == "federation"}
        assert there <= set(ROOMS[: ROOMS.index(parts[2]) + 1]), name
        seen |= there
    assert seen == set(ROOMS)


def of_fedgrad(path):
    """What a file imports of fedgrad, by full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fedgrad"}


CHECKOUT = ROOT.parents[1]
EXPERIMENTS = sorted((CHECKOUT / "experiments" / "src").rglob("*.py"))
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.py"))
INSIDE = {"command.py", "page.py"}  # of the experiments: the command and its report


@pytest.mark.parametrize("path", EXPERIMENTS + EXAMPLES, ids=lambda path: path.stem)
def test_experiments_and_examples_need_only_the_public_api(path):
    inside = path in EXPERIMENTS and path.name in INSIDE
    assert of_fedgrad(path) <= {"fedgrad"} or inside


LAYOUT = {"num_consts", "num_carry", "ft_in", "ft_out", "cond_nconsts", "body_nconsts", "branches"}


def test_one_file_knows_the_layout_of_control_flow():
    for name, path in modules():
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert name == "fedgrad.core.control" or not strings & LAYOUT, name


# Who may touch the bodies of an equation: the graph with its fold, and the evaluator. In the others
# the word stands for JAX's own jaxprs.
OF_GRAPHS = {"fedgrad.core.graph", "fedgrad.core.evaluate"}
OF_JAXPRS = {"core.control", "core.bodies", "core.normal_form", "execution.ragged"}


def test_only_the_fold_and_the_evaluator_descend_into_bodies():
    """Elsewhere it is only asked whether there are any."""
    found = set()
    for name, path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            inner = []
            if isinstance(node, ast.Subscript):
                inner = [node.value]
            elif isinstance(node, (ast.For, ast.comprehension)):
                inner = [node.iter]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                inner = [node.value]
            elif isinstance(node, ast.Call):
                inner = node.args
            if any(isinstance(x, ast.Attribute) and x.attr == "bodies" for x in inner):
                found.add(name)
    assert found >= OF_GRAPHS
    assert found - OF_GRAPHS - {f"fedgrad.{name}" for name in OF_JAXPRS} == set()


def test_importing_fedgrad_is_light():
    code = "import sys, fedgrad; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"rich", "flwr", "grpc", "matplotlib", "sklearn", "cryptography", "tensorboardX"}
    assert not (heavy | {"torch"}) & set(done.stdout.split())


def test_whoever_follows_a_gradient_opens_at_most_16_files():
    opened = set()

    def note(frame, event, argument):
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            opened.add(path.relative_to(ROOT).as_posix())

    loss, _ = counted()
    sys.setprofile(note)
    try:
        fg.grad(loss)(X, Z)
    finally:
        sys.setprofile(None)
    # The doors of public functions, which check what they are given.
    opened -= {"core/errors.py", "core/lossless.py"}
    assert "ad/transforms.py" in opened and len(opened) <= 16, opened


# --- sizes --------------------------------------------------------------------------------------

# Files that are too long, with what they may have until they are shorter. A new one does not belong
# here.
LONG_FILES = {
    "core/trace.py": 415,
    "core/program.py": 392,
    "ad/derivative.py": 389,
    "ad/transforms.py": 374,
    "ad/rules.py": 372,
}


def test_rooms_stay_within_their_budgets():
    assert size.room_sizes(
        {f"{size.PACKAGE}/a/b.py": 'def f():\n    """No."""\n    # no\n    f()\n'}
    ) == {"a": 2}
    sizes = size.room_sizes(size.sources())
    assert sizes.keys() == size.BUDGETS.keys()
    assert not {room: n for room, n in sizes.items() if n > size.BUDGETS[room]}


def test_files_and_functions_are_short():
    long_files, long_functions = {}, {}
    for path, text in size.sources().items():
        name = path.removeprefix(f"{size.PACKAGE}/")
        if text.count("\n") > LONG_FILES.get(name, size.LONGEST_FILE):
            long_files[name] = text.count("\n")
        for function, lines in size.function_lengths(text):
            if lines > size.LONGEST_FUNCTION:
                long_functions[f"{name}: {function}"] = lines
    assert not long_files and not long_functions


# --- functions ----------------------------------------------------------------------------------


def public_functions():
    names = [name for name in vars(fg) if not name.startswith("_")]
    for name in names:
        value = getattr(fg, name)
        if inspect.isfunction(value):
            yield name, value


def test_no_public_function_has_more_than_ten_parameters():
    many = {n: len(inspect.signature(f).parameters) for n, f in public_functions()}
    assert not {n: count for n, count in many.items() if count > 10}


def returned(function):
    """The classes of fedgrad in what a function says that it returns."""
    left = [typing.get_type_hints(function).get("return")]
    while left:
        one = left.pop()
        left += [part for part in typing.get_args(one) if not isinstance(part, list)]
        if inspect.isclass(one) and one.__module__.split(".")[0] == "fedgrad":
            yield one


def test_every_type_that_a_public_function_returns_is_public():
    public = set(map(id, vars(fg).values()))
    hidden = {
        (name, found.__name__)
        for name, function in public_functions()
        for found in returned(function)
        if id(found) not in public
    }
    assert not hidden


# --- plans are data -----------------------------------------------------------------------------


def counted():
    """A program, and how often its function was called."""
    calls = []

    @fg.program(z=fg.CLIENTS)
    def loss(x, z):
        calls.append(1)
        return fg.mean(jnp.sum((fg.broadcast(jnp.tanh(x)) - z) ** 2))

    return loss, calls


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_reading_a_plan_traces_nothing(mode):
    loss, calls = counted()
    plan = fg.plan(fg.grad(loss, mode=mode), X, Z)
    made = len(calls)
    names = [
        n
        for n, v in vars(type(plan)).items()
        if isinstance(v, (property, functools.cached_property))
    ]
    assert {"rounds", "traffic", "bytes"} <= set(names)
    shown = (
        [getattr(plan, name) for name in names],
        plan.rules,
        str(plan),
        plan.draw(),
        plan.audit(),
    )
    assert shown and len(calls) == made == 1


def test_an_explanation_asks_the_program_once_for_each_mode():
    loss, calls = counted()
    explained = fg.explain(loss, X, Z)
    assert len(calls) == 5  # the program, and four modes
    assert str(explained) and explained.reason and len(calls) == 5


def test_a_plan_of_a_derivative_within_another_program_has_its_own_rules():
    loss, _ = counted()

    @fg.program(z=fg.CLIENTS)
    def step(x, z):
        return x - 0.1 * fg.grad(loss, mode="mixed")(x, z)

    assert fg.plan(step, X, Z).rules == ()
    assert fg.plan(fg.jacobian(step, mode="forward"), X, Z).rules == ("push",)
    assert fg.plan(fg.grad(loss, mode="reverse"), X, Z).rules == ("pull",)


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_a_derivative_is_derived_as_often_as_rules_were_priced(mode, monkeypatch):
    from fedgrad.ad import derivative, planner, transforms
    from fedgrad.core import trace
    from fedgrad.planning import plan

    counts = collections.Counter()

    def count(module, name):
        fun = getattr(module, name)
        counting = lambda *a, **k: counts.update([name]) or fun(*a, **k)
        monkeypatch.setattr(module, name, counting)

    count(transforms, "derivative")
    count(planner, "_priced")
    count(trace, "make_jaxpr")
    count(trace, "check")
    for module in (derivative, planner, plan):
        count(module, "cut")
    loss, calls = counted()
    fg.grad(loss, mode=mode)(X, Z)
    assert len(calls) == 1
    priced = 3 if mode == "auto" else 0
    assert (counts["derivative"], counts["_priced"]) == (priced or 1, priced)
    # The program itself, and each derivative that is priced or run: what was priced is what runs.
    made = 1 + (priced or 1)
    assert (counts["make_jaxpr"], counts["check"]) == (made, made)
    # And what asks clients twice is compared with what the program itself asks of them.
    assert counts["cut"] == made + (mode == "auto")


def test_choices_are_not_remembered_for_ever():
    loss, _ = counted()
    gradient = fg.grad(loss)
    for length in range(1, 41):
        fg.plan(gradient, jnp.ones(length), jnp.ones((2, length)))
    assert 0 < len(gradient.fun.choices) <= 32


# --- what ends ----------------------------------------------------------------------------------


def test_a_closed_executor_is_garbage():
    nodes = InProcess.of([{"z": np.asarray(row)} for row in Z])
    loss, _ = counted()
    with fg.executors.flower(nodes) as executor:
        z = executor.clients("z")
        for program in (loss, fg.grad(loss), fg.grad(loss.on(executor)), fg.vjp(loss.on(executor))):
            args = (X, z) if "vjp" not in program.name else (X, z, jnp.ones(()))
            assert jax.tree.leaves(program.on(executor)(*args))
    ghosts = [weakref.ref(executor), weakref.ref(executor.federation)]
    del executor, program, args, z
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]
    assert loss(X, Z).shape == ()  # the program lives on


def test_programs_and_calls_do_not_grow_memory():
    """500 programs that nobody has any more, and 2,000 calls of one that stays."""

    def objects():
        gc.collect()
        return len(gc.get_objects())

    def fresh(number):
        @fg.program(z=fg.CLIENTS)
        def loss(x, z):
            return fg.mean(jnp.sum((fg.broadcast(x) * number - z) ** 2))

        for program in (loss, fg.grad(loss)):
            assert fg.plan(program, X, Z).rounds == 1

    loss, _ = counted()
    gradient = fg.grad(loss)
    for number in range(10):
        fresh(number)
        gradient(X, Z)
    jax.clear_caches()
    before = objects()
    for number in range(500):
        fresh(number)
    for _ in range(2000):
        gradient(X, Z)
    jax.clear_caches()  # JAX keeps what it traced, as many of each function as it likes
    assert objects() - before < 2000


# --- what is public -------------------------------------------------------------------------------


def test_all_is_the_whole_api():
    public = [n for n, v in vars(fg).items() if n[0] != "_" and not inspect.ismodule(v)]
    rooms = [n for n in fg.__all__ if inspect.ismodule(getattr(fg, n))]
    assert sorted(fg.__all__) == sorted([*public, *rooms])


def test_what_public_functions_return_is_public():
    known = [getattr(fg, name) for name in fg.__all__]
    for name, function in public_functions():
        hints = typing.get_type_hints(function)
        for kind in (hints.get("return"), *typing.get_args(hints.get("return"))):
            if inspect.isclass(kind) and kind.__module__.startswith("fedgrad"):
                assert kind in known, f"fg.{name} returns {kind}"


def test_modules_below_a_name_that_is_also_a_function():
    import fedgrad.planning.cut as module

    assert module is sys.modules["fedgrad.planning.cut"] and callable(fedgrad.plan)


def test_training_does_not_know_nodes():
    """What clients keep, here or on nodes, is `clients/handles.py` to it."""
    for name, imported in import_graph().items():
        if name.startswith("fedgrad.training"):
            assert not [other for other in imported if other.startswith("fedgrad.federation")], name
