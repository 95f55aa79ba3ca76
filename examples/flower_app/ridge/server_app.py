"""What the server runs: gradient descent, every gradient from the sites."""

import jax.numpy as jnp
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedgrad as fg
from fedgrad.federation.flower.engine import GridTransport
from ridge.program import loss

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Take some steps and print the loss before each."""
    config = context.run_config
    executor = fg.executors.flower(GridTransport(grid), deadline=float(config["deadline"]))
    sites = executor.clients()
    step = fg.value_and_grad(loss, mode=config["mode"]).on(executor)
    w = jnp.zeros(3)
    for _ in range(int(config["steps"])):
        value, gradient = step(w, sites)
        print(f"loss {float(value):.6f}", flush=True)
        w = w - float(config["learning-rate"]) * gradient
    print("w", [round(float(x), 5) for x in w], flush=True)
