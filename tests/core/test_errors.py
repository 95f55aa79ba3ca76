"""Every misuse raises a typed error that says where, what was found, and what to do.

Each misuse is a function; the line that the message has to name carries the mark `# <- here`.
"""

import inspect
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg

TRAIN, EVAL = fg.Placement("train"), fg.Placement("eval")
X, Z = jnp.arange(1.0, 4.0), jnp.arange(12.0).reshape(4, 3)
LARGE = jnp.ones((1000, 3))
MISUSES = []


def misuse(error, *words):
    """Into the table: the error's type, and what its message has to contain."""

    def add(fun):
        MISUSES.append(pytest.param(fun, error, words, id=fun.__name__))
        return fun

    return add


def on_clients(fun):
    """Call this as a program of a server vector and a client vector."""
    return fg.program(z=fg.CLIENTS)(fun)(X, Z)


# --- a server value used with a client value ----------------------------------------------------


@misuse(fg.PlacementError, '"x" is at the server', '"z", which is at clients', "fg.broadcast(x)")
def server_value_with_client_value():
    @on_clients
    def f(x, z):
        return fg.mean(x * z)  # <- here


@misuse(fg.PlacementError, "the result of fg.mean (", "at the server", "fg.broadcast(")
def mean_with_client_value():
    @on_clients
    def f(x, z):
        return fg.mean(fg.mean(z) * z)  # <- here


@misuse(fg.PlacementError, "the result of sin", "at the server", "fg.broadcast(")
def computed_server_value_with_client_value():
    @on_clients
    def f(x, z):
        y = jnp.sin(x)
        return fg.mean(y * z)  # <- here


@misuse(fg.PlacementError, "\"x['w']\" is at the server", "fg.broadcast(x['w'])")
def part_of_a_pytree_with_client_value():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return fg.mean(x["w"] * z)  # <- here

    f({"w": X, "b": 0.0}, Z)


@misuse(fg.PlacementError, '"x" is at the server', "fg.broadcast(x)")
def through_a_closure():
    @on_clients
    def f(x, z):
        def loss(data):
            return jnp.sum(data - x)  # <- here

        return fg.mean(loss(z))


@misuse(fg.PlacementError, "at the server", '"z", which is at clients', "fg.broadcast(")
def through_a_closure_of_vmap():
    @on_clients
    def f(x, z):
        return fg.mean(jax.vmap(lambda one: one * x[0])(z))  # <- here


@misuse(fg.PlacementError, "at the server", "which is at clients", "fg.broadcast(")
def inside_a_jitted_function():
    @jax.jit
    def product(a, b):
        return a * b

    @on_clients
    def f(x, z):
        return fg.mean(product(x, z))  # <- here


@misuse(fg.PlacementError, '"z", which is at clients', "fg.broadcast(")
def inside_where():
    @on_clients
    def f(x, z):
        return fg.mean(jnp.where(x > 0, z, 0.0))  # <- here


@misuse(fg.PlacementError, '"x" is at the server', '"z", which is at clients', "fg.broadcast(x)")
def inside_scan():
    @on_clients
    def f(x, z):
        def body(c, _):
            return c + jnp.sum(z * x), None  # <- here

        return fg.sum(jax.lax.scan(body, 0.0, None, length=2)[0])


@misuse(fg.PlacementError, '"x" is at the server', '"z", which is at clients', "fg.broadcast(x)")
def inside_scan_with_communication():
    @on_clients
    def f(x, z):
        def body(c, _):
            return c + fg.sum(jnp.sum(z * x)), None  # <- here

        return jax.lax.scan(body, 0.0, None, length=2)[0]


@misuse(fg.PlacementError, "at the server", "at clients", "fg.broadcast(")
def inside_scan_through_the_carry():
    @on_clients
    def f(x, z):
        def body(c, _):
            return c + fg.sum(c * z), None  # <- here

        return jax.lax.scan(body, x, None, length=2)[0]


@misuse(fg.PlacementError, "at the server", "at clients", "fg.broadcast(")
def inside_cond():
    @on_clients
    def f(x, z):
        return jax.lax.cond(
            x[0] > 0,
            lambda: fg.sum(z * x),  # <- here
            lambda: x,
        )


