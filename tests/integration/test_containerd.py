"""Pods under containerd over the CRI socket: behaviour that single containers (test_engines.py) cannot show."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import VERSION
from tests.integration import engines
from tests.integration.nvidia_cdi import LIBDIR, cdi
from tests.integration.test_k8s_plugin import COMPUTE, Plugin, folder, plugin, uuids
from tests.support.engines.base import SLEEP, Result, Want
from tests.support.engines.containerd import NO_ANNOTATIONS, Containerd
from tests.support.engines.cri import CriError
from tests.support.engines.image import PROBE
from tests.support.engines.pods import PodContainer, wait_gone
from tests.support.host import write_config
from tests.support.kubelet import Kubelet
from tests.support.launcher import require_no_python
from tests.support.realnodes import ALLOWED, DENIED, NODES, access, real_nodes
from tests.support.spec import Mount
from tests.unit.test_system_variables import checkpoint

__all__ = ["folder", "plugin"]  # fixtures

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}  # device plugins set this beside CDI devices
BOTH = {"GPUSHARE_DEVICES": "all", "GPUSHARE_MEMORY": "16Gi"}  # starts only when nothing else is granted
DEVICES = ("sh", "-c", "ls -d /dev/nvidia[0-9]* /usr/lib/gpushare 2>/dev/null")


@pytest.fixture
def engine(containerd: Containerd) -> Containerd:
    containerd.programs.started()
    return containerd


def total_bytes(one: PodContainer) -> int:
    total: int = one.exec(PROBE).answer()["total_bytes"]
    return total


# Sandboxes, and containers without a request


def test_sandbox_does_not_get_its_pod_s_request(engine: Containerd) -> None:
    with engine.pod({"main.gpushare.io/memory": "1Gi", "gpushare.io/devices": "all"}) as pod:
        info = pod.info()
        assert info["runtimeSpec"]["annotations"]["main.gpushare.io/memory"] == "1Gi"  # the annotation was readable
        root = Path(f"/proc/{info['pid']}/root")
        assert not (root / "dev/nvidia0").exists()
        assert not (root / "usr/lib/gpushare").exists()
        assert engine.node.leases() == []
    assert engine.programs.started() == []


def test_only_the_requesting_container_starts_python(engine: Containerd) -> None:
    with engine.pod() as pod:
        plain = pod.run(Want(SLEEP), "plain")
        assert plain.exec(*DEVICES).out == ""
        plain.remove()
        assert engine.programs.started() == []
        asks = pod.run(Want(SLEEP, TWO_GIB))
        assert engine.node.leases() == [asks.id]
        assert engine.programs.started() != []


def test_commands_take_names_of_pods(engine: Containerd) -> None:
    """By pod, namespace and container; a name that two containers have lists both."""
    with engine.pod() as pod:
        a, b = pod.run(Want(SLEEP, TWO_GIB), "a"), pod.run(Want(SLEEP, TWO_GIB), "b")
        name = pod.config["metadata"]["name"]
        for text in (f"default/{name}/a", f"{name}/a", "a"):
            found = json.loads(engine.node.cli("inspect", text, "-o", "json").stdout)
            assert (found["id"], found["name"]) == (a.id, f"default/{name}/a")
        error = engine.node.cli("inspect", name).stderr
        assert f"(default/{name}/a)" in error and b.id[:12] in error and "ambiguous" in error


# Annotations


def test_containers_of_one_pod_have_separate_shares(engine: Containerd) -> None:
    with engine.pod({"a.gpushare.io/memory": "1Gi", "b.gpushare.io/memory": "3Gi"}) as pod:
        a, b, c = (pod.run(Want(SLEEP), name) for name in "abc")
        assert (total_bytes(a), total_bytes(b)) == (GIB, 3 * GIB)
        assert c.exec(*DEVICES).out == ""
        assert engine.node.leases() == sorted([a.id, b.id])


def test_unscoped_annotation_applies_to_the_container_that_names_a_device(engine: Containerd) -> None:
    with engine.pod({"gpushare.io/memory": "1Gi"}) as pod:
        names = pod.run(Want(SLEEP, {"NVIDIA_VISIBLE_DEVICES": "1"}), "names")
        sidecar = pod.run(Want(SLEEP), "sidecar")
        assert total_bytes(names) == GIB
        assert sidecar.exec(*DEVICES).out == ""
        assert engine.node.leases() == [names.id]


def test_variable_that_contradicts_the_annotation_is_refused(engine: Containerd) -> None:
    with engine.pod({"a.gpushare.io/memory": "1Gi"}) as pod:
        with pytest.raises(
            CriError, match="GPUSHARE_MEMORY=.2Gi. and annotation a.gpushare.io/memory=.1Gi. contradict"
        ):
            pod.run(Want(SLEEP, TWO_GIB), "a")
        assert total_bytes(pod.run(Want(SLEEP, TWO_GIB), "b")) == 2 * GIB


def test_annotations_the_handler_does_not_allow_are_not_passed(engine: Containerd) -> None:
    with engine.pod({"main.gpushare.io/memory": "1Gi"}, NO_ANNOTATIONS) as pod:
        assert pod.run(Want(SLEEP)).exec(*DEVICES).out == ""
        assert total_bytes(pod.run(Want(SLEEP, TWO_GIB), "other")) == 2 * GIB


def test_pods_of_other_schedulers_get_their_shares(engine: Containerd) -> None:
    """Koordinator's annotation, which runtime configure allows, with the variable that koordlet adds to every
    container; and Run:ai's, for the container that it names."""
    resources = {"koordinator.sh/gpu-memory": "3Gi", "koordinator.sh/gpu-memory-ratio": "18"}
    allocated = json.dumps({"gpu": [{"minor": 1, "resources": resources}]})
    device = {"NVIDIA_VISIBLE_DEVICES": "1"}
    with engine.pod({"scheduling.koordinator.sh/device-allocated": allocated}) as pod:
        one = pod.run(Want(SLEEP, device), "train")
        assert total_bytes(one) == 3 * GIB
        assert pod.run(Want(SLEEP), "sidecar").exec(*DEVICES).out == ""
        with pytest.raises(CriError, match=r"device-allocated is for the whole pod, .*write b\.gpushare"):
            pod.run(Want(SLEEP, device), "b")
        assert engine.node.leases() == [one.id]
    with engine.pod({"gpu-fraction": "0.25", "gpu-fraction-container-name": "train"}) as pod:
        assert pod.run(Want(SLEEP), "sidecar").exec(*DEVICES).out == ""
        assert total_bytes(pod.run(Want(SLEEP), "train")) == 4 * GIB


