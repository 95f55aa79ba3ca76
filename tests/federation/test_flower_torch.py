"""A client in PyTorch: what torch_sgd trains, and the gradient and the tangent that it finds."""

import copy
import importlib

import numpy as np
import optax
import pytest

from where import ROOT

pytest.importorskip("flwr", reason="Flower apps need the extra: fedgrad[flower]")
pytest.importorskip("torch", reason="PyTorch is not installed: fedgrad[torch]")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM
from torch import nn
from torch.nn.functional import cross_entropy

from fedgrad.core.errors import ArgumentError
from fedgrad.federation import InProcessGrid, SelfTuning, torch_gradient, torch_sgd

APP = ROOT / "examples" / "flower_torch_app"
ASKED = {"fedgrad.learn": ["lr"]}
RATE = 0.05


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.inner(x.reshape(-1, 3, 4))[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(x.reshape(-1, 3, 4)).mean(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(12, 12, bias=False), nn.Linear(12, 3)
        self.again = nn.Linear(12, 12, bias=False)
        self.again.weight = self.into.weight

    def forward(self, x):
        return self.out(torch.tanh(self.again(torch.tanh(self.into(x)))))


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
        self[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))


class Sometimes(nn.Module):
    """Uses one of its layers for full batches alone."""

    def __init__(self):
        super().__init__()
        self.out, self.more = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(x) + self.more(x.tanh()) if len(x) == 6 else self.out(x)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
    "linear": lambda: nn.Linear(12, 3),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Attending,
    "tied weights": Tied,
    "frozen and unused": Frozen,
    "sometimes used": Sometimes,
}


def loss(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def made(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype)


def batches(dtype=torch.float64, seed=0, sizes=(6, 6, 4)):
    rng = np.random.default_rng(seed)
    return [
        (torch.tensor(rng.normal(size=(n, 12)), dtype=dtype), torch.tensor(rng.integers(3, size=n)))
        for n in sizes
    ]


def config(lr=RATE, **more):
    return {"lr": lr, **ASKED, **more}


def weights(model):
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters() if p.requires_grad}


def found(trained, name):
    return {n: array.numpy() for n, array in trained.records[name].items()}