@misuse(fg.PlacementError, "at the server", "at clients", "fg.broadcast(")
def inside_while_loop():
    @on_clients
    def f(x, z):
        def body(state):
            return state[0] + 1, fg.sum(state[1] * z)  # <- here

        return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, x))


@misuse(fg.PlacementError, "at the server", "at clients", "fg.broadcast(")
def inside_checkpoint():
    @on_clients
    def f(x, z):
        return jax.checkpoint(lambda x: fg.sum(x * z))(x)  # <- here


@misuse(fg.PlacementError, "at the server", "at clients", "fg.broadcast(")
def inside_a_nested_program():
    @fg.program(z=fg.CLIENTS)
    def inner(x, z):
        return fg.sum(x * z)  # <- here

    @on_clients
    def f(x, z):
        return inner(x, z)


@misuse(fg.PlacementError, "fg.sum takes a value of clients", "at the server", "fg.broadcast")
def weights_of_the_server():
    @on_clients
    def f(x, z):
        return fg.mean(z, weights=x[0])  # <- here


@misuse(fg.PlacementError, "a captured array of shape (1000, 3)", "download", "fg.broadcast(")
def large_captured_array():
    @on_clients
    def f(x, z):
        return fg.sum(jnp.sum(z[None] * LARGE))  # <- here


@misuse(fg.PlacementError, "a captured array of shape (2000,)", "download", "fg.broadcast(")
def large_captured_numpy_array():
    table = np.arange(2000.0)

    @on_clients
    def f(x, z):
        return fg.sum(jnp.asarray(table)[z[0].astype(int)])  # <- here


@misuse(fg.PlacementError, "a captured array of shape (3,)", "download", "fg.broadcast(")
def value_of_an_outer_jit():
    @jax.jit
    def outer(y):
        @on_clients
        def f(x, z):
            return fg.sum(z * y)  # <- here

    outer(X)


# --- communication in the wrong direction -------------------------------------------------------


@misuse(fg.PlacementError, "fg.sum takes a value of clients", '"x" is at the server', "Use it as")
def sum_of_a_server_value():
    @on_clients
    def f(x, z):
        return fg.sum(x)  # <- here


@misuse(fg.PlacementError, "is at the server", "Use it as it is")
def mean_of_a_server_value():
    @on_clients
    def f(x, z):
        return fg.mean(x)  # <- here


@misuse(fg.PlacementError, "the result of fed_sum", "is at the server", "Use it as it is")
def sum_of_a_sum():
    @on_clients
    def f(x, z):
        total = fg.sum(z)
        return fg.sum(total)  # <- here


@misuse(fg.PlacementError, "fg.broadcast takes a value of the server", '"z" is at clients')
def broadcast_of_a_client_value():
    @on_clients
    def f(x, z):
        return fg.sum(fg.broadcast(z))  # <- here


@misuse(fg.PlacementError, "fg.broadcast takes a value of the server", "It is there already")
def broadcast_of_a_broadcast():
    @on_clients
    def f(x, z):
        here = fg.broadcast(x)
        return fg.sum(fg.broadcast(here) + z)  # <- here


@misuse(fg.PlacementError, "only sums leave clients", "Sum it: ")
def broadcast_from_clients_to_other_clients():
    @fg.program(z=TRAIN, held_out=EVAL)
    def f(z, held_out):
        return fg.sum(fg.broadcast(z, EVAL) * held_out, EVAL)  # <- here

    f(Z, Z)


@misuse(fg.PlacementError, "at train", "at eval", "sum one of them to the server and broadcast")
def value_of_one_placement_at_another():
    @fg.program(z=TRAIN, held_out=EVAL)
    def f(z, held_out):
        return fg.sum(z * held_out, TRAIN)  # <- here

    f(Z, Z)


@misuse(fg.PlacementError, "at train", "at eval")
def broadcast_to_one_placement_used_at_another():
    @fg.program(z=TRAIN, held_out=EVAL)
    def f(x, z, held_out):
        return fg.sum(fg.broadcast(x, TRAIN) * held_out, EVAL)  # <- here

    f(X, Z, Z)


