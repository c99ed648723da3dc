"""What only docker has, with a daemon of our own: the life of a container, images, volumes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.docker_host import GIB, TWO_GIB, DockerHost, docker_host
from tests.lib.engines.base import SLEEP, Refused, Result
from tests.lib.engines.docker import GPUSHARE, IMAGE, DockerContainer
from tests.lib.engines.image import PROBE
from tests.lib.rootfs import mount_points, run, unmount_below

RUNC = ("--runtime", "runc", "--network", "none")
LIBDIR = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module")
def _made(image_root: Path) -> Iterator[DockerHost]:
    with docker_host(image_root) as made:
        yield made


@pytest.fixture
def docker(_made: DockerHost) -> Iterator[DockerHost]:
    yield _made
    left = _made.daemon.must("ps", "-aq").split()
    if left:
        _made.daemon.docker("rm", "-f", *left)
    assert _made.node.leases() == [], "a lease was left behind"


def total(one: DockerContainer) -> int:
    answer = one.exec(PROBE).answer()
    assert "failed" not in answer, answer
    assert answer["got_bytes"] < answer["total_bytes"] == answer["nvml_total_bytes"]
    return int(answer["total_bytes"])


# Kinds of containers


OPTIONS = {
    "nothing": (),
    "read-only, no place to write": ("--read-only",),
    "other user": ("--user", "1000"),
    "other user, read-only, nothing to gain": ("--user", "1000", "--read-only", "--security-opt", "no-new-privileges"),
    "no capabilities": ("--cap-drop", "ALL"),
    "tmpfs over run and tmp": ("--tmpfs", "/run", "--tmpfs", "/tmp:noexec"),
    "docker's init": ("--init",),
    "host's pids, ipc and uts": ("--pid", "host", "--ipc", "host", "--uts", "host"),
    "no syscall filter": ("--security-opt", "seccomp=unconfined"),
    "working directory made for it": ("-w", "/made/for/it"),
    "little memory": ("--memory", "256m", "--pids-limit", "64"),
    "terminal": ("--tty",),
    "its own cgroup namespace": ("--cgroupns", "private"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_kinds_of_containers(docker: DockerHost, name: str) -> None:
    answer = docker.try_run(*TWO_GIB, *OPTIONS[name], args=(PROBE,)).answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    assert GIB < answer["got_bytes"] <= 2 * GIB


def test_exec_has_no_way_around(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, args=SLEEP) as one:
        for options in (
            ("--env", "GPUSHARE_MEMORY=9Gi"),
            ("--user", "1000:1000"),
            ("--user", "4711"),
            ("--env", "LD_LIBRARY_PATH=/usr/lib/gpushare"),
            ("--workdir", "/usr/lib/gpushare"),
        ):
            answer = docker.daemon.docker("exec", *options, one.id, PROBE).answer()
            assert answer["total_bytes"] == 2 * GIB
        assert one.exec("env", "-i", PROBE).answer()["total_bytes"] == 2 * GIB


def test_only_what_was_granted_is_there(docker: DockerHost) -> None:
    done = docker.try_run(*TWO_GIB, "-e", "GPUSHARE_DEVICES=1", args=("sh", "-c", "ls -d /dev/nvidia*"))
    assert done.code == 0
    names = done.out.split()
    assert "/dev/nvidia1" in names and "/dev/nvidia0" not in names


# Life


def test_create_holds_nothing_until_start(docker: DockerHost) -> None:
    container_id = docker.daemon.must("create", *GPUSHARE, *TWO_GIB, IMAGE, *SLEEP)
    with DockerContainer(docker.daemon, container_id) as one:
        assert docker.node.leases() == []
        one.restart()
        assert docker.node.leases() == [one.id]
        assert total(one) == 2 * GIB


@pytest.mark.parametrize("ways", [("restart", "--time", "0"), ("kill", "--signal", "KILL"), ("stop", "--time", "0")])
def test_again(docker: DockerHost, ways: tuple[str, ...]) -> None:
    with docker.start_with("-e", "GPUSHARE_MEMORY=16Gi", args=SLEEP) as one:
        for _ in range(3):
            before = one.pid
            docker.daemon.must(*ways, one.id)
            if ways[0] != "restart":
                assert one.wait() == 128 + signal.SIGKILL
                assert docker.node.leases() == []
                one.restart()
            assert one.pid != before
            assert total(one) == 16 * GIB
            assert docker.node.leases() == [one.id]


def test_start_again_is_refused_when_the_share_is_taken(docker: DockerHost) -> None:
    memory = ("-e", "GPUSHARE_DEVICES=0", "-e", "GPUSHARE_MEMORY=10Gi")
    with docker.start_with(*memory, args=SLEEP) as one:
        one.stop()
        with docker.start_with(*memory, args=SLEEP) as other:
            with pytest.raises(Refused, match="10Gi"):
                one.restart()
            assert docker.node.leases() == [other.id]
        one.restart()
        assert total(one) == 10 * GIB


def test_restart_policy(docker: DockerHost) -> None:
    """A container that dies is started again by docker itself, without anybody's `docker start`."""
    with docker.start_with(*TWO_GIB, "--restart", "always", args=SLEEP) as one:
        with Events(docker, one, "start") as events:
            assert events.next() == "start"
            os.kill(one.pid, signal.SIGKILL)
            assert events.next() == "start"
        assert total(one) == 2 * GIB
        assert docker.node.leases() == [one.id]


