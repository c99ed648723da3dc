"""Slow and silent clients of `gpushare export` do not delay a scrape."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gpushare.cli import export

PART = b"GET /metrics HTTP/1.1\r\nHost: "
ANSWER = b"# metrics\n" * (1 << 18)  # larger than a socket's buffers
ADDRESSES = [f"127.0.0.{last}" for last in range(2, 12)]


@pytest.fixture
def server() -> Iterator[Any]:
    def app(_: Any, start: Any) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        return [ANSWER]

    made = export._bound("127.0.0.1", 0, None)
    made.set_app(app)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join(30)
    made.server_close()


def scrape(server: Any) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    """client(first bytes, own address) -> a connection that then stays idle."""
    with contextlib.ExitStack() as stack:

        def connect(data: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
            where = ("127.0.0.1", server.server_address[1])
            one = stack.enter_context(socket.create_connection(where, 30, (address, 0)))
            one.sendall(data)
            return one

        yield connect


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ADDRESSES], ids=["one address", "several addresses"])
@pytest.mark.parametrize(
    "sent", [b"", PART, PART + b"x\r\n\r\n"], ids=["silent", "an unfinished request", "an unread answer"]
)
def test_scrape_is_answered_beside_slow_clients(server: Any, client: Any, sent: bytes, addresses: list[str]) -> None:
    for number in range(3 * export._CLIENTS):
        client(sent, addresses[number % len(addresses)])
        if number % export._CLIENTS == 0:
            assert scrape(server) == ANSWER
    for _ in range(3):
        assert scrape(server) == ANSWER
    assert len(server._clients) <= export._CLIENTS
    assert threading.active_count() < 2 * export._CLIENTS + 16


def test_client_with_request_is_dropped_last(server: Any, client: Any) -> None:
    asked = client(PART + b"x\r\n\r\n")
    assert select.select([asked], [], [], 30)[0]  # the answer has begun
    for _ in range(3 * export._CLIENTS):
        client()
    assert scrape(server) == ANSWER
    got = b""
    while part := asked.recv(1 << 20):
        got += part
    assert got.endswith(ANSWER)


def test_whole_request_has_one_deadline(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single bytes do not extend the deadline."""
    with monkeypatch.context() as soon:
        soon.setattr(export, "_CLIENT_S", 0.3)
        slow = client(PART)
        with pytest.raises(OSError):
            while not select.select([slow], [], [], 0.05)[0]:
                slow.sendall(b"x")
            assert slow.recv(1) == b""  # end of stream, unless the kernel has already reset the connection
            raise OSError
    assert scrape(server) == ANSWER


def test_endless_header_ends_the_request(server: Any, client: Any) -> None:
    one = client(PART)
    with contextlib.suppress(OSError):  # the server need not read everything
        for _ in range(64):
            one.sendall(b"x" * (1 << 10) + b"\r\nA: ")
    assert scrape(server) == ANSWER


def test_bounded_reader_stops_at_limit() -> None:
    import io

    reader = export._Bounded(io.BytesIO(b"x" * 100_000))
    lines = [reader.readline(65537), reader.readline(65537)]
    assert [len(line) for line in lines] == [export._REQUEST_BYTES, 0]
