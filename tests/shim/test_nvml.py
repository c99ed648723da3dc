"""NVML in a container reports its own limit, usage and processes, and nothing of other containers.

The driver is nvml_driver.c: two devices of 16 GiB, of which other containers use 10 GiB; the container has the first.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import shm_abi, usage_reader

from tests.shim.inside import compile_c
from tests.shim.real_box import GIB, NONCE, RealBox, limits

SUCCESS, INVALID_ARGUMENT, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 0, 2, 4, 6, 7
VERSION_MISMATCH = 25
NO_INSTANCE = 0xFFFFFFFF
KINDS = ("Compute", "Graphics", "MPSCompute")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("nvml"), "nvml_driver.c", "-shared", "-fPIC", "-fvisibility=hidden")


@pytest.fixture
def box(tmp_path: Path, driver: Path) -> RealBox:
    return RealBox(tmp_path / "box", {"libnvidia-ml": driver})


def use(box: RealBox, *processes: tuple[int, int], dead: tuple[tuple[int, int], ...] = ()) -> None:
    """Write a usage file with these processes, (pid, bytes on device 0) each."""
    data = bytearray(shm_abi.pack_usage(NONCE, 1))
    rows = [(*process, True) for process in processes] + [(*process, False) for process in dead]
    for number, (pid, used, alive) in enumerate(rows):
        owner = 5000 + number if alive else usage_reader.OWNER_DIED
        slot = shm_abi.packer("gs_slot").pack(owner, 5000 + number, 1, pid, 1, used, *[0] * (shm_abi.MAX_DEVICES - 1))
        start = shm_abi.offset("gs_usage", "slot") + number * shm_abi.SLOT_SIZE
        data[start : start + len(slot)] = slot
    struct.pack_into("<I", data, shm_abi.offset("gs_usage", "slots_high"), len(rows))
    (box.rw / "usage").write_bytes(data)


def probe(box: RealBox, what: str, *arguments: Any) -> Any:
    return box.probe(what, *arguments, script="nvml_probe.py")


@pytest.mark.parametrize(
    ("limit", "processes", "total", "used", "free"),
    [
        (4 * GIB, (), 4 * GIB, 0, 4 * GIB),
        (4 * GIB, ((101, GIB), (102, GIB // 2)), 4 * GIB, 3 * GIB // 2, 5 * GIB // 2),
        (4 * GIB, ((101, 5 * GIB),), 4 * GIB, 4 * GIB, 0),  # usage over the limit: free is 0, never negative
        (12 * GIB, ((101, GIB),), 12 * GIB, GIB, 6 * GIB),  # less memory is free on the device than the share has left
        (32 * GIB, (), 16 * GIB, 0, 6 * GIB),  # a limit above the device's size
        (None, ((101, GIB),), 16 * GIB, GIB, 6 * GIB),
        (0, (), 0, 0, 0),
    ],
)
def test_memory_is_that_of_the_share(
    limit: int | None, processes: tuple[tuple[int, int], ...], total: int, used: int, free: int, box: RealBox
) -> None:
    box.set_limits(limits(limit))
    use(box, *processes, dead=((103, GIB),))
    found = probe(box, "memory", 0)
    assert found["v1"] == [total, used, free, 0]
    assert found["v2"] == [total, used, free, total - used - free]


def test_calls_inside_the_driver_get_the_drivers_own_numbers(box: RealBox) -> None:
    """A driver function that calls another inside the library gets the driver's own numbers.

    nvmlDeviceGetMemoryInfo calls nvmlDeviceGetMemoryInfo_v2 (the first test shows that it is not virtualised twice),
    and so does nvmlDeviceGetBAR1MemoryInfo, which is passed through.
    """
    use(box, (101, GIB))
    assert probe(box, "memory", 0)["bar1"] == [16 * GIB, 19 * GIB // 2, 6 * GIB]


def test_initialisation_inside_the_driver_is_not_refused(box: RealBox) -> None:
    box.set_limits(None)
    assert probe(box, "driver_that_starts_itself") == SUCCESS


def test_device_that_was_not_granted_is_refused(box: RealBox) -> None:
    use(box, (101, GIB))
    assert set(probe(box, "errors", 1).values()) == {NO_PERMISSION}
    assert probe(box, "listed", 1, "Compute", "v3", 8)[0] == NO_PERMISSION
    assert box.usage().warnings == (usage_reader.WARNINGS[2][1],)
    assert NO_PERMISSION not in probe(box, "errors", 0).values()


def test_invalid_arguments_return_errors(box: RealBox) -> None:
    use(box, (101, GIB))
    assert probe(box, "null_and_wrong", 0) == {
        "memory NULL": INVALID_ARGUMENT,
        "memory v2 NULL": INVALID_ARGUMENT,
        "memory v2 version": VERSION_MISMATCH,
        "no device": INVALID_ARGUMENT,
        "count NULL": INVALID_ARGUMENT,
        "room without list": INVALID_ARGUMENT,
        "details NULL": INVALID_ARGUMENT,
    }


def listed(box: RealBox, kind: str, version: str, *rooms: int) -> list[Any]:
    """Return what the calls of that kind and version list, with each of these rooms."""
    found: list[Any] = probe(box, "each", *(["listed", 0, kind, version, room] for room in rooms))
    return found


def test_own_processes_are_listed(box: RealBox) -> None:
    use(box, (101, GIB), (102, 2 * GIB), dead=((103, GIB),))
    for version in ("v1", "v2", "v3"):
        instances = [] if version == "v1" else [NO_INSTANCE, NO_INSTANCE]
        want = [[101, GIB, *instances], [102, 2 * GIB, *instances]]
        all_of_them, too_many = [SUCCESS, 2, want], [INSUFFICIENT_SIZE, 2, []]
        found = listed(box, "Compute", version, 8, 2, 1, 0)
        assert found == [all_of_them, all_of_them, too_many, too_many], version
    for kind in KINDS[1:]:
        assert listed(box, kind, "v3", 8) == [[SUCCESS, 0, []]], f"own processes are compute processes, not {kind}"


def test_no_foreign_process_is_listed(box: RealBox) -> None:
    use(box)
    for kind in KINDS:
        assert listed(box, kind, "v3", 8, 0) == [[SUCCESS, 0, []]] * 2, kind


def test_process_details_list_own_processes_only(box: RealBox) -> None:
    use(box, (101, GIB), (102, 2 * GIB))
    assert probe(box, "details", 0, 0, 8) == [SUCCESS, 2, [[101, GIB], [102, 2 * GIB]]]
    assert probe(box, "details", 0, 0, 1) == [INSUFFICIENT_SIZE, 2, []]
    assert probe(box, "details", 0, 1, 8) == [SUCCESS, 0, []]


def test_utilization_of_own_processes_only(box: RealBox) -> None:
    use(box, (102, GIB), (999, GIB))
    assert probe(box, "utilization", 0, 3) == [SUCCESS, 1, [102, 0, 0]]
    assert probe(box, "utilization", 0, 0)[:2] == [INSUFFICIENT_SIZE, 3]
    use(box)
    assert probe(box, "utilization", 0, 3) == [NOT_FOUND, 0, [0, 0, 0]]


def test_a_thousand_processes_are_listed(box: RealBox) -> None:
    use(box, *((pid, 1 << 20) for pid in range(1, shm_abi.MAX_SLOTS + 1)))
    result, count, rows = probe(box, "listed", 0, "Compute", "v3", shm_abi.MAX_SLOTS)
    assert (result, count, len(rows)) == (SUCCESS, shm_abi.MAX_SLOTS, shm_abi.MAX_SLOTS)
