"""Containers that must not start: their request cannot be granted or is invalid. Nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import Tenant

NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all"}

# environment, then strings that the last line must quote
BAD = {
    "no number": ({"GPUSHARE_MEMORY": "banana"}, ("GPUSHARE_MEMORY", "banana")),
    "more than everything": ({"GPUSHARE_MEMORY": "150%"}, ("GPUSHARE_MEMORY", "150%")),
    "negative": ({"GPUSHARE_MEMORY": "-1Gi"}, ("GPUSHARE_MEMORY", "-1Gi")),
    "nothing of it": ({"GPUSHARE_MEMORY": "0"}, ("GPUSHARE_MEMORY", "0")),
    "slot that is not there": ({"GPUSHARE_MEMORY": "3=1Gi"}, ("GPUSHARE_MEMORY", "slot 3")),
    "compute without percent": ({"GPUSHARE_COMPUTE": "lots"}, ("GPUSHARE_COMPUTE", "lots")),
    "unknown device": ({"GPUSHARE_DEVICES": "7"}, ("GPUSHARE_DEVICES", "7")),
    "unknown uuid": ({"NVIDIA_VISIBLE_DEVICES": "GPU-none"}, ("NVIDIA_VISIBLE_DEVICES", "GPU-none")),
    "unknown capability": (
        {**NVIDIA, "NVIDIA_DRIVER_CAPABILITIES": "compute,flying"},
        ("NVIDIA_DRIVER_CAPABILITIES", "flying"),
    ),
    "control characters": ({"GPUSHARE_MEMORY": "1\x1b[31mGi"}, ("GPUSHARE_MEMORY", "x1b[31mGi")),
}


def assert_refused(one: Container, node: Node, quoted: tuple[str, ...]) -> None:
    """Assert that the container does not start, the runtime's last line quotes `quoted`, and no lease is left."""
    before = node.leases()
    with pytest.raises(RuntimeFailed) as failed:
        one.start()
    missing = [text for text in quoted if text not in failed.value.last_line]
    assert not missing, f"{missing} not in {failed.value.last_line}"
    assert "Traceback" not in failed.value.message
    assert "\x1b" not in failed.value.message
    one.close()
    assert node.leases() == before


@pytest.mark.parametrize("name", BAD)
def test_invalid_request_is_refused(container: Callable[..., Container], node: Node, name: str, way: str) -> None:
    env, quoted = BAD[name]
    assert_refused(container(["true"], env=env, **node.way(way)), node, quoted)


def test_contradictory_duplicates_are_refused(container: Callable[..., Container], node: Node, way: str) -> None:
    def twice(spec: dict[str, Any]) -> None:
        spec["process"]["env"] += ["GPUSHARE_MEMORY=1Gi", "GPUSHARE_MEMORY=2Gi"]

    one = container(["true"], edit=twice, **node.way(way))
    assert_refused(one, node, ("GPUSHARE_MEMORY", "1Gi", "2Gi"))


def test_container_with_nvidia_s_hook_is_refused(container: Callable[..., Container], node: Node) -> None:
    def served(spec: dict[str, Any]) -> None:
        spec["hooks"]["createContainer"] = [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]}]

    one = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook(), edit=served)
    assert_refused(one, node, ("createContainer hook", "nvidia-cdi-hook", "GPUSHARE_MEMORY"))


NVIDIA1 = {"destination": "/dev/nvidia1", "type": "bind", "source": "/dev/null", "options": ["bind"]}
RULES = ({"access": "rwm"}, {"type": "c", "access": "rwm"}, {"type": "c", "major": 195, "minor": 1, "access": "rw"})


@pytest.mark.parametrize("rule", [*RULES, None], ids=str)
def test_hook_refuses_a_device_it_cannot_remove(
    container: Callable[..., Container], node: Node, rule: dict[str, Any] | None
) -> None:
    def wide(spec: dict[str, Any]) -> None:
        if rule is None:
            spec["mounts"].append(NVIDIA1)
        else:
            spec["linux"]["resources"]["devices"].append({"allow": True, **rule})

    one = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook(), edit=wide)
    said = ("/dev/nvidia1", "GPUSHARE_MEMORY") if rule is None else ("linux.resources.devices", "--device-cgroup-rule")
    assert_refused(one, node, (*said, "gpushare-runtime"))


def test_container_beyond_capacity_is_refused(
    tenant: Callable[..., Tenant], container: Callable[..., Container], node: Node, way: str
) -> None:
    first = tenant("first", {"GPUSHARE_MEMORY": "12Gi"}, way=way)
    first.container.start()
    first.expect("seen")
    second = container(["true"], env={"GPUSHARE_MEMORY": "8Gi"}, **node.way(way))
    assert_refused(second, node, ("8", "4"))  # requested, free
    assert node.leases() == [first.container.id]

    first.go()  # unaffected: it still gets its share, to the last block
    assert first.expect("full")["got_bytes"] > 11 << 30
    first.container.kill()
    first.container.wait()
    first.container.delete()
    assert node.leases() == []
    assert container(["true"], env={"GPUSHARE_MEMORY": "8Gi"}, **node.way(way)).run() == 0
