"""Modules of PyTorch in JAX: every module through every law, and what is refused."""

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed; make test-torch has it", exc_type=ImportError
)

from test_convolutions import assert_same as as_products  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fedgrad as fg  # noqa: E402
from fedgrad.core.primitives import inner_jaxprs  # noqa: E402
from fedgrad.federation import InProcess  # noqa: E402
from fedgrad.pytorch.operations import DRAWS, OPERATIONS  # noqa: E402
from torch_modules import (  # noqa: E402
    AT_PLACES,
    BIG,
    BY,
    CNN,
    FUNCTIONS,
    HALVES,
    HASHES,
    MODULES,
    TOKENS,
    WHOLE,
    Apply,
    Bag,
    Changing,
    Frozen,
    Kept,
    Last,
    Noisy,
    Optional,
    Straight,
    Target,
    Unknown,
    Whole,
    Words,
    batch_norm,
    module_of,
    numbers,
)

every_module = pytest.mark.parametrize("name", MODULES)
CLOSE = 1e-9  # in float64, of the largest
ROUNDED = dict.fromkeys(("hardsigmoid", "hardsigmoid at its kinks"), 1e-6)  # a sixth is a float32


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
        assert (np.isnan(a) == np.isnan(b)).all()
        a, b = (np.nan_to_num(np.asarray(x, np.float64)) for x in (a, b))
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1.0)


def weighed(output):
    """A number of an output to which everything in it contributes differently."""
    leaves = [x for x in jax.tree.leaves(output) if "float" in str(x.dtype)]
    return sum((x * x * x + 2 * x).sum() for x in leaves)


def gradient_in_torch(module, inputs):
    module.zero_grad()
    weighed(module(*inputs)).backward()
    zero = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    return as_jax({name: zero(p) for name, p in module.named_parameters()})


def noise(model, params, seed):
    """Numbers for what is trained, and where it is: the row of a padding is not."""
    rng = np.random.default_rng(seed)
    zeros = {name: np.zeros(p.shape, p.dtype) for name, p in params.items()}
    for name in {array.name for array in model.arrays.values() if array.trained}:
        zeros[name] += 0.1 * rng.normal(size=zeros[name].shape)
    for name in {"table.weight", "bag.weight"} & set(params):
        zeros[name][0] = 0
    return jax.tree.map(jnp.asarray, zeros)


def moved(model, params, seed):
    return jax.tree.map(jnp.add, params, noise(model, params, seed))


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
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # PyTorch's own, of its speed
def test_float32(name):
    """As close to the truth, which is PyTorch's float64, as 1e-6 of the norm, or as PyTorch is."""
    module, example = module_of(name)
    single, module = _single(example), module.float()
    params, model = fg.from_torch(module, single)
    exact = copy.deepcopy(module).double()
    found = model(params, *as_jax(single)), jax.grad(loss_of(model, as_jax(single)))(params)
    theirs = as_jax(module(*single)), gradient_in_torch(module, single)
    double = jax.tree.map(lambda x: x.double() if x.is_floating_point() else x, single)
    truth = as_jax(exact(*double)), gradient_in_torch(exact, double)
    for mine, other, wanted in zip(found, theirs, truth, strict=True):
        norms = [_norm(mine, wanted), _norm(other, wanted), _norm(wanted)]
        assert norms[0] <= max(1e-6 * max(norms[2], 1.0), 2 * norms[1])
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def _single(example):
    return jax.tree.map(lambda x: x.float() if x.is_floating_point() else x, example)


def _norm(tree, less=None):
    """Of what a tree has in common with another, their difference; in float64."""
    if isinstance(tree, dict) and less is not None:
        tree = {name: tree[name] for name in less}
    found = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    other = [0] * len(found) if less is None else map(np.asarray, jax.tree.leaves(less))
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(found, other, strict=True)))


@every_module
def test_a_batch_of_any_size(name):
    module, example, params, model = converted(name)
    for size in (1, 2, 7):
        rows = [torch.cat([x] * 3)[:size] for x in example]
        close(model(params, *as_jax(rows)), as_jax(module(*rows)))


@every_module
def test_params_of_many_clients(name):
    _, example, params, model = converted(name)
    clients = [moved(model, params, seed) for seed in range(3)]
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
    along, step = noise(model, params, 1), 1e-5
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
    close(list(found), [as_jax(example[i].grad) for i in at], ROUNDED.get(name, CLOSE))


def test_complex_inputs_and_outputs_but_no_parameters():
    fun = lambda z: (2j * z.conj(), z.abs(), z.sum(1).angle())
    z = torch.complex(numbers(3, 6), numbers(3, 6).flip(0)).requires_grad_()
    for kind in (torch.complex64, torch.complex128):
        z = z.detach().to(kind).requires_grad_()
        _, model = fg.from_torch(Apply(fun), z.detach())
        for found, wanted in zip(model({}, as_jax(z)), fun(z), strict=True):
            wanted = wanted.detach().resolve_conj().numpy()
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        (z.grad,) = torch.autograd.grad(fun(z)[1].sum(), z)
        slope = jax.grad(lambda z: model({}, z)[1].sum())(as_jax(z))
        np.testing.assert_allclose(slope.conj(), z.grad.numpy(), rtol=1e-5)  # JAX's is conjugate
    module = nn.Sequential(nn.Linear(6, 2).to(torch.complex64))
    refused("'0.weight' is a torch.complex64 .*params are floats", module, z.detach())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # PyTorch's own
