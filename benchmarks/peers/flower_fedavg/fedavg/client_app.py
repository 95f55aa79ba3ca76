"""A client takes the model, adds its own number, and sends it back."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Without JAX, which would have to be loaded for each message."""
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + np.float32(context.node_config["partition-id"])
    answer = {"arrays": ArrayRecord([w]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(answer), reply_to=message)
