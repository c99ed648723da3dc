"""The answers of `gpushare export` to its clients, which can be any program that reaches its address.

All clients share an answer for ten times as long as making it took. So clients that ask without end cost a tenth of a
processor, and a scrape does not wait until each of them has an answer of its own. The format is always Prometheus' text
format, so a request cannot choose how much work its answer is, or make the encoder fail.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD")
_SHARED = 10.0  # times that making an answer took
_LONGEST_S = 2.0


class Answers:
    """A WSGI application. `make` returns the metrics in Prometheus' text format."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made, self._until = (b"", b""), 0.0

    def latest(self) -> tuple[bytes, bytes]:
        """Return the metrics, as they are and compressed."""
        with self._lock:
            began = time.monotonic()
            if began >= self._until:
                text = self._make()
                self._made = text, gzip.compress(text, 5)
                self._until = began + min(_LONGEST_S, _SHARED * (time.monotonic() - began))
            return self._made

    def __call__(self, environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
        if environ["REQUEST_METHOD"] not in _METHODS:
            start("405 Method Not Allowed", [("Allow", ", ".join(_METHODS)), ("Content-Length", "0")])
            return [b""]
        plain, compressed = self.latest()
        accepted = {one.partition(";")[0].strip() for one in environ.get("HTTP_ACCEPT_ENCODING", "").split(",")}
        is_compressed = "gzip" in accepted
        body = compressed if is_compressed else plain
        encoding = [("Content-Encoding", "gzip")] if is_compressed else []
        start("200 OK", [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body))), *encoding])
        return [body] if environ["REQUEST_METHOD"] == "GET" else [b""]
