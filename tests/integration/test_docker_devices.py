"""docker's own ways to devices: --device, --privileged, the host's /dev, MKNOD, NVIDIA's runtime, user namespaces. With
each, a container can use only the granted GPUs, within its limit."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.integration.docker_host import GIB, TWO_GIB, Hosts, docker_host, docker_hosts
from tests.support.engines.base import SLEEP, Refused
from tests.support.engines.docker import DockerContainer
from tests.support.engines.image import PROBE
from tests.support.host import Node
from tests.support.launcher import require_no_python
from tests.support.rootfs import run

EDIT_SPEC = Path(__file__).parent / "programs" / "edit_spec.py"
NODES = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-uvm": (237, 0)}
DENIED, NO_DRIVER = "Operation not permitted", "No such device or address"


@pytest.fixture(scope="module")
def _made(image_root: Path) -> Iterator[Hosts]:
    def prepare(directory: Path, nodes: dict[str, Node]) -> dict[str, tuple[str, ...]]:
        nodes["real"] = _real(directory)
        low_level = _script(directory / "less", EDIT_SPEC, "drop-capability", "CAP_SYS_RESOURCE", shutil.which("runc"))
        nodes["privileged"] = Node(directory / "node3", directory / "host", runtime={"path": str(low_level)})
        nodes["injected"] = Node(directory / "node4", directory / "host")
        for node in nodes.values():
            node.cli("refresh")  # mounts the state directory, which stays
        hook = directory / "docker" / "bin" / "nvidia-container-runtime-hook"  # --gpus works only if this file exists
        hook.parent.mkdir(parents=True)
        _script(hook, "-c", "exit(1)")
        edit = _script(directory / "edit", EDIT_SPEC, "inject", directory / "host")
        return {name: (*([str(edit)] * (name == "injected")), *node.runtime()) for name, node in nodes.items()}

    with docker_hosts(image_root, prepare) as made:
        yield made


def real(hosts: Hosts) -> Path:
    """The driver root whose device nodes are character devices."""
    return hosts.nodes["real"].driver_root / "dev"


def _script(path: Path, *words: object) -> Path:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(map(str, words))} "$@"\n')
    path.chmod(0o755)
    return path


def _real(directory: Path) -> Node:
    """A host whose device nodes are character devices. No driver is behind them, so an open that the device cgroup
    allows fails with ENXIO. NVML's facts (sizes) were read from the simulated devices before."""
    root = make_simhost(directory / "real", gpus=2, memory_bytes=16 * GIB)
    node = Node(directory / "node2", root)
    node.cli("refresh")
    (root / ".gpushare-sim").unlink()
    compiled = node.state / "node.json"
    value = json.loads(compiled.read_text())
    value["inventory"]["simulated"] = False
    compiled.write_text(json.dumps(value))
    make_nodes(root / "dev")
    return node


