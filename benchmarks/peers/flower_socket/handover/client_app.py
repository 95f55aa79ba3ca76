"""A ClientApp that is started for each message, and so imports neither fedgrad nor JAX."""

from multiprocessing.connection import Client

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
INLINE = 1 << 18  # as fedgrad does: what is larger is an array, which Flower moves in pieces


@app.query("fedgrad")
def hand_over(message: Message, context: Context) -> Message:
    """Give the envelope to the node, and its answer to Flower."""
    held = message.content["fedgrad"]["envelope"]
    with Client(f"{context.node_config['sockets']}-{context.node_config['partition-id']}") as node:
        node.send_bytes(held.data if isinstance(held, Array) else held)
        answer = node.recv_bytes()
    if len(answer) <= INLINE:
        record: ConfigRecord | ArrayRecord = ConfigRecord({"envelope": answer})
    else:
        array = Array("uint8", (len(answer),), "fedgrad.envelope", answer)
        record = ArrayRecord({"envelope": array})
    return Message(RecordDict({"fedgrad": record}), reply_to=message)
