"""gpushare's units under a real systemd, with NVIDIA's own MPS control daemon, which runs without a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Optional

import pytest

from simulator.simhost import default_uuid
from tests.support.host import write_config
from tests.support.processes import reap_zombies
from tests.support.systemd import Systemd
from tools.nvidia_userland import Userland

UUID = default_uuid(0)
BY_UUID, BY_INDEX = f"gpushare-mps@{UUID}.service", "gpushare-mps@0.service"
FOLDER = f"/run/gpushare/mps/{UUID}"
NAME = "nvidia-cuda-mps-control"


class Machine(Systemd):
    """A systemd with a simulated GPU. `etc`: its /etc/gpushare."""

    def __init__(self, directory: Path, driver_root: Path) -> None:
        self.etc = directory / "gpushare"
        self.etc.mkdir(parents=True)
        self.config = write_config(self.etc / "config.yaml", driver_root, log={"decisions": "/run/decisions"})
        super().__init__(directory / "systemd", self.etc)
        self.run_dir = Path(f"/proc/{self.pid}/root/run")
        # Only shorter delays, and readable errors without a journal
        quick = "[Service]\nRestartSec=50ms\nStandardError=append:/run/said\n"
        self.unit("gpushare-mps@.service.d/test.conf", quick)

    def daemon(self) -> tuple[int, str]:
        """(pid, name) of the process that systemd watches."""
        unit = BY_UUID if self.show(BY_UUID, "ActiveState") == ("active",) else BY_INDEX
        (pid,) = self.show(unit, "MainPID")
        return int(pid), self.run("cat", f"/proc/{pid}/cmdline").split("\0")[0].rpartition("/")[2]

    def status(self) -> tuple[str, int]:
        (row,) = json.loads(self.run("gpushare", "mps", "status", "--format", "json"))
        return row["state"], row["pid"]


@pytest.fixture
def machine(tmp_path: Path, simhost: Path, userland: Userland) -> Iterator[Machine]:
    program = simhost / "usr/bin" / NAME
    program.unlink()
    shutil.copy(userland.root / "usr/bin" / NAME, program)
    made = Machine(tmp_path / "machine", simhost)
    yield made
    made.close()
    reap_zombies()


def test_unit_follows_the_daemon_from_start_to_stop(machine: Machine) -> None:
    unit = BY_UUID
    machine.unit("docker.service", f"[Service]\nType=oneshot\nExecStart=/bin/cp {FOLDER}/ready /run/seen\n")
    both = f"docker.service {unit}"
    machine.unit("boot.target", f"[Unit]\nDefaultDependencies=no\nRequires={both}\nAfter={both}\n")
    machine.run("systemctl", "start", "boot.target")
    assert (machine.run_dir / "seen").exists(), "engines begin when it is offered"
    first = machine.daemon()
    assert first[1] == NAME and machine.status() == ("running", first[0])
    machine.run("systemctl", "start", unit)
    assert machine.daemon() == first, "a second start is none"

    machine.run("kill", "-KILL", str(first[0]))
    machine.until(lambda: machine.show(unit, "ActiveState", "NRestarts") == ("active", "1"))
    second = machine.daemon()
    assert second != first and second[1] == NAME and machine.status() == ("running", second[0])

    machine.run("systemctl", "restart", unit)
    third = machine.daemon()
    assert third not in (first, second) and machine.status() == ("running", third[0])
    machine.run("systemctl", "stop", unit)
    assert machine.show(unit, "ActiveState", "Result") == ("inactive", "success")
    assert not (machine.run_dir / FOLDER[5:]).exists() and machine.call("cat", f"/proc/{third[0]}/stat").returncode
    assert "gpushare/mps" not in machine.run("cat", "/proc/1/mountinfo")


def test_unit_follows_a_daemon_that_is_already_running(machine: Machine) -> None:
    """The daemon is in no cgroup of the unit, which names the GPU by its index here."""
    machine.run("gpushare", "mps", "start")
    _, pid = machine.status()
    machine.run("systemctl", "start", BY_INDEX)
    assert machine.daemon() == (pid, NAME)
    machine.run("kill", "-KILL", str(pid))
    machine.until(lambda: machine.show(BY_INDEX, "ActiveState", "NRestarts") == ("active", "1"))
    assert machine.daemon()[0] != pid and machine.status() == ("running", machine.daemon()[0])
    machine.run("gpushare", "mps", "stop")
    machine.until(lambda: machine.show(BY_INDEX, "ActiveState", "Result") == ("inactive", "success"))


def test_failed_start_is_reported_and_retried_only_where_useful(machine: Machine) -> None:
    missing = "gpushare-mps@7.service"
    assert machine.call("systemctl", "start", missing).returncode == 1

    def is_tried_again() -> bool:
        restarts, status = machine.show(missing, "NRestarts", "ExecMainStatus")
        return int(restarts) > 1 and status == "69"

    machine.until(is_tried_again)
    machine.run("systemctl", "stop", missing)
    assert 'no device "7"; this host has' in (machine.run_dir / "said").read_text()

    machine.config.write_text("{}")
    assert machine.call("systemctl", "start", BY_INDEX).returncode == 1
    assert machine.show(BY_INDEX, "ActiveState", "Result", "ExecMainStatus", "NRestarts") == (
        *("failed", "exit-code", "78", "0"),
    )


def test_changed_configuration_is_read(machine: Machine) -> None:
    """Also more often than systemd's start limit, but not before the first use of gpushare."""
    machine.run("systemctl", "start", "gpushare-refresh.path", "gpushare-refresh.service")
    assert machine.show("gpushare-refresh.service", "ConditionResult") == ("no",)
    assert not (machine.run_dir / "gpushare").exists()
    machine.run("gpushare", "refresh")
    compiled = machine.run_dir / "gpushare" / "node.json"

    def is_read(before: int) -> bool:
        idle = machine.show("gpushare-refresh.service", "ActiveState") == ("inactive",)
        return compiled.stat().st_ino != before and idle

    for number in range(6):
        known = json.loads(machine.config.read_text())
        changed = json.dumps({**known, "policy": {"max_compute": f"{90 - number}%"}})
        before = compiled.stat().st_ino
        machine.config.write_text(changed)
        machine.until(partial(is_read, before))
    for change in (("mkdir", "/dev/nvidia-caps"), ("mknod", "/dev/nvidia-caps/nvidia-cap3", "p")):  # as MIG devices do
        before = compiled.stat().st_ino
        machine.run(*change)
        machine.until(partial(is_read, before))
    assert machine.show("gpushare-refresh.path", "ActiveState") == ("active",)
    assert json.loads(compiled.read_text())


