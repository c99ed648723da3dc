"""gRPC on Unix sockets.

    listen(path, handlers, threads)   -> the running server
    require_answer(path, method)      raise GpushareError if the server on this socket does not answer

Not on the start path.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..core.errors import GpushareError
from ..core.quoting import shown

_MAX_PATH_BYTES = 107  # of a socket's path: unix(7)
_ANSWERS_S = 5.0  # less than the timeout of the probes in packaging/kubernetes


def listen(path: str, handlers: Sequence[Any], threads: int, options: Sequence[tuple[str, int]] = ()) -> Any:
    """Serve on a new socket (0600), which replaces one that a killed process left. Raises GpushareError."""
    import grpc  # the callers' protocol.py reports that it is missing

    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise GpushareError(f"cannot serve on {shown(path)}: longer than {_MAX_PATH_BYTES} bytes", "give --kubelet")
    server = grpc.server(ThreadPoolExecutor(threads), options=[("grpc.so_reuseport", 0), *options])
    server.add_generic_rpc_handlers(tuple(handlers))
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        raise GpushareError(f"cannot serve on {shown(path)}", "run as root") from None
    finally:
        os.umask(before)
    server.start()
    return server


def require_answer(path: str, method: str) -> None:
    """Call a method whose request has no fields. Raises GpushareError if it fails."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=_ANSWERS_S)
        except grpc.RpcError as error:
            raise GpushareError(f"{shown(path)} does not answer: {error.code().name}", "see its log") from None
