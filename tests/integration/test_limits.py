"""Real containers on one simulated 16 GiB GPU: limits are visible, reached and enforced for every kind of program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.tenant import LAST_BYTES
from tests.integration.conftest import Node
from tests.support.host import PYTHON, TREE, python_mounts
from tests.support.judge import peak_bytes
from tests.support.runc import Container
from tests.support.tenant import PROGRAM, Tenant

GIB = 1 << 30
GRAB = TREE / "tests" / "integration" / "programs" / "grab.py"
GRAB_IN_CONTAINER = f"/opt/{GRAB.name}"
TOTALS = """
import json, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
print(json.dumps([n.nvmlDeviceGetMemoryInfo(h).total for h in handles]))
"""


def take_all(tenant: Tenant) -> dict[str, Any]:
    """Make the tenant allocate until refused, and return its report."""
    tenant.go()
    return tenant.expect("full")


def test_two_containers_reach_and_keep_their_limits(tenant: Callable[..., Tenant], simhost: Path, way: str) -> None:
    limits = {"a": ("3Gi", 3 * GIB), "b": ("50%", 8 * GIB)}
    both = [tenant(name, {"GPUSHARE_MEMORY": asked}, way=way) for name, (asked, _) in limits.items()]
    for one in both:
        one.container.start()
    for one in both:
        seen, limit = one.expect("seen"), limits[one.name][1]
        assert (seen["nvml_total_bytes"], seen["cuda_total_bytes"], seen["gpus"]) == (limit, limit, 1)
        assert seen["nvml_free_bytes"] == seen["cuda_free_bytes"] <= limit
        one.free_bytes = seen["cuda_free_bytes"]  # type: ignore[attr-defined]
        one.go()
    for one in both:
        full, limit = one.expect("full"), limits[one.name][1]
        assert full["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert one.free_bytes - full["got_bytes"] < LAST_BYTES  # type: ignore[attr-defined]
        taken = peak_bytes(simhost, one.pid_namespace())
        assert full["got_bytes"] < taken <= limit
    for one in both:
        one.go()
        one.expect("freed")
        assert one.container.wait() == 0


TRICKS = {
    "exec": [PYTHON, GRAB_IN_CONTAINER],
    "empty environment": ["env", "-i", PYTHON, GRAB_IN_CONTAINER],
    "shell": ["sh", "-c", f"unset GPUSHARE_MEMORY; export GPUSHARE_MEMORY=16Gi; {PYTHON} {GRAB_IN_CONTAINER}; exit $?"],
    "fork without exec": [PYTHON, GRAB_IN_CONTAINER, "fork"],
    "descriptors closed": [PYTHON, GRAB_IN_CONTAINER, "closed"],
}


@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
@pytest.mark.parametrize("trick", TRICKS)
def test_bypass_attempts_get_no_more_than_the_limit(
    tenant: Callable[..., Tenant], simhost: Path, trick: str, user: str, way: str
) -> None:
    first = tenant("first", {"GPUSHARE_MEMORY": "2Gi"}, extra_mounts=python_mounts(GRAB)[1:], way=way)
    first.container.start()
    first.expect("seen")

    def grab() -> dict[str, Any]:
        done = first.container.exec(*TRICKS[trick], options=("--user", user))
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    beside = grab()  # so far the first process has allocated nothing but its context
    assert beside["total_bytes"] == beside["nvml_total_bytes"] == 2 * GIB
    assert GIB < beside["got_bytes"] < 2 * GIB
    take_all(first)
    assert grab() in ({"refused": "CUDA_ERROR_OUT_OF_MEMORY"}, beside | {"got_bytes": 0})
    assert peak_bytes(simhost, first.pid_namespace()) <= 2 * GIB


@pytest.mark.usefixtures("no_hybrid_cgroups")
@pytest.mark.parametrize("low", ["runc", "crun"])
def test_hook_works_in_the_create_runtime_stage(container: Callable[..., Container], node: Node, low: str) -> None:
    """test_engines.py has the stage prestart."""
    one = container(
        [PYTHON, GRAB_IN_CONTAINER],
        env={"GPUSHARE_MEMORY": "1Gi"},
        hook=node.hook("createRuntime"),
        mounts=python_mounts(PROGRAM, GRAB),
        runtime=low,
    )
    assert one.run() == 0, one.stderr
    answer = json.loads(one.stdout)
    assert answer["total_bytes"] == answer["nvml_total_bytes"] == GIB > answer["got_bytes"] > GIB // 2
    one.delete()
    assert node.leases() == []


def test_two_devices_have_separate_limits(
    container: Callable[..., Container], make_host: Callable[..., Path], make_node: Callable[..., Node], way: str
) -> None:
    node = make_node(make_host("two", gpus=2, memory_bytes=16 * GIB))
    env = {"GPUSHARE_DEVICES": "any:2", "GPUSHARE_MEMORY": "0=4Gi,1=50%"}
    one = container([PYTHON, "-c", TOTALS], env=env, mounts=python_mounts(), **node.way(way))
    assert one.run() == 0, one.stderr
    assert json.loads(one.stdout) == [4 * GIB, 8 * GIB]
