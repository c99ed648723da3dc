"""kubelet's APIs for DRA drivers: their messages as protobuf classes, and the names of their services.

    REGISTRATION          the service on the registration socket
    DRA                   {name that kubelet knows: service on the driver's socket}
    message(package, name), reader(...), serializer(...)

Source: k8s.io/kubelet, pluginregistration/v1, dra/v1 and dra/v1beta1. The import raises GpushareError if grpcio or
protobuf is missing.
"""

from __future__ import annotations

import functools
from typing import Any

from ...core.errors import GpushareError

try:
    import grpc as grpc  # service.py imports it from here, for the error message
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError:
    raise GpushareError(
        "gpushare dra needs grpcio and protobuf, which are not installed",
        "pip install 'gpushare[kubernetes]', or install a package built with WITH=kubernetes",
    ) from None

PLUGIN = "pluginregistration"
REGISTRATION = f"{PLUGIN}.Registration"
TYPE = "DRAPlugin"
_DRA = "k8s.io.kubelet.pkg.apis.dra"
PACKAGES = {f"{version}.DRAPlugin": f"{_DRA}.{version}" for version in ("v1", "v1beta1")}

_CLAIMS: dict[str, tuple[str, ...]] = {
    "Claim": ("string namespace", "string uid", "string name"),
    "NodePrepareResourcesRequest": ("Claim+ claims",),
    "Device": ("string+ request_names", "string pool_name", "string device_name", "string+ cdi_device_ids"),
    "NodePrepareResourceResponse": ("Device+ devices", "string error"),
    "NodePrepareResourcesResponse": ("NodePrepareResourceResponse* claims",),
    "NodeUnprepareResourcesRequest": ("Claim+ claims",),
    "NodeUnprepareResourceResponse": ("string error",),
    "NodeUnprepareResourcesResponse": ("NodeUnprepareResourceResponse* claims",),
}
# package -> message -> its fields as "type name", numbered from 1; type+: repeated; type*: map from string to type
_MESSAGES: dict[str, dict[str, tuple[str, ...]]] = {
    PLUGIN: {
        "InfoRequest": (),
        "PluginInfo": ("string type", "string name", "string endpoint", "string+ supported_versions"),
        "RegistrationStatus": ("bool plugin_registered", "string error"),
        "RegistrationStatusResponse": (),
    },
    PACKAGES["v1.DRAPlugin"]: {**_CLAIMS, "Device": (*_CLAIMS["Device"], "string share_id")},
    PACKAGES["v1beta1.DRAPlugin"]: _CLAIMS,
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _Field.TYPE_STRING, "bool": _Field.TYPE_BOOL}


def _add_field(package: str, to: Any, number: int, text: str) -> None:
    kind, name = text.split()
    field = to.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):  # protobuf encodes a map as repeated messages with a key and a value
        entry = to.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        _add_field(package, entry, 1, "string key")
        _add_field(package, entry, 2, f"{kind[:-1]} value")
        kind = f"{to.name}.{entry.name}+"
    if kind.endswith("+"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"


@functools.cache
def _pool(package: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"gpushare/{package}.proto", package=package, syntax="proto3")
    for name, fields in _MESSAGES[package].items():
        described = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _add_field(package, described, number, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@functools.cache
def message(package: str, name: str) -> Any:
    return message_factory.GetMessageClass(_pool(package).FindMessageTypeByName(f"{package}.{name}"))


def handler(package: str, function: Any, request: str, response: str) -> Any:
    """The function as a method of a service."""
    asked, answer = message(package, request), message(package, response)
    return grpc.unary_unary_rpc_method_handler(function, asked.FromString, answer.SerializeToString)