def test_removed_while_it_runs(docker: DockerHost) -> None:
    one = docker.start_with("-e", "GPUSHARE_MEMORY=16Gi", args=(PROBE, "hold"))
    one.remove()
    assert docker.node.leases() == []


def test_paused(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, args=SLEEP) as one:
        docker.daemon.must("pause", one.id)
        assert docker.node.cli("prune").returncode == 0
        assert docker.node.leases() == [one.id]
        docker.daemon.must("unpause", one.id)
        assert total(one) == 2 * GIB


def test_update(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, "--memory", "256m", args=SLEEP) as one:
        docker.daemon.must("update", "--memory", "128m", "--memory-swap", "128m", "--cpu-shares", "512", one.id)
        assert total(one) == 2 * GIB


def test_health_check_sees_the_share(docker: DockerHost) -> None:
    command = f"{PROBE} | grep -q '\"total_bytes\": {2 * GIB},'"
    health = ("--health-cmd", command, "--health-interval", "1s", "--health-retries", "1")
    created = docker.daemon.must("create", *GPUSHARE, *TWO_GIB, *health, IMAGE, *SLEEP)
    with DockerContainer(docker.daemon, created) as one, Events(docker, one, "health_status") as events:
        one.restart()
        assert events.next() == "health_status: healthy"


@pytest.mark.parametrize("live_restore", [True, False])
def test_daemon_is_killed(image_root: Path, live_restore: bool) -> None:
    """What the daemon's next life finds running goes on (--live-restore), or is ended by it: the lease likewise."""
    options = ("--live-restore",) if live_restore else ()
    with docker_host(image_root, *options) as docker:
        # A daemon ends what it finds with the container's own signal, and waits ten seconds for that.
        with docker.start_with(*TWO_GIB, "--stop-signal", "KILL", args=SLEEP) as one:
            pid = one.pid
            docker.daemon.end(signal.SIGKILL)
            assert docker.node.leases() == [one.id]
            docker.daemon.start(*options)
            assert one.inspect("{{.State.Running}}") == str(live_restore).lower()
            if live_restore:
                assert one.pid == pid
            else:
                assert docker.node.leases() == []
                one.restart()
            assert total(one) == 2 * GIB
            assert docker.node.leases() == [one.id]
        assert docker.node.leases() == []


class Events:
    """`docker events` of one kind: all that the container had so far, then what comes."""

    def __init__(self, docker: DockerHost, one: DockerContainer, kind: str) -> None:
        self._command = docker.daemon.command("events", "--format", "{{.Action}}", "--since", "10m")
        self._command += ["--filter", f"container={one.id}", "--filter", f"event={kind}"]

    def __enter__(self) -> Events:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        return self

    def next(self) -> str:
        """Waits for it."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        return self._process.stdout.readline().strip() if ready else "nothing came"

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


# Files


def test_commit_and_run_again(docker: DockerHost) -> None:
    """An image of a container that had a share has our empty mount points, links and ld.so.cache in it."""
    daemon = docker.daemon
    with docker.start_with(*TWO_GIB, args=(PROBE,)) as one:
        assert one.wait() == 0
        daemon.must("commit", one.id, "committed")
    try:
        ran = docker.try_run("-e", "GPUSHARE_MEMORY=3Gi", args=(PROBE,), image="committed").answer()
        assert ran["total_bytes"] == 3 * GIB
        found = f"ls -l {LIBDIR}/libcuda.so* /usr/lib/gpushare; ldconfig && ls /"
        plain = daemon.docker("run", "--rm", *RUNC, "committed", "sh", "-c", found)
        assert plain.code == 0, plain.err
        without = daemon.docker("run", "--rm", *RUNC, "committed", PROBE)
        assert json.loads(without.out)["failed"] == "nvmlInit_v2"  # no driver, and no crash
        # `docker commit` keeps the variable as well
        assert docker.try_run(args=(PROBE,), image="committed").answer()["total_bytes"] == 2 * GIB
    finally:
        daemon.docker("rmi", "-f", "committed")


def test_copied_limits_do_not_count(docker: DockerHost, tmp_path: Path) -> None:
    """docker cp writes below our mounts, into the container's own root: nobody sees it there, not in its next life."""
    daemon = docker.daemon
    (tmp_path / "limits").write_text("everything")
    with docker.start_with(*TWO_GIB, args=SLEEP) as one:
        daemon.must("cp", f"{tmp_path}/limits", f"{one.id}:/usr/lib/gpushare/limits")
        assert total(one) == 2 * GIB
        daemon.must("cp", f"{one.id}:/usr/lib/gpushare/limits", str(tmp_path / "back"))
        assert (tmp_path / "back").read_text() == "everything"
        # Replacing a mount point takes the mount off it; the next start puts it there again.
        daemon.must("cp", f"{tmp_path}/limits", f"{one.id}:{LIBDIR}/libcuda.so.535.261.03")
        daemon.must("restart", "--time", "0", one.id)
        assert total(one) == 2 * GIB


