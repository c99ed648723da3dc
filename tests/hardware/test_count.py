"""Reports of NVML's counts and of the costs of objects, with known answers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import checks_count, fakes, processes
from tests.hardware.session import Session
from tests.hardware.tenants import counts

MIB = 1 << 20


def test_latencies_are_in_microseconds() -> None:
    assert checks_count.spread_us([*range(1000, 100_000, 1000), 9_000_000]) == {
        "median_us": 50.5,
        "p99_us": 9000.0,
        "n": 100,
    }


@pytest.mark.parametrize(
    ("rows", "own", "host", "used"),
    [
        ([[7, 5 * MIB]], 0, 0, None),
        ([[1, 5 * MIB], [7, MIB]], 1, 0, 5 * MIB),
        ([[1, 5 * MIB], [1, 6 * MIB]], 2, 0, 6 * MIB),
        ([[4242, 5 * MIB]], 0, 1, 5 * MIB),
    ],
)
def test_process_is_found_by_its_own_or_the_hosts_pid(
    rows: list[list[int]], own: int, host: int, used: int | None
) -> None:
    seen = checks_count.listing({"pid": 1, "rows": rows}, 4242)
    assert (seen["times_by_own_pid"], seen["times_by_host_pid"], seen["bytes"]) == (own, host, used)


def test_sentence_names_each_situation() -> None:
    spread = {"median_us": 12.0, "p99_us": 80.0}
    values = {
        "own": {"times_by_own_pid": 1, "bytes": 500 * MIB},
        "in_pid_namespace": {"pid": 1, "times_by_own_pid": 0, "times_by_host_pid": 1},
        "query": {"idle": spread, "a kernel runs": spread},
        "init": spread,
        "shutdown": spread,
    }
    said = checks_count.sentence(values)
    assert "lists the own pid 1 times, with 500 MiB" in said
    assert "in a pid namespace 0 times by its own pid 1, 1 times by the host's" in said
    assert "a query takes 12 us (p99 80); a query takes 12 us (p99 80) while a kernel runs" in said
    assert "pid namespace: no unshare" in checks_count.sentence(
        {**values, "in_pid_namespace": {"missing": "no unshare"}}
    )


class Gpu:
    """A device that counts what is taken."""

    def __init__(self) -> None:
        self.free = 1000 * MIB

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        return self.free

    def take(self, size: int) -> int:
        self.free -= size
        return size

    def give(self, size: int) -> None:
        self.free += size


def test_cost_leaves_out_what_a_framework_keeps_in_its_pool() -> None:
    gpu, held = Gpu(), [0]
    costs = counts.Costs(gpu, "/nonexistent", "GPU-0", lambda: held[0])  # type: ignore[arg-type]

    def make() -> int:
        held[0] += 20 * MIB
        return gpu.take(20 * MIB) + gpu.take(2 * MIB)

    costs.of("a handle", make)
    costs.of("a stream", lambda: gpu.take(4 * MIB), lambda size: gpu.give(size - MIB))
    assert costs.rows == [
        {"item": "a handle", "device_bytes": 2 * MIB, "process_bytes": None},
        {"item": "a stream", "device_bytes": 4 * MIB, "process_bytes": None, "left_bytes": MIB},
    ]


def test_object_that_cannot_be_made_stops_no_other() -> None:
    costs = counts.Costs(Gpu(), "/nonexistent", "GPU-0")  # type: ignore[arg-type]
    costs.of("a cuDNN handle", lambda: counts.handle_of(counts.LIBRARIES[2]))
    costs.of("nothing", lambda: None)
    assert costs.rows[0] == {"item": "a cuDNN handle", "failed": "OSError: libcudnn.so is not loaded"}
    assert costs.rows[1]["device_bytes"] == 0


def test_handle_comes_from_the_library_that_is_loaded(tmp_path: Path) -> None:
    library = tmp_path / "libcublas.so.13"
    source = "int cublasCreate_v2(void **handle) { *handle = (void *)42; return 0; }"
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    ctypes.CDLL(str(library))
    assert counts.handle_of(counts.LIBRARIES[0]).value == 42


def test_costs_of_pytorch_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: Session, what: str, **__: Any) -> dict[str, Any]:
        if what == "torch_costs":
            raise processes.Failed("torch_costs: was killed by SIGSEGV")
        if what == "limit_costs":
            return {"rows": []}
        row = {"item": "64 streams", "device_bytes": 128 * MIB, "process_bytes": 0}
        return {"rows": [row, {"item": "1 stream", "device_bytes": 0, "process_bytes": 0}]}

    monkeypatch.setattr(checks_count, "has_torch", lambda: True)
    monkeypatch.setattr(Session, "ask", ask)
    monkeypatch.setattr(Session, "idle_bytes", lambda _: 0)
    machine = fakes.namespace(libnvml="", uuid="", simhost=None)
    result = checks_count.costs(Session(machine, 0, False, Path(), None, 0))  # type: ignore[arg-type]
    assert result.note == "2 kinds of objects; most take: 64 streams 128 MiB"
    assert result.values["torch"] == "torch_costs: was killed by SIGSEGV"
    assert result.values["hidden"] == ["64 streams"], "NVML does not count them for the process"