def test_a_variance_that_is_corrected_by_more_than_there_are_is_infinite():
    fun = lambda x: (x.var(1, correction=9), x.std(1, correction=6), x[:, :1].var(1))
    _, model = fg.from_torch(Apply(fun), numbers(3, 6))
    close(model({}, as_jax(numbers(3, 6))), tuple(map(as_jax, fun(numbers(3, 6)))))
    assert np.isinf(model({}, as_jax(numbers(3, 6)))[0]).all()


def test_every_operation_was_met():
    """A row of the table that nothing above has tried."""
    for name, (fun, example) in FUNCTIONS.items():
        if name not in MET:  # only some tests were asked for
            example = example if isinstance(example, tuple) else (example,)
            noted(name, fg.from_torch(Apply(fun), example)[1])
    for name in MODULES:
        noted(name, converted(name)[3])
    for name, fun in WHOLE.items():
        noted(name, fg.from_torch(Apply(fun), (BIG, BY))[1])
    noted("noisy", fg.from_torch(Noisy(), TOKENS)[1])
    assert set(OPERATIONS) - set.union(*MET.values()) == set()
    assert DRAWS.keys() <= OPERATIONS.keys()


# --- whole numbers and halves ---------------------------------------------------------------------


def in_parts(fun):
    """What it returns, of which each int64 is two int32: JAX without 64 bits returns no others."""

    def parts(*inputs):
        found = fun(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        return [
            part
            for x in found
            for part in ((x.int(), (x >> 32).int()) if x.dtype == torch.int64 else (x,))
        ]

    return parts


def same_numbers(fun, example):
    """Of this example, and of more and fewer rows: whole numbers are equal, others close."""
    _, model = fg.from_torch(Apply(fun), example)
    for rows in ([0, 1, 2], [0, 1, 2, 1, 0], [2]):
        few = tuple(x[rows] for x in example)
        found, wanted = model({}, *(x.numpy() for x in few)), fun(*few)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            b = b.numpy()
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if b.dtype.kind == "f":
                np.testing.assert_allclose(a, b, rtol=1e-3 if b.dtype == np.float16 else 1e-6)
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_of_every_kind(name, dtype, x64):
    with jax.enable_x64(x64):
        same_numbers(in_parts(WHOLE[name]), (BIG.to(getattr(torch, dtype)), _divisors(dtype)))


def _divisors(dtype):
    by = BY.to(getattr(torch, dtype))
    return torch.where(by == 0, torch.ones_like(by), by)


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("name", HASHES)
def test_whole_numbers_of_64_bits_are_exact_where_jax_has_32(name, x64):
    with jax.enable_x64(x64):
        same_numbers(in_parts(HASHES[name]), (BIG, BY))


@pytest.mark.parametrize("name", AT_PLACES)
def test_places_are_computed_where_jax_has_32_bits(name):
    with jax.enable_x64(False):
        same_numbers(AT_PLACES[name], (TOKENS,))


def test_a_hash_of_tokens_is_mapped_and_exported():
    """Also one that is divided, which is a loop; of any number of examples, and of many clients."""
    fun = in_parts(lambda t: ((t * 2654435761) % 1000003, (t * 2654435761 + 7) // 1000003))
    with jax.enable_x64(False):
        _, model = fg.from_torch(Apply(fun), TOKENS)
        tokens = jnp.asarray(TOKENS.numpy(), jnp.int32)
        run = jax.jit(lambda t: model({}, t))
        (rows,) = jax.export.symbolic_shape("rows")
        anyhow = jax.ShapeDtypeStruct((rows, 5), jnp.int32)
        data = jax.export.export(run)(anyhow).serialize()
        wanted = [x.numpy() for x in fun(TOKENS)]
        close(jax.export.deserialize(data).call(tokens), wanted)
        many = jax.vmap(run)(jnp.stack([tokens, tokens]))
        close(many, [np.stack([x, x]) for x in wanted])


def test_what_64_bits_would_take_is_refused_where_jax_has_32():
    """Whatever may not fit and is not computed in halves; there is a way out each time."""
    wider = r"have 64 bits .*jax_enable_x64.*x\.int\(\)"
    with jax.enable_x64(False):
        for fun in (
            lambda t: t @ torch.ones(5, 2, dtype=torch.long),
            lambda t: torch.einsum("bi,bi->b", t, t).float(),
            lambda t: (t * 31).sort(1).values % 7,
            lambda t: (t * 31).amax(1).float(),
            lambda t: 2**t % 7,
            lambda t: (t + torch.full((5,), 2**40)) % 7,
            lambda t: (t + torch.arange(2**33, 2**33 + 5)) % 7,
            lambda t: torch.linspace(0, 2**40, 5, dtype=torch.long) % 7 + t,
        ):
            refused(wider, Apply(fun), TOKENS)
            with jax.enable_x64(True):
                fg.from_torch(Apply(fun), TOKENS)
        text = refused(
            r"returns whole numbers of 64 bits.*y\.int\(\)", Apply(lambda t: t + 1), TOKENS
        )
        assert "aten.add.Tensor (torch_modules.py:" in text and "jax_enable_x64" in text
        refused(r"type uint64.*int64", Apply(lambda t: t), TOKENS.to(torch.uint64))
        refused(r"'many' has whole numbers of 64 bits.*jax_enable_x64", Whole(2**33), TOKENS)
        _, model = fg.from_torch(Apply(lambda t: (t + torch.tensor([2**40 + 1])) % 7), TOKENS)
        close(model({}, TOKENS.int().numpy()), ((TOKENS + 2**40 + 1) % 7).int().numpy())
        with pytest.raises(fg.ArgumentError, match=r"int64 with numbers that int32 does not hold"):
            model({}, np.full((1, 5), 2**33 + 5))
    refused("divided by 0", Apply(lambda t: t // 0), TOKENS)


def test_whole_numbers_divided_by_zero_are_the_least_there_is():
    """PyTorch raises, which no compiled program does."""
    least = {"int32": -(2**31), "int8": -128, "uint8": 255}
    for fun in (lambda a, b: a // b, lambda a, b: a % b, torch.fmod, _trunc):
        for dtype, wanted in least.items():
            _, model = fg.from_torch(Apply(fun), (TOKENS.to(getattr(torch, dtype)),) * 2)
            tokens = np.full((1, 5), 7, dtype)
            assert (model({}, tokens, 0 * tokens) == wanted).all()
        with jax.enable_x64(False):
            in_halves = lambda a, b, fun=fun: fun(a * 3, b).float()
            _, model = fg.from_torch(Apply(in_halves), (TOKENS, TOKENS))
            tokens = np.full((1, 5), 7)
            assert (model({}, tokens, 0 * tokens) == -(2.0**63)).all()


def _trunc(a, b):
    return torch.div(a, b, rounding_mode="trunc")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_have_room(name, dtype):
    """What an operation computes on the way may be larger than a half: it is a float32. So it is as
    close to the truth as a half can be, or as PyTorch is."""
    fun, scale = HALVES[name]
    half = (numbers(3, 50) * scale).to(getattr(torch, dtype))
    exact = fun(half.float()).abs().max()

    def in_torch(x):
        x = x.clone().requires_grad_()
        weighed(fun(x).float() / exact).backward()
        return [np.asarray(y.detach().float()) for y in (fun(x), x.grad)]

    _, model = fg.from_torch(Apply(fun), half)
    x = jnp.asarray(half.float().numpy(), dtype)
    slope = jax.grad(lambda x: weighed(model({}, x).astype(jnp.float32) / float(exact)))(x)
    truth, theirs = in_torch(half.float()), in_torch(half)
    for mine, other, wanted in zip((model({}, x), slope), theirs, truth, strict=True):
        errors = [np.abs(np.asarray(y, np.float32) - wanted).max() for y in (mine, other)]
        assert errors[0] <= 2e-2 * np.abs(wanted).max() or errors[0] <= 2 * errors[1]
    assert slope.dtype == dtype and model({}, x).dtype == str(fun(half).dtype).removeprefix(
        "torch."
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_remainders_of_halves(dtype):
    """Which jump: a divisor that is written down is a half for one, a float32 for the other."""
    fun = lambda x: (x.remainder(0.7), x % 0.1, x.fmod(0.1), x // 0.1, x // 0.3)
    x = torch.tensor([[1.0, 0.3, 0.7, 2.0, -1.0, 6.0]], dtype=getattr(torch, dtype)) * 7
    _, model = fg.from_torch(Apply(fun), x)
    for found, wanted in zip(model({}, jnp.asarray(x.float().numpy(), dtype)), fun(x), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.float().numpy())


# --- what draws -----------------------------------------------------------------------------------


def test_dropout_takes_the_key():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.25), nn.Dropout(0.25))
    params, model = fg.from_torch(module, torch.zeros(2, 6))
    plain = fg.from_torch(module.eval(), torch.zeros(2, 6))[1]
    x = jnp.ones((500, 6), jnp.float32)
    draw = jax.jit(lambda key: model(params, x, key=key))
    one, again, other = (draw(jax.random.key(seed)) for seed in (0, 0, 1))
    assert (one == again).all() and (one != other).any()
    dropped = np.asarray(one == 0)
    wanted = np.asarray(plain(params, x))
    np.testing.assert_allclose(np.where(dropped, wanted, one * 0.75**2), wanted, rtol=1e-6)
    # Two of them draw apart: together they drop 1 - 0.75^2, and no row as another.
    assert abs(dropped.mean() - 0.4375) < 0.02
    assert len(np.unique(dropped, axis=0)) > 490
    with pytest.raises(fg.ArgumentError, match=r"give it a key.*module\.eval\(\)"):
        model(params, x)
    with pytest.raises(fg.ArgumentError, match=r"evaluation mode.*module\.train\(\)"):
        plain(params, x, key=jax.random.key(0))


def test_everything_that_draws():
    """Draws anew for each key, alike for equal ones, for clients and in exported programs too."""
    torch.manual_seed(0)
    module = Noisy().double()
    params, model = fg.from_torch(module, TOKENS)
    evaluate = fg.from_torch(module.eval(), TOKENS)[1]
    tokens = jnp.asarray(TOKENS.numpy())
    close(evaluate(params, tokens), as_jax(module(TOKENS)))
    run = jax.jit(lambda params, tokens, key: model(params, tokens, key=key))
    keys = jax.random.split(jax.random.key(0), 2)
    one, other = (run(params, tokens, key) for key in keys)
    assert (run(params, tokens, keys[0]) == one).all() and (one != other).any()
    close(jax.vmap(run, (None, None, 0))(params, tokens, keys), jnp.stack([one, other]))
    rows = jax.export.symbolic_shape("rows, 5")
    anyhow = jax.ShapeDtypeStruct(rows, tokens.dtype)
    data = jax.export.export(run)(params, anyhow, keys[0]).serialize()
    close(jax.export.deserialize(data).call(params, tokens, keys[0]), one)


def test_dropout_between_layers_is_inside_of_the_scan_and_right_on_average():
    torch.manual_seed(0)
    net = Last(nn.LSTM(4, 5, 2, dropout=0.2, batch_first=True)).double()
    params, model = fg.from_torch(net, torch.zeros(2, 3, 4).double())
    plain = fg.from_torch(net.eval(), torch.zeros(2, 3, 4).double())[1]
    x = jnp.asarray(numbers(3, 3, 4).numpy())
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.jit(jax.vmap(lambda key: model(params, x, key=key)))(keys)
    spread = drawn.std(0) / np.sqrt(len(keys))
    # The mean of a bent function is not the function of the mean: near, and not exact.
    assert (abs(drawn.mean(0) - plain(params, x)) < 5 * spread + 0.02).all()
    assert (spread > 0).all()


# --- how it is computed ---------------------------------------------------------------------------


def scans(jaxpr):
    return sum(
        (eqn.primitive.name == "scan") + sum(map(scans, inner_jaxprs(eqn.params)))
        for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize(
    "name, wanted", {"LSTM": 1, "GRU": 1, "RNN": 1, "tied words": 1, "LSTM, both ways": 2}.items()
)
def test_a_recurrent_net_is_one_scan(name, wanted):
    """All layers together; in both directions one for each layer."""
    _, example, params, model = converted(name)
    jaxpr = jax.make_jaxpr(model)(params, *as_jax(example)).jaxpr
    assert scans(jaxpr) == wanted
    assert len(jaxpr.eqns) < 40 * wanted + 20  # nothing is unrolled along time


@pytest.mark.parametrize(
    "name", ["CNN", "1-d CNN", "down and up", "residual, GroupNorm", "depthwise, GroupNorm"]
)
def test_convolutions_meet_the_fast_rule_of_the_executor(name):
    """For clients with kernels of their own, and in gradients."""
    _, example, params, model = converted(name)
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    slope = jax.vmap(jax.grad(loss_of(model, as_jax(example))))
    as_products(slope, clients)


# --- federated ------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def own_mlp(params, x):
    hidden = jnp.tanh(x @ params["0.weight"].T + jnp.broadcast_to(params["0.bias"], (len(x), 8)))
    return hidden @ params["2.weight"].T + jnp.broadcast_to(params["2.bias"], (len(x), 3))


def data_of(sizes=(5, 3, 8, 6), shape=(4,), tokens=False):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.integers(0, 11, (n, *shape)) if tokens else rng.normal(size=(n, *shape)),
            "y": rng.integers(0, 3, n),
        }
        for n in sizes
    ]


def entropy(model):
    def loss(params, batch):
        scores = model(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])

    return loss


def keyed(model):
    def loss(params, batch, key):
        scores = model(params, batch["x"], key=key)
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])

    return loss


def trained(algorithm, clients, params):
    return fg.fit(
        algorithm, clients, params=params, rounds=3, cohort_size=3, key=jax.random.key(0),
        progress=False,
    )  # fmt: skip


ALGORITHMS = {
    "FedAvg": lambda loss: fg.fed_avg(loss, fg.local_training(0.1, batch_size=2)),
    "FedAdam": lambda loss: fg.fed_adam(loss, fg.local_training(0.1, batch_size=2)),
    "SCAFFOLD": lambda loss: fg.scaffold(loss, fg.local_training(0.1, batch_size=2)),
    "PerFedAvg": lambda loss: fg.per_fed_avg(loss, fg.local_training(0.1, batch_size=2)),
    "self-tuning": lambda loss: fg.self_tuning(
        fg.fed_avgm(loss, fg.local_training(0.1, batch_size=2)),
        learn=["server.learning_rate", "client.learning_rate"],
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_trains_as_the_same_model_written_in_jax(name):
    params, model = fg.from_torch(mlp(), torch.zeros(2, 4).double())
    clients = fg.population(data_of())
    results = [trained(ALGORITHMS[name](entropy(m)), clients, params) for m in (model, own_mlp)]
    close(results[0].params, results[1].params, 1e-12)
    for metric in set(results[0].history) - {"seconds"}:
        np.testing.assert_allclose(*(r.history[metric] for r in results), rtol=1e-9)
    assert abs(results[0].params["0.weight"] - params["0.weight"]).max() > 1e-3


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_derivatives_of_a_federated_program(mode):
    module = mlp()
    params, model = fg.from_torch(module, torch.zeros(2, 4).double())
    x = numbers(5, 2, 4)  # two examples at each of five clients

    @fg.program(x=fg.CLIENTS)
    def program(params, x):
        return fg.mean(jnp.mean(model(fg.broadcast(params), x) ** 2))

    (module(x) ** 2).mean().backward()
    wanted = as_jax({n: p.grad for n, p in module.named_parameters()})
    close(fg.grad(program, mode=mode)(params, jnp.asarray(x.numpy())), wanted)


ON_NODES = {
    "CNN": (lambda: nn.Sequential(CNN(), nn.Dropout(0.2)), {"shape": (1, 8, 8)}),
    "LSTM": (
        lambda: Last(nn.LSTM(4, 5, 2, dropout=0.2, batch_first=True)),
        {"shape": (3, 4)},
    ),
    "fixed": (
        lambda: nn.Sequential(nn.Linear(4, 4), batch_norm(4, 1), nn.Dropout(), nn.Linear(4, 3)),
        {},
    ),
}


@pytest.mark.parametrize("name", ON_NODES)
def test_nodes_train_it_from_exported_stages(name):
    make, shape = ON_NODES[name]
    torch.manual_seed(0)
    data = data_of(**shape)
    params, model = fg.from_torch(make().double(), data[0]["x"])
    algorithm = fg.self_tuning(
        fg.fed_avgm(keyed(model), fg.local_training(0.1, batch_size=2)), "server.learning_rate"
    )
    here = trained(algorithm, fg.population(data), params)
    executor = fg.executors.flower(InProcess.of(data), platforms=("cpu",))
    there = trained(algorithm.on(executor), executor.population(), params)
    close(there.params, here.params)
    moves = {n: bool((here.params[n] != p).any()) for n, p in params.items()}
    assert moves == {n: "running" not in n for n in params}  # the others, bit for bit


def test_tokens_are_int32_and_tied_weights_are_one():
    torch.manual_seed(0)
    module = Words()
    params, model = fg.from_torch(module, TOKENS)
    assert set(params) == {n for n, _ in module.named_parameters()} and "out.weight" not in params
    assert {p.dtype for p in params.values()} == {jnp.dtype("float32")}
    few = jnp.asarray(TOKENS.numpy(), jnp.int32)
    assert model(params, few).shape == (3, 5, 11)
    slope = jax.grad(lambda params: model(params, few).sum())(params)["table.weight"]
    # The padding's row has no gradient as a word, but one as an output.
    module(TOKENS).sum().backward()
    np.testing.assert_allclose(slope, module.table.weight.grad, rtol=1e-4, atol=1e-5)
    with jax.enable_x64(False):
        params, model = fg.from_torch(module, TOKENS)
        assert model(params, few).dtype == jnp.float32


def test_what_is_frozen_is_in_params_and_does_not_train():
    torch.manual_seed(0)
    module = Frozen().double()
    params, model = fg.from_torch(module, torch.zeros(2, 6).double())
    assert set(params) == {"first.weight", "first.bias", "out.weight", "out.bias"}
    clients = fg.population(data_of(shape=(6,)))
    loss = lambda params, batch: model(params, batch["x"])[:, 0] ** 2
    result = trained(fg.fed_adam(loss, fg.local_training(0.1, batch_size=2)), clients, params)
    for name, start in params.items():
        assert (result.params[name] == start).all() == name.startswith("first")
    fresh = fg.into_torch(Frozen().double(), result.params)
    assert not fresh.first.weight.requires_grad and fresh.out.weight.requires_grad


def test_buffers_that_are_used_are_in_params_as_floats_of_the_same_kind():
    module, example, params, model = converted("attention")
    assert {p.dtype for p in params.values()} == {jnp.dtype("float64")}
    assert (np.asarray(params["allowed"]) == module.allowed.numpy()).all()
    refused("'many' is a torch.int64 that floats do not hold exactly", Whole())


# --- what is refused ------------------------------------------------------------------------------


def refused(match, module, example=None, **how):
    with pytest.raises(fg.ArgumentError, match=match) as caught:
        fg.from_torch(module, torch.zeros(2, 6) if example is None else example, **how)
    assert "test_from_torch.py:" in str(caught.value)
    return str(caught.value)


def test_operations_that_are_not_known_are_all_named():
    text = refused("does not know", Unknown())
    assert "aten.special_erfcx.default" in text and "aten.erfinv.default" in text
    assert "torch_modules.py:" in text and "torch.erfinv(x / 9)" in text and "operations={" in text
    known = {
        "aten.special_erfcx.default": lambda x: jnp.exp(x * x) * jax.scipy.special.erfc(x),
        "aten.erfinv.default": jax.scipy.special.erfinv,
    }
    _, model = fg.from_torch(Unknown(), numbers(3, 6), operations=known)
    close(model({}, as_jax(numbers(3, 6))), as_jax(Unknown()(numbers(3, 6))))


def test_what_is_known_but_not_in_this_way_is_refused_at_conversion_too():
    text = refused("which JAX does not compute here", Apply(lambda x: x[x > 0].sum() + x))
    assert "aten.index.Tensor (torch_modules.py:" in text and "operations={" in text
    counting = {"scale_grad_by_freq": True}
    refused(r"embedding\.default.*scale_grad_by_freq=True", nn.Embedding(11, 2, **counting), TOKENS)
    refused("scale_grad_by_freq=True", Bag(mode="sum", **counting), TOKENS)
    refused("a norm of order -1", Apply(lambda x: torch.linalg.vector_norm(x, -1, dim=1)))
    wrong = {"aten.erfinv.default": lambda x: x.sum(1), "aten.special_erfcx.default": jnp.exp}
    text = refused(r"result has shape \(2,\) here and \(any, 6\)", Unknown(), operations=wrong)
    assert "torch.erfinv(x / 9)" in text


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)])
def test_batch_norm_in_training_is_refused(norm):
    refused(r"BatchNorm in training mode.*GroupNorm.*module\.eval\(\)", nn.Sequential(norm))
    alone = nn.BatchNorm1d(6, track_running_stats=False).eval()
    refused("or without .*if it has running statistics, keep them", nn.Sequential(alone))


def test_instance_norm_that_keeps_statistics_is_refused_in_training():
    norm, images = nn.InstanceNorm2d(4, track_running_stats=True), torch.zeros(2, 4, 3, 3)
    refused(r"InstanceNorm with track_running_stats=True in training mode", norm, images)
    fg.from_torch(norm.eval(), images)


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor


torch.export.register_dataclass(Scores)


def test_what_cannot_be_exported_is_refused():
    refused(r"changes its buffer 'calls'.*input and an output", Changing())
    refused(r"torch\.export cannot take.*x\.shape\[0\]", Apply(lambda x: x.view(len(x), 3, 2)))
    refused(r"torch\.export cannot take.*torch\.where", Apply(lambda x: x if x.sum() > 0 else -x))
    refused(r"write x\.detach\(\)", Apply(lambda x: x * (2 * x).data))
    refused(r"register_buffer", Apply(lambda x: x[:, :1] * torch.tensor([0.5] * 2000)))
    refused("Give a torch.nn.Module, got function", lambda x: x)
    refused("returns a Scores, .*Return a dict or a tuple", Apply(Scores))
    refused("at least one example", nn.Linear(6, 2), torch.zeros(0, 6))


def test_no_derivative_goes_through_what_runs_under_no_grad():
    torch.manual_seed(0)
    module, example = Target().double(), (numbers(3, 6),)
    params, model = fg.from_torch(module, example)
    close(model(params, *as_jax(example)), as_jax(module(*example)))
    found = jax.grad(loss_of(model, as_jax(example)))(params)
    close(found, gradient_in_torch(module, example))
    with torch.no_grad():  # around the conversion it means nothing
        params, model = fg.from_torch(module, example)
    close(jax.grad(loss_of(model, as_jax(example)))(params), found)


def test_no_grad_inside_of_autocast_is_refused():
    """There torch.export forgets it; around it, it does not."""
    grad, half = torch.no_grad, lambda on: torch.autocast("cpu", torch.bfloat16, enabled=on)

    def run(outer, inner):
        def fun(x):
            with outer():
                y = 2 * x
                with inner():
                    y = x * (x @ x.mT).sum()
            return (x * y).float()

        return Apply(fun)

    for on in (True, False):
        region = functools.partial(half, on)
        refused(r"torch\.no_grad inside of torch\.autocast.*x\.detach\(\)", run(region, grad))
        with half(True):  # around the conversion it means nothing
            fg.from_torch(run(grad, grad), torch.zeros(2, 6))
        _, model = fg.from_torch(run(grad, region), torch.zeros(2, 6))
        x = jnp.ones((3, 6), jnp.float32)
        assert (jax.grad(lambda x: model({}, x).sum())(x) == 54).all()


def test_derivatives_that_a_module_takes_in_its_own_way_are_refused():
    """torch.export knows values alone: what else would be gradients of another function."""
    own = Straight.apply  # also where it is called by another name
    for module in (Apply(own), nn.Sequential(nn.Linear(6, 2), Apply(lambda x: own(x) * 2))):
        refused(r"a torch\.autograd\.Function, Straight, .*straight-through", module)
    again = lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)
    refused(r"CheckpointFunction.*use_reentrant=False", Apply(again))

    def halved(x):
        x = 2 * x
        x.register_hook(lambda slope: slope / 2)
        return x

    refused(r"calls register_hook on a tensor.*an optimizer's work", Apply(halved))
    module = nn.Sequential(nn.Linear(6, 2))
    hook = module[0].weight.register_hook(lambda slope: slope / 2)
    refused(r"a hook on gradients, of its parameter '0\.weight'", module)
    hook.remove()
    hook = module[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(r"a hook on gradients, of its parameter '0\.weight'", module)
    hook.remove()
    hook = module[0].register_full_backward_hook(lambda *_: None)
    refused(r"a hook on gradients, of its part '0'", module)
    hook.remove()
    fg.from_torch(module, torch.zeros(2, 6))
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_an_operation_of_torch_library_with_a_derivative_is_one_that_operations_names():
    schema = "(Tensor x) -> Tensor"
    twice = torch.library.custom_op(
        "fedgrad::twice", lambda x: 2 * x, mutates_args=(), schema=schema
    )
    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda _, slope: 2 * slope)
    refused(r"does not know:\n  fedgrad\.twice\.default", Apply(twice))
    known = {"fedgrad.twice.default": lambda x: 2 * x}
    _, model = fg.from_torch(Apply(twice), torch.zeros(2, 6), operations=known)
    assert (jax.grad(lambda x: model({}, x).sum())(jnp.ones((3, 6), jnp.float32)) == 2).all()