def test_pod_of_gpu_fractioning_gets_its_request(engine: Containerd) -> None:
    """KAI's annotations for one container each, also where fractiond writes no variables."""
    annotations = {
        "nvidia.com/container.train.gpu-memory.request": "4Gi",
        "nvidia.com/container.train.gpu-memory.limit": "12Gi",
        "nvidia.com/container.serve.gpu-memory.limit": "2Gi",
    }
    with engine.pod(annotations) as pod:
        assert pod.run(Want(SLEEP), "sidecar").exec(*DEVICES).out == ""
        variables = {"NVIDIA_GPU_MEMORY_REQUEST": "4096", "NVIDIA_GPU_MEMORY_LIMIT": "12288"}
        assert total_bytes(pod.run(Want(SLEEP, variables), "train")) == 4 * GIB
        assert total_bytes(pod.run(Want(SLEEP), "serve")) == 2 * GIB


# Lifecycle


def test_next_attempt_gets_the_share_of_the_ended_one(engine: Containerd) -> None:
    """kubelet keeps an ended container for its log; the next attempt still gets its share."""
    with engine.pod() as pod:
        first = pod.run(Want(("sh", "-c", "exit 3"), BOTH))
        assert first.wait().code == 3
        assert engine.node.leases() == []
        second = pod.run(Want(SLEEP, BOTH), attempt=1)
        assert engine.node.leases() == [second.id]


