"""A Flower app without PyTorch, and the loss that it really has after some rounds."""

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgrad.federation import InProcessGrid, derivatives

NODES, STEPS, LR = 5, 3, 0.2
SIZES = [6, 9, 12, 20, 30]
SHAPES = {"hidden": (3, 4), "out": (4,), "bias": ()}


def client(i):
    rng = np.random.default_rng(i)
    x = rng.normal(size=(SIZES[i], 3))
    return {"x": x, "y": np.sin(x @ [1.0, -2.0, 0.5]) + 0.3 * i}


BUFFER = {"steps": np.asarray(0)}  # of whole numbers, which nobody differentiates


def start(dtype=np.float64):
    rng = np.random.default_rng(7)
    return {name: np.asarray(0.7 * rng.normal(size=s), dtype) for name, s in SHAPES.items()}


def loss(params, data):
    hidden = jnp.tanh(data["x"] @ params["hidden"])
    return jnp.mean((hidden @ params["out"] + params["bias"] - data["y"]) ** 2)


def trained(params, data, lr):
    for _ in range(STEPS):
        gradient = jax.grad(loss)(params, data)
        params = jax.tree.map(lambda p, g: p - lr.astype(p.dtype) * g, params, gradient)
    return params


@jax.jit
def reply(params, data, lr):
    value, gradient = jax.value_and_grad(loss)(params, data)
    new, tangent = jax.jvp(lambda lr: trained(params, data, lr), (lr,), (jnp.ones_like(lr),))
    return new, value, gradient, tangent


def record(arrays):
    """In the order in which they come, which some strategies go by."""
    return ArrayRecord({name: Array(np.asarray(x)) for name, x in arrays.items()})


def arrays(found):
    return {name: array.numpy() for name, array in found.items()}


def plain(node, round, content):
    """The answer of a client that knows nothing of derivatives."""
    return {name: found for name, found in content.items() if not name.startswith("fedgrad")}


def tuned_app(dtype=np.float64, change=lambda node, round, content: content, buffer=BUFFER):
    """An app whose clients answer with derivatives. `change`: what is wrong with an answer."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        node, config = context.node_config["partition-id"], message.content["config"]
        model = arrays(message.content["arrays"])
        params, data = (
            {n: jnp.asarray(np.asarray(x, dtype)) for n, x in found.items()}
            for found in ({n: model[n] for n in SHAPES}, client(node))
        )
        new, value, gradient, tangent = reply(params, data, jnp.asarray(config["lr"], dtype))
        gradient, tangent = ({n: np.asarray(x) for n, x in g.items()} for g in (gradient, tangent))
        metrics = {"num-examples": SIZES[node], "train_loss": float(value)}
        content = {
            "arrays": record({**{n: new[n] for n in SHAPES}, **buffer}),
            "metrics": MetricRecord(metrics),
            **derivatives(gradient, float(value), SIZES[node], {"lr": tangent}),
        }
        return Message(RecordDict(change(node, config["server-round"], content)), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        params, node = arrays(message.content["arrays"]), context.node_config["partition-id"]
        found = {"eval_loss": float(loss(params, client(node))), "num-examples": SIZES[node]}
        return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

    return app


def initial(dtype=np.float64, buffer=BUFFER):
    return record({**start(dtype), **buffer})


def settings(lr=LR):
    return ConfigRecord({"lr": lr})


def mean_loss(found):
    params = {n: np.asarray(x, float) for n, x in arrays(found).items() if n in SHAPES}
    losses = [float(loss(params, client(i))) for i in range(NODES)]
    return float(np.average(losses, weights=SIZES))


def loss_after(strategy, rounds, last=lambda strategy, config: None, buffer=BUFFER):
    """What the strategy itself makes of the loss, with something changed for the last round."""
    grid = InProcessGrid(tuned_app(change=plain, buffer=buffer), NODES)
    model, config = initial(buffer=buffer), settings()
    for number in range(1, rounds + 1):
        if number == rounds:
            last(strategy, config)
        messages = strategy.configure_train(number, model, config, grid)
        model, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
    return mean_loss(model)
