"""Probe events (shim/limiter/probe.c): they show which container has the device, in a stream of the shim's own."""

from __future__ import annotations

import pytest

from tests.limiter.cells import Tenant, simulate

ABSENT = Tenant(60, more="join=1000000")  # has a granted share but no work


@pytest.mark.parametrize(("kernel", "program"), [("bimodal", "graph"), ("lognormal", "graph"), ("20ms", "graph")])
def test_time_of_preempted_launches_is_measured(kernel: str, program: str) -> None:
    """From the launches' timestamps alone the error exceeds a point per 100 ms; long kernels leave no timestamps."""
    for ledger in simulate([Tenant(25, kernel, program)] * 4, ms=4500):
        assert ledger.mae(25, 100) <= 1.4
        assert ledger.charged_ns / 45e6 == pytest.approx(ledger.held_ns / 45e6, abs=1.0)


@pytest.mark.parametrize("seed", [2, 8])  # of the containers' clocks
def test_start_of_a_preemption_is_dated_by_the_expected_end(seed: int) -> None:
    """Intervals of short kernels are shorter than the time between two probes: half of that is too much."""
    for limit, ledger in zip(
        (30, 70), simulate([Tenant(30, "50us", "streams"), Tenant(70, "50us", "streams")], ms=4500, seed=seed)
    ):
        assert ledger.share() == pytest.approx(limit, abs=0.35)


def test_container_without_peers_does_not_probe() -> None:
    """Probes cost host and device time, so they run only beside a container with a granted share."""
    alone, beside = (simulate(tenants, ms=2500)[0].marks for tenants in ([Tenant(30)], [Tenant(30), ABSENT]))
    assert alone < 0.75 * beside


@pytest.mark.parametrize("kernel", ["50us", "1ms", "20ms", "lognormal"])
@pytest.mark.parametrize("program", ["stream", "graph"])
@pytest.mark.parametrize("other", [ABSENT, Tenant(60, "50us")], ids=["absent", "there"])
def test_probes_behind_the_programs_own_work_gain_nothing(kernel: str, program: str, other: Tenant) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share a device queue, so a late probe proves nothing."""
    ledger, *_ = simulate([Tenant(30, kernel, program), other], ms=4500, one_queue=1)
    assert ledger.share() <= 31
