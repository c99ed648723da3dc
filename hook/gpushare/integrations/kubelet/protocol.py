"""kubelet's device plugin API, v1beta1: its messages as protobuf classes, and the names of its methods.

    message(name)  -> the class                              serializer(name), reader(name) -> functions
    REGISTER, SERVICE, SOCKET, VERSION

Source: "Device Plugins" in Kubernetes' documentation, and the API itself (k8s.io/kubelet, deviceplugin/v1beta1).
Messages and fields that the plugin neither sends nor reads are left out; protobuf skips unknown fields. Field numbers
count from 1 in the order of the table, without gaps. The import raises GpushareError if grpcio or protobuf is missing.
"""

from __future__ import annotations

import functools
from typing import Any

from ...core.errors import GpushareError

try:
    import grpc as grpc  # plugin.py and service.py import it from here, for the error message
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
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

# message -> its fields as "type name"; type+: repeated; map: from string to string
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
    "ContainerAllocateResponse": ("map envs",),
    "AllocateResponse": ("ContainerAllocateResponse+ container_responses",),
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def _add_field(to: Any, number: int, text: str) -> None:
    kind, name = text.split()
    field = to.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind == "map":  # protobuf encodes a map as repeated messages with a key and a value
        entry = to.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string key")
        _add_field(entry, 2, "string value")
        kind = f"{to.name}.{entry.name}+"
    if kind.endswith("+"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{VERSION}.{kind}"


@functools.cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="gpushare/deviceplugin.proto", package=VERSION, syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _add_field(described, number, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@functools.cache
def message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{VERSION}.{name}"))


def reader(name: str) -> Any:
    return message(name).FromString


def serializer(name: str) -> Any:
    return message(name).SerializeToString
