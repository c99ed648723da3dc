"""The cost of an allocation, and of a launch that need not wait: instructions in the shim, and calls of the driver."""

from __future__ import annotations

import resource
import statistics
from pathlib import Path
from typing import Any

import pytest
from gpushare.state.shm_abi import DEVICE_LENDING, DEVICE_LENT

from tests.shim.box import Box
from tests.shim.inside import compile_c
from tests.support.busy import build, words

LAUNCHES = 200
LEAST_PAID = LAUNCHES // 4  # a slow machine steps so slowly that the device is idle, and more launches are probed
ALLOCATION, ALLOCATION_LENT = 716, 716  # gcc: 683 and 685; before memory was lent 716
NOTED = 30  # once a second, by the first call
INSTRUCTIONS = 41  # gcc 12: 34 to 40; gcc 14: to 41; comparisons with what the thread cached, two atomic additions


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("steps"), "steps.c", "-O2")


@pytest.mark.parametrize(
    ("percent", "call"),
    [
        (100, "cuLaunchKernel"),
        (90, "cuLaunchKernel"),
        (100, "cuLaunchKernelEx"),
        (100, "cuLaunchKernelEx_ptsz"),
        (90, "cuGraphLaunch_ptsz"),
    ],
)
def test_prepaid_launch_costs_few_instructions(percent: int, call: str, steps: Path) -> None:
    """No clock, no lock, no other driver call: these occur only in the launches in between that are probed."""
    paid: list[int] = []
    for _ in range(3):  # other load stretches the time between steps, so that more launches are probed
        with Box(compute=[percent]) as box:
            done = box.run([str(steps), str(LAUNCHES), call])
        assert done.returncode == 0, done.stderr
        counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
        assert len(counts) == LAUNCHES
        paid = [count for count, exits in counts if exits == 1]
        if len(paid) > LEAST_PAID:
            break
    assert len(paid) > LEAST_PAID
    assert max(paid) <= INSTRUCTIONS


@pytest.mark.parametrize("lent", [False, True])
def test_allocation_costs_few_instructions(lent: bool, steps: Path) -> None:
    """Without a clock and a lock, also where the limit is above the request and in force."""
    options: dict[str, Any] = {"whole": [12 << 30], "lending": "evict"} if lent else {}
    with Box([4 << 30], **options) as box:
        if lent:
            box.set_limit(flags=DEVICE_LENT | DEVICE_LENDING)
        done = box.run([str(steps), "20", "cuMemAlloc_v2"])
    assert done.returncode == 0, done.stderr
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == 20
    most = ALLOCATION_LENT if lent else ALLOCATION
    assert statistics.median(count for count, _ in counts) <= most
    assert max(count for count, _ in counts) <= most + NOTED
    assert max(exits for _, exits in counts) <= 3  # the current context, the address, the driver's own call


def test_throttled_process_uses_little_processor_time() -> None:
    """In a time that is nearly all waiting, the process uses little CPU; polling would use most of a CPU."""
    program = build()
    with Box([None], compute=[5]) as box:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = box.run([str(program), *words(kernel=1000, seconds=2)])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.8
