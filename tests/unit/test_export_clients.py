"""No client of `gpushare export` delays a scrape, or fills the exporter's log."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gpushare.cli import export
from gpushare.cli.answers import Answers

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


def test_scrape_is_answered_beside_a_flood_of_requests(server: Any, client: Any) -> None:
    """All clients share an answer, so a client that asks again and again takes no processor time from a scrape."""
    made: list[float] = []

    def make() -> bytes:
        made.append(time.monotonic())
        time.sleep(0.02)
        return ANSWER

    server.set_app(Answers(make))
    for number in range(4 * export._CLIENTS):
        client(PART + b"x\r\n\r\n")
        if number % export._CLIENTS == 0:
            assert scrape(server) == ANSWER
    assert len(made) <= 1 + (time.monotonic() - made[0]) / 0.2


@pytest.mark.parametrize(
    "accept",
    [b"text/plain;version=x", b"application/openmetrics-text;version=\xff", b"text/plain;version=" + b"9" * 5000]
    + [b"application/openmetrics-text;version=1.0.0\x01;escaping=\x02", b"\x1b[2J;q=1e400,,;=;"],
)
@pytest.mark.parametrize("line", [b"GET /metrics?" + b"name[]=%00&" * 900, b"GET //[::1", b"GET \xff\x1b[2J"])
def test_strange_request_gets_the_metrics_and_logs_nothing(
    server: Any, client: Any, capfd: pytest.CaptureFixture[str], line: bytes, accept: bytes
) -> None:
    server.set_app(Answers(lambda: b"x 1\n"))
    one = client(line + b" HTTP/1.1\r\nAccept: " + accept + b"\r\n\r\n")
    assert one.makefile("rb").read().endswith(b"\r\n\r\nx 1\n")
    assert capfd.readouterr().err == ""


def test_answer_is_compressed_on_request_and_other_methods_are_refused(server: Any) -> None:
    server.set_app(Answers(lambda: b"x 1\n"))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    found = []
    for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
        connection.request(method, "/metrics", headers={"Accept-Encoding": "br, gzip;q=1"})
        answer = connection.getresponse()
        found.append((answer.status, answer.headers["Content-Encoding"], answer.read()))
        connection.close()
    assert found[1:] == [(200, "gzip", b""), *[(405, None, b"")] * 3]
    assert found[0][:2] == (200, "gzip") and gzip.decompress(found[0][2]) == b"x 1\n"
