"""Responses of `gpushare k8s-plugin` to kubelet, in pods under containerd."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.integration.test_k8s_plugin import COMPUTE, GIB, Plugin, folder, plugin, uuids
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd import Containerd
from tests.support.engines.image import PROBE
from tests.support.host import write_config
from tests.support.kubelet import Kubelet
from tests.unit.test_system_variables import checkpoint

__all__ = ["folder", "plugin"]  # fixtures


def test_pod_gets_the_device_that_kubelet_chose(
    containerd: Containerd, folder: Path, plugin: Callable[..., Plugin], tmp_path: Path
) -> None:
    """The pod gets 3 GiB and 30 % of the second device, although `any` would choose the first. A neighbour in the pod
    has its own share; a container without an allocation has none."""
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
