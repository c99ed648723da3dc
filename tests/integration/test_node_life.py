"""docs/node-life.md with real containerd 1.7 and 2.1, and with CRI-O where it is in PATH (make engines): the
installer's image over a node on which containers run.

tests/unit/test_node_life.py has the rows in which the engine has no part, and more causes of each.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import engines
from tests.integration.node_engines import ENGINES
from tests.integration.node_life_stage import OPT, Node, Stage, here
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd import Containerd
from tests.support.engines.cri import CriError
from tests.support.engines.image import PROBE
from tests.support.engines.pods import PodContainer

GIB = 1 << 30
PLAIN, SHARE = Want(SLEEP), Want(SLEEP, {"GPUSHARE_MEMORY": "2Gi"})


@pytest.fixture(scope="module", params=["newest containerd", "trixie containerd"])
def engine(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Containerd]:
    with engines.programs(request.param), engines.containerd("runtime", image_root) as made:
        yield made


@pytest.fixture(scope="module", params=ENGINES)
def stage(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Stage]:
    with engines.programs(request.param), Stage(request.param, image_root) as made:
        yield made


@pytest.fixture
def node(stage: Stage) -> Iterator[Node]:
    with stage.booted() as made:
        yield made


def total_bytes(one: PodContainer) -> int:
    total: int = one.exec(PROBE).answer()["total_bytes"]
    return total


def version_of(node: Node, one: PodContainer) -> str:
    """The version from which a container has its files; "" without a share."""
    mounts = Path(f"/proc/{one.pid}/mountinfo").read_text()
    return next((name for name in node.versions if f"/{name}/" in mounts), "")


def check_new_pod(node: Node) -> None:
    """A new pod gets its share, from the current version."""
    with node.pod() as pod:
        one = pod.run(SHARE)
        assert total_bytes(one) == 2 * GIB and version_of(node, one) == node.current


# Installation, and ends of the pod


def test_first_start_installs(node: Node) -> None:
    with pytest.raises(CriError, match="gpushare"):
        node.pod()
    pod = node.install(node.stage.release("1"))
    assert pod.ready and node.restarts == 1 and node.entry == f"{OPT}/{node.current}/bin/gpushare-runtime-cri"
    check_new_pod(node)


def test_end_of_the_pod_changes_nothing(node: Node) -> None:
    """By SIGTERM or SIGKILL, for containers that run and for pods that start afterwards. Nor does the next pod."""
    release = node.stage.release("1")
    installer = node.install(release)
    with node.pod() as pod:
        share, plain = pod.run(SHARE), pod.run(PLAIN, "plain")
        before = node.entry, node.current, node.versions, share.pid, plain.pid
        for end in (signal.SIGTERM, signal.SIGKILL):
            installer.process.send_signal(end)
            installer.process.wait(60)
            assert (node.entry, node.current, node.versions, share.pid, plain.pid) == before
            assert total_bytes(share) == 2 * GIB and node.shares() == [share.id]
            pod.run(SHARE, "next").remove()
            check_new_pod(node)
            if end == signal.SIGTERM:
                installer = node.install(release)
    assert node.restarts == 1 and node.shares() == []


def test_pod_killed_while_the_engine_restarts_leaves_a_node_that_works(node: Node) -> None:
    """The engine starts by itself; the next pod has nothing to do."""
    node.settle(node.stage.release("1"))
    first = node.current
    with node.pod() as pod:
        share = pod.run(SHARE)
        killed = node.begin("install", node.stage.release("2"))
        node.during_restart = killed.kill
        killed.until(f"running: {node.engine.restart}")
        killed.process.wait(60)
        node.during_restart = lambda: None
        (OPT / "new/bin").mkdir(parents=True)  # as a pod that was killed while it copied leaves it
        node.settle(node.stage.release("2"))
        assert node.restarts == 2 and node.current != first and version_of(node, share) == first
        assert total_bytes(share) == 2 * GIB and node.versions == {first, node.current}
        check_new_pod(node)


# Upgrades


def test_upgrade_restarts_the_engine_once_and_keeps_the_version_in_use(node: Node) -> None:
    """A version is in use by a share, by a container without a share, and by a pause container alone."""
    node.settle(node.stage.release("1"))
    first = node.current
    with node.pod() as pod:
        share, plain = pod.run(SHARE), pod.run(PLAIN, "plain")
        pids = share.pid, plain.pid
        node.settle(node.stage.release("2"))
        assert node.restarts == 2 and node.entry == f"{OPT}/{node.current}/bin/gpushare-runtime-cri"
        assert node.current != first and (share.pid, plain.pid) == pids
        assert version_of(node, share) == first and total_bytes(share) == 2 * GIB
        check_new_pod(node)
        for one in (share, plain):  # and then the pause container is left, if there is one
            assert node.versions == {first, node.current}
            one.remove()
            node.tidy()
        assert node.versions == {*([first] if node.engine.pause else []), node.current} and node.shares() == []
    node.tidy()
    assert node.versions == {node.current} and node.restarts == 2


def test_version_stays_until_the_engine_is_restarted(node: Node) -> None:
    """With GPUSHARE_RESTART=never: until then the engine starts pods by the earlier version."""
    node.settle(node.stage.release("1"))
    first = node.current
    upgrade = node.begin("install", node.stage.release("2"), GPUSHARE_RESTART="never")
    upgrade.until("ready")
    assert upgrade.stop() == 0 and node.current != first and node.versions == {first, node.current}
    assert node.restarts == 1
    with node.pod() as pod:
        assert version_of(node, pod.run(SHARE)) == first
    node.restart_engine()  # by the administrator
    check_new_pod(node)
    node.tidy()
    assert node.versions == {node.current} and node.restarts == 2


def test_failed_restart_of_an_upgrade_is_undone(node: Node) -> None:
    """Containers that run and new pods have the earlier version."""
    node.settle(node.stage.release("1"))
    first, before = node.current, node.engine.files()
    with node.pod() as pod:
        share, plain = pod.run(SHARE), pod.run(PLAIN, "plain")
        pids, entry = (share.pid, plain.pid), node.entry
        upgrade = node.begin("install", node.stage.release("2"))
        upgrade.until("copied to ")
        second = upgrade.lines[-1].rpartition("/")[2]
        node.fails = second
        upgrade.until("gpushare: ")
        assert "that was undone, and the engine runs as before" in upgrade.lines[-1], upgrade.lines
        assert not upgrade.ready and node.restarts == 3
        assert (node.entry, node.current, node.engine.files()) == (entry, first, before)
        assert (share.pid, plain.pid) == pids and total_bytes(share) == 2 * GIB
        pod.run(SHARE, "next").remove()
        check_new_pod(node)


def test_release_that_breaks_the_engine_is_undone(node: Node) -> None:
    """It wrote more into the engine's file than the earlier version knows: containerd runs without CRI, CRI-O does not
    start. The next release replaces its pod."""
    node.settle(node.stage.release("1"))
    first, before = node.current, node.engine.files()
    with node.pod() as pod:
        share, plain = pod.run(SHARE), pod.run(PLAIN, "plain")
        pids, entry = (share.pid, plain.pid), node.entry
        upgrade = node.begin("install", node.stage.breaking_release())
        upgrade.until("gpushare: ")
        assert node.engine.broken in upgrade.lines[-1], upgrade.lines
        assert "that was undone, and the engine runs as before" in upgrade.lines[-1], upgrade.lines
        assert not upgrade.ready and node.restarts == 3
        assert (node.entry, node.current, node.engine.files()) == (entry, first, before)
        assert (share.pid, plain.pid) == pids and total_bytes(share) == 2 * GIB
        check_new_pod(node)
        upgrade.kill()
        node.settle(node.stage.release("3"))
        assert node.restarts == 4 and version_of(node, share) == first
        check_new_pod(node)


def test_failed_restart_of_the_first_installation_leaves_the_engine_s_own_files(node: Node) -> None:
    before = node.engine.files()
    with node.pod(handler="") as pod:
        plain = pod.run(PLAIN)
        pid = plain.pid
        node.fails = "gpushare"
        installer = node.begin("install", node.stage.release("1"))
        installer.until("gpushare: ")
        assert "that was undone" in installer.lines[-1] and not installer.ready, installer.lines
        assert node.engine.files() == before and node.entry == "" and node.restarts == 2
        assert plain.pid == pid and plain.exec("true").code == 0
        with node.pod(handler="") as other:
            other.run(PLAIN)
        with pytest.raises(CriError, match="gpushare"):
            node.pod()


def test_engine_that_never_starts_leaves_containers_running(node: Node) -> None:
    """Its own files are broken: no upgrade or removal can start it, and each is tried again at SIGHUP."""
    first, second = node.stage.release("1"), node.stage.release("2")
    node.settle(first)
    version, entry = node.current, node.entry
    with node.pod() as pod:
        share = pod.run(SHARE)
        pid = share.pid
        node.fails = ""
        upgrade = node.begin("install", second)
        upgrade.until("gpushare: ")
        assert "undoing it failed as well" in upgrade.lines[-1] and not upgrade.ready, upgrade.lines
        assert (node.current, node.entry) == (version, entry) and node.shares() == [share.id]
        node.fails = None
        upgrade.process.send_signal(signal.SIGHUP)
        upgrade.until("ready")
        assert upgrade.stop() == 0 and share.pid == pid and total_bytes(share) == 2 * GIB
        check_new_pod(node)
    node.fails = ""
    removal = node.begin("remove", second)
    removal.until(f"waiting until nothing uses gpushare: `{node.engine.restart}` ended with 1")
    node.fails = None
    removal.process.send_signal(signal.SIGHUP)
    removal.until("gpushare is removed from this node")
    assert removal.stop() == 0 and node.entry == "" and not OPT.exists()


def test_version_that_cannot_configure_the_engine_is_not_current(node: Node) -> None:
    """The engine's file was broken since the engine's start."""
    node.settle(node.stage.release("1"))
    first = node.current
    node.engine.config.write_text(node.engine.config.read_text() + "[[[\n")
    upgrade = node.begin("install", node.stage.release("2"))
    upgrade.until("gpushare: `/opt/gpushare/current/bin/gpushare runtime configure")
    assert upgrade.process.wait(60) == 1 and not upgrade.ready
    assert node.current == first and node.restarts == 1
    check_new_pod(node)


# Reboot


def test_reboot_needs_no_restart_of_the_engine(node: Node) -> None:
    """kubelet removes the pods of the last boot, and starts new ones; the installer's pod can come later."""
    release = node.stage.release("1")
    node.install(release)
    pod = node.pod()
    pod.run(SHARE)
    pod.run(PLAIN, "plain")
    node.power_off()
    assert node.start_engine()
    check_new_pod(node)
    pod.remove()
    node.settle(release)
    check_new_pod(node)
    assert node.restarts == 1 and node.shares() == []


