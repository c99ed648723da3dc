"""The time until the driver has a launch is no work: programs that leave the device idle between launches.

The programs have 500 functions, synchronise once a step, and their launches reach the device 8 us after the beginning
of the call, the first ones 300 us after it. The device has an H100's slices and switches.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.limiter.cells import Ledger, Tenant, simulate

H100: dict[str, Any] = {"slice_us": 2090, "told_slice_us": 2090, "switch_us": 143, "preempt_us": 239}
LATE = "latency_us=8,first_us=300"
CPU_BOUND = ("5to65us", f"{LATE},cpu_us=58")
GPU_BOUND = ("30to80us", f"{LATE},cpu_us=2")
WARM_MS = 1000  # the first launches are charged until they return: it is unknown when their kernels began


def train(limit: float, program: tuple[str, str], seed: int = 1, more: str = "") -> Ledger:
    kernel, options = program
    tenant = Tenant(limit, kernel, "train", more=options + more)
    return simulate([tenant], ms=6500, seed=seed, **H100)[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_at_half_of_the_device_has_half_of_its_speed(seed: int) -> None:
    native = train(100, GPU_BOUND, seed, ",law=none")
    assert native.share(WARM_MS) > 99
    assert 48 <= 100 * train(50, GPU_BOUND, seed).share(WARM_MS) / native.share(WARM_MS) <= 50


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_limit_above_its_use_does_not_slow_a_program(seed: int) -> None:
    """The device is idle about half of the time."""
    native = train(100, CPU_BOUND, seed, ",law=none")
    limited = train(60, CPU_BOUND, seed)
    assert 50 < native.share(WARM_MS) < 55
    assert limited.share(WARM_MS) == pytest.approx(native.share(WARM_MS), abs=0.3)
    assert limited.done > 0.97 * native.done  # the first launches included


@pytest.mark.parametrize("limit", [30, 50, 60])
def test_data_loader_that_stalls_loses_no_more_than_its_stalls(limit: float) -> None:
    """It may use the credit of 20 ms that it saved during a stall of 40 ms, and no more."""
    stalls = (GPU_BOUND[0], f"{GPU_BOUND[1]},stall_ms=40")
    native = train(100, stalls, more=",law=none").share(WARM_MS)
    assert limit - 1.5 <= train(limit, stalls).share(WARM_MS) <= limit
    assert native > 90


@pytest.mark.parametrize("latency_us", [3, 8])
@pytest.mark.parametrize("program", ["stream", "sync", "pause", "graph"])
@pytest.mark.parametrize("kernel", ["5us", "50us", "1ms", "lognormal"])
def test_latency_is_not_charged(kernel: str, program: str, latency_us: int) -> None:
    """A kernel of 5 us is measured to half a microsecond."""
    (ledger,) = simulate([Tenant(50, kernel, program, more=f"latency_us={latency_us}")], ms=3500)
    assert ledger.charged_ns == pytest.approx(ledger.held_ns, rel=0.12 if kernel == "5us" else 0.012)


@pytest.mark.parametrize("kernel", ["50us", "1ms"])
def test_launches_that_are_always_late_gain_nothing(kernel: str) -> None:
    """A program that interrupts itself in the driver hides when its kernels begin: then all of the time counts."""
    (ledger,) = simulate([Tenant(20, kernel, "sync", more="latency_us=200")], ms=4500)
    assert ledger.share() < 20.5
