"""Everything below Flower's public API that is used here, checked on import.

A user's process drives a run itself, and a site's agent stays in memory between messages; Flower
has no public API for either. These names move between versions, so only this file imports them.
"""

# ruff: noqa: F401 (this file exists for its imports)

from importlib.metadata import version

from fedgrad.core.errors import needs
from fedgrad.federation.flower import engine  # fails first if Flower is missing

with needs(f"fedgrad, written against flwr 1.41 and 1.42, with {version('flwr')}", "flower"):
    import httpx
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        Metadata,
        RecordDict,
    )
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.clientapp import ClientApp
    from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.control_pb2 import (
        ListNodesRequest,
        ListRunsRequest,
        RegisterNodeRequest,
        StartRunRequest,
    )
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
        RegisterNodeFleetRequest,
        UnregisterNodeFleetRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        PullObjectRequest,
        PushObjectRequest,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import (
        AcquireTaskRequest,
        GetNodesRequest,
        PullAppMessagesRequest,
        PullTaskInputRequest,
        PushAppMessagesRequest,
        PushTaskOutputRequest,
        SendTaskHeartbeatRequest,
    )
    from flwr.serverapp import Grid
    from flwr.supercore.constant import TaskType
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.date import now
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject,
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.interceptors.http.utils import add_headers
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufClient, ProtobufRequestContext
    from flwr.supercore.run import Run
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

del engine