class Words(nn.Module):
    """A table whose gradients are sparse; torch.optim.SGD takes them without weight decay."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table((9 * x[:, :3]).long() % 5).sum(1))


HOW = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1, "epochs": 2},
    {"momentum": 0.5, "epochs": 2},
    {"momentum": 0.5, "weight_decay": 0.1, "epochs": 3},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_as_torch_does(kind, how):
    mine, theirs = made(kind), made(kind)
    trained = torch_sgd(mine, loss, batches(), config(), **how)
    how = dict(how)
    epochs, seen = how.pop("epochs", 1), []
    optimizer = torch.optim.SGD(theirs.parameters(), RATE, **how)
    for batch in batches() * epochs:
        optimizer.zero_grad()
        value = loss(theirs, batch)
        value.backward()
        optimizer.step()
        seen.append((value.item(), len(batch[1])))
    for name, value in theirs.state_dict().items():  # buffers, too: a step each, and no more
        np.testing.assert_allclose(mine.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    assert trained.examples == 16
    values, counts = zip(*seen, strict=True)
    assert trained.loss == pytest.approx(np.average(values, weights=counts))


def by_torch(model, given, **how):
    """The model after a step of torch.optim.SGD for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, **how)
    for batch in given:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"weight_decay": 0.1, "momentum": 0.5}])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_it_rounds_as_torch_does(dtype, how):
    dtype = getattr(torch, dtype)
    mine, given = made("mlp", dtype), batches(dtype) * 3
    torch_sgd(mine, loss, given, {"lr": RATE}, **how)
    theirs = by_torch(made("mlp", dtype), given, **how)
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients(momentum):
    torch.manual_seed(0)
    mine = Words()
    theirs = by_torch(copy.deepcopy(mine), batches(torch.float32), momentum=momentum)
    torch_sgd(mine, loss, batches(torch.float32), {"lr": RATE}, momentum=momentum)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_the_tangent_is_the_derivative_by_the_rate(kind, how):
    model = made(kind)
    tangent = found(torch_sgd(model, loss, batches(), config(), **how), "fedgrad.tangent.lr")
    ends = []
    for rate in (RATE + 1e-5, RATE - 1e-5):
        model = made(kind)
        torch_sgd(model, loss, batches(), {"lr": rate}, **how)
        ends.append(weights(model))
    assert set(tangent) == set(weights(model))
    for name, value in tangent.items():
        wanted = (ends[0][name] - ends[1][name]) / 2e-5
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_the_gradient_is_that_of_the_mean_loss_at_the_broadcast_model(kind):
    model = made(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = torch_gradient(model, loss, batches(), config())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    twin = made(kind)
    value = sum(loss(twin, batch) * len(batch[1]) for batch in batches()) / 16
    value.backward()
    for name, p in twin.named_parameters():
        if p.requires_grad:
            wanted = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
            np.testing.assert_allclose(
                asked["fedgrad.gradient"][name].numpy(), wanted, rtol=1e-9, atol=1e-12
            )
    assert asked["fedgrad"]["loss"] == pytest.approx(value.item())
    assert asked["fedgrad"]["examples"] == 16
    trained = torch_sgd(made(kind), loss, batches(), config())
    for name, array in asked["fedgrad.gradient"].items():
        np.testing.assert_array_equal(array.numpy(), found(trained, "fedgrad.gradient")[name])


def test_only_what_is_asked_for_is_computed():
    calls = []

    def counting(model, batch):
        calls.append(1)
        return loss(model, batch)

    plain = torch_sgd(made("mlp"), counting, iter(batches()), {"lr": RATE})
    assert not plain.records and len(calls) == 3  # neither a gradient before nor a second pass
    server_only = torch_sgd(made("mlp"), counting, batches(), {"lr": RATE, "fedgrad.learn": []})
    assert {*server_only.records} == {"fedgrad", "fedgrad.gradient"} and len(calls) == 9
    assert torch_gradient(made("mlp"), loss, batches(), {}) == {}
    called = torch_sgd(
        made("mlp"), loss, batches(), {"rate": RATE, "fedgrad.learn": ["rate"]}, lr="rate"
    )
    assert "fedgrad.tangent.rate" in called.records


def test_the_gradient_may_come_from_held_out_examples():
    other = batches(seed=5)
    held = torch_sgd(made("mlp"), loss, iter(batches()), config(), gradient_from=other)
    wanted = torch_gradient(made("mlp"), loss, other, config())
    assert held.records["fedgrad"] == wanted["fedgrad"]


def test_batches_may_be_dicts_and_dropout_is_drawn_once_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    start = {n: p.clone() for n, p in model.state_dict().items()}
    given = [{"in": {"x": x}, "y": y} for x, y in batches()]
    of_dict = lambda model, batch: cross_entropy(model(batch["in"]["x"]), batch["y"])
    ends = []
    for rate in (RATE, RATE + 1e-5, RATE - 1e-5):
        torch.manual_seed(1)
        model.load_state_dict(start)
        trained = torch_sgd(model, of_dict, given, config(rate))
        ends.append((weights(model), found(trained, "fedgrad.tangent.lr")))
    for name, value in ends[0][1].items():
        wanted = (ends[1][0][name] - ends[2][0][name]) / 2e-5
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"config": ASKED}, "train_config has no 'lr'"),
        ({"batches": iter(batches())}, r"list\(batches\)"),
        ({"batches": []}, "There is no batch"),
        ({"batches": [("a", "b")]}, "no tensor in a batch, a tuple"),
        ({"loss": lambda model, batch: model(batch[0])}, "a tensor with one number"),
        ({"loss": lambda model, batch: 3.0}, "a tensor with one number"),
        ({"epochs": 0}, "epochs=0"),
        ({"momentum": -0.1}, "momentum is -0.1: torch.optim.SGD takes numbers from 0 on"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"config": config(-0.1)}, "lr is -0.1"),
        ({"config": config("0.1")}, "lr is '0.1'"),
    ],
)
def test_what_cannot_be_trained_is_told(given, said):
    arguments = {"model": made("mlp"), "loss": loss, "batches": batches(), "config": config()}
    with pytest.raises(ArgumentError, match=said):
        torch_sgd(**{**arguments, **given})
    with pytest.raises(ArgumentError, match="no parameter that trains"):
        torch_gradient(made("mlp").requires_grad_(False), loss, batches(), config())