@misuse(fg.PlacementError, "at=eval", "which is at train", "Write at=train")
def sum_over_the_wrong_clients():
    @fg.program(z=TRAIN, held_out=EVAL)
    def f(z, held_out):
        return fg.sum(z, EVAL)  # <- here

    f(Z, Z)


@misuse(fg.PlacementError, "at the server", "at train", "at=train")
def fix_names_the_placement():
    @fg.program(z=TRAIN)
    def f(x, z):
        return fg.sum(x * z, TRAIN)  # <- here

    f(X, Z)


@misuse(fg.PlacementError, "psum", "Only fg.sum and fg.broadcast")
def collective_of_jax():
    @on_clients
    def f(x, z):
        return jax.lax.psum(z, "fedgrad:clients")  # <- here


# --- control flow -------------------------------------------------------------------------------


@misuse(fg.PlacementError, "at clients", "every client would decide", "Decide at the server")
def cond_on_a_client_predicate():
    @on_clients
    def f(x, z):
        return jax.lax.cond(z[0] > 0, lambda: fg.sum(z), lambda: x)  # <- here


@misuse(fg.PlacementError, "at clients", "every client would decide", "Decide at the server")
def switch_on_a_client_index():
    @on_clients
    def f(x, z):
        which = z[0].astype(int)
        return jax.lax.switch(which, [lambda: fg.sum(z), lambda: x, lambda: x])  # <- here


@misuse(fg.PlacementError, "while_loop", "every client would decide", "Decide at the server")
def while_on_a_client_predicate():
    @on_clients
    def f(x, z):
        def body(state):
            return state[0] + z, fg.sum(state[0])

        return jax.lax.while_loop(lambda s: s[0][0] < 9, body, (z, x))[1]  # <- here


@misuse(fg.PlacementError, "at clients", "at the server")
def server_branches_on_a_client_predicate():
    @on_clients
    def f(x, z):
        return jax.lax.cond(z[0] > 0, lambda: x * 2, lambda: x)  # <- here


@misuse(fg.PlacementError, "on one path and at", "Give it one placement")
def branches_with_different_placements():
    @on_clients
    def f(x, z):
        return jax.lax.cond(x[0] > 0, lambda: fg.sum(z), lambda: z)  # <- here


@misuse(fg.PlacementError, "on one path and at", "Give it one placement")
def carry_that_moves_from_server_to_clients():
    @on_clients
    def f(x, z):
        def body(c, _):
            return fg.broadcast(c), fg.sum(z)

        return jax.lax.scan(body, x, None, length=2)  # <- here


@misuse(fg.PlanError, "is not supported", "Use jit, scan")
def communication_inside_a_linear_solve():
    @on_clients
    def f(x, z):
        def matvec(v):
            return v + fg.mean(fg.broadcast(v) * z**2)

        return jax.lax.custom_linear_solve(matvec, x, lambda _, b: b)  # <- here


# --- outside of programs, and unknown clients ---------------------------------------------------


@misuse(fg.PlacementError, "fg.sum was called outside of a program", "@fg.program(")
def sum_outside():
    fg.sum(X)  # <- here


@misuse(fg.PlacementError, "fg.broadcast was called outside of a program", "@fg.program(")
def broadcast_outside():
    fg.broadcast(X)  # <- here


@misuse(fg.PlacementError, "outside of a program", "@fg.program(")
def mean_outside_under_jit():
    jax.jit(lambda x: fg.mean(x))(X)  # <- here


@misuse(fg.PlacementError, "outside of a program", "@fg.program(")
def client_key_outside():
    fg.client_key(jax.random.key(0))  # <- here


@misuse(fg.PlacementError, "no argument of this program is at eval", "Placement('eval')")
def sum_over_clients_that_the_program_does_not_have():
    @on_clients
    def f(x, z):
        return fg.sum(z, at=EVAL)  # <- here