def test_threads_convert_one_at_a_time_and_leave_nothing_behind():
    own = torch.Tensor.register_hook

    def hooked():
        torch.ones(2, requires_grad=True).mul(2).register_hook(lambda slope: slope)

    def slow(x):
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(hooked).result()  # what another thread does is its own
        time.sleep(0.05)
        return 2 * x

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: fg.from_torch(Apply(slow), torch.zeros(2, 6))[1], range(6))
    assert {model({}, jnp.ones((3, 6), jnp.float32)).shape for model in found} == {(3, 6)}
    assert torch.Tensor.register_hook is own and torch.backends.mha.get_fastpath_enabled()


def test_what_is_changed_under_no_grad_is_refused():
    refused(r"changes its parameter 'out\.weight' when it is called", Kept())

    def small(x):
        x = 2 * x
        with torch.no_grad():
            x.clamp_(-1, 1)
        return x

    def zeroed(x):
        x = 2 * x
        with torch.no_grad():
            x[:, 0] = 0
        return x

    def doubled(x):
        x = 2 * x
        with torch.no_grad():
            x.split(3, 1)[1].mul_(2)
        return x

    def own(x):
        with torch.no_grad():
            y = 2 * x
            y[:, 0] = 0
        return x * y

    changing = r"changes a value in place under torch\.no_grad \(torch_modules\.py:"
    for fun in (small, zeroed, doubled):
        refused(changing, Apply(fun))
    fg.from_torch(Apply(own), torch.zeros(2, 6))


