"""`gpushare mps` with the driver's own nvidia-cuda-mps-control, which runs without a GPU: settings are read back with
its own commands, and its own libcuda connects. The rest of the host is simulated."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation.backends.mps import state as mps
from gpushare.allocation.backends.mps import status as mps_status
from gpushare.core.model import Device, Lease, Share
from gpushare.state import shm_abi

from simulator.simhost import default_uuid
from tests.shim.real_box import NONCE, RealBox
from tests.support import processes
from tests.support.doctor import finding
from tests.support.host import BIN, Node, write_config
from tests.support.processes import reap_zombies
from tests.support.rootfs import unmount_below
from tools.nvidia_userland import Userland

UUID = default_uuid(0)
GIB = 1 << 30
NO_DEVICE, CONNECTION_FAILED = 100, 805  # CUresult


class Host:
    """A node with the real control program."""

    def __init__(self, node: Node, userland: Userland) -> None:
        self.node = node
        self.control = node.driver_root / "usr/bin/nvidia-cuda-mps-control"
        self.folder = node.state / "mps" / UUID
        self.control.unlink()
        shutil.copy(userland.root / "usr/bin/nvidia-cuda-mps-control", self.control)

    def mps(self, *args: str, code: int = 0) -> Any:
        done = self.node.cli("mps", *args, "--format", "json")
        assert done.returncode == code, done.stderr + done.stdout
        return json.loads(done.stdout) if done.stdout else done.stderr

    def refused(self, *args: str) -> str:
        done = self.node.cli("mps", *args)
        assert done.returncode not in (0, 1) and done.stdout == "" and done.stderr.count("\n") == 1
        return done.stderr

    def ask(self, command: str, pipe: str = "pipe") -> str:
        """Send the daemon a command with its own program."""
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(self.folder / pipe)}
        done = subprocess.run([self.control], input=command + "\n", env=env, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()

    def quit(self) -> None:
        """End the daemons and wait for their exit, which takes seconds on a busy machine."""
        daemons = [pid for pid, command in processes.children().items() if self.control.name in command]
        self.ask("quit")
        assert daemons and None not in [processes.wait_exit(pid, 30) for pid in daemons]

    def pid(self) -> int:
        (row,) = self.mps("status")
        return int(row["pid"])

    def kill(self) -> int:
        pid = self.pid()
        fd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        os.close(fd)
        return pid


@pytest.fixture
def host(node: Node, userland: Userland) -> Iterator[Host]:
    """A node with a short state path: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as short:
        node.move(str(node.config), short)
        made = Host(node, userland)
        yield made
        node.cli("mps", "stop", "--force")
        unmount_below(Path(short))
    reap_zombies()


@pytest.mark.every_driver
def test_daemon_reports_the_limits_that_were_set(host: Host) -> None:
    (started,) = host.mps("start", "--device", "0", "--compute", "40", "--memory", "6Gi")
    assert started["how"] == "started" and started["uuid"] == UUID
    assert host.ask("get_default_active_thread_percentage") == "40.0"
    assert host.ask("get_default_device_pinned_mem_limit 0") == "6G"
    (row,) = host.mps("status")
    assert (row["state"], row["pid"], row["compute_percent"], row["memory_bytes"]) == (
        *("running", started["pid"], 40),
        6 * GIB,
    )
    assert row["clients_max"] == 48 and row["clients"] == row["containers"] == row["restart"] == []


@pytest.mark.every_driver
@pytest.mark.parametrize(("asked", "said"), [("1536Mi", "2G"), ("512Mi", "512M")])
def test_memory_limit_is_set_in_the_daemon(host: Host, asked: str, said: str) -> None:
    host.mps("start", "--memory", asked)
    assert host.ask("get_default_device_pinned_mem_limit 0") == said


def test_policy_sets_the_maximum_of_each_container(host: Host) -> None:
    write_config(host.node.config, host.node.driver_root, policy={"max_memory": "25%", "max_compute": "60%"})
    host.mps("start")
    assert host.ask("get_default_active_thread_percentage") == "60.0"
    assert host.ask("get_default_device_pinned_mem_limit 0") == "4G"
    hint = "No container uses it until mps is in policy.allowed_backends (now: shim)"
    assert hint in host.node.cli("mps", "start").stdout, "and whom it gets at all"
    more = {"max_memory": "25%", "max_compute": "60%", "allowed_backends": ["shim", "mps"]}
    write_config(host.node.config, host.node.driver_root, policy=more)
    assert hint not in host.node.cli("mps", "start").stdout