@misuse(fg.PlacementError, "no argument of this program is at clients", "Placement('clients')")
def program_without_clients():
    @fg.program
    def f(x):
        return fg.sum(fg.broadcast(x))  # <- here

    f(X)


@misuse(fg.PlacementError, "has no clients 'eval'", "'z'", "Give the outer program an argument")
def nested_program_of_unknown_clients():
    @fg.program(z=EVAL)
    def inner(z):
        return fg.sum(z, EVAL)

    @on_clients
    def f(x, z):
        return inner(z)  # <- here


# --- the clients of a call ----------------------------------------------------------------------


@fg.program(z=fg.CLIENTS, y=fg.CLIENTS)
def both(x, z, y):
    return fg.mean(jax.tree.leaves(z)[0].sum() * y)


@fg.program(z=fg.CLIENTS)
def one(x, z):
    return x, fg.sum(jnp.sum(jax.tree.leaves(z)[0]))


@fg.program(data=fg.CLIENTS)
def ragged(data):
    return fg.sum(data.count)


@misuse(fg.CohortError, "different numbers of clients", '"z" has 4', '"y" has 3', "same clients")
def arguments_with_different_numbers_of_clients():
    both(X, Z, Z[:3])  # <- here


@misuse(fg.CohortError, "different numbers of clients", "\"z['b']\" has 3", "fg.cohort(")
def leaves_with_different_numbers_of_clients():
    one(X, {"a": Z, "b": Z[:3]})  # <- here


@misuse(fg.CohortError, "different numbers of clients", "has 3", "has 4", "same clients")
def cohort_and_array_with_different_numbers_of_clients():
    both(X, fg.cohort([X, X[:2], X]), Z)  # <- here


@misuse(fg.CohortError, "no clients", "(0, 3)", "at least one client")
def empty_cohort():
    one(X, Z[:0])  # <- here


@misuse(fg.CohortError, "no clients", "(0, 3)", "at least one client")
def empty_second_argument():
    both(X, Z[:0], Z[:0, 0])  # <- here


@misuse(fg.CohortError, "leading axis over clients", "got a scalar")
def scalar_for_clients():
    one(X, 3.0)  # <- here


@misuse(fg.CohortError, "got a list of 4", "stack them", "fg.cohort([...])")
def list_instead_of_stacked():
    one(X, list(Z))  # <- here


@misuse(fg.CohortError, "got a list of 2", "fg.cohort([...])")
def ragged_list():
    one(X, [np.ones(3), np.ones(5)])  # <- here


@misuse(fg.CohortError, "different numbers of clients", "fg.cohort(")
def ragged_list_in_a_pytree():
    one(X, {"a": [np.ones(3), np.ones(5)]})  # <- here


@misuse(fg.CohortError, "array of objects", "different sizes", "fg.cohort([")
def ragged_array_of_objects():
    one(X, np.array([np.ones(3), np.ones(5)], dtype=object))  # <- here


@misuse(fg.CohortError, "got a population", "population.sample(key, size)", "population.everyone")
def population_instead_of_cohort():
    ragged(fg.population([X, X]))  # <- here


@misuse(fg.CohortError, "no array over clients")
def nothing_for_clients():
    one(X, {})  # <- here


@misuse(fg.CohortError, "different numbers of clients")
def plan_checks_clients_too():
    fg.plan(both, X, Z, Z[:3])  # <- here


@misuse(fg.CohortError, "Cannot sample 4 of 2 clients", "1 to 2")
def sample_of_too_many():
    fg.population([X, X]).sample(jax.random.key(0), 4)  # <- here


@misuse(fg.CohortError, "There are 2 clients, numbered from 0", "1 to 2")
def selection_of_unknown_clients():
    fg.population([X, X]).select([1, 2])  # <- here


@misuse(fg.CohortError, "non-empty vector of indices")
def selection_by_a_mask():
    fg.population([X, X]).select([True, False])  # <- here


@misuse(fg.CohortError, "no clients", "empty")
def cohort_of_nobody():
    fg.cohort([])  # <- here


@misuse(fg.CohortError, "got dict", "fg.population([")
def population_of_a_dict():
    fg.population({"a": X})  # <- here


