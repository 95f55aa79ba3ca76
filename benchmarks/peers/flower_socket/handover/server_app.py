"""The rounds of `sections.flower` in a ServerApp; prints what each took."""

import json
import time

import jax.numpy as jnp
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from sections.flower import fed_avg

import fedgrad as fg
from fedgrad.federation.flower.engine import GridTransport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds. The first one sends the program, and is not to be counted."""
    config, times = context.run_config, []
    executor = fg.executors.flower(GridTransport(grid), deadline=600)
    own, step = executor.clients(), fed_avg.on(executor)
    w = jnp.zeros(int(config["scalars"]), jnp.float32)
    for _ in range(int(config["rounds"])):
        start = time.perf_counter()
        w = step(w, own).block_until_ready()
        times.append(time.perf_counter() - start)
    print("RESULT " + json.dumps({"seconds": times, "first": float(w[0])}), flush=True)
