"""Serve gRPC on a Unix socket: listen(path, handlers, threads) -> the running server.

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
