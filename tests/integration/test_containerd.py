"""Pods under containerd over the CRI socket: behaviour that single containers (test_engines.py) cannot show."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration import engines
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd import NO_ANNOTATIONS, Containerd
from tests.support.engines.cri import CriError
from tests.support.engines.image import PROBE
from tests.support.engines.pods import PodContainer, wait_gone

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
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


def test_pods_without_request_start_no_python(engine: Containerd) -> None:
    with engine.pod() as pod:
        one = pod.run(Want(SLEEP))
        assert one.exec(*DEVICES).out == ""
        one.remove()
    assert engine.programs.started() == []


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
        pod.run(Want(SLEEP), "plain")
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
        with pytest.raises(CriError, match="lots"):
            pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "lots"}))
        assert engine.node.leases() == []
        assert total_bytes(pod.run(Want(SLEEP, TWO_GIB), "next")) == 2 * GIB


def test_removed_pod_releases_all_shares(engine: Containerd) -> None:
    with engine.pod() as pod:
        for name in "ab":
            pod.run(Want(SLEEP, {"GPUSHARE_DEVICES": "all", "GPUSHARE_MEMORY": "8Gi"}), name)
        assert len(engine.node.leases()) == 2
    assert engine.node.leases() == []
    assert engine.run(Want(env=BOTH)).answer()["total_bytes"] == 16 * GIB


def test_each_container_sees_only_its_gpu(engine: Containerd) -> None:
    with engine.pod() as pod:
        for index in "01":
            one = pod.run(Want(SLEEP, {**TWO_GIB, "GPUSHARE_DEVICES": index}), f"gpu{index}")
            assert one.exec(*DEVICES).out == f"/dev/nvidia{index}\n/usr/lib/gpushare\n"
            assert one.exec(PROBE).answer()["devices"] == 1
        both = pod.run(Want(SLEEP, {"GPUSHARE_DEVICES": "all", "GPUSHARE_MEMORY": "0=1Gi,1=2Gi"}), "both")
        assert both.exec(PROBE).answer()["devices"] == 2


def test_share_survives_a_resource_update(engine: Containerd) -> None:
    with engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        limit = {"cpu_shares": 512, "memory_limit_in_bytes": 512 << 20}
        pod.daemon.cri.call("UpdateContainerResources", container_id=one.id, linux=limit)
        assert one.info()["runtimeSpec"]["linux"]["resources"]["memory"]["limit"] == 512 << 20
        assert total_bytes(one) == 2 * GIB


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
