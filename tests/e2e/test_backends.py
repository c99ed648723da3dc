"""What holds for every backend that holds a container's memory, and what a host refuses that has it not. (MPS: its own
files.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare import backends

from tests.lib.host import Node
from tests.lib.judge import peak_bytes
from tests.lib.runc import Container, RuntimeFailed
from tests.lib.tenant import Tenant

GIB = 1 << 30
REGION = "nvidia/{bus_id}/vidmem"
MEMORY = [row.name for row in backends.BACKENDS.values() if backends.MEMORY in row.holds]


class Kernel:
    """A cgroup tree of plain files below a simulated driver root, with a dmem controller for one container."""

    def __init__(self, root: Path, container: Container, bus_id: str) -> None:
        spec = json.loads((container.bundle / "config.json").read_text())
        tree = root / "sys/fs/cgroup"
        self.leaf, self.region = tree / spec["linux"]["cgroupsPath"].strip("/"), REGION.format(bus_id=bus_id)
        self.leaf.mkdir(parents=True)
        (tree / "dmem.capacity").write_text(f"{self.region} {16 * GIB}\n")
        for name in ("dmem.max", "dmem.min"):
            (self.leaf / name).write_text("")

    def limits(self) -> set[str]:
        return {(self.leaf / name).read_text() for name in ("dmem.max", "dmem.min")}


def bus_id(node: Node) -> str:
    found: str = json.loads(node.cli("devices", "--format", "json").stdout)[0]["bus_id"]
    return found


@pytest.fixture
def any_backend(make_node: Callable[..., Node], simhost: Path) -> Node:
    return make_node(simhost, "any", policy={"allowed_backends": ["shim", "mps", "dmem"]})


@pytest.mark.parametrize("backend", MEMORY)
def test_a_memory_limit_is_kept_and_changed_whoever_holds_it(
    tmp_path: Path, simhost: Path, any_backend: Node, backend: str, way: str
) -> None:
    env = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_BACKEND": backend}
    one = Tenant(tmp_path, "one", env, any_backend, way=way)
    kernel = Kernel(simhost, one.container, bus_id(any_backend))
    try:
        one.container.start()
        asked = any_backend.cli("explain", str(one.container.bundle))
        assert f"memory by {backend} (asked)" in asked.stdout, asked
        assert one.expect("seen")["cuda_total_bytes"] == 2 * GIB
        by_kernel = backends.BACKENDS[backend].in_cgroup
        assert kernel.limits() == ({f"{kernel.region} {2 * GIB}"} if by_kernel else {""})
        changed = any_backend.cli("limit", "set", one.container.id, "--memory", "1Gi")
        assert changed.returncode == 0, changed.stderr
        assert kernel.limits() == ({f"{kernel.region} {GIB}"} if by_kernel else {""})
        one.go()
        assert one.expect("full")["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert GIB // 2 < peak_bytes(simhost, one.pid_namespace()) <= GIB
        (granted, *_) = any_backend.decisions()
        assert backend in granted["backend"].split("+")
    finally:
        one.close()


@pytest.mark.parametrize("backend", [name for name in backends.BACKENDS if name != backends.SHIM])
def test_a_host_that_has_not_what_was_asked_for_starts_nothing(
    container: Callable[..., Container], any_backend: Node, backend: str, way: str
) -> None:
    env = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE": "30%", "GPUSHARE_BACKEND": backend}
    one = container(["true"], env=env, **any_backend.way(way))
    with pytest.raises(RuntimeFailed, match=f"{backend} cannot: .*set GPUSHARE_BACKEND=shim"):
        one.start()
    assert any_backend.leases() == []


def test_a_container_s_cgroup_without_the_controller_starts_nothing(
    container: Callable[..., Container], any_backend: Node, simhost: Path, way: str
) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_BACKEND": "dmem"}, **any_backend.way(way))
    (Kernel(simhost, one, bus_id(any_backend)).leaf / "dmem.max").unlink()
    with pytest.raises(RuntimeFailed, match=r"dmem\.max.* is not there: .*write \+dmem"):
        one.start()
    assert any_backend.leases() == []
