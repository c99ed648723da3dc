"""A compute limit holds, whatever the program does: judged by the simulated device's own ledger, in real time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lib.busy import build, words
from tests.shim.tenants import boxes, holds, observe, tenants

POINTS = 5.0  # on a machine that others use as well; exact figures come from make bench
SETTLED_S = 0.5  # the first launches are looked at one by one
WINDOW_S = 1.5

BUSY = {"kernel": 1000}
ALONE: dict[str, tuple[int, dict[str, Any]]] = {
    "stream": (50, {"kernel": 1000}),
    "tiny": (30, {"kernel": 20}),
    "long": (30, {"kernel": 20000}),
    "graph": (30, {"mode": "graph", "kernel": 100}),
    "sync": (30, {"mode": "sync", "kernel": 1000}),
    "streams": (40, {"kernel": 300, "streams": 8}),
    "threads": (40, {"kernel": 300, "threads": 4}),
    "processes": (25, {"kernel": 500, "processes": 4}),
    "irregular": (40, {"kernel": "bimodal"}),
}


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    percent, options = ALONE[name]
    with boxes(percent) as (box,), tenants((box, options)) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        holds(tenant, percent, POINTS, WINDOW_S)


def test_no_limit_is_none() -> None:
    with boxes(100) as (box,), tenants((box, {"kernel": 1000})) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        holds(tenant, 100, POINTS, WINDOW_S, least=90)


COMPANY: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "two": ((30, {"kernel": 1000}), (70, {"kernel": 1000})),
    "four processes beside one": ((25, {"kernel": 500, "processes": 4}), (75, {"kernel": 1000})),
    "graphs beside syncs": ((30, {"mode": "graph", "kernel": 100}), (50, {"mode": "sync", "kernel": 500})),
    "beside an unlimited one": ((30, {"kernel": 1000}), (100, {"kernel": 1000})),
}


@pytest.mark.parametrize("name", COMPANY)
def test_in_company(name: str) -> None:
    """Each gets its share, switches to it included, or what is left by who is unlimited."""
    (first, first_does), (second, second_does) = COMPANY[name]
    with boxes(first, second) as (a, b), tenants((a, first_does), (b, second_does)) as (one, two):
        observe(a, SETTLED_S, [one, two])
        holds(one, first, POINTS, 2 * WINDOW_S)
        holds(two, second, POINTS, 2 * WINDOW_S, least=None if second < 100 else 100 - first - 2 * POINTS)


def test_each_device_has_its_own_limit() -> None:
    with boxes([30, 60], gpus=2) as (box,), tenants((box, BUSY), (box, {**BUSY, "device": 1})) as (one, two):
        observe(box, SETTLED_S, [one, two])
        holds(one, 30, POINTS)
        holds(two, 60, POINTS)


@pytest.mark.parametrize("processes", [1, 2])
def test_waiter_and_releaser_both_go_on(processes: int) -> None:
    """Kernels that spin until another one has run, which the limit holds back: in a stream, or in another process.

    Spinning is charged, so there are few of them.
    """
    with boxes(10) as (box,):
        words_of = words(mode="pair", kernel=1000, processes=processes, seconds=8)
        said = json.loads(box.run([str(build()), *words_of]).stdout)
    assert said["failed"] == "" and said["done"] >= 2