# Removal


def test_removal_waits_while_something_uses_gpushare(node: Node) -> None:
    release, before = node.stage.release("1"), node.engine.files()
    node.settle(release)
    with node.pod() as pod:
        share, plain = pod.run(SHARE), pod.run(PLAIN, "plain")
        removal = node.begin("remove", release)
        name = pod.config["metadata"]["name"]
        removal.until(f"waiting until nothing uses gpushare: container default/{name}/main holds a share, ")
        share.remove()
        by_pod, by_plain = node.engine.what_uses(pod), node.engine.what_uses(plain)
        for left in ([by_pod, by_plain], [by_pod]):
            removal.process.send_signal(signal.SIGHUP)
            removal.until("waiting until nothing uses gpushare: ")
            assert [text for text in (by_pod, by_plain) if text in removal.lines[-1]] == left
            assert not removal.ready and node.restarts == 1 and node.entry
            check_new_pod(node)
            plain.remove()
    removal.process.send_signal(signal.SIGHUP)
    removal.until("gpushare is removed from this node")
    assert removal.stop() == 0 and node.restarts == 2
    assert not OPT.exists() and node.engine.files() == before and node.entry == ""
    with node.pod(handler="") as other:
        other.run(PLAIN)
    with pytest.raises(CriError, match="gpushare"):
        node.pod()


