"""FedAvg; prints when each round was over."""

import json
import time

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds. The first one starts the nodes' apps, and is not to be counted."""
    config, times = context.run_config, []
    nodes = int(config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(int(config["scalars"]), np.float32)]),
        num_rounds=int(config["rounds"]),
        evaluate_fn=lambda number, arrays: times.append(time.time()),
    )
    (w,) = result.arrays.to_numpy_ndarrays()
    seconds = list(np.diff(times))
    print("RESULT " + json.dumps({"seconds": seconds, "first": float(w[0])}), flush=True)
