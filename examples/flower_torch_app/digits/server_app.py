"""What the server runs: FedAvgM, as it is or tuning itself."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM, Result

from digits.task import held_out, loss, make_model
from fedgrad.federation import SelfTuning

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print what came out."""
    result = train(grid, **context.run_config)
    for number, found in result.evaluate_metrics_serverapp.items():
        learned = result.train_metrics_clientapp.get(number, {})
        hyper = {k: round(float(v), 5) for k, v in learned.items() if k.startswith("hyper.")}
        print(f"round {number} loss {found['loss']:.4f} accuracy {found['accuracy']:.4f}", hyper)


def train(grid: Grid, rounds: int, lr: float, tuned: bool, fraction: float) -> Result:
    """Some rounds from a learning rate of clients, which is learned if `tuned`."""
    strategy = FedAvgM(
        fraction_train=fraction,
        fraction_evaluate=0.0,
        server_learning_rate=1.0,
        server_momentum=0.5,
    )
    if tuned:
        strategy = SelfTuning(
            strategy, server=("server_learning_rate", "server_momentum"), client=("lr",)
        )
    return strategy.start(
        grid,
        ArrayRecord(make_model().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": lr}),
        evaluate_fn=evaluate,
    )


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    """Loss and accuracy on examples that no site has."""
    model, (x, y) = make_model(), held_out()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
        return MetricRecord({"loss": float(loss(model, (x, y))), "accuracy": float(accuracy)})