@misuse(fg.CohortError, "Client 1 has another structure than client 0", "same pytree")
def clients_of_different_structure():
    fg.cohort([{"x": X}, {"y": X}])  # <- here


@misuse(fg.CohortError, "one row per example", "client 1", "(3,), (2,)")
def leaves_with_different_numbers_of_examples():
    fg.cohort([(X, X), (X, X[:2])])  # <- here


@misuse(fg.CohortError, "Client 1 has no examples", "Leave it out")
def client_without_examples():
    fg.cohort([X, X[:0]])  # <- here


@misuse(fg.CohortError, "client 1 have shape (2,)", "client 0 (3,)", "Only the number")
def examples_of_different_shapes():
    fg.cohort([Z, Z[:, :2]])  # <- here


# --- arguments ----------------------------------------------------------------------------------


@misuse(fg.ArgumentError, "no argument 'zed'", "Did you mean 'zet'?", "Known: x, zet")
def unknown_name_in_the_decorator():
    @fg.program(zed=fg.CLIENTS)  # <- here
    def f(x, zet):
        return fg.sum(zet)


@misuse(fg.ArgumentError, "z='clients'", "fg.CLIENTS")
def string_instead_of_placement():
    @fg.program(z="clients")  # <- here
    def f(x, z):
        return fg.sum(z)


@misuse(fg.ArgumentError, "decorates a function", "Placement('clients')")
def placement_without_a_name():
    @fg.program(fg.CLIENTS)  # <- here
    def f(z):
        return fg.sum(z)


@misuse(fg.ArgumentError, "one(x, z)", "missing", "'z'")
def missing_argument():
    one(X)  # <- here


@misuse(fg.ArgumentError, "one(x, z)", "too many")
def surplus_argument():
    one(X, Z, Z)  # <- here


@misuse(fg.ArgumentError, "one(x, z)", "unexpected", "'zz'")
def unknown_argument():
    one(X, Z, zz=Z)  # <- here


@misuse(fg.ArgumentError, '"x" is str', "not an array", "functools.partial")
def text_for_the_server():
    one("text", Z)  # <- here


@misuse(fg.ArgumentError, "fg.plan takes a program", "@fg.program(")
def plan_of_a_function():
    fg.plan(lambda x: x, X)  # <- here


@misuse(fg.ArgumentError, "takes a fg.Placement", "'clients'")
def at_a_string():
    @on_clients
    def f(x, z):
        return fg.sum(z, at="clients")  # <- here


@misuse(fg.ArgumentError, "one weight per client", "shape (3,)", "Multiply first")
def vector_of_weights():
    @on_clients
    def f(x, z):
        return fg.mean(z, weights=z)  # <- here


@misuse(fg.ArgumentError, "PRNG keys cannot be summed", "Sum what you drew")
def sum_of_keys():
    @fg.program(z=fg.CLIENTS)
    def f(key, z):
        return fg.sum(fg.client_key(key))  # <- here

    f(jax.random.key(0), Z)


@misuse(fg.ArgumentError, "PRNG keys cannot be summed")
def mean_of_keys():
    @fg.program(z=fg.CLIENTS)
    def f(key, z):
        return fg.mean({"key": fg.client_key(key), "z": z})  # <- here

    f(jax.random.key(0), Z)


@misuse(fg.ArgumentError, "takes a typed key", "jax.random.key(0)")
def client_key_of_an_integer():
    @on_clients
    def f(x, z):
        return fg.sum(jax.random.normal(fg.client_key(0)))  # <- here


@misuse(fg.ArgumentError, "Only arrays, numbers and keys", "str")
def broadcast_of_text():
    @on_clients
    def f(x, z):
        return fg.broadcast("text")  # <- here


@misuse(fg.ArgumentError, "chunk=0", "at least 1")
def chunks_of_nobody():
    fg.executors.local(chunk=0)  # <- here


@misuse(fg.ArgumentError, "identifier", "'my clients'", 'fg.Placement("eval")')
def placement_with_a_space():
    fg.Placement("my clients")  # <- here


@misuse(fg.ArgumentError, "'server' is not a client placement")
def placement_at_the_server():
    fg.Placement("server")  # <- here