def test_killed_removal_is_repaired_or_completed_by_the_next_pod(node: Node) -> None:
    """Killed while the engine restarts without gpushare's entry."""
    release = node.stage.release("1")
    for _ in range(2):
        node.settle(release)
        check_new_pod(node)
        killed = node.begin("remove", release)
        node.during_restart = killed.kill
        killed.until(f"running: {node.engine.restart}")
        killed.process.wait(60)
        node.during_restart = lambda: None
        assert node.entry == "" and node.current
    removal = node.begin("remove", release)
    removal.until("gpushare is removed from this node")
    assert removal.stop() == 0 and not OPT.exists()


# Records


def found(install: dict[str, Any], name: bytes) -> set[str]:
    """The ids of tasks whose runtime is in this directory."""
    return {one for one, runtime, _ in install["tasks"]() if name in runtime}


def test_records_of_containerd_name_the_runtime(engine: Containerd) -> None:
    """Also of a pause container and of a container without a share. containerd deletes the task of a container that has
    ended. Its state is in another directory than usual here, as in k3s."""
    install = here()
    program = bytes(engine.programs.runtime.parent) + b"/"
    with engine.pod() as pod:
        plain, ended = pod.run(Want(SLEEP), "plain"), pod.run(Want(("true",)), "ended")
        ended.wait()
        assert found(install, program) == {pod.id, plain.id}
        plain.remove()
        assert found(install, program) == {pod.id}
    assert found(install, program) == set()
