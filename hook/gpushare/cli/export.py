"""gpushare export."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import Counter
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Optional
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import click

from ..allocation import limit_update
from ..config import node
from ..core.errors import GpushareError, RequestError, what_to_do
from ..core.model import Lease
from ..core.quoting import shown
from ..gpu import driverfiles, inventory, nvml_usage
from ..monitor import overuse, unlimited
from ..state import journal
from ..state.unlimited import Unlimited
from ..state.unlimited import find as find_unlimited
from ..system import sigterm
from . import facts
from .answers import Answers
from .options import Paths, given, with_interval, with_no_color
from .output import write, write_now

PORT = 9878
_CHECKPOINT_S = 600.0
_CLIENTS = 32  # connected at once; for one more the server drops the oldest
_CLIENT_S = 10.0  # for a request and its answer
_REQUEST_BYTES = 16 << 10  # read of a request at most; http.server alone would keep 6 MiB of headers
_HINTS = {
    errno.EADDRINUSE: "is another exporter running? give another --port",
    errno.EADDRNOTAVAIL: "give an address of this host",
    errno.EACCES: "give a --port above 1023, or run as root",
}


@click.command()
@click.option("--listen", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to serve on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    metavar="NUMBER",
    help="Port to serve on; 0: any free port, which the first line names.",
)
@click.option("--socket", "path", callback=given, metavar="FILE", help="A unix socket (0600) instead of a port.")
@with_interval(10.0, "Time between two comparisons of usage with limits.")
@click.option("--once", is_flag=True, help="Print the metrics and exit; report and stop nothing.")
@with_no_color
@click.pass_obj
def export(paths: Paths, listen: str, port: int, path: Optional[str], interval: float, once: bool) -> int:
    """Serve metrics to Prometheus.

    Serves metrics of containers and devices, by default on loopback. At every interval the exporter also compares the
    usage that the driver counts with the limits of containers. A container that is over its limit twice in a row has
    bypassed the shim: the exporter writes a line to log.decisions, and kills the container if reconcile.action is
    stop. There is no password and no encryption: any client that can reach the address can read the metrics.
    """
    watched = Watched(paths)
    if once:
        watched.update(act=False)  # without an Asker this process may fork
        write(watched.text().decode())
        return 0
    server = _bound(listen, port, path)
    try:
        watched.asker = nvml_usage.Asker()  # it forks, so before this process has threads
        return _serve(watched, server, interval)
    finally:
        server.server_close()
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.abspath(path))
        if watched.asker is not None:
            watched.asker.close()


class Watched:
    """The metrics, and the driver's numbers behind them. Raises PermissionError if this user may not read leases."""

    def __init__(self, paths: Paths) -> None:
        from .metrics import Metrics
        from .node import installed

        self._paths, self._watch, self._unlimited = paths, overuse.Watch(), unlimited.Watch()
        self.asker: Optional[nvml_usage.Asker] = None  # None: this process may fork
        self._config = node.load_config_only(*paths)
        self._checkpoint_due = time.monotonic()
        facts.containers(paths.state_dir)  # raises now, not at the first scrape, if leases cannot be read
        self.metrics = Metrics(paths, installed())

    def update(self, act: bool = True) -> None:
        """Read the driver's usage and compare it with limits; if `act`, report or stop containers over their limits.
        Raises DeviceError if the process that asks the driver is gone."""
        from .metrics import Seen

        try:
            # Only the configuration, not all of node.json: that would fork, and this process has threads
            self._config = node.load_config_only(*self._paths)
        except (GpushareError, OSError):
            pass  # the file is being edited: keep the previous configuration
        root, library = self._config.driver_root, ""
        try:
            version = inventory.driver_version(root)
            library = driverfiles.nvml_library(
                self._config.driver_libraries or driverfiles.root_of(root, version), version
            )
        except (GpushareError, OSError):
            pass  # no driver is loaded
        gpus = self.asker.read(library) if self.asker else nvml_usage.read(library)
        comparison, now = overuse.Comparison((), {}), 0.0
        found: tuple[Unlimited, ...] = ()
        try:
            leases = self._leases()
        except (GpushareError, OSError):
            pass  # gpushare_state_up reports it at the next scrape
        else:
            found = find_unlimited(leases, unlimited.of_driver(leases, gpus))
            if gpus is not None:
                now = time.time()
                comparison = overuse.judge(leases, gpus, overuse.Owners(leases))
            if act:
                self._unlimited.follow(leases, found, self._config.log, self._config.policy.unlimited_process)
                if gpus is not None:
                    self._watch.follow(leases, comparison, self._config.log, self._config.reconcile)
        exceeded, counts = dict(self._watch.exceeded), Counter(one.id for one in found)
        self.metrics.seen = Seen(gpus, comparison, now or self.metrics.seen.time_s, exceeded, counts)

    def checkpoint(self) -> None:
        """Write running containers to the usage journal, every ten minutes."""
        if time.monotonic() >= self._checkpoint_due:
            self._checkpoint_due = time.monotonic() + _CHECKPOINT_S
            journal.checkpoint(self._config, self._paths.state_dir)

    def _leases(self) -> list[Lease]:
        found = facts.containers(self._paths.state_dir)
        running = [one.lease for one in found if one.lease is not None and one.state in facts.ALIVE]
        return list(limit_update.settled(self._paths.state_dir, tuple(running), keep=False))

    def text(self) -> bytes:
        """The current metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.metrics)
        return generate_latest(registry)

    def app(self) -> Answers:
        """A WSGI application that serves the metrics."""
        return Answers(self.text)


class _Bounded:
    """A file of a request that ends after _REQUEST_BYTES."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, _REQUEST_BYTES

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S  # of one read or write; _Server.service_actions bounds the whole connection
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)

    def parse_request(self) -> bool:
        complete = super().parse_request()
        self.server.asked(self.connection)
        return complete

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for a scrape."""

    def address_string(self) -> str:
        return "local"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: Any, family: int) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, tuple[bool, float]] = {}  # (it has sent its request, time of its connection)
        self._room = threading.BoundedSemaphore(2 * _CLIENTS)  # threads; those of dropped clients are about to end
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind as WSGIServer does, without resolving the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def place(self) -> str:
        """The address as shown to the user."""
        bound = self.socket.getsockname()
        if isinstance(bound, str):
            return f"unix:{bound}"
        return f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}/metrics"

    def get_request(self) -> Any:
        request, address = super().get_request()
        return request, address or ("local", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new client in a thread. If there are too many clients, drop the oldest, preferring clients that have
        not sent their request: a real scrape sends it at once."""
        self._room.acquire()
        with self._lock:
            if len(self._clients) >= _CLIENTS:
                self._drop(min(self._clients, key=self._clients.__getitem__))
            self._clients[request] = (False, time.monotonic())
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def asked(self, request: Any) -> None:
        """Note that the client has sent its request."""
        with self._lock:
            if request in self._clients:
                self._clients[request] = (True, self._clients[request][1])

    def service_actions(self) -> None:
        """Drop clients that are connected for too long, even if they still send data. socketserver calls this between
        two polls for new clients."""
        before = time.monotonic() - _CLIENT_S
        with self._lock:
            for request in [one for one, (_, since) in self._clients.items() if since < before]:
                self._drop(request)

    def _drop(self, request: Any) -> None:
        """Shut a client's connection down. Its thread then reads an end of file or gets an error, and closes it."""
        del self._clients[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line for an error, unless the client closed its connection early."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            from ..state import log

            log.to_stderr(log.line_of(error)[0] if isinstance(error, Exception) else str(error))


def _bound(listen: str, port: int, path: Optional[str]) -> _Server:
    """A server that is bound to the port or socket file. Raises RequestError or GpushareError, which name the
    address."""
    if path is not None:
        return _bound_to_file(os.path.abspath(path))
    try:
        address = ipaddress.ip_address(listen)
    except ValueError:
        raise RequestError(
            f"--listen {shown(listen)}: not an address", "give 127.0.0.1, ::1, or 0.0.0.0 for all"
        ) from None
    where = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    try:
        return _Server((str(address), port), socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0) or what_to_do(error)
        raise GpushareError(f"cannot serve on {where}: {error.strerror}", hint) from None


def _bound_to_file(path: str) -> _Server:
    """A server on a unix socket. Replaces the socket of a server that was killed, never one on which a process listens.
    Files of another type are checked first: for them connect() also fails with ECONNREFUSED, but they must stay."""
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise GpushareError(f"cannot serve on {shown(path)}: it exists and is not a socket", "give another --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _no_socket(path, error) from None
        else:
            raise GpushareError(f"cannot serve on {shown(path)}: another process does", "give another --socket")
    before = os.umask(0o177)
    try:
        return _Server(path, socket.AF_UNIX)
    except OSError as error:
        raise _no_socket(path, error) from None
    finally:
        os.umask(before)


def _no_socket(path: str, error: OSError) -> GpushareError:
    """The error of a socket file. For a path that is too long Python raises an OSError without errno and strerror."""
    return GpushareError(f"cannot serve on {shown(path)}: {error.strerror or error}", what_to_do(error))


def _serve(watched: Watched, server: _Server, interval: float) -> int:
    """Serve until SIGTERM, which is the usual end, and compare usage with limits at every interval."""
    with sigterm.readable() as end:
        watched.update()
        server.set_app(watched.app())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        try:
            write_now(f"serving metrics at {server.place()}")
            due = time.monotonic() + interval
            while not select.select([end], [], [], max(0.0, due - time.monotonic()))[0]:
                watched.update()
                watched.checkpoint()
                due = time.monotonic() + interval
        finally:
            server.shutdown()
    return 0