@pytest.mark.parametrize(
    ("engine", "action", "options"), [("docker", "reload", ()), ("containerd", "restart", ("--engine-version=1.7",))]
)
def test_configuration_is_named_until_the_engine_has_read_it(
    machine: Machine, engine: str, action: str, options: tuple[str, ...]
) -> None:
    machine.unit(
        f"{engine}.service",
        "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/sleep inf\nExecReload=/bin/true\n",
    )
    words = [
        "gpushare",
        "runtime",
        "configure",
        engine,
        f"--config-file=/etc/gpushare/{engine}",
        *options,
        "--format=json",
    ]

    def command(*more: str) -> Optional[str]:
        found: Optional[str] = json.loads(machine.run(*words, *more))["next"]
        return found

    machine.run("systemctl", "start", engine)
    assert [command(), command()] == [f"systemctl {action} {engine}"] * 2
    machine.run("systemctl", action, engine)
    assert command() is None
    assert [command("--undo"), command("--undo")] == [f"systemctl restart {engine}"] * 2
    machine.run("systemctl", "restart", engine)
    assert command("--undo") is None
    assert [command(), command()] == [f"systemctl {action} {engine}"] * 2
    machine.run("systemctl", "stop", engine)
    assert command() is None  # it reads its files when it starts


def test_metrics_are_served(machine: Machine) -> None:
    machine.run("systemctl", "start", "gpushare-exporter.service")
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9878/metrics').read().decode())"
    machine.until(lambda: machine.call("python3", "-c", ask).stdout.count("\n# HELP gpushare_") > 3)
    machine.run("systemctl", "kill", "--signal=KILL", "gpushare-exporter.service")
    machine.until(lambda: machine.show("gpushare-exporter.service", "SubState") == ("auto-restart",))
    machine.run("systemctl", "stop", "gpushare-exporter.service")
    machine.run("systemctl", "start", "gpushare-exporter.service")
    machine.run("systemctl", "stop", "gpushare-exporter.service")
    assert machine.show("gpushare-exporter.service", "ActiveState", "Result") == ("inactive", "success")
