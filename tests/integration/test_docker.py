"""Features of docker alone, with the test's own daemon: kinds of containers, and their lifecycle."""

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


def test_created_container_holds_no_share_until_start(docker: DockerHost) -> None:
    container_id = docker.daemon.must("create", *GPUSHARE, *TWO_GIB, IMAGE, *SLEEP)
    with DockerContainer(docker.daemon, container_id) as one:
        assert docker.node.leases() == []
        one.restart()
        assert docker.node.leases() == [one.id]
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


def test_paused_container_keeps_its_share(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, args=SLEEP) as one:
        docker.daemon.must("pause", one.id)
        assert docker.node.cli("prune").returncode == 0
        assert docker.node.leases() == [one.id]
        docker.daemon.must("unpause", one.id)
        assert total(one) == 2 * GIB


def test_share_survives_docker_update(docker: DockerHost) -> None:
    with docker.start_with(*TWO_GIB, "--memory", "256m", args=SLEEP) as one:
        docker.daemon.must("update", "--memory", "128m", "--memory-swap", "128m", "--cpu-shares", "512", one.id)
        assert total(one) == 2 * GIB


def test_health_check_sees_the_share(docker: DockerHost) -> None:
    command = f"{PROBE} | grep -q '\"total_bytes\": {2 * GIB},'"
    health = ("--health-cmd", command, "--health-interval", "1s", "--health-retries", "1")
    created = docker.daemon.must("create", *GPUSHARE, *TWO_GIB, *health, IMAGE, *SLEEP)
    with (
        DockerContainer(docker.daemon, created) as one,
        Events(docker.daemon, f"container={one.id}", "event=health_status") as events,
    ):
        one.restart()
        assert events.next() == "health_status: healthy"


@pytest.mark.parametrize("live_restore", [True, False])
def test_share_follows_the_container_after_a_daemon_restart(image_root: Path, live_restore: bool) -> None:
    """The restarted daemon keeps running containers (--live-restore) or ends them; their leases follow."""
    options = ("--live-restore",) if live_restore else ()
    with docker_host(image_root, *options) as docker:
        # The daemon ends containers with their own stop signal and waits ten seconds.
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
