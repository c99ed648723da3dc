"""Features of docker alone, with the test's own daemon: kinds of containers, their lifecycle, and the message and exit
code of one that does not start."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.docker_host import GIB, TWO_GIB, DockerHost, Events, docker_host, total
from tests.support.engines.base import SLEEP, Refused
from tests.support.engines.docker import GPUSHARE, IMAGE, DockerContainer, start
from tests.support.engines.image import PROBE

DAEMON_ERROR, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # `docker run --help`, "Exit status"

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
def test_limit_holds_with_each_option(docker: DockerHost, name: str) -> None:
    answer = docker.try_run(*TWO_GIB, *OPTIONS[name], args=(PROBE,)).answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    assert GIB < answer["got_bytes"] <= 2 * GIB


# Lifecycle


def test_share_lasts_from_start_through_update_and_pause(docker: DockerHost) -> None:
    daemon = docker.daemon
    created = daemon.must("create", *GPUSHARE, *TWO_GIB, "--memory", "256m", IMAGE, *SLEEP)
    with DockerContainer(daemon, created) as one:
        assert docker.node.leases() == []
        one.restart()
        assert docker.node.leases() == [one.id]
        daemon.must("update", "--memory", "128m", "--memory-swap", "128m", "--cpu-shares", "512", one.id)
        assert total(one) == 2 * GIB
        daemon.must("pause", one.id)
        assert docker.node.cli("prune").returncode == 0
        assert docker.node.leases() == [one.id]
        daemon.must("unpause", one.id)
        assert total(one) == 2 * GIB


def test_restart_is_refused_when_the_share_is_taken(docker: DockerHost) -> None:
    memory = ("-e", "GPUSHARE_DEVICES=0", "-e", "GPUSHARE_MEMORY=10Gi")
    with docker.start_with(*memory, args=SLEEP) as one:
        one.stop()
        with docker.start_with(*memory, args=SLEEP) as other:
            with pytest.raises(Refused, match="10 GiB requested"):
                one.restart()
            assert docker.node.leases() == [other.id]
        one.restart()
        assert total(one) == 10 * GIB


def test_restart_policy_restores_the_share(docker: DockerHost) -> None:
    """Docker itself restarts a container that dies."""
    with docker.start_with(*TWO_GIB, "--restart", "always", args=SLEEP) as one:
        with Events(docker.daemon, f"container={one.id}", "event=start") as events:
            assert events.next() == "start"
            os.kill(one.pid, signal.SIGKILL)
            assert events.next() == "start"
        assert total(one) == 2 * GIB
        assert docker.node.leases() == [one.id]


def test_health_check_sees_the_share(docker: DockerHost) -> None:
    command = f"{PROBE} | grep -q '\"total_bytes\": {2 * GIB},'"
    health = ("--health-cmd", command, "--health-interval", "100ms", "--health-retries", "1")
    created = docker.daemon.must("create", *GPUSHARE, *TWO_GIB, *health, IMAGE, *SLEEP)
    with (
        DockerContainer(docker.daemon, created) as one,
        Events(docker.daemon, f"container={one.id}", "event=health_status") as events,
    ):
        one.restart()
        assert events.next() == "health_status: healthy"


def test_share_follows_the_container_after_a_daemon_restart(image_root: Path) -> None:
    """The restarted daemon keeps running containers (--live-restore) or ends them; their leases follow. Other tests
    must end with the daemon that they began with, so this one has its own."""
    # The daemon ends containers with their own stop signal and waits ten seconds.
    with (
        docker_host(image_root) as docker,
        docker.start_with(*TWO_GIB, "--stop-signal", "KILL", args=SLEEP) as one,
    ):
        pid = one.pid
        for live_restore in (True, False):
            docker.daemon.end(signal.SIGKILL)
            assert docker.node.leases() == [one.id]
            docker.daemon.start(*(("--live-restore",) if live_restore else ()))
            assert one.inspect("{{.State.Running}}") == str(live_restore).lower()
            if live_restore:
                assert one.pid == pid
            else:
                assert docker.node.leases() == []
                one.restart()
            assert total(one) == 2 * GIB
            assert docker.node.leases() == [one.id]
        one.remove()
        assert docker.node.leases() == []


# Names


def test_commands_take_docker_s_names(docker: DockerHost) -> None:
    """Also after a rename, for containers of Compose and with a shared network, and while the daemon hangs."""
    shared = (*TWO_GIB, "--name", "side", "--runtime", "gpushare")
    labels = ("--label", "com.docker.compose.project=shop", "--label", "com.docker.compose.service=web")
    with (
        docker.start_with(*TWO_GIB, "--name", "before", args=SLEEP) as one,
        docker.start_with(*TWO_GIB, *labels, "--name", "shop-web-1", args=SLEEP) as web,
        start(docker.daemon, *shared, "--network", f"container:{web.id}", IMAGE, *SLEEP) as side,
    ):
        docker.daemon.must("rename", "before", "train")
        os.kill(docker.daemon.pid, signal.SIGSTOP)
        try:
            names = {found["id"]: found["name"] for found in json.loads(docker.node.cli("list", "-o", "json").stdout)}
            assert names == {one.id: "train", web.id: "shop-web-1", side.id: "side"}
            for text, container in (("train", one), ("web", web), ("shop/web", web), ("side", side)):
                done = docker.node.cli("limit", "set", text, "--memory", "1Gi", "-o", "json")
                assert json.loads(done.stdout)["id"] == container.id, done.stderr
        finally:
            os.kill(docker.daemon.pid, signal.SIGCONT)
        assert docker.node.cli("inspect", "before").returncode == 64


# Errors


def test_refusal_is_one_line_with_exit_code_125(docker: DockerHost) -> None:
    """One complete line of gpushare below docker's own; 125 is the daemon's "could not start it"."""
    done = docker.try_run("-e", "GPUSHARE_MEMORY=1\n2", args=("true",))
    assert (done.code, done.out) == (DAEMON_ERROR, ""), done
    (line,) = [line for line in done.err.splitlines() if "gpushare: " in line]
    assert "GPUSHARE_MEMORY" in line and r"1\x0a2" in line
    assert "Traceback" not in done.err and "internal error" not in done.err
    assert docker.daemon.must("ps", "-aq") == "", "docker kept the container"


def test_docker_s_exit_codes_are_unchanged(docker: DockerHost) -> None:
    for program, code in (("no-such", NOT_FOUND), ("/etc/passwd", NOT_EXECUTABLE)):
        for options in ((), TWO_GIB):
            assert docker.try_run(*options, args=(program,)).code == code, (program, options)
    assert docker.try_run(*TWO_GIB, args=("sh", "-c", "exit 42")).code == 42
    assert docker.try_run(*TWO_GIB, "--init", args=("sh", "-c", "kill -TERM $$")).code == 128 + signal.SIGTERM


def test_inspect_shows_the_last_refusal(docker: DockerHost) -> None:
    created = docker.daemon.must("create", "--runtime", "gpushare", "-e", "GPUSHARE_MEMORY=lots", IMAGE, "true")
    assert docker.daemon.docker("start", created).code == 1
    assert "lots" in docker.daemon.must("inspect", "--format", "{{.State.Error}}", created)
    shown = docker.node.cli("inspect", created)
    assert "lots" in shown.stdout + shown.stderr


def test_refusal_for_the_image_s_content_is_shown(docker: DockerHost, tmp_path: Path) -> None:
    """A link's name is a directory in the image: the hook detects it, and runc shows the hook's message. docker 26 and
    newer exit with 126 if the message has the kernel's words for that."""
    (tmp_path / "d").mkdir()
    made = docker.daemon.must("create", IMAGE, "true")
    docker.daemon.must("cp", f"{tmp_path}/d", f"{made}:/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    docker.daemon.must("commit", made, "odd")
    done = docker.try_run(*TWO_GIB, image="odd", args=("true",))
    assert done.code == DAEMON_ERROR
    assert "gpushare: " in done.err and "libcuda.so.1" in done.err and "folder" in done.err