def test_second_start_keeps_the_running_daemon(host: Host) -> None:
    (first,) = host.mps("start", "--compute", "40")
    (second,) = host.mps("start", "--compute", "40")
    assert (second["how"], second["pid"]) == ("running", first["pid"])
    assert "thread percent 40, not 50" in host.refused("start", "--compute", "50")
    assert "shm own, not host" in host.refused("start", "--compute", "40", "--shm", "host")
    assert host.ask("get_default_active_thread_percentage") == "40.0"


def _waits(pid: int, lock: str, events: int) -> bool:
    """Whether the process has opened the lock, which it takes next; the wait ends at an event of `events`."""
    with contextlib.suppress(OSError):
        if any(os.readlink(f"/proc/{pid}/fd/{name}") == lock for name in os.listdir(f"/proc/{pid}/fd")):
            return True
    return bool(select.select([events], [], [], 0.01)[0])


def test_concurrent_starts_make_one_daemon(host: Host) -> None:
    """The daemon becomes available when all starts are as far as they can get. One stop came before all of them."""
    real = host.control.rename(host.control.with_name("real"))
    began, go = (host.folder.parent.parent / name for name in ("began", "go"))
    host.control.write_text(f'#!/bin/sh\ncase $* in *-d) echo >{began}; read line <{go};; esac\nexec {real} "$@"\n')
    host.control.chmod(0o755)
    assert host.node.cli("refresh").returncode == 0 and host.mps("stop") == []
    os.mkfifo(began)
    os.mkfifo(go)
    events, answers = (os.open(path, os.O_RDWR) for path in (began, go))
    words = [BIN / "gpushare", "--config", host.node.config, "--state", host.node.state, "mps", "start", "--compute"]
    started: list[subprocess.Popen[str]] = []

    def start(percent: str) -> None:
        command = [str(word) for word in (*words, percent, "--format", "json")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        while not _waits(started[-1].pid, f"{host.folder}.lock", events):
            assert started[-1].poll() is None

    try:
        host.folder.parent.mkdir(exist_ok=True)
        with open(f"{host.folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            start("40")
            shutil.rmtree(host.folder, ignore_errors=True)
        assert os.read(events, 10) == b"\n" and host.folder.stat().st_mode & 0o777 == 0o700
        start("40")
        start("50")
        assert not select.select([events], [], [], 0)[0], "one of them starts a daemon"
        os.write(answers, b"\n")
        said = [(one.communicate(timeout=60), one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
        os.close(events)
        os.close(answers)
    (first, code), (second, same), (third, refused) = said
    assert code == same == 0 and json.loads(first[0])[0]["how"] == "started"
    assert json.loads(second[0])[0] == {**json.loads(first[0])[0], "how": "running"}
    assert refused == 75 and "runs on" in third[1] and "thread percent 40, not 50" in third[1]
    assert third[1].count("\n") == 1 and host.ask("get_default_active_thread_percentage") == "40.0"


def test_start_after_a_daemon_s_death_is_clean(host: Host) -> None:
    host.mps("start", "--compute", "40")
    before = host.kill()
    (row,) = host.mps("status", code=1)
    assert row["state"] == "dead" and f"pid {before}" in row["note"] and row["pid"] is None
    (host.folder / "ready").unlink()  # as after another boot that kept the directory
    assert finding(host.node, "MPS").detail == f"stale {host.folder}/pipe: no process listens there"
    (again,) = host.mps("start", "--compute", "70")
    assert again["how"] == "started" and again["pid"] != before
    assert host.ask("get_default_active_thread_percentage", "share") == "70.0"  # where tenants connect
    assert host.ask("get_default_active_thread_percentage") == "70.0"
    assert host.mps("status")[0]["state"] == "running"


def test_daemon_of_a_killed_start_is_adopted_and_its_limits_are_set(host: Host) -> None:
    """Killed before it was offered: the daemon listens without any limits."""
    host.mps("start", "--compute", "40")
    pid = host.pid()
    (host.folder / "ready").unlink()
    (host.folder / "share" / "control").unlink()
    host.ask("set_default_active_thread_percentage 100")
    assert host.mps("status")[0]["state"] == "stopped"
    assert f"(pid {pid}) whose limits are not set" in finding(host.node, "MPS").detail
    (again,) = host.mps("start", "--compute", "30")
    assert (again["how"], again["pid"]) == ("adopted", pid)
    assert host.ask("get_default_active_thread_percentage") == "30.0" and (host.folder / "share" / "control").exists()


def test_foreign_daemon_of_root_is_not_adopted(host: Host) -> None:
    """A daemon that root started in our directory, for all devices and with the host's /dev/shm."""
    assert host.node.cli("refresh").returncode == 0
    for name in ("pipe", "log", "shm"):
        (host.folder / name).mkdir(parents=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(host.folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(host.folder / "log")}
    for more, why in (({}, "not started for this device"), ({"CUDA_VISIBLE_DEVICES": UUID}, "with another /dev/shm")):
        subprocess.run([host.control, "-d"], env={**env, **more}, check=True, timeout=20)
        assert why in host.refused("start") and not (host.folder / "ready").exists()
        host.quit()


def test_daemon_that_ignores_a_limit_is_not_used(host: Host) -> None:
    """A program that accepts a percentage and reports another: no ready file, no socket for containers, no daemon."""
    real = host.control.rename(host.control.with_name("real"))
    host.control.write_text(f"#!/bin/sh\nif [ $# = 0 ]; then sed 's/_percentage 40/_percentage 90/' | {real}; else exec {real} \"$@\"; fi\n")  # noqa: E501  # fmt: skip
    host.control.chmod(0o755)
    assert "did not accept a limit of 40%" in host.refused("start", "--compute", "40")
    assert not (host.folder / "ready").exists() and not list((host.folder / "share").iterdir())
    host.control.unlink()
    real.rename(host.control)
    assert host.ask("get_server_list") == "" and host.mps("start")[0]["how"] == "started"


def test_daemon_of_another_user_is_reported_and_kept(host: Host) -> None:
    """A user's own daemon in our directory, with the user's own limits."""
    assert host.node.cli("refresh").returncode == 0  # creates the state directory
    pipe = host.folder / "pipe"
    (host.folder / "log").mkdir(parents=True)
    pipe.mkdir()
    for path in (pipe, host.folder / "log"):
        os.chown(path, 1000, 1000)
    program = shutil.copy(host.control, host.folder)  # at a path that the user can reach
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(host.folder / "log")}
    subprocess.run([program, "-d"], env=env, user=1000, group=1000, check=True, timeout=20)
    said = host.refused("start")
    assert "belongs to uid 1000, who can change its limits" in finding(host.node, "MPS").detail
    assert "belongs to uid 1000" in said and host.ask("get_default_active_thread_percentage") == "100.0"
    host.quit()


@pytest.mark.every_driver
def test_tenants_cannot_end_the_daemon_through_their_socket(host: Host, userland: Userland, tmp_path: Path) -> None:
    """Containers have share/. The driver's own library connects through it and requests a server."""
    host.mps("start")
    assert sorted(path.name for path in (host.folder / "share").iterdir()) == ["control", "log"]
    library = userland.library("libcuda")
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).cuInit(0))"
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(host.folder / "share"), "PATH": os.environ["PATH"]}
    done = subprocess.run(["python3", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(CONNECTION_FAILED), "there is no GPU to serve"
    assert "NEW CLIENT" in (host.folder / "log" / "control.log").read_text()
    note = host.mps("status")[0]["note"]
    assert re.fullmatch(r"server \d+ has died \(status 1\): programs that used it must be started again", note)
    now = time.time()
    one, later = (
        Lease(name, "held", "", "", (), 1, 1, created=at) for name, at in (("one", now - 60), ("later", now + 60))
    )
    assert " that used it in one must" in mps_status.deaths(str(host.folder), host.pid(), (one, later)), (
        "as the log has times"
    )
    assert "Not enough privilege" in host.ask("quit", "share") and host.mps("status")[0]["state"] == "running"


@pytest.mark.every_driver
def test_shim_connects_the_real_driver_to_the_daemon(host: Host, userland: Userland, tmp_path: Path) -> None:
    """Everything except the GPU is real: the shim names the daemon, and the driver connects to it with any other
    setting."""
    host.mps("start")
    box = RealBox(tmp_path / "box", userland)
    (box.private / "mps" / UUID).mkdir(parents=True)
    box.binds.append((host.folder / "share", f"/usr/lib/gpushare/mps/{UUID}"))
    device = Device(0, UUID, 0, "0000:01:00.0", "none", 16 * GIB, 300 << 20)
    share = Share(0, device, 4 * GIB, 30, compute_backend="mps")
    log = host.folder / "log" / "control.log"
    elsewhere = {"CUDA_MPS_PIPE_DIRECTORY": "/none"}
    box.set_limits(shm_abi.pack_limits([share], NONCE))
    assert box.probe("cuda_init", env=elsewhere) == NO_DEVICE and "NEW CLIENT" not in log.read_text()
    box.set_limits(shm_abi.pack_limits([share], NONCE, mps=mps.Grant(1, 1, 1000)))
    assert box.probe("cuda_init", env=elsewhere) == CONNECTION_FAILED and "NEW CLIENT" not in log.read_text()
    box.set_limits(shm_abi.pack_limits([share], NONCE, mps=mps.Grant(1, 1, 0)))
    assert box.probe("cuda_init", env=elsewhere) == CONNECTION_FAILED, "there is no GPU to serve"
    assert "NEW CLIENT" in log.read_text()


def test_daemon_without_its_directory_is_reported(host: Host) -> None:
    """Its clients live, but it cannot be reached: a second daemon on the same GPU would be an error."""
    host.mps("start")
    pid = host.pid()
    hidden = Path(tempfile.mkdtemp(dir=host.node.state))
    host.folder.rename(hidden / UUID)
    try:
        assert f"pid {pid}" in host.refused("start")
    finally:
        os.kill(pid, signal.SIGKILL)
        unmount_below(hidden)
    reap_zombies()
    assert host.mps("start")[0]["how"] == "started"


def test_stop_ends_a_daemon_without_sockets(host: Host) -> None:
    """Its sockets were removed: its pid and start time identify it."""
    host.mps("start")
    pid = host.pid()
    shutil.rmtree(host.folder / "pipe")
    assert host.mps("status", code=1)[0]["state"] == "dead"
    assert f"(pid {pid}) runs but no longer accepts connections; `gpushare mps stop" in host.refused("start")
    assert host.mps("stop") == [{"uuid": UUID, "stopped": True}] and not os.path.exists(f"/proc/{pid}/exe")
    assert host.mps("start")[0]["how"] == "started"


@pytest.mark.every_driver
def test_status_reports_changed_limits(host: Host) -> None:
    host.mps("start", "--compute", "40")
    host.ask("set_default_active_thread_percentage 90")
    (row,) = host.mps("status", code=1)
    assert row["state"] == "changed" and row["note"] == "its limits are 90.0%, 16G, not 40.0%, 16G"
    assert finding(host.node, "MPS").detail == f"the daemon of GPU 0: {row['note']}"
    assert host.mps("start", "--compute", "40")[0]["how"] == "running" and host.mps("status")[0]["state"] == "running"


@pytest.mark.every_driver
def test_several_users_need_a_driver_that_supports_them(host: Host) -> None:
    assert "serves one user at a time" in host.refused("start", "--uid", "any")
    assert "not a user id" in host.refused("start", "--uid", "me")
    assert not (host.folder / "ready").exists()


@pytest.mark.every_driver
def test_drivers_before_615_lack_the_new_protocol(host: Host, tmp_path: Path) -> None:
    """docs/mps.md states what they lack: the option, the variable and named servers. So none of it is used."""
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    for words in (["-p", "3"], ["--protocol", "3"], ["-m"], ["--multiuser"]):
        done = subprocess.run(
            [host.control, "-d", *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 1, words
    assert list(tmp_path.glob("control*")) == []
    code = host.control.read_bytes()
    assert set(re.findall(rb"\bCUDA_MPS_\w+", code)) == {
        b"CUDA_MPS_" + name
        for name in (b"PIPE_DIRECTORY", b"LOG_DIRECTORY", b"ACTIVE_THREAD_PERCENTAGE", b"CLIENT_PRIORITY")
    }
    (started,) = host.mps("start")
    assert host.ask("server list") == 'Unknown command "server"'
    assert host.ask("ps -p 3").splitlines()[0] == "Server 3 not found"
    daemon = Path(f"/proc/{started['pid']}/environ").read_text().split("\0")
    names = {word.partition("=")[0] for word in daemon if word}
    assert "CUDA_MPS_PIPE_DIRECTORY" in names and names <= {
        *("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    }


def test_stop_leaves_nothing(host: Host) -> None:
    host.mps("start")
    pid = host.pid()
    assert host.mps("stop") == [{"uuid": UUID, "stopped": True}]
    assert not os.path.exists(f"/proc/{pid}/exe") and not host.folder.exists()
    assert str(host.folder) not in Path("/proc/self/mountinfo").read_text()
    assert host.mps("stop", "--device", "0") == [{"uuid": UUID, "stopped": False}]