def test_host_directory_over_usr_is_refused_and_stays_as_it_is(
    docker: DockerHost, image_root: Path, tmp_path: Path
) -> None:
    for target in ("/usr", LIBDIR):
        host = tmp_path / target.rpartition("/")[2]
        run("cp", "-a", f"{image_root}{target}", host)
        before = sorted(path.relative_to(host) for path in host.rglob("*"))
        done = docker.try_run(*TWO_GIB, "-v", f"{host}:{target}", args=(PROBE,))
        assert done.code == 125 and done.out == ""
        assert f"in the volume at '{target}' (on the host: '{host}')" in done.err
        assert sorted(path.relative_to(host) for path in host.rglob("*")) == before


def test_host_directory_over_etc(docker: DockerHost, image_root: Path, tmp_path: Path) -> None:
    """The loader's cache there is the host's: it stays as it is, and the share works without it."""
    host = tmp_path / "etc"
    run("cp", "-a", image_root / "etc", host)
    before = (host / "ld.so.cache").read_bytes()
    answer = docker.try_run(*TWO_GIB, "-v", f"{host}:/etc", args=(PROBE,)).answer()
    assert answer["total_bytes"] == 2 * GIB
    assert (host / "ld.so.cache").read_bytes() == before


def test_named_volume_over_our_own_directory(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, "-v", "ours:/usr/lib/gpushare", args=SLEEP) as one:
        assert total(one) == 2 * GIB
    docker.daemon.must("volume", "rm", "ours")


def test_shared_volume_would_show_the_share_on_the_host(docker: DockerHost, tmp_path: Path) -> None:
    """A mount over a volume with propagation appears on the host, and stays there when the container is gone."""
    run("mount", "-t", "tmpfs", "gpushare-test", tmp_path)
    try:
        run("mount", "--make-shared", tmp_path)
        (tmp_path / "v").mkdir()
        volume = f"{tmp_path}/v:/usr/lib/gpushare"
        done = docker.try_run(*TWO_GIB, "-v", f"{volume}:rshared", args=(PROBE,))
        assert done.code == 125 and "would appear on the host" in done.err and str(tmp_path / "v") in done.err
        for options in (f"{volume}:rslave", f"{tmp_path}/v:/data:rshared"):
            assert docker.try_run(*TWO_GIB, "-v", options, args=(PROBE,)).answer()["total_bytes"] == 2 * GIB
        assert [point for point in mount_points() if point.startswith(f"{tmp_path}/")] == []
    finally:
        unmount_below(tmp_path)


# Images


@pytest.fixture(scope="module")
def asking(_made: DockerHost) -> str:
    return _made.load("asking", "ENV GPUSHARE_MEMORY=1Gi", "USER 1000", f'CMD ["{PROBE}"]')


def test_image_that_asks(docker: DockerHost, asking: str) -> None:
    for options, expected in (((), GIB), (TWO_GIB, 2 * GIB)):
        assert docker.try_run(*options, image=asking, args=()).answer()["total_bytes"] == expected


def test_image_that_asks_for_all(docker: DockerHost) -> None:
    image = docker.load("all", "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    answer = docker.try_run(image=image, args=(PROBE,)).answer()
    assert (answer["devices"], answer["total_bytes"]) == (2, 16 * GIB)
    with docker.start_with(*TWO_GIB, "-e", "NVIDIA_VISIBLE_DEVICES=0", image=image, args=SLEEP) as one:
        assert total(one) == 2 * GIB
        with pytest.raises(Refused):
            docker.start_with(image=image, args=SLEEP)
    nothing = docker.try_run("-e", "NVIDIA_VISIBLE_DEVICES=void", image=image, args=("ls", "/dev/nvidiactl"))
    assert nothing.code != 0


def test_default_runtime(docker: DockerHost, tmp_path: Path) -> None:
    """Whoever names no runtime: docker run, and the steps of docker build."""
    answer = Result(0, docker.daemon.must("run", "--rm", "--network", "none", *TWO_GIB, IMAGE, PROBE), "").answer()
    assert answer["total_bytes"] == 2 * GIB
    step = f"{PROBE} | grep '\"total_bytes\": {GIB}'"
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nENV GPUSHARE_MEMORY=1Gi\nRUN {step}\nRUN ldconfig\n")
    docker.daemon.must("build", "--network", "none", "--tag", "built", str(tmp_path))
    assert docker.try_run(image="built", args=(PROBE,)).answer()["total_bytes"] == GIB
    assert docker.daemon.docker("run", "--rm", *RUNC, "built", "sh", "-c", "ldconfig").code == 0
