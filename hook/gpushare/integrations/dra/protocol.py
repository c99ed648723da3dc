"""kubelet's APIs for DRA drivers: their messages as protobuf classes, and the names of their services.

    REGISTRATION          the service on the registration socket
    DRA                   {name that kubelet knows: service on the driver's socket}
    message(package, name), reader(...), serializer(...)

Source: k8s.io/kubelet, pluginregistration/v1, dra/v1 and dra/v1beta1. The import raises GpushareError if grpcio or
protobuf is missing.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import GpushareError

try:
    import grpc as grpc  # service.py imports it from here, for the error message

    from ..protobuf import messages
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
# package -> message -> its fields as "type name"; see protobuf.py
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
_CLASSES = {package: messages(package, table) for package, table in _MESSAGES.items()}


def message(package: str, name: str) -> Any:
    return _CLASSES[package](name)


def handler(package: str, function: Any, request: str, response: str) -> Any:
    """The function as a method of a service."""
    asked, answer = message(package, request), message(package, response)
    return grpc.unary_unary_rpc_method_handler(function, asked.FromString, answer.SerializeToString)
