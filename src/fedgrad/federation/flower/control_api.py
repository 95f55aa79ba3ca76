"""Operator requests to a SuperLink: register nodes, list connected ones, count the traffic."""

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import Connection, located
from fedgrad.federation.flower.http import call, client


def register(connection: Connection, key: bytes, name: str | None = None) -> int:
    """Let the node with this public key (PEM) take part; return its id."""
    with located(), client(flower.ControlHttpClient, connection, "fedgrad") as control:
        request = flower.RegisterNodeRequest(public_key=key, name=name)
        return int(call(control.RegisterNode, request).node_id)


def nodes_online(connection: Connection) -> list[int]:
    """Return the ids of the nodes that are connected now, without starting a run."""
    with located(), client(flower.ControlHttpClient, connection, "fedgrad") as control:
        answer = call(control.ListNodes, flower.ListNodesRequest())
        return sorted(n.node_id for n in answer.nodes_info if n.status == "online")


def traffic(connection: Connection, run: int) -> tuple[int, int]:
    """Return the bytes sent to and received from nodes in a run, as counted by the SuperLink."""
    with located(), client(flower.ControlHttpClient, connection, "fedgrad") as control:
        found = call(control.ListRuns, flower.ListRunsRequest(run_id=run)).run_dict[run]
        return int(found.bytes_sent), int(found.bytes_recv)
