"""The nodes of a Flower app in this process, for trying out an app and for tests."""

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from fedgrad.core.errors import require_whole
from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.derivatives import shifted

_RAISED = 2  # Flower's code for an app that raised


class InProcessGrid(flower.Grid):
    """A grid for `strategy.start(grid, ...)` whose nodes run in this process, one after the other,
    without SuperLink or Ray.

    Args:
        app: The ClientApp. If it raises, the reply of that node is an error, as on real nodes.
        nodes: The number of nodes. Each has a context with its `partition-id` and
            `num-partitions`, whose state persists between messages.
        run_config: The `run_config` of every context.
    """

    def __init__(
        self, app: flower.ClientApp, nodes: int, run_config: Mapping[str, Any] = {}
    ) -> None:
        require_whole("nodes", nodes)
        identity = flower.TaskIdentity
        if identity._run_id is None:  # messages need a run, and there is none here
            identity.task_id, identity.run_id, identity.node_id = 1, 1, flower.SUPERLINK_NODE_ID
        self._app = app
        self._replies: dict[str, flower.Message] = {}
        self._sent = 0
        self._contexts = {
            i + 1: flower.Context(
                run_id=identity.run_id,
                node_id=i + 1,
                node_config={"partition-id": i, "num-partitions": nodes},
                state=flower.RecordDict(),
                run_config=dict(run_config),
            )
            for i in range(nodes)
        }

    def set_run(self, run: flower.Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> flower.Run:
        """The run that was set."""
        return self._run

    def create_message(
        self,
        content: flower.RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> flower.Message:
        """Create a message to a node."""
        return flower.Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of the nodes: 1, 2, ..."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[flower.Message]) -> list[str]:
        """Have the nodes answer messages; return the ids of the messages."""
        names = []
        for message in messages:
            self._sent += 1
            names.append(str(self._sent))
            self._replies[names[-1]] = self._answered(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[flower.Message]:
        """Return the replies to these messages."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[flower.Message], *, timeout: float | None = None
    ) -> list[flower.Message]:
        """Return all replies, in the order of the messages."""
        return self.pull_messages(self.push_messages(messages))

    def _answered(self, message: flower.Message) -> flower.Message:
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(shifted(message), context)  # with a copy, as if it were sent
        except Exception:  # any kind: this runs user code
            return flower.Message(flower.Error(_RAISED, traceback.format_exc()), reply_to=message)
