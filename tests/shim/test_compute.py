"""A compute limit holds, whatever the program does: measured from the simulated device's own ledger, in real time."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from simulator.ledger import Ledger
from tests.shim.box import Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS
from tests.shim.tenants import Tenant, all_hold, boxes, holds, observe, tenants
from tests.support.busy import build, words

POINTS = 5.0  # tolerance for a machine with other load; exact figures come from make bench
THREADS_POINTS = (
    2.0  # threads gain 5 points and more if one records an event before another's launch; POINTS would hide that
)
SETTLED_S = 0.5  # the limiter probes the first launches one by one
WINDOW_S = 1.5

BUSY = {"kernel": 1000}
# Several callers of the rate limiter at once; one caller with kernels of every length is in tests/limiter
ALONE: dict[str, tuple[int, dict[str, Any]]] = {
    "streams": (40, {"kernel": 300, "streams": 8}),
    "threads": (40, {"kernel": 300, "threads": 4}),
    "processes": (25, {"kernel": 500, "processes": 4}),
}


@pytest.mark.parametrize("name", ALONE)
def test_limit_holds_alone(name: str) -> None:
    percent, options = ALONE[name]
    with boxes(percent) as (box,), tenants((box, options)) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        points = THREADS_POINTS if name == "threads" else POINTS
        holds(tenant, percent, points, WINDOW_S, least=percent - POINTS)


COMPANY: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "graphs beside syncs": ((30, {"mode": "graph", "kernel": 100}), (50, {"mode": "sync", "kernel": 500})),
    "beside an unlimited one": ((30, {"kernel": 1000}), (100, {"kernel": 1000})),
}


@pytest.mark.parametrize("name", COMPANY)
def test_limits_hold_on_a_shared_device(name: str) -> None:
    """Each tenant gets its share, switches included; an unlimited one gets what is left."""
    (first, first_does), (second, second_does) = COMPANY[name]
    with boxes(first, second) as (a, b), tenants((a, first_does), (b, second_does)) as (one, two):
        observe(a, SETTLED_S, [one, two])
        least = first - 2 * POINTS, min(second, 100 - first) - 2 * POINTS
        all_hold(2 * WINDOW_S, (one, least[0], first + POINTS), (two, least[1], second + POINTS))


def switching(box: Box, watched: list[Tenant], seconds: float) -> float:
    """Return the part of its time that the device switches between contexts, in percent."""
    with Ledger(box.device(0)) as ledger:
        before = sum(group.switch_ns for group in ledger.groups())
        observe(box, seconds, watched)
        return (sum(group.switch_ns for group in ledger.groups()) - before) / (seconds * 1e7)


def processor_s(tenant: Tenant) -> float:
    """Return the processor time of all processes of the tenant."""
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/pid").stat().st_ino == tenant.pidns:
                used += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


def test_turns_hold_the_limits_with_fewer_switches() -> None:
    """In real processes, which see each other's turns in activity files only, and use no processor while they wait.
    Exact in tests/limiter/test_turns.py."""
    found = []
    for round_ms in (0, 20):
        with (
            boxes(30, 70, round_ms=round_ms) as (a, b),
            tenants((a, {"kernel": 2000}), (b, {"kernel": 2000})) as (one, two),
        ):
            observe(a, 2 * SETTLED_S, [one, two])
            before = processor_s(one)
            found.append(switching(a, [one, two], WINDOW_S))
            assert before > 0 and processor_s(one) - before < 0.1 * WINDOW_S
            if round_ms and found[1] >= 0.9 * found[0]:  # half of it, unless other load ends turns
                found[1] = min(switching(a, [one, two], WINDOW_S) for _ in range(2))
            if round_ms:
                all_hold(WINDOW_S, (one, 20, 30 + POINTS), (two, 60, 70 + POINTS))
    assert found[1] < 0.9 * found[0]


TRACED = """
cd "$1"; shift
GPUSHARE_TRACE=trace.json "$@" >report && cat trace.json
GPUSHARE_TRACE=/nowhere/trace.json "$@" >report
"""


def test_trace_explains_each_charge(tmp_path: Path) -> None:
    """A line for each interval. A file that cannot be written is named once, and does not stop the program."""
    with boxes(30) as (box,):
        program = [str(build()), *words(kernel=1000, seconds=0.5)]
        done = box.run(["sh", "-c", TRACED, "sh", str(tmp_path), *program], timeout_s=60)
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        "gpushare: GPUSHARE_TRACE cannot be written: /nowhere/trace.json; name a file .*\n", done.stderr
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) > 100
    for one in records:
        assert one["charged_ns"] == one["own_ns"] + one["switch_ns"] and one["start_ns"] <= one["end_ns"]
    took_ns = records[-1]["end_ns"] - records[0]["start_ns"]
    assert 0 < sum(one["charged_ns"] for one in records) < 0.35 * took_ns + 0.1e9
    assert sum(one["waited_ns"] for one in records if one["why"] == "bucket") > 0.2 * took_ns


def test_each_device_has_its_own_limit() -> None:
    with boxes([30, 60], gpus=2) as (box,), tenants((box, BUSY), (box, {**BUSY, "device": 1})) as (one, two):
        observe(box, SETTLED_S, [one, two])
        holds(one, 30, POINTS)
        holds(two, 60, POINTS)


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 1), (1, 2)])
def test_spinning_kernel_and_its_releaser_make_progress(processes: int, devices: int) -> None:
    """Kernels make progress when one spins until another has run and the limit holds both back.

    They are in one stream, in two processes, or on two devices. Spinning is charged, so few of them run.
    """
    with boxes([10] * devices, gpus=devices) as (box,):
        words_of = words(mode="pair", kernel=1000, processes=processes, devices=devices, seconds=3)
        said = json.loads(box.run([str(build()), *words_of]).stdout)
    assert said["failed"] == "" and said["done"] >= 2


WAYS = """
class Config(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("n", c_uint)]