def test_what_depends_on_the_number_of_examples_is_refused():
    two = torch.zeros(2, 6)
    refused("right for 2 to 3", Apply(lambda x: x if x.shape[0] > 3 else -x), two)
    refused("right for 4 or more", Apply(lambda x: x if x.shape[0] > 3 else -x), torch.zeros(5, 6))
    many = torch.zeros(20, 6)
    refused("right for 12 or more", Apply(lambda x: x if x.shape[0] > 11 else -x), many)
    for match, fun in {
        r"with Eq\(Mod\(examples, 2\), 0\)": lambda x: x if x.shape[0] % 2 == 0 else -x,
        r"with Ne\(examples, 7\)": lambda x: x if x.shape[0] != 7 else -x,
        r"with examples\*\*2 > 50": lambda x: x if x.shape[0] ** 2 > 50 else -x,
    }.items():
        refused(match, Apply(fun), many)
    table = torch.arange(7.0)[:, None]
    refused("right for 2 to 7.*first axis", Apply(lambda x: x + table[: x.shape[0]]), two)
    apart = torch.zeros(3, 4, 7, 6)[..., :6, :]  # whose strides are looked at, and may be
    fg.from_torch(Apply(lambda x: torch.nn.functional.max_pool2d(x @ x, 2)), apart)
    _, model = fg.from_torch(Apply(lambda x: x[:, :1].squeeze()), two)
    with pytest.raises(fg.ArgumentError, match=r"with this number of examples.*x\.squeeze\(1\)"):
        model({}, jnp.ones((1, 6), jnp.float32))