# --- with a server -------------------------------------------------------------------------------


def app(kind, dtype):
    client = ClientApp()

    @client.train()
    def train(message, context):
        model, part = made(kind, dtype), context.node_config["partition-id"]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        mine = batches(dtype, part, sizes=(6, 4 + part))
        trained = torch_sgd(model, loss, mine, message.content["config"])
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": trained.examples}),
            **trained.records,
        }
        return Message(RecordDict(content), reply_to=message)

    return client


def after(kind, dtype, strategy, lr, rounds):
    grid, start = InProcessGrid(app(kind, dtype), 3), ArrayRecord(made(kind, dtype).state_dict())
    return strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord({"lr": lr}))


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-5), (torch.float32, 1e-2)])
@pytest.mark.parametrize("kind", ["mlp", "convolution", "lstm", "transformer", "tied weights"])
def test_hypergradients_of_real_clients(kind, dtype, error):
    def mean_loss(lr):
        strategy = FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.7)
        result = after(kind, torch.float64, strategy, lr, 1)
        model = made(kind)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        pairs = [(loss(model, b).item(), len(b[1])) for p in range(3)
                 for b in batches(torch.float64, p, sizes=(6, 4 + p))]  # fmt: skip
        return np.average([v for v, _ in pairs], weights=[n for _, n in pairs])

    strategy = FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.7)
    held = SelfTuning(strategy, client=("lr",), optimizer=optax.sgd(0.0))
    result = after(kind, dtype, held, RATE, 2)
    found = result.train_metrics_clientapp[2]["hypergradient.lr"] / RATE
    assert found == pytest.approx(
        (mean_loss(RATE + 1e-5) - mean_loss(RATE - 1e-5)) / 2e-5, rel=error
    )


def test_batch_norm_trains():
    """Its buffers, whole numbers among them, are aggregated and not differentiated."""
    tuned = SelfTuning(FedAvg(fraction_evaluate=0.0), client=("lr",))
    result = after("batch norm", torch.float32, tuned, 0.01, 4)
    losses = [m["fedgrad.loss"] for m in result.train_metrics_clientapp.values()]
    assert losses[-1] < losses[0] and tuned.hyper["lr"] > 0.01
    assert result.arrays["1.num_batches_tracked"].numpy() == 8


@pytest.fixture
def compare(monkeypatch):
    """The script beside the app, which runs it as it is and tuned."""
    monkeypatch.syspath_prepend(str(APP))
    return importlib.import_module("compare")


def test_the_app_in_process(compare):
    losses = compare.in_process(2)
    plain, tuned = (losses(6, 0.03, tuned) for tuned in (False, True))
    assert plain[0] == tuned[0] and tuned[-1] < 0.7 * plain[-1] < 0.5 * plain[0]
    asked = lambda rounds, lr, tuned: [lr + tuned] * (rounds + 1)
    assert compare.table(asked, 1, [0.5, 2.0]).splitlines() == [
        "| after round | 0.5, as it is | 0.5, tuned | 2, as it is | 2, tuned |",
        "| --- | --- | --- | --- | --- |",
        "| 0 | 0.500 | 1.500 | 2.000 | 3.000 |",
        "| 1 | 0.500 | 1.500 | 2.000 | 3.000 |",
    ]


def test_the_app_on_real_nodes(compare):
    """`flwr run` on Flower's own nodes, and the same app in this process."""
    here = compare.in_process(2)
    with compare.on_nodes(2) as there:
        found = there(3, 0.03, True)
    assert found == pytest.approx(here(3, 0.03, True), abs=1e-3)
    assert found[-1] < here(3, 0.03, False)[-1] - 0.05  # what was learned was used, too
