"""`fg.explain`: one row for each mode, the same as the plans, and readable."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest

import fedgrad as fg
from programs import TABLE, class_1, custom_vjp_inside, normal, two_rounds, while_loop

X, Z = normal(0, 3), normal(1, 4, 3)
MODES = ("forward", "reverse", "mixed", "auto")


@fg.program(z=fg.CLIENTS)
def vector(x, z):
    return jnp.sin(fg.sum(jnp.tanh(fg.broadcast(x) * z)))


@pytest.mark.parametrize("program", [class_1, two_rounds], ids=lambda p: p.name)
def test_rows_are_the_plans(program):
    cost = fg.CostModel(up=2, round_trip=7)
    shown = fg.explain(program, X, Z, cost=cost)
    plain = fg.plan(program, X, Z)
    assert shown.program.traffic == plain.traffic and shown.cost == cost
    assert [row.mode for row in shown.rows] == list(MODES)
    for mode in MODES:
        plan = fg.plan(fg.grad(program, mode=cost if mode == "auto" else mode), X, Z)
        row = shown[mode]
        assert row.plan.traffic == plan.traffic and row.plan.rules == plan.rules
        assert row.plan.readdressed == plan.readdressed
        assert row.plan.client_memory == plan.client_memory
        assert row.price == cost.price(plan)
        assert row.allowed == cost.allows(plan, plain)
        assert bool(row.problem) == (not row.allowed)


def test_result_that_is_not_one_number():
    shown = fg.explain(vector, X, Z)
    for mode in MODES:
        plan = fg.plan(fg.jacobian(vector, mode=mode), X, Z)
        assert shown[mode].plan.traffic == plan.traffic


def test_argnums_aux_and_shapes():
    case = next(c for c in TABLE if c.name == "state_in_and_out")
    args = case.args(3)
    shown = fg.explain(case.program, *args, has_aux=True)
    plan = fg.plan(fg.grad(case.program, has_aux=True), *args)
    assert shown["auto"].plan.traffic == plan.traffic
    case = next(c for c in TABLE if c.name == "weight_exponent")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.args(3))
    by_q, by_both = (fg.explain(case.program, *args, argnums=a) for a in ("q", ("q", "x")))
    assert by_q["mixed"].plan.scalars[1] == 2 + 2
    assert by_both["mixed"].plan.scalars[1] > by_q["mixed"].plan.scalars[1]


def test_a_mode_that_cannot_says_why():
    shown = fg.explain(while_loop, X, Z)
    assert shown["reverse"].plan is None and shown["reverse"].price is None
    assert not shown["reverse"].allowed and "while_loop" in shown["reverse"].problem
    assert "reverse is not possible" in shown.reason
    shown = fg.explain(custom_vjp_inside, X, Z)
    assert "custom_vjp" in shown["forward"].problem
    assert "forward is not possible" in shown.reason
    assert str(shown) and shown._repr_html_()


def test_nothing_is_allowed():
    shown = fg.explain(class_1, X, Z, argnums="z")
    assert shown["auto"].plan is None and "readdress=True" in shown["auto"].problem
    assert shown.reason.startswith("auto: ") and "not allowed" not in shown["mixed"].problem
    assert not shown["reverse"].allowed
    assert "clients" in shown["forward"].problem
    assert str(shown)


def test_reason():
    shown = fg.explain(class_1, X, Z)
    assert shown.reason.startswith("auto takes local for 120.")
    assert "reverse is not allowed: it asks clients again" in shown.reason
    assert "mixed costs the same" in shown.reason
    assert "forward costs 192 (1.6x)" in shown.reason
    tight = fg.CostModel(readdress=True, client_memory=0)
    assert "remember too much" in fg.explain(class_1, X, Z, cost=tight)["reverse"].problem

    @fg.program(z=fg.CLIENTS)
    def at_the_server(x, z):
        return jnp.sum(x**2) + fg.mean(jnp.sum(z))

    assert "No round is active" in fg.explain(at_the_server, X, Z).reason


@pytest.mark.parametrize("program", [class_1, two_rounds, vector, while_loop], ids=lambda p: p.name)
def test_text(program):
    shown = fg.explain(program, X, Z, cost=fg.CostModel(up=1.5, round_trip=1e6))
    lines = str(shown).splitlines()
    assert max(map(len, lines)) <= 110
    assert any(f"differentiating {program.name}" in line for line in lines)
    assert str(shown.program).splitlines()[0].strip() in lines[0]
    for row in (r for r in shown.rows if r.plan is not None):
        (line,) = [x for x in lines if x.strip().startswith(f"{row.mode} ") and " B" in x]
        cells = line.split()
        down, up = row.plan.scalars
        for word in (*row.plan.rules, str(row.plan.rounds), f"{down:,}", f"{up:,}"):
            assert word.strip(",") in [cell.strip(",") for cell in cells]
        assert ("✗" in line) == (not row.allowed)
    assert "\x1b[" not in str(shown)


def test_long_names_and_large_numbers_fit():
    at = fg.Placement("a_placement_with_a_long_name")

    @fg.program(z=at)
    def a_program_with_a_name_that_is_longer_than_anybody_would_like_it_to_be(x, z):
        for _ in range(2):
            x = x - fg.mean(jnp.tanh(fg.broadcast(x, at) * z), at=at)
        return jnp.sum(x**2)

    big = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
    many = jax.ShapeDtypeStruct((1000, 1_000_000), jnp.float32)
    shown = fg.explain(
        a_program_with_a_name_that_is_longer_than_anybody_would_like_it_to_be, big, many
    )
    lines = str(shown).splitlines()
    assert max(map(len, lines)) <= 110
    assert shown["mixed"].plan.bytes[1] > 8e12 / 2


def test_html_is_well_formed():
    for program in (class_1, while_loop):
        html = fg.explain(program, X, Z)._repr_html_()
        root = ElementTree.fromstring(html.replace("&nbsp;", " "))
        assert root.tag == "div"
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert {"img", "pre"} <= tags
        text = "".join(root.itertext())
        assert all(mode in text for mode in MODES) and program.name in text


def test_nothing_is_run():
    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float64)
    shown = fg.explain(class_1, jax.ShapeDtypeStruct((10**6,), jnp.float64), huge)
    assert shown["reverse"].plan.scalars == (2 * 10**6, 2 * 10**6)