def test_what_cannot_be_exported_names_its_line_and_prints_nothing(capfd):
    def turned(x):
        return x if x.sum() > 0 else -x

    text = refused(r"test_from_torch\.py:\d+, 'return x if x\.sum\(\) > 0", Apply(turned))
    assert text.count("test_from_torch.py:") == 2  # where it was converted, and where it branches
    assert capfd.readouterr() == ("", ""), "torch prints its own graph, twice"


def test_float64_needs_to_be_switched_on():
    with jax.enable_x64(False):
        refused(r"is a float64.*jax_enable_x64", nn.Linear(6, 2).double())


def test_a_batch_of_one_is_an_example():
    params, model = fg.from_torch(nn.Linear(6, 2), torch.zeros(1, 6))
    assert model(params, jnp.ones((5, 6), jnp.float32)).shape == (5, 2)


def test_arguments_that_do_not_fit_say_so():
    params, model = fg.from_torch(nn.Linear(6, 2), np.zeros((2, 6), np.float32))
    x = jnp.ones((3, 6), jnp.float32)
    assert (
        repr(model) == "Linear of PyTorch, in training mode: model(params, input: float32[any, 6])"
    )
    assert (model(params, x.astype(jnp.float64)) == model(params, x)).all()
    for match, args in {
        r"float32\[any, 6\], but got float32\[3, 5\]": (params, x[:, :5]),
        r"but got int32\[3, 6\]": (params, x.astype(jnp.int32)),
        r"but got complex64\[3, 6\]": (params, x.astype(jnp.complex64)),
        r"but got key<fry>\[3, 6\]": (params, jax.random.split(jax.random.key(0), (3, 6))),
        r"but got \(float32\[3, 6\], float32\[3, 6\]\)": (params, x, x),
        "no 'bias' in": ({"weight": params["weight"]}, x),
        r"jax\.vmap": (jax.tree.map(lambda p: jnp.stack([p, p]), params), x),
    }.items():
        with pytest.raises(fg.ArgumentError, match=match):
            model(*args)


