"""What a site runs: an epoch of SGD, also for a server that does not tune itself."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import loss, make_model, site
from fedgrad.federation import torch_sgd

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model that was broadcast; reply with it, and with what was found on the way."""
    model, node = make_model(), context.node_config
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = site(int(node["partition-id"]), int(node["num-partitions"]))
    trained = torch_sgd(model, loss, batches, message.content["config"])
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": trained.examples, "loss": trained.loss}),
            **trained.records,
        }
    )
    return Message(content, reply_to=message)
