"""Modules of PyTorch in JAX: every module through every law, and what is refused."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed; make test-torch has it", exc_type=ImportError
)


import fedgrad as fg  # noqa: E402
from fedgrad.pytorch.operations import DRAWS, OPERATIONS  # noqa: E402
from torch_modules import (  # noqa: E402
    FUNCTIONS,
    MODULES,
    Apply,
    module_of,
)

every_module = pytest.mark.parametrize("name", MODULES)
CLOSE = 1e-9  # in float64, of the largest


@functools.cache
def converted(name):
    module, example = module_of(name)
    return module, example, *fg.from_torch(module, example)


def as_jax(tree):
    return jax.tree.map(lambda x: jnp.asarray(x.detach().numpy()), tree)


def close(found, wanted, bound=CLOSE):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (np.nan_to_num(np.asarray(x, np.float64)) for x in (a, b))
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1.0)


def weighed(output):
    """A number of an output to which everything in it contributes differently."""
    leaves = [x for x in jax.tree.leaves(output) if x.dtype in (torch.float64, jnp.float64)]
    return sum((x * x * x + 2 * x).sum() for x in leaves)


def gradient_in_torch(module, inputs):
    module.zero_grad()
    weighed(module(*inputs)).backward()
    zero = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    return as_jax({name: zero(p) for name, p in module.named_parameters()})


def moved(params, seed=0):
    """Other params, by numbers that are drawn."""
    rng = np.random.default_rng(seed)
    return {n: p + jnp.asarray(0.1 * rng.normal(size=p.shape)) for n, p in params.items()}


def direction(params, seed=1):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return moved(zeros, seed)


def loss_of(model, inputs):
    return lambda params: weighed(model(params, *inputs))


# --- every module, every law ----------------------------------------------------------------------


@every_module
def test_values_and_gradients_are_those_of_torch(name):
    module, example, params, model = converted(name)
    inputs = as_jax(example)
    close(model(params, *inputs), as_jax(module(*example)))
    wanted = gradient_in_torch(module, example)
    found = jax.jit(jax.grad(loss_of(model, inputs)))(params)
    for fixed in found.keys() - wanted.keys():  # buffers
        assert not found.pop(fixed).any()
    close(found, wanted)


@every_module
def test_float32(name):
    """Closer to PyTorch's float32 than 1e-6 of the norm, values and gradients."""
    module, example = module_of(name)
    module = module.float()
    single = jax.tree.map(lambda x: x.float() if x.is_floating_point() else x, example)
    params, model = fg.from_torch(module, single)
    inputs = as_jax(single)
    value = lambda out: sum((x * x * x).sum() for x in jax.tree.leaves(out))
    value(module(*single)).backward()
    found, slope = jax.value_and_grad(lambda params: value(model(params, *inputs)))(params)
    wanted = value(module(*single)).detach().numpy()
    assert found.dtype == jnp.float32
    assert abs(found - wanted) <= 1e-6 * max(abs(wanted), 1.0)
    trained = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    norm = np.sqrt(sum((g**2).sum() for g in trained.values()))
    apart = np.sqrt(sum((np.asarray(slope[n] - g) ** 2).sum() for n, g in trained.items()))
    assert apart <= 1e-6 * max(norm, 1.0)


@every_module
def test_a_batch_of_any_size(name):
    module, example, params, model = converted(name)
    for size in (1, 2, 7):
        rows = [torch.cat([x] * 3)[:size] for x in example]
        close(model(params, *as_jax(rows)), as_jax(module(*rows)))


@every_module
def test_params_of_many_clients(name):
    _, example, params, model = converted(name)
    clients = [moved(params, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)
    inputs = as_jax(example)
    slope = jax.jit(jax.grad(loss_of(model, inputs)))
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(slope, clients))
    close(jax.jit(jax.vmap(slope))(stacked), wanted)


@every_module
def test_derivatives(name):
    """Forward is the transpose of reverse, and the second derivative that of the first."""
    _, example, params, model = converted(name)
    loss = loss_of(model, as_jax(example))
    along, step = direction(params), 1e-5
    slope = jax.jit(jax.grad(loss))
    dot = lambda a, b: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))
    pushed = jax.jit(lambda p: jax.jvp(loss, (p,), (along,))[1])(params)
    close(pushed, dot(slope(params), along))
    at = lambda t: jax.tree.map(lambda p, d: p + t * d, params, along)
    hvp = jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (along,))[1])(params)
    wanted = jax.tree.map(lambda a, b: (a - b) / (2 * step), slope(at(step)), slope(at(-step)))
    close(hvp, wanted, 1e-5)


@every_module
def test_it_is_exported_for_a_batch_of_any_size(name):
    _, example, params, model = converted(name)
    inputs = as_jax(example)
    rows = jax.export.symbolic_shape("rows")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    anyhow = [jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype) for x in inputs]
    slope = lambda params, *inputs: jax.grad(loss_of(model, inputs))(params)
    data = jax.export.export(jax.jit(slope))(shapes, *anyhow).serialize()
    for size in (1, 3):
        few = [x[:size] for x in inputs]
        close(jax.export.deserialize(data).call(params, *few), jax.jit(slope)(params, *few))


@every_module
def test_and_back(name):
    module, example, params, model = converted(name)
    fresh, _ = module_of(name)
    trained = {n for n, p in fresh.named_parameters() if p.requires_grad}
    other = {n: p + 0.1 if n in trained else p for n, p in params.items()}
    assert fg.into_torch(fresh, other) is fresh
    close(as_jax(fresh(*example)), model(other, *as_jax(example)))
    assert not torch.equal(*(jax.tree.leaves(m(*example))[0].detach() for m in (module, fresh)))


# --- every operation ------------------------------------------------------------------------------

MET = collections.defaultdict(set)


def noted(name, model):
    MET[name] |= {call.target.removeprefix("aten.") for call in model.calls}
    return model


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation(name):
    fun, example = FUNCTIONS[name]
    example = example if isinstance(example, tuple) else (example,)
    example = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in example)
    params, model = fg.from_torch(Apply(fun), tuple(x.detach() for x in example))
    assert params == {}
    noted(name, model)
    inputs = as_jax(example)
    wanted = fun(*example)
    close(model({}, *inputs), as_jax(wanted))
    more = [torch.cat([x, x[:2]]).detach() for x in example]
    if name != "sums":  # which adds up the batch too
        close(model({}, *as_jax(more)), as_jax(fun(*more)))
    weighed(wanted).backward()
    at = [i for i, x in enumerate(example) if x.requires_grad and x.grad is not None]
    found = jax.jit(jax.grad(lambda *x: weighed(model({}, *x)), at))(*inputs)
    close(list(found), [as_jax(example[i].grad) for i in at])


def test_every_operation_was_met():
    """A row of the table that nothing above has tried."""
    for name, (fun, example) in FUNCTIONS.items():
        if name not in MET:  # only some tests were asked for
            example = example if isinstance(example, tuple) else (example,)
            noted(name, fg.from_torch(Apply(fun), example)[1])
    for name in MODULES:
        noted(name, converted(name)[3])
    assert set(OPERATIONS) - set.union(*MET.values()) == set(DRAWS) - {
        "scaled_dot_product_attention.default",
        "lstm.input",
        "gru.input",
        "rnn_tanh.input",
        "rnn_relu.input",
    } | {"new_empty.default", "empty_like.default"}
