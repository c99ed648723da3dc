"""A client of the Container Runtime Interface, like kubelet's: gRPC over a Unix socket, messages from cri.proto.

    with Cri(socket) as cri:
        pod = cri.call("RunPodSandbox", config={...}, runtime_handler="gpushare").pod_sandbox_id

CriError has the text that kubelet would write into a pod's events.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc

_PROTO = Path(__file__).with_name("cri.proto")
_PACKAGE = "runtime.v1"
_TIMEOUT_S = 60


class CriError(Exception):
    """A call failed: `code` is gRPC's number, `detail` its text."""

    def __init__(self, method: str, code: int, detail: str) -> None:
        super().__init__(f"{method}: {detail}")
        self.code = code
        self.detail = detail


@functools.cache
def methods(proto: Path = _PROTO, package: str = _PACKAGE) -> dict[str, tuple[str, Any, Any]]:
    """name -> (path on the wire, class of the request, class of the response)"""
    with tempfile.NamedTemporaryFile() as out:
        if protoc.main(["protoc", f"-I{proto.parent}", f"--descriptor_set_out={out.name}", str(proto)]):
            raise RuntimeError(f"{proto} does not compile")
        described = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    found = {}
    for file in described.file:
        pool.Add(file)
        for service in file.service:
            for method in pool.FindServiceByName(f"{package}.{service.name}").methods:
                classes = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
                found[method.name] = (f"/{package}.{service.name}/{method.name}", *classes)
    return found


class Cri:
    """One connection."""

    def __init__(self, socket: Path) -> None:
        # The daemon may restart: reconnect soon, at first every few milliseconds.
        options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=options)

    def call(self, method: str, timeout_s: float = _TIMEOUT_S, **fields: Any) -> Any:
        """The response. `fields` of the request; nested messages are dictionaries. Raises CriError."""
        path, request, response = methods()[method]
        function = self._channel.unary_unary(path, request.SerializeToString, response.FromString)
        try:
            return function(json_format.ParseDict(fields, request()), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CriError(method, error.code().value[0], error.details()) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Cri:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
