"""The messages of ttrpc and of NRI's API, v1alpha1, as protobuf classes.

    message(name)      -> the class
    parse(name, data)  -> a message; raises ProtocolError

Sources: containerd/ttrpc, request.proto; containerd/nri, pkg/api/api.proto. Messages and fields that the plugin neither
sends nor reads are left out; protobuf skips unknown fields. The import raises GpushareError if protobuf is missing.
"""

from __future__ import annotations

import functools
from typing import Any

from ...core.errors import GpushareError
from .wire import ProtocolError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
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

# message -> its fields as "type name number"; type+: repeated; map: from string to string
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
    "PodSandbox": ("map annotations 6",),
    "Container": ("string id 1", "map annotations 6", "Hooks hooks 10"),
    "CreateContainerRequest": ("PodSandbox pod 1", "Container container 2"),
    "OptionalInt": ("int64 value 1",),
    "Hook": ("string path 1", "string+ args 2", "string+ env 3", "OptionalInt timeout 4"),
    "Hooks": ("Hook+ prestart 1", "Hook+ poststop 6"),
    "ContainerAdjustment": ("map annotations 2", "Hooks hooks 5"),
    "CreateContainerResponse": ("ContainerAdjustment adjust 1",),
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def _add_field(to: Any, text: str) -> None:
    kind, name, number = text.split()
    field = to.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind == "map":  # protobuf encodes a map as repeated messages with a key and a value
        entry = to.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key 1")
        _add_field(entry, "string value 2")
        kind = f"{to.name}.{entry.name}+"
    if kind.endswith("+"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


@functools.cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="gpushare/nri.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for text in fields:
            _add_field(described, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@functools.cache
def message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def parse(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError:
        raise ProtocolError(f"the engine sent {len(data)} bytes that are no {name}") from None
