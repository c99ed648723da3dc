"""Memory that the driver counts against limits: which container exceeds its limit, when it is logged, and when it is
stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.core.errors import DeviceError
from gpushare.core.model import Lease
from gpushare.gpu import nvml_usage
from gpushare.gpu.nvml_usage import Gpu, Process
from gpushare.monitor import overuse
from gpushare.system import procs

from tests.support.host import logfmt
from tests.unit import pure

GIB, MIB = 1 << 30, 1 << 20
A, B = pure.UUIDS
SLACK = 128 * MIB  # a quarter of the context of pure.device


def gpus(**processes: Any) -> dict[str, Gpu]:
    """gpus(A={pid: bytes})"""
    empty = Gpu(16 * GIB, 0, 0, 0, 0, ())
    given = {A: processes.get("A", {}), B: processes.get("B", {})}
    return {
        uuid: empty._replace(processes=tuple(Process(*one) for one in used.items())) for uuid, used in given.items()
    }


def judged(limit: Optional[int], used: dict[int, Any], uuid: str = "A", **share: int) -> overuse.Comparison:
    lease = pure.lease(pure.share(0, 0, limit)._replace(**share))
    return overuse.judge([lease], gpus(**{uuid: used}), {1: "c1", 2: "c1", 3: "other"}.get)


@pytest.mark.parametrize(
    ("limit", "used", "uuid", "share", "over"),
    [
        (GIB, {1: GIB}, "A", {}, 0),
        (GIB, {1: GIB + SLACK}, "A", {}, 0),
        (GIB, {1: GIB + SLACK + 1}, "A", {}, 1),
        (GIB, {1: GIB, 2: 2 * SLACK}, "A", {}, 0),  # a context in each process
        (GIB, {1: GIB, 2: 2 * SLACK + 5}, "A", {}, 5),
        (GIB, {1: GIB, 3: 9 * GIB, 4: 9 * GIB}, "A", {}, 0),  # of other containers
        (GIB, {1: None}, "A", {}, 0),  # the driver does not report it
        (None, {1: 15 * GIB}, "A", {}, 0),
        (GIB, {1: 3 * GIB}, "A", {"draining_bytes": 3 * GIB}, 0),  # the limit was lowered
        (GIB, {1: 2 * GIB}, "A", {"virtual_bytes": 2 * GIB}, 0),  # its host part, during its migration slice
        (GIB, {1: 2 * GIB + SLACK + 7}, "A", {"virtual_bytes": 2 * GIB}, 7),
        (GIB, {1: 300 * MIB}, "B", {}, 300 * MIB),  # no allocation on that device
        (0, {}, "A", {}, 0),
    ],
)
def test_bytes_over_limit_are_found(
    limit: Optional[int], used: dict[int, Any], uuid: str, share: Any, over: int
) -> None:
    comparison = judged(limit, used, uuid, **share)
    assert sum(one.over_bytes for one in comparison.findings) == over
    assert sum(comparison.unshared_bytes.values()) == sum(size or 0 for pid, size in used.items() if pid > 2)


def test_device_without_allocation_has_no_slot() -> None:
    assert {(one.uuid, one.slot) for one in judged(GIB, {1: MIB}, "B").findings} == {(A, 0), (B, None)}


def lines(path: Path) -> list[dict[str, str]]:
    return [logfmt(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_overuse_is_logged_once_per_occurrence(tmp_path: Path) -> None:
    log, watch, lease = tmp_path / "log", overuse.Watch(), pure.lease(pure.share(0, 0, GIB))
    over, below = judged(GIB, {1: 3 * GIB}), judged(GIB, {1: GIB})
    counts = []
    for comparison in (over, below, over, over, over, below, over, over):
        watch.follow([lease], comparison, str(log), "report")
        counts.append(len(lines(log)))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2] and watch.exceeded == {"c1": 2}
    fields = lines(log)[0]
    assert (fields["decision"], fields["devices"], fields["used"], fields["memory"]) == (
        *("exceeded", A, str(3 * GIB)),
        str(GIB),
    )
    watch.follow([], overuse.Comparison((), {}), str(log), "report")
    assert watch.exceeded == {}, "an ended container leaves no record"


def _sleep() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process
        process.kill()


sleeper, bystander = pytest.fixture(_sleep, name="sleeper"), pytest.fixture(_sleep, name="bystander")


def running(process: subprocess.Popen[bytes], **changes: Any) -> Lease:
    found = procs.find(process.pid)
    assert found is not None
    lease = pure.lease(pure.share(0, 0, GIB))
    return lease._replace(init_pid=process.pid, init_start=found.start)._replace(**changes)


def test_stop_kills_only_init(sleeper: Any, bystander: Any) -> None:
    comparison, watch = judged(GIB, {1: 3 * GIB, 2: 0}), overuse.Watch()
    comparison = comparison._replace(findings=tuple(one._replace(pids=(bystander.pid,)) for one in comparison.findings))
    watch.follow([running(sleeper)], comparison, "none", "stop")
    assert sleeper.poll() is None, "one sample is not enough"
    watch.follow([running(sleeper)], comparison, "none", "stop")
    assert sleeper.wait(10) == -signal.SIGKILL
    bystander.terminate()  # SIGKILL, if it was sent, was sent before
    assert bystander.wait(10) == -signal.SIGTERM, "its pid belonged to the container when NVML was queried"


def test_reused_pid_is_not_killed(sleeper: Any) -> None:
    overuse.stop(running(sleeper, init_start=1), (), lambda _: "c1")
    assert sleeper.poll() is None


def test_stop_also_kills_processes_over_limit(sleeper: Any, bystander: Any) -> None:
    """In the host's pid namespace they would outlive the first process."""
    overuse.stop(running(sleeper), (bystander.pid,), {bystander.pid: "c1"}.get)
    assert (sleeper.wait(10), bystander.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)


