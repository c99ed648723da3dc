"""`gpushare export` beside real containers: its metrics, its detection of a program that bypasses the shim, and its
exit."""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.core import constants
from prometheus_client.parser import text_string_to_metric_families

from tests.support import host
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container
from tests.support.tenant import Tenant

MakeContainer = Callable[..., Container]
Samples = dict[tuple[str, str], float]  # (metric, id of the container) -> value
GIB, MIB = 1 << 30, 1 << 20
BYPASS = TREE / "tests" / "integration" / "programs" / "bypass.py"
DEADLINE_S = 60


class Exporter:
    """The running program, from its first line on."""

    def __init__(self, node: Node, *arguments: str) -> None:
        command = [host.BIN / "gpushare", "--config", node.config, "--state", node.state, "export", *arguments]
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], DEADLINE_S)[0]
        self.line = self.process.stdout.readline() if ready else ""

    @property
    def port(self) -> int:
        return int(self.line.rpartition(":")[2].partition("/")[0])

    def text(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()
        finally:
            connection.close()

    def samples(self) -> Samples:
        return parsed(self.text())

    def until(self, true: Callable[[Samples], bool]) -> Samples:
        """Return the first scrape for which the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            now = self.samples()
            if true(now):
                return now
        raise AssertionError(self.text())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, standard error)"""
        self.process.send_signal(number)
        error = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, error


def parsed(text: str) -> Samples:
    return {
        (sample.name, sample.labels.get("id", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def exporter(node: Node) -> Iterator[Callable[..., Exporter]]:
    made: list[Exporter] = []

    def start(*arguments: str) -> Exporter:
        made.append(Exporter(node, *(arguments or ("--port", "0", "--interval", "0.1"))))
        return made[-1]

    yield start
    for one in made:
        if one.process.returncode is None:
            one.process.kill()
            one.process.communicate()


@pytest.fixture
def full(tenant: Callable[..., Tenant]) -> Tenant:
    """A tenant that uses all of its limit, as allowed."""
    one = tenant("honest", {"GPUSHARE_MEMORY": "4Gi", "GPUSHARE_COMPUTE": "30%"})
    one.container.start()
    one.expect("seen")
    one.go()
    one.expect("full")
    return one


def bypass(container: MakeContainer, node: Node) -> Container:
    """A container that uses five GiB with a limit of one."""
    command = [PYTHON, f"/opt/{BYPASS.name}", constants.REAL_CUDA, str(5 * GIB)]
    return container(command, env={"GPUSHARE_MEMORY": "1Gi"}, mounts=python_mounts(BYPASS), **node.way("hook")).start()


def exceeded(node: Node) -> list[dict[str, str]]:
    return [line for line in node.decisions() if line["decision"] == "exceeded"]


def test_only_a_bypassing_container_is_reported_once(
    container: MakeContainer, node: Node, full: Tenant, exporter: Callable[..., Exporter]
) -> None:
    wrong = bypass(container, node).id
    one, honest = exporter(), full.container.id
    seen = one.until(lambda now: now.get(("gpushare_exceeded_total", wrong)) == 1)
    assert seen["gpushare_memory_used_bytes", wrong] < 100 * MIB, "the shim was not in its way"
    assert seen["gpushare_memory_physical_bytes", wrong] >= 5 * GIB
    assert seen["gpushare_memory_over_bytes", wrong] > 3 * GIB
    assert seen["gpushare_memory_physical_bytes", honest] == seen["gpushare_memory_used_bytes", honest] > 3.9 * GIB
    assert seen["gpushare_memory_over_bytes", honest] == seen["gpushare_exceeded_total", honest] == 0
    assert seen["gpushare_memory_limit_bytes", honest] == 4 * GIB
    assert (seen["gpushare_compute_limit_ratio", honest], seen["gpushare_oom_total", honest] > 0) == (0.3, True)
    assert seen["gpushare_device_memory_unshared_bytes", ""] == 0
    assert seen["gpushare_device_memory_used_bytes", ""] >= 9 * GIB
    looked = "gpushare_reconcile_timestamp_seconds", ""
    one.until(lambda now: now[looked] > seen[looked] + 0.5)  # after several measurements
    (line,) = exceeded(node)
    assert (line["id"], line["memory"], line["action"]) == (wrong, str(GIB), "report")
    assert int(line["used"]) == seen["gpushare_memory_physical_bytes", wrong]
    assert one.end() == (0, "")


def test_bypassing_container_is_stopped_where_configured(
    container: MakeContainer, node: Node, full: Tenant, exporter: Callable[..., Exporter]
) -> None:
    host.write_config(node.config, node.driver_root, reconcile={"action": "stop"})
    wrong = bypass(container, node)
    once = node.cli("export", "--once")
    assert parsed(once.stdout)["gpushare_memory_over_bytes", wrong.id] > 0 and not exceeded(node)
    one = exporter()
    assert wrong.wait() == 128 + signal.SIGKILL
    one.until(lambda now: ("gpushare_memory_used_bytes", wrong.id) not in now)
    (line,) = exceeded(node)
    assert (line["id"], line["action"]) == (wrong.id, "stop")
    full.go()
    full.expect("freed")
    assert full.container.wait() == 0


def test_address_in_use_is_refused_and_exit_is_clean(
    node: Node, exporter: Callable[..., Exporter], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.sock"
    first = exporter("--port", "0")
    assert first.line == f"serving metrics at http://127.0.0.1:{first.port}/metrics\n"
    busy = node.cli("export", "--port", str(first.port))
    where = f"cannot serve on 127.0.0.1:{first.port}: Address already in use"
    hint = "is another exporter running? give another --port"
    assert (busy.returncode, busy.stderr) == (1, f"gpushare: {where}; {hint}\n")
    second = exporter("--socket", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    taken = node.cli("export", "--socket", str(path))
    assert taken.returncode == 1 and "another process does" in taken.stderr and taken.stderr.count("\n") == 1
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"gpushare_state_up 1.0" in b"".join(iter(lambda: client.recv(1 << 16), b""))
    silent = [socket.create_connection(("127.0.0.1", first.port)) for _ in range(8)]  # idle clients must not block
    assert first.samples()["gpushare_driver_up", ""] == 1
    asker = subprocess.run(["ps", "--ppid", str(first.process.pid), "-o", "pid="], capture_output=True, text=True)
    assert second.end() == (0, "") and not path.exists()
    assert first.end(signal.SIGINT)[0] == 130
    assert not os.path.exists(f"/proc/{int(asker.stdout)}")
    for one in silent:
        one.close()
    left = tmp_path / "left.sock"  # of a killed server
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    third = exporter("--socket", str(left))
    assert third.line and third.end() == (0, "")
