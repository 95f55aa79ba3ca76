"""Law: a convolution as a matrix product is the convolution, wherever it stands in a jaxpr."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedgrad.core.evaluate import run
from fedgrad.core.primitives import inner_jaxprs, jax_primitives
from fedgrad.execution import convolutions
from fedgrad.execution.convolutions import as_matmul, default_rules

conv_p = jax_primitives.conv_general_dilated_p
RULES = {conv_p: as_matmul}
STRATEGIES = [convolutions._by_window, convolutions._by_output, convolutions._by_sum]


@dataclass(frozen=True)
class Case:
    space: tuple[int, ...] = (7, 6)
    window: tuple[int, ...] = (3, 2)
    strides: tuple[int, ...] = (1, 1)
    padding: Any = ((0, 0), (0, 0))
    spread: tuple[int, ...] = (1, 1)
    gaps: tuple[int, ...] = (1, 1)
    layout: Any = ("NHWC", "HWIO", "NHWC")
    batch: int = 2
    features: int = 2
    outs: int = 3
    by_feature: int = 1
    by_batch: int = 1

    def conv(self, x, kernel):
        dilations, groups = (self.spread, self.gaps), (self.by_feature, self.by_batch)
        how = (self.strides, self.padding, *dilations, self.layout, *groups)
        return lax.conv_general_dilated(x, kernel, *how)

    def inputs(self):
        dims = lax.conv_dimension_numbers((1,) * self.rank, (1,) * self.rank, self.layout)
        groups = self.by_feature * self.by_batch
        x = (self.batch * self.by_batch, self.features * self.by_feature, *self.space)
        kernel = (self.outs * groups, self.features, *self.window)
        shapes = (_ordered(x, dims.lhs_spec), _ordered(kernel, dims.rhs_spec))
        return [np.random.default_rng(0).normal(size=shape) for shape in shapes]

    @property
    def rank(self):
        return len(self.space) + 2


def _ordered(sizes, spec):
    return tuple(size for _, size in sorted(zip(spec, sizes, strict=True)))


CASES = {
    "plain": Case(),
    "channels first": Case(layout=("NCHW", "OIHW", "NCHW")),
    "odd layout": Case(layout=("CHNW", "WIOH", "HCWN")),
    "1 x 1": Case(window=(1, 1)),
    "same": Case(padding=((1, 1), (0, 1))),
    "negative padding": Case(padding=((-1, 2), (1, -2))),
    "strides": Case(strides=(2, 3)),
    "dilated kernel": Case(gaps=(2, 3)),
    "dilated image": Case(spread=(2, 3), padding=((1, 2), (2, 1))),
    "everything": Case((5, 6), (2, 3), (2, 3), ((2, 1), (-1, 3)), (3, 2), (2, 1)),
    "the whole image": Case(window=(7, 6)),
    "small output": Case(window=(6, 4)),
    "many features": Case(features=9, outs=2),
    "feature groups": Case(by_feature=3),
    "depthwise": Case(features=1, outs=1, by_feature=4),
    "batch groups": Case(by_batch=2),
    "one dimension": Case((9,), (4,), (2,), ((1, 2),), (1,), (2,), ("NCH", "OIH", "NCH")),
    "three dimensions": Case(
        (4, 3, 5), (2, 2, 3), (1, 2, 1), "SAME", None, None, ("NDHWC", "DHWIO", "NDHWC")
    ),
}


def under(rules, fun):
    def rewritten(*args):
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = run(jaxpr, jax.tree.leaves(args), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return rewritten


def count(jaxpr):
    return sum(
        (eqn.primitive is conv_p) + sum(map(count, inner_jaxprs(eqn.params))) for eqn in jaxpr.eqns
    )


def assert_same(fun, *args, rules=RULES):
    rewritten = under(rules, fun)
    assert count(jax.make_jaxpr(rewritten)(*args).jaxpr) == 0
    expected, actual = jax.jit(lambda *args: (fun(*args), rewritten(*args)))(*args)
    for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        scale = np.abs(e).max(initial=1)  # of a sum, whose terms may cancel
        np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-13 * scale)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_strategy_is_the_convolution(case, strategy):
    def rule(eqn, inputs):
        conv = convolutions._read(eqn.params, *inputs)
        return [convolutions._write(conv, eqn.params, strategy(conv))]

    assert_same(case.conv, *case.inputs(), rules={conv_p: rule})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_by_image_and_kernel(case):
    def loss(x, kernel):
        return jnp.sum(jnp.sin(case.conv(x, kernel)))

    gradient = jax.grad(loss, (0, 1))
    assert count(jax.make_jaxpr(gradient)(*case.inputs()).jaxpr) == 3
    assert_same(gradient, *case.inputs())  # differentiated, then rewritten
    x, kernel = case.inputs()
    expected = jax.jit(gradient)(x, kernel)
    actual = jax.jit(jax.grad(under(RULES, loss), (0, 1)))(x, kernel)  # the other way round
    for e, a in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-11, atol=1e-12)


def _in_scan(conv, x, kernel):
    def step(k, image):
        return k + 0.1 * jnp.sum(conv(image[None], k)), jnp.mean(conv(image[None], k))

    return lax.scan(step, kernel, x)


def _in_while(conv, x, kernel):
    return lax.fori_loop(0, jnp.int32(3), lambda i, k: k - 0.1 * jnp.mean(conv(x, k)), kernel)


def _in_cond(conv, x, kernel):
    return lax.cond(x.sum() > 0, conv, lambda x, k: 2 * conv(x, k), x, kernel)


def _in_vmap(conv, x, kernel):
    kernels = jnp.stack([kernel, 2 * kernel, kernel - 1])
    return jax.vmap(jax.grad(lambda k, x: conv(x, k).var()), (0, None))(kernels, x)


def _of_each_example(conv, x, kernel):
    return jax.vmap(jax.grad(lambda k, x: conv(x[None], k).var()), (None, 0))(kernel, x)


def _local_sgd(conv, x, kernel):
    def step(k, _):
        return k - 0.1 * jax.grad(lambda k: conv(jnp.tanh(conv(x, k)), k).var())(k), None

    return lax.scan(step, kernel, length=2)[0]


PLACES = [_in_scan, _in_while, _in_cond, _in_vmap, _of_each_example, _local_sgd]


@pytest.mark.parametrize("program", PLACES, ids=lambda f: f.__name__)
def test_inside_of_control_flow(program):
    case = Case(outs=2, padding=((1, 1), (1, 0)))
    assert_same(lambda x, kernel: program(jax.jit(case.conv), x, kernel), *case.inputs())


def test_vmap_of_the_rule_has_no_convolution():
    case = Case()
    x, kernel = case.inputs()
    xs, kernels = np.stack([x, 2 * x, x + 1]), np.stack([kernel, kernel - 1, 3 * kernel])
    rewritten = jax.vmap(under(RULES, case.conv))
    assert count(jax.make_jaxpr(rewritten)(xs, kernels).jaxpr) == 0
    expected = [case.conv(x, kernel) for x, kernel in zip(xs, kernels, strict=True)]
    np.testing.assert_allclose(rewritten(xs, kernels), expected, rtol=1e-12, atol=1e-12)


DTYPES = [("float32", None), ("bfloat16", None), ("bfloat16", "float32"), ("complex128", None)]


@pytest.mark.parametrize("dtype, wanted", [*DTYPES, ("int32", None)])
def test_dtypes(dtype, wanted):
    case = Case(features=8, outs=2)  # by sum, where rounding to half precision would add up
    x, kernel = (jnp.asarray(np.round(4 * v), dtype) for v in case.inputs())

    def conv(x, kernel):
        how = {"dimension_numbers": case.layout, "preferred_element_type": wanted}
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **how)

    expected, actual = conv(x, kernel), under(RULES, conv)(x, kernel)
    assert actual.dtype == expected.dtype
    tolerance = 1e-2 if actual.dtype == jnp.bfloat16 else 1e-6
    wide = jnp.complex128 if dtype == "complex128" else jnp.float64
    np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=tolerance)


@pytest.mark.parametrize(
    "case",
    [Case((40, 40), (12, 12)), Case(space=(0, 6)), Case(window=(8, 2))],
    ids=["many slices", "empty image", "empty output"],
)
def test_left_as_it_is(case):
    x, kernel = case.inputs()
    rewritten = under(RULES, case.conv)
    assert count(jax.make_jaxpr(rewritten)(x, kernel).jaxpr) == 1
    assert rewritten(x, kernel).shape == case.conv(x, kernel).shape


def test_default_rules_are_for_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert default_rules()[conv_p] is as_matmul
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not default_rules()


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@hypothesis.given(
    case=st.builds(
        Case,
        space=pairs(1, 7),
        window=pairs(1, 4),
        strides=pairs(1, 3),
        padding=st.tuples(pairs(-2, 3), pairs(-2, 3)),
        spread=pairs(1, 3),
        gaps=pairs(1, 3),
        layout=st.sampled_from([case.layout for case in CASES.values() if case.rank == 4]),
        batch=st.integers(1, 3),
        features=st.integers(1, 4),
        outs=st.integers(1, 4),
    ),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
def test_any_convolution(case, groups):
    case = replace(case, by_feature=groups[0], by_batch=groups[1])
    try:
        shape = jax.eval_shape(case.conv, *case.inputs()).shape
    except (TypeError, ValueError):
        hypothesis.reject()  # not a convolution: padding has cut away all of the image
    hypothesis.assume(0 not in shape)
    assert_same(case.conv, *case.inputs())
