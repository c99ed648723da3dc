"""Looks (shim/limiter/probe.c): whose the device is, by events in a stream of our own."""

from __future__ import annotations

import pytest

from tests.limiter.cells import Tenant, simulate

ABSENT = Tenant(60, more="join=1000000")  # it was granted its share, and has no work


@pytest.mark.parametrize(("kernel", "program"), [("bimodal", "graph"), ("lognormal", "graph"), ("20ms", "graph")])
def test_what_interrupted_launches_took_is_known(kernel: str, program: str) -> None:
    """By the stamps of the launches alone it is off by a point and more over each 100 ms; long kernels leave none."""
    for ledger in simulate([Tenant(25, kernel, program)] * 4, ms=4500):
        assert ledger.mae(25, 100) <= 1.4
        assert ledger.charged_ns / 45e6 == pytest.approx(ledger.held_ns / 45e6, abs=1.0)


def test_nobody_looks_where_nobody_else_can_be() -> None:
    """A look is host time and device time; beside one that was granted something there are some."""
    alone, beside = (simulate(tenants, ms=2500)[0].marks for tenants in ([Tenant(30)], [Tenant(30), ABSENT]))
    assert alone < 0.75 * beside


@pytest.mark.parametrize("kernel", ["50us", "1ms", "20ms", "lognormal"])
@pytest.mark.parametrize("program", ["stream", "graph"])
@pytest.mark.parametrize("other", [ABSENT, Tenant(60, "50us")], ids=["absent", "there"])
def test_looks_behind_the_programs_own_work_win_nothing(kernel: str, program: str, other: Tenant) -> None:
    """All streams may share one queue of the device (CUDA_DEVICE_MAX_CONNECTIONS=1): then a look that is late says
    nothing of others."""
    ledger, *_ = simulate([Tenant(30, kernel, program), other], ms=4500, one_queue=1)
    assert ledger.share() <= 31
