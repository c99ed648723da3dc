"""Devices that a container's request had before gpushare, and real device nodes, under containerd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import VERSION
from tests.integration import engines
from tests.integration.nvidia_cdi import LIBDIR, cdi
from tests.support.engines.base import SLEEP, Result, Want
from tests.support.engines.containerd import Containerd
from tests.support.engines.cri import CriError
from tests.support.engines.image import PROBE
from tests.support.launcher import require_no_python
from tests.support.realnodes import ALLOWED, DENIED, NODES, access, real_nodes
from tests.support.spec import Mount

GIB = 1 << 30
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}  # device plugins set this beside CDI devices
TWO_GIB = {**VOID, "GPUSHARE_MEMORY": "2Gi"}


@pytest.fixture
def real_root(containerd: Containerd, tmp_path: Path) -> Iterator[Path]:
    with real_nodes(containerd.node, tmp_path / "real") as root:
        yield root


def device(root: Path, name: str) -> dict[str, str]:
    """A device in a CRI request, as kubelet writes a device plugin's response."""
    return {"container_path": f"/dev/{name}", "host_path": str(root / "dev" / name), "permissions": "rw"}


def test_nodes_of_other_gpus_cannot_be_opened(containerd: Containerd, real_root: Path) -> None:
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP, {"NVIDIA_VISIBLE_DEVICES": "0"}))
        assert (access(one, 0), access(one, 1), access(one, 255)) == (ALLOWED, DENIED, ALLOWED)
        other = pod.run(Want(SLEEP), "nothing")
        assert (access(other, 0), access(other, 255)) == (DENIED, DENIED)


def test_access_survives_an_update(containerd: Containerd, real_root: Path) -> None:
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP, {"NVIDIA_VISIBLE_DEVICES": "1"}))
        limit = {"cpu_shares": 512, "memory_limit_in_bytes": 512 << 20}
        pod.daemon.cri.call("UpdateContainerResources", container_id=one.id, linux=limit)
        assert (access(one, 0), access(one, 1), access(one, 255)) == (DENIED, ALLOWED, ALLOWED)


def test_injected_devices_are_reduced_to_the_granted_ones(containerd: Containerd, real_root: Path) -> None:
    """A device plugin added both GPUs and the container requests one: the other is removed."""
    devices = [device(real_root, name) for name in NODES]
    with containerd.pod() as pod:
        want = Want(SLEEP, {**VOID, "GPUSHARE_DEVICES": "1"})
        if containerd.way == "hook":
            with pytest.raises(CriError, match="already has an NVIDIA device ./dev/nvidia"):
                pod.run(want, devices=devices)
            return
        one = pod.run(want, devices=devices)
        assert (access(one, 0), access(one, 1), access(one, 255)) == (DENIED, ALLOWED, ALLOWED)
        assert one.exec("ls", "/dev/nvidia0").code != 0
        alone = pod.run(Want(SLEEP, VOID), "alone", devices=[device(real_root, "nvidia0")])
        assert containerd.node.leases() == sorted([one.id, alone.id])
        with pytest.raises(CriError, match=f"held by {alone.id[:12]} "):  # no memory limit, so the whole device
            pod.run(Want(SLEEP, {"GPUSHARE_DEVICES": "0"}), "late")


def test_void_without_devices_gets_no_gpu(containerd: Containerd) -> None:
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP, VOID))
        assert one.exec("ls", "-d", "/dev/nvidia0", "/usr/lib/gpushare").out == ""


# CDI. This containerd is older than CDI, so the test does what containerd 1.7 does with a specification.


def inject(spec: dict[str, Any], described: dict[str, Any], name: str, root: Path) -> None:
    """Applies a CDI device to a config.json. A simulated node is a file, so it is mounted."""
    own = next(one["containerEdits"] for one in described["devices"] if one["name"] == name)
    for edits in (own, described["containerEdits"]):
        spec["process"]["env"] += edits.get("env", [])
        for node in edits.get("deviceNodes", []):
            path = node["path"]
            mount = {"destination": path, "type": "bind", "source": f"{root}{path}", "options": ["bind", "rw"]}
            spec["mounts"].append(mount)
        for one in edits.get("mounts", []):
            mount = {"destination": one["containerPath"], "type": "bind", "source": one["hostPath"]}
            spec["mounts"].append({**mount, "options": one["options"]})
        for hook in edits.get("hooks", []):
            entry = {"path": hook["path"], "args": hook["args"]}
            spec.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)


def ctr_spec(containerd: Containerd, env: dict[str, str]) -> dict[str, Any]:
    spec = containerd.base_spec()
    spec["process"]["args"] = [PROBE]
    spec["process"]["env"] = [f"{key}={value}" for key, value in env.items()]
    return spec


def test_ctr_container_gets_its_share(containerd: Containerd) -> None:
    """Without CRI: no pod, no annotations, one container."""
    if containerd.way == "runtime":
        words = ("--runc-binary", str(containerd.programs.runtime), "--env", "GPUSHARE_MEMORY=2Gi")
        done = containerd.daemon.try_ctr("run", "--rm", *words, engines.IMAGE, "by-ctr", PROBE)
    else:
        done = containerd.ctr_run("by-ctr", ctr_spec(containerd, {"GPUSHARE_MEMORY": "2Gi"}))
    assert Result(done.returncode, done.stdout, done.stderr).answer()["total_bytes"] == 2 * GIB


def test_ctr_shows_the_refusal(containerd: Containerd) -> None:
    done = containerd.ctr_run("by-ctr", ctr_spec(containerd, {"GPUSHARE_MEMORY": "lots"}))
    assert done.returncode != 0
    assert 'GPUSHARE_MEMORY="lots"' in done.stderr


@pytest.mark.parametrize("index", ["0", "1"])
def test_cdi_devices_get_a_share_or_are_refused(containerd: Containerd, index: str) -> None:
    root = containerd.node.driver_root
    spec = ctr_spec(containerd, {"GPUSHARE_MEMORY": "2Gi"})
    inject(spec, cdi(root), index, root)
    done = containerd.ctr_run("by-cdi", spec)
    if containerd.way == "hook":
        assert done.returncode != 0
        assert 'already has an NVIDIA createContainer hook "/usr/bin/nvidia-cdi-hook" and 9 more' in done.stderr
        return
    answer = Result(done.returncode, done.stdout, done.stderr).answer()
    assert (answer["devices"], answer["total_bytes"], answer["nvml_total_bytes"]) == (1, 2 * GIB, 2 * GIB)


def test_mounted_driver_files_are_covered(containerd: Containerd) -> None:
    """Older device plugins mount the driver's files, which must not bypass the limit."""
    root = containerd.node.driver_root
    library = f"{LIBDIR}/libcuda.so.{VERSION}"
    mounts = (Mount(root / library, f"/{library}"), Mount(root / "dev/nvidia1", "/dev/nvidia1", ("rw",)))
    with containerd.pod() as pod:
        if containerd.way == "hook":
            with pytest.raises(CriError, match=f"already has an NVIDIA mount at ./{library}"):
                pod.run(Want(SLEEP, TWO_GIB, mounts=mounts))
            return
        one = pod.run(Want(SLEEP, TWO_GIB, mounts=mounts))
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert one.exec("sh", "-c", "ls /dev/nvidia[0-9]*").out == "/dev/nvidia1\n"


def test_containerd_s_default_device_rules_start_no_python(containerd: Containerd, tmp_path: Path) -> None:
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP))
        for place, spec in (("pod", pod.info()["runtimeSpec"]), ("one", one.info()["runtimeSpec"])):
            require_no_python(tmp_path / place, spec)
