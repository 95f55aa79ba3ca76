"""The picture and the text of a plan: they show what the plan says, readably."""

import itertools
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import fedgrad as fg
from fedgrad.show.draw import svg
from fedgrad.show.outline import Frame, Round, Size, inside, outline
from fedgrad.show.terminal import columns
from fedgrad.show.text import text, totals

TRAIN, EVAL, AUDIT = (fg.Placement(name) for name in ("train", "eval", "audit"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def local_loss(v, z):
    return jnp.sum((v - z) ** 2)


def distill(x):
    return jnp.tanh(x) * 3


@fg.program(z=fg.CLIENTS)
def one_round(x, z):
    return fg.mean(local_loss(fg.broadcast(distill(x)), z))


@fg.program(z=fg.CLIENTS)
def remembers(x, z):
    r = jnp.tanh(fg.broadcast(x) * z)
    c = fg.broadcast(jnp.cos(fg.sum(r)))
    return fg.mean(jnp.sum(c * r)), r * c


@fg.program(data=TRAIN, held_out=EVAL)
def two_cohorts(w, data, held_out):
    g = fg.mean(jax.grad(local_loss)(fg.broadcast(w, TRAIN), data), at=TRAIN)
    return w - g, {"loss": fg.mean(local_loss(fg.broadcast(w, EVAL), held_out), at=EVAL)}


@fg.program(z=fg.CLIENTS)
def scanned(x, z):
    def body(carry, _):
        w, s = carry
        s = s + fg.broadcast(w) * z
        return (w + fg.mean(s), s), (fg.mean(jnp.sum(s)), s * 1)

    return jax.lax.scan(body, (x, jnp.zeros_like(x)), None, length=10)


@fg.program(z=fg.CLIENTS)
def branching(x, z):
    first = fg.mean(local_loss(fg.broadcast(x), z))

    def careful(x):
        x = x - fg.mean(jax.grad(local_loss)(fg.broadcast(x), z))
        return x, fg.mean(local_loss(fg.broadcast(x), z))

    return jax.lax.cond(first > 3, careful, lambda x: (x, first), x)


@fg.program(z=fg.CLIENTS)
def derivative(x, z):
    def chain(x):
        s = fg.sum(jnp.sin(fg.broadcast(x) * z))
        return fg.sum(jnp.sum(jnp.tanh(fg.broadcast(s) * z)))

    return jax.value_and_grad(chain)(x)


@fg.program(z=TRAIN, e=EVAL)
def nested(x, z, e):
    """Clients of both placements carry state through a while in a scan, and into a cond."""
    start = jnp.exp(fg.broadcast(x, TRAIN) * z)
    x = x + fg.sum(start, TRAIN)

    def inner(carry):
        i, w, s, q = carry
        s, q = s + fg.broadcast(w, TRAIN) * z, q * fg.broadcast(w, EVAL)
        return i + 1, w + fg.mean(s, at=TRAIN) + fg.mean(q, at=EVAL), s, q

    def outer(carry, _):
        w, s, q = jax.lax.while_loop(lambda c: c[0] < 5, inner, (0, *carry))[1:]
        a = fg.sum(jnp.sum(s * fg.broadcast(w, TRAIN)), TRAIN)
        s = jax.lax.cond(a > 0, lambda s: s * fg.broadcast(a, TRAIN), lambda s: s, s)
        return (w + a, s, q), s * 2

    (w, s, q), ys = jax.lax.scan(outer, (x, start, e), None, length=7)
    return w, start, fg.sum(jnp.sum(s * fg.broadcast(w, TRAIN)), TRAIN), q, ys


@fg.program(a=TRAIN, b=EVAL, c=AUDIT)
def a_program_with_a_really_long_name(an_argument_with_a_really_long_name, p, q, r, s, a, b, c):
    def a_function_with_an_unreasonably_long_name(v, z):
        return jnp.sum(v * z)

    x = an_argument_with_a_really_long_name + p + q + r + s
    t = a_function_with_an_unreasonably_long_name(fg.broadcast(x, TRAIN), a)
    t = fg.sum(t, TRAIN) + fg.sum(jnp.sum(fg.broadcast(x, EVAL) * b), EVAL)
    t = t + fg.sum(jnp.sum(fg.broadcast(x, AUDIT) * c), AUDIT)
    kept = fg.broadcast(t, AUDIT) * c
    return fg.sum(kept, AUDIT) + fg.sum(fg.broadcast(t, TRAIN) * a, TRAIN), kept


@fg.program(z=fg.CLIENTS)
def five_rounds(x, z):
    r = jnp.tanh(fg.broadcast(x) * z)
    keep = jnp.exp(r)
    for _ in range(4):
        x = fg.sum(jnp.sin(fg.broadcast(x) * z))
    return fg.sum(fg.broadcast(x) * r), keep, z


@fg.program(z=fg.CLIENTS)
def silent(x, z):
    return jnp.sin(z)


V, Z = f32(3), f32(4, 3)
PLANS = {
    program.name: fg.plan(program, *arguments)
    for program, arguments in [
        (one_round, (V, Z)),
        (remembers, (V, Z)),
        (two_cohorts, (f32(610), f32(50, 610), f32(12, 610))),
        (scanned, (V, Z)),
        (branching, (V, Z)),
        (derivative, (V, Z)),
        (nested, (V, Z, Z)),
        (a_program_with_a_really_long_name, (V, V, V, V, V, f32(100_000, 3), Z, Z)),
        (five_rounds, (f32(1_663_370), f32(3400, 1_663_370))),
        (silent, (V, Z)),
    ]
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    return [e.text or "" for e in ET.fromstring(picture).iter(SVG + "text")]


def extent(e):
    """Left, top, right, bottom of a text, estimated as of a middling font."""
    x, y, size = (float(e.get(key)) for key in ("x", "y", "font-size"))
    wide = columns(e.text) * size * 0.56
    left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor")]
    return left, y - 0.72 * size, left + wide, y + 0.2 * size


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@every_plan
def test_picture_is_accessible_xml(plan):
    root = ET.fromstring(svg(plan))
    assert root.tag == SVG + "svg" and root.get("role") == "img"
    assert plan.name in root.find(SVG + "title").text
    assert "round" in root.find(SVG + "desc").text
    style = root.find(SVG + "style").text
    assert "prefers-color-scheme:dark" in style
    for e in root.iter():  # every color has a rule, in viewers without variables too
        for name in (e.get("class") or "").split():
            assert name == "fedgrad" or f".{name}{{" in style.split("@supports")[0]


@every_plan
def test_picture_shows_what_the_plan_says(plan):
    found = texts(svg(plan))
    for t in plan.traffic:
        assert f"round {t.round}" in found
        for scalars, size in ((t.down, t.down_bytes), (t.up, t.up_bytes)):
            if scalars:
                words = {Size(scalars, size, floats).count for floats in (True, False)}
                assert words & set(found) and Size(scalars, size).memory in found
    for placement, n in plan.clients.items():
        assert f"{placement} ×{n:,}" in found
    assert "server" in found


def stage_boxes(root):
    for e in root.iter(SVG + "rect"):
        if "fill-box" in (e.get("class") or ""):
            x, y, w, h = (float(e.get(key)) for key in ("x", "y", "width", "height"))
            yield x, y, x + w, y + h


def within(a, b):
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


@every_plan
def test_no_text_is_covered_or_cut_off(plan):
    root = ET.fromstring(svg(plan))
    found = [(e.text, extent(e)) for e in root.iter(SVG + "text")]
    page = (0, 0, float(root.get("width")), float(root.get("height")))
    for words, box in found:
        assert within(box, page), words
        for stage in stage_boxes(root):  # a text is inside of a box or outside of it
            assert within(box, stage) or apart(box, stage), words
    for (one, a), (other, b) in itertools.combinations(found, 2):
        assert apart(a, b), (one, other)


@every_plan
def test_no_line_runs_through_a_text(plan):
    root = ET.fromstring(svg(plan))
    stages = list(stage_boxes(root))
    found = [(e.text, extent(e)) for e in root.iter(SVG + "text")]
    free = [  # boxes and the circles around sums hide the lines behind them
        (words, box)
        for words, box in found
        if words != "Σ" and not any(within(box, stage) for stage in stages)
    ]
    for path in root.iter(SVG + "path"):
        if re.fullmatch(r"M[-\d. L]+", path.get("d")):
            points = [tuple(map(float, p.split())) for p in path.get("d")[1:].split("L")]
            for (a, b), (x, y) in itertools.pairwise(points):
                line = (min(a, x), min(b, y), max(a, x), max(b, y))
                for words, box in free:
                    assert apart(line, box), words


@every_plan
def test_loops_are_framed(plan):
    root = ET.fromstring(svg(plan))
    framed = [e for e in root.iter(SVG + "rect") if e.get("data-frame")]
    frames = list(inside(outline(plan).items, Frame))
    assert [e.get("data-frame") for e in framed] == [f.label for f in frames]
    heads = [e for e in root.iter(SVG + "text") if re.fullmatch(r"round \d+", e.text)]
    for e, frame in zip(framed, frames, strict=True):
        left, wide = float(e.get("x")), float(e.get("width"))
        held = {head.text for head in heads if 0 < float(head.get("x")) - left < wide}
        inner = [r.number for part in frame.parts for r in inside(part.items, Round)]
        assert held == {f"round {number}" for number in inner if number is not None}


@every_plan
def test_text_shows_what_the_plan_says(plan):
    shown = text(plan)
    lines = shown.splitlines()
    assert max(map(columns, lines)) <= 100 and "\x1b" not in shown
    assert f"{plan.rounds} round" in shown
    for t in plan.traffic:
        assert f"round {t.round} " in shown
        for arrow, scalars, size in (("↓", t.down, t.down_bytes), ("↑", t.up, t.up_bytes)):
            amount = rf"{scalars:,} (float|scalar)s?, {Size(scalars, size).memory}"
            assert not scalars or re.search(rf"{arrow} (Σ )?{t.placement}.*: {amount}", shown)
    for placement, memory in plan.client_memory.items():
        about = shown[shown.rindex(f" {placement}: ↓") :].split("\neach of")[0]
        assert about.endswith(f"keeps {Size(0, memory).memory if memory else 'nothing'}")
        assert (placement in plan.readdressed) == ("addressed again" in about)


@every_plan
def test_rounds_are_those_of_the_plan(plan):
    shown = [
        (r.number, v.placement, (v.down or Size()).scalars, (v.up or Size()).bytes)
        for r in inside(outline(plan).items, Round)
        for v in r.visits
        if v.down or v.up
    ]
    assert shown == [(t.round, t.placement, t.down, t.up_bytes) for t in plan.traffic]


@every_plan
def test_totals_add_up(plan):
    if any(t.times is None for t in plan.traffic):
        pytest.skip("the data decide how often")
    for placement in plan.clients:
        mine = [t for t in plan.traffic if t.placement == placement]
        down, up = totals(outline(plan).items, placement)
        assert down.bytes == sum(t.down_bytes * t.times for t in mine)
        assert up.scalars == sum(t.up * t.times for t in mine)


def test_drawing_is_deterministic_and_follows_the_plan():
    first, again = (fg.plan(remembers, V, Z) for _ in range(2))
    assert svg(first) == svg(again) == first.draw() == first._repr_svg_()
    assert text(first) == text(again) == str(first)
    assert svg(fg.plan(remembers, V, f32(5, 3))) != svg(first)


def test_any_key_of_a_result_can_be_drawn():
    @fg.program(z=fg.CLIENTS)
    def odd(x, z):
        return {"<a> & \0\x1b": fg.sum(z)}

    plan = fg.plan(odd, V, Z)
    assert "<a> & ?? · 3 floats" in texts(svg(plan))
    assert "<a> & ?? (3 floats)" in text(plan)


def test_rules_of_a_derivative_are_shown():
    plan = fg.plan(fg.grad(one_round, mode="reverse"), V, Z)
    assert "rules: pull" in text(plan)
    assert any("rules: pull" in words for words in texts(svg(plan)))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_stages_of_a_derivative_have_the_lines_of_its_program(mode):
    @fg.program(z=fg.CLIENTS)
    def twice(x, z):
        y = fg.sum(jnp.sin(fg.broadcast(x) * z))
        return jnp.sum(fg.sum(jnp.cos(fg.broadcast(y) * z)))

    shown = text(fg.plan(fg.grad(twice, mode=mode), V, Z))
    stages = re.findall(r"^│ │ (.*) operations, with own z", shown, re.MULTILINE)
    assert stages and all(stage.startswith("test_draw.py:") for stage in stages)


def test_stages_are_called_by_functions_that_do_not_communicate():
    server, clients = outline(PLANS["one_round"]).items[:2]
    assert (server.title, clients.visits[0].work.title) == ("distill", "local_loss")


def test_text_of_one_round():
    expected = """\
one_round

  server ← x (3 floats)
  clients ×4 ← z (3 floats)
  server: distill · 2 operations
┌─ round 1 ────────────────────────────────────────────────────────────────────────────┐
│ ↓ clients ×4: 3 floats, 12 B                                                         │
│ │ local_loss · 3 operations, with own z                                              │
│ ↑ Σ clients: 2 scalars, 8 B                                                          │
└──────────────────────────────────────────────────────────────────────────────────────┘
  server: test_draw.py:N · 5 operations
  server → result (1 float)

1 round
each of 4 clients: ↓ 3 floats, 12 B · ↑ 2 scalars, 8 B · addressed once · keeps nothing"""
    assert re.sub(r"(test_draw\.py):\d+", r"\1:N", str(PLANS["one_round"])) == expected
