"""The messages of ttrpc and of NRI's API, v1alpha1, as protobuf classes.

    message(name)      -> the class
    parse(name, data)  -> a message; raises ProtocolError

Sources: containerd/ttrpc, request.proto; containerd/nri, pkg/api/api.proto. Messages and fields that the plugin neither
sends nor reads are left out; protobuf skips unknown fields. The import raises GpushareError if protobuf is missing.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import GpushareError
from .wire import ProtocolError

try:
    from google.protobuf.message import DecodeError

    from ..protobuf import messages
except ImportError:
    raise GpushareError(
        "gpushare nri needs protobuf, which is not installed",
        "pip install 'gpushare[kubernetes]', or install a package built with WITH=kubernetes",
    ) from None

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
CREATE_CONTAINER = 4  # of enum Event
UNKNOWN, INVALID_ARGUMENT, UNIMPLEMENTED = 2, 3, 12  # codes of a Status, as in gRPC
_PACKAGE = "gpushare.nri"

# message -> its fields as "type name number"; see protobuf.py
_MESSAGES: dict[str, tuple[str, ...]] = {
    "Request": ("string service 1", "string method 2", "bytes payload 3", "int64 timeout_nano 4"),
    "Status": ("int32 code 1", "string message 2"),
    "Response": ("Status status 1", "bytes payload 2"),
    "Empty": (),
    "RegisterPluginRequest": ("string plugin_name 1", "string plugin_idx 2"),
    "ConfigureRequest": ("string runtime_name 2", "string runtime_version 3"),
    "ConfigureResponse": ("int32 events 2",),
    "SynchronizeRequest": ("Container+ containers 2", "bool more 3"),
    "SynchronizeResponse": ("bool more 2",),
    "PodSandbox": ("string namespace 4", "string* annotations 6"),
    "Container": ("string id 1", "string* annotations 6", "Hooks hooks 10"),
    "CreateContainerRequest": ("PodSandbox pod 1", "Container container 2"),
    "OptionalInt": ("int64 value 1",),
    "Hook": ("string path 1", "string+ args 2", "string+ env 3", "OptionalInt timeout 4"),
    "Hooks": ("Hook+ prestart 1", "Hook+ create_runtime 2", "Hook+ poststop 6"),
    "ContainerAdjustment": ("string* annotations 2", "Hooks hooks 5"),
    "CreateContainerResponse": ("ContainerAdjustment adjust 1",),
}
message = messages(_PACKAGE, _MESSAGES)


def parse(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError:
        raise ProtocolError(f"the engine sent {len(data)} bytes that are no {name}") from None