def test_stop_kills_no_process_that_got_the_number_meanwhile(
    sleeper: Any, bystander: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's process ends directly after its owner was found."""
    asked, find = [], procs.find

    def owner(pid: int) -> str:
        asked.append(pid)
        return "c1"

    def before(pid: int) -> Optional[procs.Process]:
        found = find(pid)
        return found._replace(start=1) if found and pid == bystander.pid and not asked else found

    monkeypatch.setattr(procs, "find", before)
    overuse.stop(running(sleeper), (bystander.pid,), owner)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert (asked, bystander.poll()) == ([bystander.pid], None)


def test_owner_is_found_by_unshared_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {10: "/k/a", 11: "/k/a/sub/x", 12: "/k/ab", 13: "/user", 14: "/", os.getpid(): "/user/me", 20: "/user"}
    spaces = {13: "pid:[2]", 20: "pid:[2]", 14: "pid:[1]", os.getpid(): "pid:[1]"}
    monkeypatch.setattr(procs, "cgroup_of", lambda pid: groups.get(pid, ""))
    monkeypatch.setattr(overuse, "_pid_namespace", lambda pid: spaces.get(pid, ""))
    monkeypatch.setattr(procs, "alive", lambda pid, start: start == 7)

    def lease(name: str, cgroup: str, init: int = 0, start: int = 7) -> Lease:
        return pure.lease(container_id=name)._replace(cgroup=cgroup, init_pid=init, init_start=start)

    owner = overuse.Owners([lease("a", "/k/a"), lease("b", "/k/a/sub"), lease("u", "/user", 20), lease("r", "/")])
    assert [owner(pid) for pid in (10, 11, 12, 13, 14, 20, 99)] == ["a", "b", None, "u", None, "u", None]
    reused = overuse.Owners([lease("u", "/gone", 20, start=6)])
    assert [reused(pid) for pid in (13, 20)] == [None, None], "its first process has ended, and this is another one"
    both = overuse.Owners([lease("x", "/k/a"), lease("y", "/k/a")])
    assert both(10) is None
    mine = overuse.Owners([lease("x", "/user", os.getpid())])
    assert (mine(13), mine(14)) == (None, None), "our own cgroup contains every process"


def test_child_answers_repeatedly_until_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = gpus(A={5: GIB, 6: None})
    monkeypatch.setattr(nvml_usage, "_all", lambda library: answers if library == "/good.so" else 1 / 0)
    asker = nvml_usage.Asker()
    try:
        assert [asker.read(path) for path in ("/good.so", "/bad.so", "", "/good.so")] == [answers, None, None, answers]
        os.kill(asker._pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="has ended"):
            asker.read("/good.so")
    finally:
        asker.close()