# --- the law, and that not only the default executor checks -------------------------------------


@pytest.mark.parametrize("fun, error, words", MISUSES)
def test_misuse(fun, error, words):
    with pytest.raises(fg.FederatedError) as caught:
        fun()
    assert caught.type is error
    message = str(caught.value)
    for word in words:
        assert word in message
    lines, first = inspect.getsourcelines(fun)
    (marked,) = [first + i for i, line in enumerate(lines) if "# <- here" in line]
    assert f"{os.path.basename(__file__)}:{marked}" in message.replace("\n", " ")


@pytest.mark.parametrize(
    "executor",
    [fg.executors.reference(), fg.executors.local(), fg.executors.local(chunk=2)],
    ids=["reference", "local", "chunked"],
)
@pytest.mark.parametrize(
    "error, args",
    [
        (fg.CohortError, (X, Z[:0])),
        (fg.CohortError, (X, list(Z))),
        (fg.CohortError, (X, {"a": Z, "b": Z[:3]})),
        (fg.CohortError, (X, fg.population([X, X]))),
        (fg.ArgumentError, ("text", Z)),
        (fg.ArgumentError, (X, "text")),
        (fg.ArgumentError, (X,)),
    ],
)
def test_every_executor_checks_arguments(executor, error, args):
    with pytest.raises(fg.FederatedError) as caught:
        one.on(executor)(*args)
    assert caught.type is error


def test_arguments_are_checked_under_jit_and_on_every_call():
    for _ in range(2):  # a failed call leaves nothing behind in a cache
        with pytest.raises(fg.CohortError, match="different numbers of clients"):
            jax.jit(both)(X, Z, Z[:3])
        with pytest.raises(fg.CohortError, match="different numbers of clients"):
            both(X, Z, Z[:3])
    assert both(X, Z, Z).shape == (3,)


def test_an_error_does_not_spoil_the_program():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return fg.sum((x if x.ndim else fg.broadcast(x)) * z)

    with pytest.raises(fg.PlacementError):
        f(X, Z)
    np.testing.assert_allclose(f(jnp.float64(2.0), Z), 2 * Z.sum(0))
    with pytest.raises(fg.PlacementError, match="outside of a program"):
        fg.sum(X)


def test_small_constants_may_be_captured():
    matrix = jnp.eye(3)
    found = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(matrix @ z * 2))(Z)
    np.testing.assert_allclose(found, 2 * Z.sum(0))


def test_server_code_may_capture_large_arrays():
    found = fg.program(z=fg.CLIENTS)(lambda z: jnp.sum(LARGE @ fg.sum(z)))(Z)
    np.testing.assert_allclose(found, 1000 * Z.sum())


def test_python_errors_of_user_code_pass_through():
    @fg.program(z=fg.CLIENTS)
    def f(z):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        f(Z)


def test_argument_errors_are_type_errors_and_all_are_federated_errors():
    assert issubclass(fg.ArgumentError, TypeError)
    kinds = (fg.PlacementError, fg.CohortError, fg.ArgumentError, fg.PlanError)
    assert all(issubclass(kind, fg.FederatedError) for kind in kinds)


@pytest.mark.parametrize(
    "mode", ["auto", fg.CostModel(readdress=True), "forward", "reverse", "mixed"], ids=str
)
def test_the_rule_of_a_custom_derivative_captures_no_large_array(mode):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0] * jnp.sum(LARGE)))

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return jnp.sum(fg.sum(sine(fg.broadcast(x) * z)))

    with pytest.raises(fg.PlacementError, match=r"captured array of shape \(1000, 3\)") as caught:
        fg.plan(fg.grad(f, mode=mode), X, Z)
    assert "somewhere in a library" not in str(caught.value)


@pytest.mark.parametrize("call", [fg.from_torch, fg.into_torch], ids=lambda call: call.__name__)
def test_pytorch_is_an_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(fg.FederatedError, match=r"pip install 'fedgrad\[torch\]'") as caught:
        call(None, {})
    assert call.__name__ in str(caught.value)