def test_refused_attempt_leaves_nothing(engine: Containerd) -> None:
    with engine.pod() as pod:
        with pytest.raises(CriError, match=r"GPUSHARE_MEMORY=\W+lots") as failed:
            pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "lots"}))
        assert "StartContainer" in str(failed.value) and "Traceback" not in failed.value.detail
        assert engine.node.leases() == []
        assert total_bytes(pod.run(Want(SLEEP, TWO_GIB), "next")) == 2 * GIB


def test_each_container_sees_only_its_gpu(engine: Containerd) -> None:
    with engine.pod() as pod:
        for index in "01":
            one = pod.run(Want(SLEEP, {**TWO_GIB, "GPUSHARE_DEVICES": index}), f"gpu{index}")
            assert one.exec(*DEVICES).out == f"/dev/nvidia{index}\n/usr/lib/gpushare\n"
            assert one.exec(PROBE).answer()["devices"] == 1
        both = pod.run(Want(SLEEP, {"GPUSHARE_DEVICES": "all", "GPUSHARE_MEMORY": "0=1Gi,1=2Gi"}), "both")
        assert both.exec(PROBE).answer()["devices"] == 2


# Devices that a container's request had before gpushare, and real device nodes


@pytest.fixture
def real_root(containerd: Containerd, tmp_path: Path) -> Iterator[Path]:
    with real_nodes(containerd.node, tmp_path / "real") as root:
        yield root


def device(root: Path, name: str) -> dict[str, str]:
    """A device in a CRI request, as kubelet writes a device plugin's response."""
    return {"container_path": f"/dev/{name}", "host_path": str(root / "dev" / name), "permissions": "rw"}


def test_nodes_of_other_gpus_cannot_be_opened(containerd: Containerd, real_root: Path) -> None:
    """Also after an update of the container's resources."""
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP, {"NVIDIA_VISIBLE_DEVICES": "1"}))
        assert (access(one, 0), access(one, 1), access(one, 255)) == (DENIED, ALLOWED, ALLOWED)
        limit = {"cpu_shares": 512, "memory_limit_in_bytes": 512 << 20}
        pod.daemon.cri.call("UpdateContainerResources", container_id=one.id, linux=limit)
        assert one.info()["runtimeSpec"]["linux"]["resources"]["memory"]["limit"] == 512 << 20
        assert (access(one, 0), access(one, 1), access(one, 255)) == (DENIED, ALLOWED, ALLOWED)
        other = pod.run(Want(SLEEP), "nothing")
        assert (access(other, 0), access(other, 255)) == (DENIED, DENIED)


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
    """Without CRI: no pod, no annotations, one container. ctr shows a refusal."""
    if containerd.way == "runtime":
        words = ("--runc-binary", str(containerd.programs.runtime), "--env", "GPUSHARE_MEMORY=2Gi")
        done = containerd.daemon.try_ctr("run", "--rm", *words, engines.IMAGE, "by-ctr", PROBE)
    else:
        done = containerd.ctr_run("by-ctr", ctr_spec(containerd, {"GPUSHARE_MEMORY": "2Gi"}))
    assert Result(done.returncode, done.stdout, done.stderr).answer()["total_bytes"] == 2 * GIB
    refused = containerd.ctr_run("by-ctr", ctr_spec(containerd, {"GPUSHARE_MEMORY": "lots"}))
    assert refused.returncode != 0 and 'GPUSHARE_MEMORY="lots"' in refused.stderr


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
                pod.run(Want(SLEEP, {**VOID, **TWO_GIB}, mounts=mounts))
            return
        one = pod.run(Want(SLEEP, {**VOID, **TWO_GIB}, mounts=mounts))
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert one.exec("sh", "-c", "ls /dev/nvidia[0-9]*").out == "/dev/nvidia1\n"


