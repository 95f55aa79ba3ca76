"""fedgrad inside Flower apps, started by `flwr run` and SuperNodes. Uses only Flower's public API.

A SuperNode starts a process for each message. A node therefore keeps in Flower's run state what the
resident agent (`fedgrad node`) keeps in memory, and JAX compiles again each time. This is slower,
but it works wherever Flower does.
"""

import json
from typing import Any

from fedgrad.core.errors import needs
from fedgrad.federation.flower.connection import EngineError
from fedgrad.federation.flower.engine import FIELD, MESSAGE_TYPE, RECORD, envelope, reply
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.memory import Entry, Memory
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context, load
from fedgrad.federation.protocol.packing import pack, unpack
from fedgrad.federation.protocol.policy import Policy

with needs("A Flower app", "flower"):
    from flwr.app import Array, ArrayRecord, Message
    from flwr.app import Context as FlowerContext
    from flwr.clientapp import ClientApp

_SECONDS = 600.0


def client_app() -> ClientApp:
    """Return the ClientApp of a node. The site configures it when it starts its SuperNode:

    --node-config 'data="module:function" policy="/path/policy.toml" partition-id=0'
    """
    app = ClientApp()
    _, _, action = MESSAGE_TYPE.partition(".")

    @app.query(action)
    def answer(message: Message, context: FlowerContext) -> Message:
        config = dict(context.node_config)
        node = Node(
            load(str(_required(config, "data"))),
            Policy.read(str(config["policy"])) if "policy" in config else Policy(),
            context=Context(config),
            memory=_recalled(context),
        )
        answered = reply(message, node.handle(envelope(message)))
        _remember(context, node.memory)
        return answered

    return app


def _required(config: dict[str, Any], name: str) -> Any:
    if name not in config:
        raise EngineError(f"The SuperNode has no {name!r} in its --node-config.")
    return config[name]


def _recalled(context: FlowerContext) -> Memory:
    memory = Memory(_SECONDS)
    record = context.state.get(RECORD)
    if isinstance(record, ArrayRecord):
        kept = unpack(record[FIELD].data)
        entries = json.loads(str(kept.meta["entries"]))
        memory.entries.update(
            (name, Entry(array, used, origin))
            for (name, used, origin), array in zip(entries, kept.arrays, strict=True)
        )
    return memory


def _remember(context: FlowerContext, memory: Memory) -> None:
    entries = json.dumps([(name, e.used, e.origin) for name, e in memory.entries.items()])
    arrays = tuple(entry.array for entry in memory.entries.values())
    data = pack(Envelope("memory", {"entries": entries}, arrays))
    array = Array("uint8", (len(data),), "fedgrad.memory", data)
    context.state[RECORD] = ArrayRecord({FIELD: array})