def test_two_inputs_need_the_same_number_of_examples():
    _, example, params, model = converted("two inputs")
    a, b = as_jax(example)
    with pytest.raises(fg.ArgumentError, match="different numbers of examples"):
        model(params, a, b[:2])


def test_an_input_may_be_left_out():
    x, scale = numbers(3, 4), numbers(3, 1)
    _, model = fg.from_torch(Optional(), (x, None, scale))
    close(model({}, as_jax(x), None, as_jax(scale)), as_jax(x * scale))
    with pytest.raises(fg.ArgumentError, match="was converted for inputs like"):
        model({}, as_jax(x), as_jax(x), as_jax(scale))


def test_the_order_of_a_dict_is_that_of_the_example():
    parts = {"b": numbers(3, 2), "a": numbers(3, 1) + 9}
    joined = lambda parts: torch.cat(list(parts.values()), 1)
    _, model = fg.from_torch(Apply(joined), (parts,))
    close(model({}, as_jax(parts)), as_jax(joined(parts)))
    close(model({}, as_jax(dict(sorted(parts.items())))), as_jax(joined(parts)))


def test_whole_numbers_are_computed_with_as_those_of_the_example():
    _, model = fg.from_torch(Apply(lambda t: (t - 1) * 200), TOKENS)
    assert (model({}, np.zeros((2, 5), np.uint8)) == -200).all()
    _, model = fg.from_torch(Apply(lambda x, m: x.masked_fill(~m, 0)), (TOKENS, TOKENS > 3))
    with pytest.raises(fg.ArgumentError, match=r"converted for .*bool\[any, 5\], but got int64"):
        model({}, TOKENS.numpy(), TOKENS.numpy())  # of which ~ is no mask
    for given, example in {"int64": "int32", "int32": "int64", "uint8": "int16"}.items():
        small = TOKENS.to(getattr(torch, example))
        _, model = fg.from_torch(Apply(lambda t: t + 1), small)
        close(model({}, TOKENS.numpy().astype(given)), as_jax(small + 1))
    _, model = fg.from_torch(Apply(lambda t: t + 1), TOKENS.to(torch.uint8))
    with pytest.raises(
        fg.ArgumentError, match=r"int32\[1, 5\], of which uint8 .*astype\('uint8'\)"
    ):
        model({}, np.full((1, 5), 300, np.int32))  # 44 of an uint8


