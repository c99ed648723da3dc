"""kubelet's device plugin API, v1beta1: its messages as protobuf classes, and the names of its methods.

    message(name)  -> the class                              serializer(name), reader(name) -> functions
    REGISTER, SERVICE, SOCKET, VERSION

Source: "Device Plugins" in Kubernetes' documentation, and the API itself (k8s.io/kubelet, deviceplugin/v1beta1).
Messages and fields that the plugin neither sends nor reads are left out; protobuf skips unknown fields. Field numbers
count from 1 in the order of the table, without gaps. The import raises GpushareError if grpcio or protobuf is missing.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import GpushareError

try:
    import grpc as grpc  # plugin.py and service.py import it from here, for the error message

    from ..protobuf import messages
except ImportError:
    raise GpushareError(
        "gpushare k8s-plugin needs grpcio and protobuf, which are not installed",
        "pip install 'gpushare[kubernetes]', or install a package built with WITH=kubernetes",
    ) from None

VERSION = "v1beta1"
SOCKET = "kubelet.sock"  # in kubelet's directory for plugins
REGISTER = f"/{VERSION}.Registration/Register"
SERVICE = f"{VERSION}.DevicePlugin"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
MAX_MESSAGE_BYTES = 4 << 20  # that kubelet accepts: the default of gRPC for Go

# message -> its fields as "type name"; see protobuf.py
_MESSAGES: dict[str, tuple[str, ...]] = {
    "Empty": (),
    "DevicePluginOptions": ("bool pre_start_required", "bool get_preferred_allocation_available"),
    "RegisterRequest": ("string version", "string endpoint", "string resource_name", "DevicePluginOptions options"),
    "NUMANode": ("int64 ID",),
    "TopologyInfo": ("NUMANode+ nodes",),
    "Device": ("string ID", "string health", "TopologyInfo topology"),
    "ListAndWatchResponse": ("Device+ devices",),
    "PreStartContainerRequest": ("string+ devices_ids",),
    "PreStartContainerResponse": (),
    "ContainerPreferredAllocationRequest": (
        "string+ available_deviceIDs",
        "string+ must_include_deviceIDs",
        "int32 allocation_size",
    ),
    "PreferredAllocationRequest": ("ContainerPreferredAllocationRequest+ container_requests",),
    "ContainerPreferredAllocationResponse": ("string+ deviceIDs",),
    "PreferredAllocationResponse": ("ContainerPreferredAllocationResponse+ container_responses",),
    "ContainerAllocateRequest": ("string+ devices_ids",),
    "AllocateRequest": ("ContainerAllocateRequest+ container_requests",),
    "ContainerAllocateResponse": ("string* envs",),
    "AllocateResponse": ("ContainerAllocateResponse+ container_responses",),
}
message = messages(VERSION, _MESSAGES)


def reader(name: str) -> Any:
    return message(name).FromString


def serializer(name: str) -> Any:
    return message(name).SerializeToString