class Attribute(ctypes.Structure):
    _fields_ = [("id", c_uint), ("pad", c_uint), ("value", c_uint * 16)]

class Launch(ctypes.Structure):
    _fields_ = [("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
                ("stream", c_void_p), ("parameters", c_void_p)]

ONE = (c_uint * 3)(1, 1, 1)
start()
stream, function = new_stream(), kernel("spin_us_1000")

def ex(name, *attributes):
    array = (Attribute * len(attributes))(*(Attribute(id=number, value=(c_uint * 16)(1)) for number in attributes))
    config = Config(ONE, ONE, 0, stream, ctypes.addressof(array) if attributes else None, len(attributes))
    return lambda: (getattr(cuda, name)(byref(config), function, None, None), array)[0]

def plain(name, where, *extra):
    return lambda: getattr(cuda, name)(function, 1, 1, 1, 1, 1, 1, 0, where, *extra)

def found(name):
    "What cuGetProcAddress gives out."
    pointer = c_void_p()
    ok(cuda.cuGetProcAddress(name.encode(), byref(pointer), 12000, c_uint64(0)))
    call = ctypes.CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)(pointer.value)
    return lambda: call(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

def graph(name, where):
    made, executable = c_void_p(), c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(stream, 2))
    ok(plain("cuLaunchKernel", stream, None, None)())
    ok(cuda.cuStreamEndCapture(stream, byref(made)))
    ok(cuda.cuGraphInstantiateWithFlags(byref(executable), made, c_uint64(0)))
    return lambda: getattr(cuda, name)(executable, where)

def multi():
    launches = (Launch * 1)(Launch(function, ONE, ONE, 0, stream, None))
    return lambda: cuda.cuLaunchCooperativeKernelMultiDevice(launches, 1, 0)

LAUNCHES = {
    "default stream": plain("cuLaunchKernel", None, None, None),
    "legacy handle": plain("cuLaunchKernel", c_void_p(1), None, None),
    "per-thread handle": plain("cuLaunchKernel", c_void_p(2), None, None),
    "per-thread function": plain("cuLaunchKernel_ptsz", None, None, None),
    "cooperative": plain("cuLaunchCooperativeKernel", stream, None),
    "cooperative per thread": plain("cuLaunchCooperativeKernel_ptsz", None, None),
    "several devices": multi(),
    "configured": ex("cuLaunchKernelEx"),
    "configured per thread": ex("cuLaunchKernelEx_ptsz"),
    "overlapping": ex("cuLaunchKernelEx", 6),
    "of CUDA 1": lambda: cuda.cuLaunch(function),
    "of CUDA 1, a grid": lambda: cuda.cuLaunchGrid(function, 1, 1),
    "of CUDA 1, in a stream": lambda: cuda.cuLaunchGridAsync(function, 1, 1, stream),
    "looked up": found("cuLaunchKernel"),
    "graph": graph("cuGraphLaunch", stream),
    "graph per thread": graph("cuGraphLaunch_ptsz", None),
}
for way, launch in LAUNCHES.items():
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 0.5:
        ok(launch())
        n += 1
    ok(cuda.cuCtxSynchronize())
    print(way.replace(" ", "-"), 0.1 * n / (time.monotonic() - began))
"""


def test_every_way_to_launch_is_limited() -> None:
    """Each gets 30 % of half a second for its kernels, of a millisecond each."""
    with boxes(30) as (box,):
        words = run(box, WAYS, helpers=HELPERS)
    percent = dict(zip(words[::2], map(float, words[1::2])))
    assert len(percent) == 16 and {way: got for way, got in percent.items() if not 10 < got < 30 + POINTS} == {}
