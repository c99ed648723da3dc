"""The users and the number of clients that an MPS daemon serves, its /dev/shm, and the limits of an adopted daemon. The
daemon is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simulator import mpscontrol
from tests.integration.mps_stage import (
    CLIENT,
    GIB,
    MAX_CLIENTS_REACHED,
    MOUNTS,
    OUT_OF_MEMORY,
    PROGRAM,
    RAISED,
    UUID,
    client,
    make_mps_containers,
    make_mps_host,
    start,
    status,
)
from tests.support.host import BIN, Node
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount


@pytest.fixture
def host(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Iterator[Node]:
    yield from make_mps_host(make_host, make_node)


@pytest.fixture
def container(tmp_path: Path, host: Node) -> Iterator[Callable[..., Container]]:
    yield from make_mps_containers(tmp_path, host)


@pytest.fixture
def host_shm() -> Iterator[Path]:
    """The host's /dev/shm, in this run's mount namespace."""
    path = Path("/dev/shm")
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "gpushare-test", path)
    yield path
    run("umount", "--lazy", path)


def test_several_users_are_served_where_the_driver_allows_it(host: Node, container: Callable[..., Container]) -> None:
    mpscontrol.install(host.driver_root, MULTIUSER=True)
    start(host)
    (host.state / "mps" / UUID / "ready").unlink()
    refused = host.cli("mps", "start", "--device", "0", "--uid", "any")
    assert "serves one user at a time; stop it" in refused.stderr, "one is not adopted that cannot do it"
    assert host.cli("mps", "stop").returncode == 0
    start(host, "--uid", "any")
    one, two = container("hook").start(), container("runtime", user=(1000, 1000)).start()
    assert [client(one)["cuInit"], client(two)["cuInit"], client(two, user="1001")["cuInit"]] == [0, 0, 0]


def test_several_users_are_served_by_the_new_protocol(host: Node, container: Callable[..., Container]) -> None:
    """A server of that protocol serves all users; on the host only root can reach it."""
    program = mpscontrol.install(host.driver_root, MULTIUSER=True, PROTOCOL_3=True)
    folder = host.state / "mps" / UUID
    pid = start(host, "--uid", "any", "--compute", "40", "--memory", "3Gi")
    assert {"--protocol", "3", "--multiuser"} <= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))

    def ask(*args: str) -> str:
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe")}
        return subprocess.run([program, *args], env=env, capture_output=True, text=True, timeout=20).stdout.strip()

    had = [
        ask(*f"namespace get default gpushare {key}".split())
        for key in ("active-thread-percentage", "pinned-memory-limit")
    ]
    assert had == ["40", "3G"] and folder.stat().st_mode & 0o777 == 0o700
    one, two = container("hook").start(), container("runtime", user=(1000, 1000)).start()
    command = ["runc", "--root", str(one.bundle / "runtime"), "exec", one.id, *CLIENT, "hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin and first.stdout and json.loads(first.stdout.readline())["multiprocessors"] == 15
        assert client(two)["multiprocessors"] == client(two, user="1001")["multiprocessors"] == 15
        row = status(host)
        assert (row["state"], row["servers"], len(row["clients"])) == ("running", [pid], 1)
        first.stdin.close()
    (folder / "ready").unlink()
    refused = host.cli("mps", "start", "--device", "0")
    assert refused.returncode == 69 and "uses another version of the MPS protocol; stop it" in refused.stderr
    assert start(host, "--uid", "any", "--compute", "20") == pid, "it is adopted"
    assert client(one)["multiprocessors"] == 10
    ask("server", "set", "gpushare", "--active-thread-percentage=90")
    assert status(host, 1)["note"].startswith("its limits are 90.0%, ")
    assert host.cli("mps", "stop", "--force").returncode == 0 and not Path(f"/proc/{pid}/exe").exists()


def test_adopted_daemon_s_server_gets_the_limits(host: Node, container: Callable[..., Container]) -> None:
    """The daemon's default applies only to its next server."""
    pid = start(host)
    one = container("hook").start()
    assert client(one)["multiprocessors"] == 15, "a server is there from now on"
    (host.state / "mps" / UUID / "ready").unlink()
    assert start(host, "--compute", "20", "--memory", "1Gi") == pid
    said = client(one, str(1 << 20), str(GIB))
    assert said["multiprocessors"] == 10 and said["allocations"] == [0, OUT_OF_MEMORY]
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(host.state / "mps" / UUID / "share")}
    word = f"set_active_thread_percentage {pid} 90\n"
    subprocess.run([host.driver_root / "usr/bin" / mpscontrol.NAME], input=word, env=env, text=True, check=True)
    assert status(host, 1)["note"] == f"server {pid} gives 90.0%, not 20.0%", "a tenant can do that"
    assert start(host, "--compute", "20", "--memory", "1Gi") == pid and status(host)["state"] == "running"


