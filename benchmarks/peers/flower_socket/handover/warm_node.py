"""The process of a node that stays: it answers envelopes that come over a Unix socket."""

import sys
from multiprocessing.connection import Listener

from fedgrad.federation import Context, Node, Policy
from fedgrad.federation.protocol.node_data import load
from fedgrad.federation.protocol.packing import pack, unpack


def serve(data: str, sockets: str, index: int) -> None:
    """Until it is ended."""
    node = Node(load(data), Policy(anything=True), context=Context({"partition-id": index}))
    with Listener(f"{sockets}-{index}") as listener:
        while True:
            with listener.accept() as app:
                app.send_bytes(pack(node.handle(unpack(app.recv_bytes()))))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
