"""The ledger of device time, and the scheduling behaviour that a compute limiter has to cope with."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from simulator.ledger import Group, Ledger
from simulator.simhost import Timing
from tests.support.busy import Busy
from tests.support.remote import Remote

MS = 1_000_000
OWN_PIDNS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def group_of(ledger: Ledger, pidns: int) -> Group:
    return next(g for g in ledger.groups() if g.pidns == pidns)


def test_two_containers_share_the_device_in_each_window(simhost: Path, ledger: Ledger) -> None:
    with Busy(simhost, OWN_PIDNS, seconds=1.3) as a, Busy(simhost, OWN_PIDNS, seconds=1.3, kernel=200) as b:
        for busy in (a, b):
            busy.go()
        said = [a.result(), b.result()]
        start_ns, end_ns = max(s["started_ns"] for s in said), min(s["ended_ns"] for s in said)
        histories = [ledger.history(s["pidns"]) for s in said]
    for history in histories:
        shares = history.shares(start_ns + 50 * MS, end_ns - 20 * MS, 100 * MS)
        assert len(shares) >= 11 and all(0.4 < share < 0.6 for share in shares)
    both = [sum(pair) for pair in zip(*(h.shares(start_ns + 50 * MS, end_ns - 20 * MS, 100 * MS) for h in histories))]
    assert all(
        share == pytest.approx(1, abs=1e-6) for share in both
    )  # the device was never idle, and never shared twice


def test_switch_counts_for_the_context_switched_to(make_host: Callable[..., Path]) -> None:
    root = make_host("noisy", timing=Timing(switch_us=(150, 151), slice_noise=0))
    with Busy(root, OWN_PIDNS, seconds=1.5) as a, Busy(root, OWN_PIDNS, seconds=1.5) as b:
        for busy in (a, b):
            busy.go()
        said = [a.result(), b.result()]
    with Ledger(str(root / "dev/nvidia0")) as ledger:
        groups = [group_of(ledger, s["pidns"]) for s in said]
        assert ledger.snapshot().busy_ns == sum(g.busy_ns for g in groups)
    for group in groups:
        assert group.busy_ns == group.work_ns + group.switch_ns
        assert group.switch_ns / group.busy_ns == pytest.approx(0.15 / 2.15, rel=0.15)


def test_slices_differ_in_length(make_host: Callable[..., Path]) -> None:
    root = make_host("noisy", timing=Timing(slice_noise=0.5))
    with Remote(root) as a, Busy(root, seconds=60) as b:
        b.go()
        a.do("cuda.context(); module = cuda.load(b'SIMMOD globals=0 code=4096\\n\\0')")
        a.do("slow = cuda.function(module, 'spin_us_1000'); stream = cuda.stream(1)")
        a.do("events = [cuda.event() for _ in range(300)]")
        a.do("[(cuda.launch(slow, stream), cuda.ok('cuEventRecord', e, stream)) for e in events]")
        a.do("cuda.ok('cuEventSynchronize', events[-1])")
        gaps = a.get("[cuda.milliseconds(x, y) for x, y in zip(events, events[1:])]")
    away = sorted(gap - 1 for gap in gaps if gap > 2)
    assert len(away) > 50 and away[0] < 1.6 and away[-1] > 2.6 and mean(away) == pytest.approx(2.1, abs=0.25)


def test_device_time_of_dead_processes_is_kept(start: Callable[..., Remote], ledger: Ledger) -> None:
    doomed, survivor = start(), start()
    for p in (doomed, survivor):
        p.do("cuda.context(); module = cuda.load(b'SIMMOD globals=0 code=4096\\n\\0')")
    doomed.do("slow = cuda.function(module, 'spin_us_20000'); cuda.launch(slow); cuda.synchronize()")
    doomed.kill()
    while [c.host_pid for c in ledger.clients()] != [survivor.pid]:
        survivor.do("cuda.free_bytes()")  # any client reaps dead ones
    (group,) = ledger.groups()
    assert group.busy_ns >= group.work_ns >= 20 * MS


def test_history_covers_ten_seconds_and_rejects_other_ranges(simhost: Path, ledger: Ledger) -> None:
    with Busy(simhost, seconds=1) as busy:
        busy.go()
        said = busy.result()
    history = ledger.history(said["pidns"])
    assert mean(history.shares(said["started_ns"], said["ended_ns"] - 20 * MS, 10 * MS)) > 0.9
    assert sum(history.shares(said["started_ns"] - 300 * MS, said["started_ns"] - 20 * MS, 10 * MS)) == 0
    with pytest.raises(ValueError, match="history ends"):
        history.shares(said["started_ns"], time.monotonic_ns() + 1000 * MS, 10 * MS)
    with pytest.raises(ValueError, match="start of the history"):
        history.shares(said["started_ns"] - 11_000 * MS, said["ended_ns"] - 20 * MS, 10 * MS)
    with pytest.raises(KeyError):
        ledger.history(1)


def test_spinning_kernel_uses_its_slices(simhost: Path, ledger: Ledger) -> None:
    """The kernel uses half of the device as long as the neighbour works, since no kernel sets its flag."""
    with Remote(simhost) as spinner, Busy(simhost, OWN_PIDNS, seconds=0.5) as busy:
        spinner.do("from ctypes import c_uint, c_void_p, c_uint64, byref, cast, pointer")
        spinner.do("cuda.context(); module = cuda.load(b'SIMMOD globals=0 code=4096\\n\\0'); stream = cuda.stream(1)")
        spinner.do("flag = c_uint64(cuda.alloc(4096)); value = c_uint64(1); cuda.ok('cuMemsetD8_v2', flag, 0, 4096)")
        spinner.do("arguments = (c_void_p * 2)(*(cast(pointer(v), c_void_p) for v in (flag, value)))")
        spinner.do("wait, set_ = (cuda.function(module, n) for n in ('wait_flag', 'set_flag'))")
        launch = "cuda.ok('cuLaunchKernel', {}, *[c_uint(1)] * 6, c_uint(0), {}, arguments, None)"
        spinner.do(launch.format("wait", "stream"))
        busy.go()
        said = busy.result()
        assert 0.35 < said["done_ns"] / (said["ended_ns"] - said["started_ns"]) < 0.6
        assert spinner.get("cuda.code('cuStreamQuery', stream)") == 600
        spinner.do("other = cuda.stream(1)")
        spinner.do(launch.format("set_", "other"))  # concurrently in the same context
        spinner.do("cuda.ok('cuStreamSynchronize', stream)")
        group = next(g for g in ledger.groups() if g.pidns != said["pidns"])
        assert group.busy_ns - group.work_ns - group.switch_ns > 150 * MS


def test_stream_wait_uses_no_device_time(simhost: Path) -> None:
    """Assumed: the front end waits, not a kernel."""
    with Remote(simhost) as waiter, Busy(simhost, OWN_PIDNS, seconds=0.5) as busy:
        waiter.do("from ctypes import c_uint; cuda.context(); stream = cuda.stream(1); flag = cuda.alloc(4096)")
        waiter.do("cuda.ok('cuMemsetD8_v2', flag, 0, 4096)")
        waiter.do("cuda.ok('cuStreamWaitValue32_v2', stream, flag, c_uint(1), c_uint(0))")
        busy.go()
        said = busy.result()
    assert said["done_ns"] > 0.9 * (said["ended_ns"] - said["started_ns"])


def fastest(process: Remote, code: str, times: int) -> float:
    """The smallest `took` of these runs: other load delays some of them."""
    found: list[float] = []
    for _ in range(times):
        process.do(code)
        found.append(process.get("took"))
    return min(found)


def test_launches_and_records_cost_the_configured_time(make_host: Callable[..., Path]) -> None:
    root = make_host("costly", timing=Timing(launch_us=100, record_us=200, bubble_us=300))
    with Remote(root) as p:
        p.do("import time; cuda.context(); module = cuda.load(b'SIMMOD globals=0 code=4096\\n\\0')")
        p.do(
            "brief, stream, events = cuda.function(module, 'spin_us_1'), cuda.stream(1), [cuda.event() for _ in '123']"
        )
        launch = (
            "t = time.perf_counter(); [cuda.launch(brief, stream) for _ in range(50)]; took = time.perf_counter() - t"
        )
        assert 0.005 <= fastest(p, launch, 10) < 0.02
        # A long kernel first, so that both events are queued before the device reaches them.
        p.do("long = cuda.function(module, 'spin_us_50000')")
        record = "t = time.perf_counter(); [cuda.ok('cuEventRecord', e, stream) for e in events]"
        took = fastest(p, f"cuda.launch(long, stream); {record}; took = time.perf_counter() - t", 3)
        assert 0.0006 <= took < 0.01
        # so that the events are recorded before it ends
        p.do(
            "cuda.launch(cuda.function(module, 'spin_us_900000'), stream); "
            "[cuda.ok('cuEventRecord', e, stream) for e in events]; cuda.ok('cuEventSynchronize', events[2])"
        )
        assert p.get("cuda.milliseconds(*events[:2])") == pytest.approx(0.3, abs=0.001)


def test_waits_end_when_the_work_does(simhost: Path) -> None:
    """A program that waits for each kernel of 200 us gets most of an idle device and does not spin.

    The best of several runs counts: whatever else this machine does can only make a wait longer.
    """
    shares = []
    while max(shares, default=0) < 0.6 and len(shares) < 10:
        with Busy(simhost, mode="sync", kernel=200, seconds=0.2) as busy:
            busy.go()
            said = busy.result()
        shares.append(said["done_ns"] / (said["ended_ns"] - said["started_ns"]))
    assert max(shares) >= 0.6, shares


def test_command_line_sets_the_timing(tmp_path: Path) -> None:
    from simulator import layout, simhost

    options = "--switch-us 10 20 --slice-ms 1 --seed 9"
    subprocess.run(["python3", simhost.__file__, str(tmp_path / "h"), *options.split()], check=True)
    config = layout.CONFIG.unpack((tmp_path / "h/dev/nvidia0").read_bytes()[: layout.CONFIG.size])
    assert config[9:11] == (1_000_000, 10_000) and config[28] == 20_000 and config[33] == 9