def test_daemon_s_shm_is_mounted_at_dev_shm(
    host: Node, container: Callable[..., Container], way: str, host_shm: Path
) -> None:
    """The daemon's directory covers the container's own. With --shm host nothing is mounted, and a container with
    another /dev/shm is refused: its programs would find no server."""
    (host_shm / "the host's").touch()
    theirs = [*MOUNTS, Mount(host_shm, "/dev/shm", ("nosuid", "nodev"))]

    def places(one: Container) -> int:
        return one.exec("cat", "/proc/self/mountinfo").stdout.count(" /dev/shm ")

    plain = container(way, env={"GPUSHARE_DEVICES": "1", "GPUSHARE_BACKEND": "shim"}, mounts=theirs).start()
    start(host)
    one = container(way, mounts=theirs).start()
    assert places(one) == places(plain) + 1 and one.exec("ls", "/dev/shm").stdout.startswith("cuda.shm.")
    assert one.exec("touch", "/dev/shm/mine").returncode == 0 and len(list(host_shm.iterdir())) == 1
    one.delete()
    assert host.cli("mps", "stop").returncode == 0
    start(host, "--shm", "host")
    with pytest.raises(RuntimeFailed, match=r"the container's /dev/shm is not the host's \(--ipc=host\)"):
        container(way).create()
    one = container(way, mounts=theirs).start()
    assert places(one) == places(plain)
    files = one.exec("ls", "/dev/shm").stdout.splitlines()
    assert len(files) == 2 and files[0].startswith("cuda.shm.") and files[1] == "the host's"
    assert client(one)["multiprocessors"] == 15


@pytest.mark.parametrize("most", [48, 60])
def test_process_beyond_the_server_s_limit_gets_an_error(
    host: Node, container: Callable[..., Container], most: int
) -> None:
    """All in one container, one after another; tests/unit/test_mps.py checks that the limit is 60 from driver 580
    on."""
    mpscontrol.install(host.driver_root, MAX_CLIENTS=most)
    start(host)
    one = container("hook").start()
    command = ["runc", "--root", str(one.bundle / "runtime"), "exec", one.id, *CLIENT, "crowd", str(most + 2)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdin and crowd.stdout
        assert json.loads(crowd.stdout.readline()) == [0] * most + [MAX_CLIENTS_REACHED] * 2
        assert len(status(host)["clients"]) == most
        crowd.stdin.close()
    assert client(one)["cuInit"] == 0, "there is room again"


@pytest.mark.parametrize("shm", ["own", "host"])
def test_gpushare_run_is_served_with_either_shm(host: Node, shm: str, host_shm: Path) -> None:
    start(host, "--shm", shm)
    words = [str(BIN / "gpushare"), "--config", str(host.config), "--state", str(host.state), "run"]
    words += ["--devices", "0", "--memory", "2Gi", "--compute", "25%", "--", sys.executable, str(PROGRAM)]
    env = {"PATH": os.environ["PATH"], "GPUSHARE_BACKEND": "mps", **RAISED}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["cuInit"], report["multiprocessors"], report["PINNED_DEVICE_MEM_LIMIT"]) == (0, 12, "0=2048M")
    assert len(list(host_shm.glob("cuda.shm.*"))) == (shm == "host")