def test_a_place_that_there_is_not_has_no_number():
    """PyTorch refuses it; another row, such as the last for -1, would be a silent mistake."""
    at = jnp.asarray([[-1, 11, 3, 10, -100]])
    table, row = jnp.arange(11.0)[:, None], jnp.arange(11.0)[None]
    params, model = fg.from_torch(nn.Embedding(11, 1), TOKENS)
    assert np.isnan(model({**params, "weight": table}, at)).ravel().tolist() == [1, 1, 0, 0, 1]
    _, model = fg.from_torch(Apply(lambda x, t: x.gather(1, t)), (numbers(3, 11), TOKENS))
    assert np.isnan(model({}, row, at)).ravel().tolist() == [1, 1, 0, 0, 1]
    words = Apply(lambda t: torch.arange(11.0)[t])  # where -1 is the last, as in PyTorch
    np.testing.assert_array_equal(
        fg.from_torch(words, TOKENS)[1]({}, at)[0, :4], [10, np.nan, 3, 10]
    )


def test_what_draws_in_evaluation_too_takes_a_key():
    module = Apply(lambda x: torch.dropout(x, 0.5, True)).eval()
    _, model = fg.from_torch(module, torch.zeros(2, 6))
    assert model({}, jnp.ones((3, 6)), key=jax.random.key(0)).shape == (3, 6)
    with pytest.raises(fg.ArgumentError, match="give it a key"):
        model({}, jnp.ones((3, 6)))