def make_nodes(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, (major, minor) in NODES.items():
        (directory / name).unlink(missing_ok=True)
        os.mknod(directory / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    return directory


@pytest.fixture
def hosts(_made: Hosts) -> Iterator[Hosts]:
    yield _made
    assert {name: node.leases() for name, node in _made.nodes.items() if node.leases()} == {}


def opened(one: DockerContainer, *paths: str) -> dict[str, str]:
    """The kernel's error when a program in the container opens each node for reading and writing. A node NAME-MINOR is
    made first."""
    made = {path: f"test -e {path} || mknod {path} c 195 {path.rpartition('-')[2]}" for path in paths if "-" in path}
    script = "; ".join(f"({{ {made.get(path, ':')}; }} && : <>{path}) 2>&1 || true" for path in paths)
    lines = one.exec("sh", "-c", script).out.splitlines()
    return dict(zip(paths, (line.rpartition(": ")[2] for line in lines), strict=True))


def assert_only_first_device(one: DockerContainer) -> None:
    """Assert that the granted node reaches the (absent) driver and no other node can be opened under any name."""
    nodes = ("/dev/nvidia0", "/dev/nvidiactl", "/tmp/made-1", "/tmp/made-0")
    assert opened(one, *nodes) == dict(zip(nodes, (NO_DRIVER, NO_DRIVER, DENIED, NO_DRIVER)))


FIRST = (*TWO_GIB, "-e", "GPUSHARE_DEVICES=0")


# The device cgroup


@pytest.mark.parametrize(
    "more", [(), ("--cap-add", "MKNOD"), ("--cap-add", "ALL"), ("--device-cgroup-rule", "c 10:* rw")]
)
def test_nodes_of_other_gpus_cannot_be_made_and_opened(hosts: Hosts, more: tuple[str, ...]) -> None:
    more = tuple(word if word != "ALL" else "SYS_ADMIN" for word in more)
    with hosts.docker.start_with(*FIRST, *more, runtime="real", args=SLEEP) as one:
        assert_only_first_device(one)
        hosts.docker.daemon.must("update", "--memory", "128m", "--memory-swap", "128m", one.id)
        hosts.docker.daemon.must("pause", one.id)
        hosts.docker.daemon.must("unpause", one.id)
        assert_only_first_device(one)


def test_device_flag_is_a_request(hosts: Hosts) -> None:
    """docker run --device requests that device, and all of it without a limit."""
    device = ("--device", f"{real(hosts)}/nvidia0:/dev/nvidia0", "--device", f"{real(hosts)}/nvidiactl:/dev/nvidiactl")
    for limit, expected in (((), None), (TWO_GIB, 2 * GIB)):
        with hosts.docker.start_with(*device, *limit, runtime="real", args=SLEEP) as one:
            assert_only_first_device(one)
            assert limits_of(hosts.nodes["real"], one) == {0: expected}


def test_device_flag_for_another_device_gives_no_access(hosts: Hosts) -> None:
    """The explicit request counts; an ungranted device is removed."""
    device = ("--device", f"{real(hosts)}/nvidia1:/dev/nvidia1")
    with hosts.docker.start_with(*device, *FIRST, runtime="real", args=SLEEP) as one:
        assert_only_first_device(one)
        assert one.exec("ls", "/dev/nvidia1").code != 0


def limits_of(node: Node, one: DockerContainer) -> dict[int, int | None]:
    lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
    return {share["device"]["minor"]: share["memory_limit_bytes"] for share in lease["shares"]}


def test_host_s_dev_as_a_volume_opens_only_granted_gpus(hosts: Hosts, tmp_path: Path) -> None:
    """All nodes are visible; the device cgroup allows only the granted ones."""
    dev = make_nodes(tmp_path / "dev")
    for name, minor in (("null", 3), ("zero", 5)):
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    before = sorted(path.name for path in dev.iterdir())
    with hosts.docker.start_with(*FIRST, "-v", f"{dev}:/dev", runtime="real", args=SLEEP) as one:
        assert_only_first_device(one)
        assert opened(one, "/dev/nvidia1") == {"/dev/nvidia1": DENIED}
    assert sorted(path.name for path in dev.iterdir()) == before


def test_host_s_dev_without_the_nodes_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    """Nodes would be created in that directory, that is on the host."""
    (tmp_path / "dev").mkdir()
    done = hosts.docker.try_run(*FIRST, "-v", f"{tmp_path}/dev:/dev", runtime="real", args=("true",))
    assert done.code == 125 and f'in the volume at "/dev" (on the host: "{tmp_path}/dev")' in done.err
    assert list((tmp_path / "dev").iterdir()) == []


def test_privileged_container_keeps_its_limit(hosts: Hosts) -> None:
    """It may do anything to the host; its programs still see only the granted share, or without a request no GPU."""
    with hosts.docker.start_with("--privileged", *FIRST, runtime="privileged", args=SLEEP) as one:
        answer = one.exec(PROBE).answer()
        assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
        assert one.exec("ls", "/dev/nvidia1").code != 0
        docker_exec = hosts.docker.daemon.docker("exec", "--privileged", one.id, PROBE)
        assert docker_exec.answer()["total_bytes"] == 2 * GIB
    done = hosts.docker.try_run("--privileged", runtime="privileged", args=("ls", "/usr/lib/gpushare"))
    assert done.code != 0 and done.out == ""


@pytest.mark.parametrize("rule", ["c 195:* rmw", "c *:* rmw", "a *:* rmw"])
def test_device_rule_alone_opens_no_gpu(hosts: Hosts, rule: str) -> None:
    options = ("--device-cgroup-rule", rule, "--cap-add", "MKNOD")
    with hosts.docker.start_with(*options, runtime="real", args=SLEEP) as one:
        nodes = ("/tmp/made-0", "/tmp/made-1", "/tmp/made-255")
        assert opened(one, *nodes) == dict.fromkeys(nodes, DENIED)


# Devices from other software


@pytest.mark.parametrize(("gpus", "uuids"), [("all", [0, 1]), ("1", [0]), ("device=1", [1])])
def test_gpus_flag_gets_a_share(hosts: Hosts, gpus: str, uuids: list[int]) -> None:
    """docker run --gpus adds NVIDIA's variable and NVIDIA's hook, which would fail here: gpushare replaces it."""
    with hosts.docker.start_with("--gpus", gpus, *TWO_GIB, args=SLEEP) as one:
        answer = one.exec(PROBE).answer()
        assert (answer["devices"], answer["total_bytes"]) == (len(uuids), 2 * GIB)
        assert limits_of(hosts.nodes["gpushare"], one) == dict.fromkeys(uuids, 2 * GIB)


def test_injection_by_nvidia_s_runtime_is_replaced(hosts: Hosts) -> None:
    """gpushare replaces all of it: its hooks would fail here, its libcuda has no limit, its node has no lease."""
    answer = hosts.docker.try_run(
        *TWO_GIB, "-e", "NVIDIA_VISIBLE_DEVICES=void", runtime="injected", args=(PROBE,)
    ).answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    with hosts.docker.start_with(runtime="injected", args=SLEEP), pytest.raises(Refused):
        hosts.docker.start_with(runtime="injected", args=SLEEP)


# User namespaces


@pytest.fixture
def subordinate_ids(tmp_path: Path) -> Iterator[str]:
    """A user and group with id ranges in this mount namespace's /etc/subuid and subgid."""
    for name in ("subuid", "subgid"):
        (tmp_path / name).write_text("nobody:300000:65536\n")
        run("mount", "--bind", tmp_path / name, Path("/etc", name))
    yield "nobody:nogroup"
    for name in ("subuid", "subgid"):
        run("umount", Path("/etc", name))


def test_limit_holds_in_a_user_namespace(image_root: Path, subordinate_ids: str) -> None:
    with docker_host(image_root, f"--userns-remap={subordinate_ids}") as docker:
        for options in ((), ("--user", "1000"), ("--read-only",)):
            answer = docker.try_run(*TWO_GIB, *options, args=(PROBE,)).answer()
            assert (answer["total_bytes"], answer["refused"]) == (2 * GIB, 2)
        with docker.start_with(*TWO_GIB, args=SLEEP) as one:
            assert "300000" in Path(f"/proc/{one.pid}/uid_map").read_text()
            assert one.exec(PROBE, user="1000:1000").answer()["total_bytes"] == 2 * GIB
            written = one.exec("sh", "-c", "ldconfig; echo > /usr/lib/gpushare/limits")
            assert written.code != 0 and "Read-only" in written.err
            one.stop()
            one.restart()
            assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert docker.node.leases() == []
        own = docker.try_run(*TWO_GIB, "--userns", "host", args=(PROBE,)).answer()
        assert own["total_bytes"] == 2 * GIB


def test_docker_s_default_device_rules_start_no_python(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.docker.start_with(args=SLEEP) as one:
        (path,) = hosts.docker.daemon.directory.glob(f"exec/containerd/**/moby/{one.id}/config.json")
        require_no_python(tmp_path / "installed", json.loads(path.read_text()))