def test_containerd_s_default_device_rules_start_no_python(containerd: Containerd, tmp_path: Path) -> None:
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP))
        for place, spec in (("pod", pod.info()["runtimeSpec"]), ("one", one.info()["runtimeSpec"])):
            require_no_python(tmp_path / place, spec)


def test_pod_gets_the_device_that_kubelet_chose(
    containerd: Containerd, folder: Path, plugin: Callable[..., Plugin], tmp_path: Path
) -> None:
    """`gpushare k8s-plugin` answers kubelet. The pod gets 3 GiB and 30 % of the second device, although `any` would
    choose the first. A neighbour in the pod has its own share; a container without an allocation has none."""
    node, unit = containerd.node, "gpushare.io/memory-64mib"
    records = tmp_path / "kubelet"
    records.mkdir()
    write_config(node.config, node.driver_root, kubernetes={"kubelet_dir": str(records)})
    assert node.cli("refresh").returncode == 0
    with Kubelet(folder) as kubelet, containerd.pod() as pod:
        uid = str(uuid.uuid4())
        pod.config["linux"]["cgroup_parent"] += f"/pod{uid}"  # of its containers, as kubelet names it
        plugin(node, "--memory-unit", "64Mi")
        kubelet.wait(lambda: kubelet.has_listed(unit, COMPUTE) and len(kubelet.healthy(unit)) == 2 * 256)
        kubelet.allocate(unit, 250)
        counted = {**kubelet.allocate(unit, 48), **kubelet.allocate(COMPUTE, 30)}
        beside = kubelet.allocate(unit, 16)
        given = {"main": counted, "other": beside}
        entries = ({"PodUID": uid, "ContainerName": name, "envs": envs} for name, envs in given.items())
        checkpoint(records, *entries)
        main = pod.run(Want(SLEEP, {**counted, "NVIDIA_VISIBLE_DEVICES": "all"}))
        other = pod.run(Want(SLEEP, beside), "other")
        none = pod.run(Want(SLEEP), "none")
        for one, size in (main, 3 * GIB), (other, GIB):
            answer = one.exec(PROBE).answer()
            assert (answer["devices"], answer["total_bytes"], answer["nvml_total_bytes"]) == (1, size, size)
            inspected = node.cli("inspect", one.id, "--format", "json").stdout
            assert uuids(node)[1] in inspected and uuids(node)[0] not in inspected
        for one, percent in (main, 30), (other, 0):
            lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
            assert [share["compute_percent"] or 0 for share in lease["shares"]] == [percent]
        assert none.exec("ls", "/dev/nvidia0", "/dev/nvidia1").code != 0
        assert node.leases() == sorted([main.id, other.id])


# Death of the daemon. The test has its own daemon, because other tests must end with the daemon that they began with.


def test_shares_survive_a_daemon_restart(image_root: Path, way: str) -> None:
    with engines.containerd(way, image_root) as engine, engine.pod() as pod:
        lives, dies = (pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "16Gi"}), name) for name in ("lives", "dies"))
        pids = (lives.pid, dies.pid)
        engine.daemon.kill(signal.SIGKILL)
        dying = os.pidfd_open(pids[1])
        os.kill(pids[1], signal.SIGKILL)
        wait_gone(dying)
        assert engine.node.leases() == sorted([lives.id, dies.id])
        engine.daemon.start(engine.config)
        assert lives.pid == pids[0]
        assert total_bytes(lives) == 16 * GIB
        dies.wait()
        with pytest.raises(CriError, match=f"held by {lives.id[:12]} "):
            pod.run(Want(SLEEP, BOTH), "both")
        other = pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "16Gi"}), "other")
        assert total_bytes(other) == 16 * GIB
        lives.remove()
        other.remove()
        assert engine.node.leases() == []
        with engine.pod() as other_pod:
            other_pod.run(Want(SLEEP, BOTH))