def test_only_what_fits_is_loaded():
    module = nn.Linear(6, 2)
    params, _ = fg.from_torch(module, torch.zeros(2, 6))
    before = module.weight.detach().clone()
    for match, wrong in {
        "has no 'wieght': nothing was loaded. Did you mean 'weight'": {**params, "wieght": 0.0},
        "params has no 'bias'": {"weight": params["weight"] + 1},
        r"has shape \(2, 6\), but params has \(3, 2, 6\)": {
            **params,
            "weight": jnp.ones((3, 2, 6)),
        },
    }.items():
        with pytest.raises(fg.ArgumentError, match=match):
            fg.into_torch(module, wrong)
    assert torch.equal(module.weight, before)


def test_half_precision():
    module = nn.Linear(6, 2).bfloat16()
    params, model = fg.from_torch(module, torch.zeros(2, 6, dtype=torch.bfloat16))
    assert model(params, jnp.ones((3, 6), jnp.bfloat16)).dtype == jnp.bfloat16
    moved = jax.tree.map(lambda p: p + 1, params)
    fg.into_torch(module, moved)
    assert module.weight.detach().float().numpy().tolist() == moved["weight"].astype(float).tolist()


def test_a_mean_of_halves_has_room_for_their_sum():
    x, far = (torch.full((300, 200), at, dtype=torch.float16) for at in (3.0, -30.0))
    classes = torch.ones(300, dtype=torch.long)
    mean = lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y)
    _, model = fg.from_torch(Apply(mean), (x, far))
    close(model({}, *as_jax((x, far))), as_jax(mean(x, far)))
    weights = torch.full((200,), 500.0, dtype=torch.float16)
    _, model = fg.from_torch(Apply(lambda x, y: F.cross_entropy(x, y, weights)), (x, classes))
    found = model({}, *as_jax((x, classes)))  # which PyTorch has as NaN
    assert found.dtype == jnp.float16 and abs(float(found) - np.log(200)) < 1e-2
