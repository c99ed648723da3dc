"""Devices whose context switches cost more or less than expected, or that do not preempt kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.limiter.cells import Tenant, simulate
from tests.limiter.matrix import RUN_MS, Cell, targets

POINTS = 2.0
COSTS = [
    {"switch_us": 20},
    {"switch_us": 300},
    {"switch_us": 500},
    {"switch_us": 15, "preempt_us": 125},
    {"switch_us": 15, "preempt_us": 250, "slice_us": 1024},
]


@pytest.mark.parametrize("world", COSTS, ids=str)
@pytest.mark.parametrize("kernel", ["5us", "50us", "1ms", "lognormal", "bimodal"])
@pytest.mark.parametrize("program", ["stream", "sync"])
def test_both_switch_costs_are_learned(kernel: str, program: str, world: dict[str, Any]) -> None:
    """The configured cost is 125 us, and the configured slice 2 ms."""
    cell = Cell("", (Tenant(30, kernel, program), Tenant(70, kernel, program)), program == "sync", world)
    ledgers = simulate(cell.tenants, ms=RUN_MS, seed=1, **world)
    for target, ledger in zip(targets(cell, 1), ledgers):
        assert ledger.share() == pytest.approx(target, abs=POINTS)


@pytest.mark.parametrize("told_us", [20, 125, 400])
def test_configured_switch_cost_does_not_matter(told_us: int) -> None:
    tenants = [Tenant(30, "50us"), Tenant(50, "50us")]
    for ledger in simulate(tenants, ms=RUN_MS, switch_us=15, preempt_us=250, told_switch_us=told_us):
        assert ledger.charged_ns / 45e6 == pytest.approx(ledger.held_ns / 45e6, abs=1.3)


@pytest.mark.parametrize("switch_us", [15, 250])
def test_preemption_cost_does_not_include_the_end_of_a_kernel(switch_us: int) -> None:
    """Without preemption inside kernels, a launch waits for the end of a kernel and for the switch of 500 us."""
    tenants = [Tenant(30, "bimodal"), Tenant(70, "bimodal")]
    ledgers = simulate(tenants, ms=RUN_MS, switch_us=switch_us, preempt_us=500, whole_kernels=1)
    for target, ledger in zip((30, 70), ledgers):
        assert ledger.share() == pytest.approx(target, abs=POINTS)


@pytest.mark.parametrize(
    ("kernel", "program", "slice_us", "switch_us", "preempt_us", "seed"),
    [
        ("1ms", "sync", 1024, 125, 250, 3),  # a kernel ends soon after its slice
        ("1ms", "sync", 500, 15, 125, 2),  # the other container only completes its marker
        ("50us", "stream", 500, 15, 15, 1),  # late probe events complete together with markers
    ],
)
def test_limit_holds_for_kernels_that_end_soon_after_their_slice(
    kernel: str, program: str, slice_us: int, switch_us: int, preempt_us: int, seed: int
) -> None:
    """The device does not preempt inside kernels."""
    world = {"slice_us": slice_us, "told_slice_us": slice_us, "switch_us": switch_us, "preempt_us": preempt_us}
    tenants = (Tenant(30, kernel, program), Tenant(70, kernel, program))
    cell = Cell("", tenants, program == "sync", {**world, "whole_kernels": 1})
    ledgers = simulate(cell.tenants, ms=RUN_MS, seed=seed, **cell.world)
    for target, ledger in zip(targets(cell, seed), ledgers):
        assert ledger.share() == pytest.approx(target, abs=POINTS)


@pytest.mark.parametrize("program", ["stream", "sync"])
@pytest.mark.parametrize("limits", [(30, 70), (25, 25, 25, 25)], ids=str)
def test_limit_holds_without_preemption_inside_kernels(limits: tuple[float, ...], program: str) -> None:
    """A kernel of 20 ms runs to its end, and the marker after it waits until its context is switched in again.

    The limiter recognises that in the first 1.5 s.
    """
    cell = Cell("", tuple(Tenant(limit, "20ms", program) for limit in limits), program == "sync", {"whole_kernels": 1})
    ledgers = simulate(cell.tenants, ms=10_500, seed=1, **cell.world)
    for target, ledger in zip(targets(cell, 1), ledgers):
        assert ledger.share(1500) == pytest.approx(target, abs=POINTS)


@pytest.mark.parametrize("kernel", ["1ms", "20ms", "lognormal"])
@pytest.mark.parametrize("program", ["stream", "graph"])
def test_probe_events_that_are_always_prompt_are_not_believed(kernel: str, program: str) -> None:
    """The container without a limit always has work, so launches must wait, but no probe event is late."""
    tenants = [Tenant(50, kernel, program), Tenant(100, kernel, program)]
    limited, _ = simulate(tenants, ms=RUN_MS, prompt_probes=1)
    assert limited.share() == pytest.approx(50, abs=POINTS)
