"""Checks of kernel and driver, with programs and files of known answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation.backends.mps import control as mps_control

from simulator import mpscontrol
from tests.hardware import checks_offered
from tests.hardware.machine import Machine
from tests.hardware.place import TREE
from tests.hardware.session import Session
from tools.nvidia_userland import Userland

pytestmark = pytest.mark.usefixtures("no_leaks")
PATH = {"PATH": os.environ["PATH"]}


def control(tmp_path: Path, **constants: object) -> str:
    (tmp_path / "usr/bin").mkdir(parents=True)
    return str(mpscontrol.install(tmp_path, **constants))


def asked(values: dict[str, Any]) -> list[str]:
    return [answer["asked"] for answer in values["answers"]]


def test_both_protocols_are_tried(tmp_path: Path) -> None:
    note, values = checks_offered.words_of(control(tmp_path, MULTIUSER=True, PROTOCOL_3=True), PATH, "535.1")
    assert note == "protocol 2: 12 of 12 answers as assumed; protocol 3: 8 of 8 answers as assumed"
    assert values["protocol_3"]["options"] == ["--protocol", "3", "--multiuser"]
    assert asked(values["protocol_3"])[0] == mps_control.COMMANDS[3].prepare[0]
    assert "namespace get default gpushare active-thread-percentage" in asked(values["protocol_3"])
    assert "--multiuser" in values["help"]


def test_unexpected_answer_is_reported(tmp_path: Path) -> None:
    program = Path(control(tmp_path))
    program.write_text(program.read_text().replace('return f"{limits.percent:.1f}"', 'return "full"'))
    note, values = checks_offered.words_of(str(program), PATH, "615.3")
    assert "8 of 12 answers as assumed; otherwise: 'get_default_active_thread_percentage'" in note
    assert values["protocol_2"]["answers"][0]["out"] == "full", "verbatim"
    assert values["protocol_3"]["options"] == ["-p", "3"], "a driver whose documentation has it is queried too"


def test_program_without_a_daemon_gets_no_commands(tmp_path: Path) -> None:
    program = tmp_path / "control"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    program.chmod(0o755)
    note, values = checks_offered.words_of(str(program), PATH, "535.1")
    assert note.startswith("protocol 2: no daemon: broken; protocol 3: `-h` lists none")
    assert values["protocol_2"]["started"] == {"code": 3, "out": "", "err": "broken"}
    assert values["protocol_2"]["answers"] == []


@pytest.mark.every_driver
def test_real_program_answers_without_a_gpu(tmp_path: Path, userland: Userland) -> None:
    """The program answers. Its server ends at once, but its pid may still be listed when it is queried."""
    program = shutil.copy(userland.root / "usr/bin/nvidia-cuda-mps-control", tmp_path)
    note, values = checks_offered.words_of(program, {**PATH, "LD_LIBRARY_PATH": str(userland.libdir)}, userland.version)
    assert "Copyright (C)" in values["help"]
    answers = values["protocol_2"]["answers"]
    assert [one["out"] for one in answers[:6]] == ["100.0", "40.0", "40.0", "", "2G", ""]
    of_server = [one for one in answers if one["asked"].startswith("get_active_thread_percentage")]
    assert len(of_server) == 2 and not any(one["as_assumed"] for one in of_server)
    assert "protocol 3: `-h` lists none" in note


@pytest.mark.parametrize(
    ("capacity", "note"),
    [
        (None, "no dmem.capacity in "),
        ("", "dmem.capacity has 0 regions, and none is 0000:01:00.0"),
        ("nvidia/00000000:02:00.0/vidmem 17179869184\n", "dmem.capacity has 1 regions, and none is"),
        ("drm/0000:01:00.0/vram0 1\nnvidia/00000000:01:00.0/vidmem 17179869184\n", "dmem.capacity names this device: "),
    ],
)
def test_dmem_capacity_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: str | None, note: str
) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    if capacity is not None:
        (tmp_path / "sys/fs/cgroup/dmem.capacity").write_text(capacity)
    monkeypatch.setattr(Session, "ask", lambda *_, **__: {"there": []})
    result = checks_offered.dmem(session(tmp_path))
    assert result.verdict == "measured" and result.note.startswith(note)
    assert result.note.endswith("; NVML has no nvmlDeviceSetMemoryLimits_v1")
    assert result.values["capacity"] == (capacity or "")


def session(simhost: Path) -> Session:
    where: tuple[Any, ...] = ("libcuda.so.1", "libnvidia-ml.so.1", simhost, {}, (), simhost)
    what = ("some GPU", "GPU-0", "0000:01:00.0", 1 << 34, (9, 0), 132, "580.0", 13000)
    machine = Machine._make([*where, *what, "", None, (0, 0)])
    return Session(machine, time.monotonic() + 60, False, simhost, None, 0)  # type: ignore[arg-type]


# A driver with the call, which accepts exactly what its documentation says (cuda.h 13.0)
DRIVER = r"""
#include <stddef.h>
static unsigned long long block, gone;
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAllocManaged(unsigned long long *at, size_t size, unsigned flags) {
    *at = block = 0x7000000000;
    return flags == 1 ? 0 : 1;
}
struct place { int type, id; };
int cuMemPrefetchBatchAsync(unsigned long long *at, size_t *sizes, size_t count, struct place *places, size_t *indices,
                            size_t n_places, unsigned long long flags, void *stream) {
    if (count != 1 || *at != block || *sizes != 2 << 20 || n_places != 1 || *indices || flags || stream ||
        places->type != 1 || places->id)
        return 1;
    gone = *at;
    return 0;
}
int cuMemRangeGetAttribute(void *data, size_t size, int attribute, unsigned long long at, size_t count) {
    *(int *)data = at == gone ? 0 : -2;
    return size == 4 && attribute == 4 && count == 2 << 20 ? 0 : 1;
}
int cuGetProcAddress(const char *name, void **at, int version, unsigned long long flags) {
    *at = name[5] == 'P' && version >= 13000 ? (void *)cuMemPrefetchBatchAsync : 0;
    return *at ? 0 : 500;
}
"""


def test_batch_prefetch_is_tried_if_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libcuda.so"
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True, timeout=60)

    def ask(_: Session, what: str, __: object = None, **arguments: Any) -> Any:
        words = json.dumps({"library": str(library), **arguments})
        command = [sys.executable, "-m", "tests.hardware.tenant", what, words]
        said = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True, timeout=60).stdout
        return json.loads(said)

    monkeypatch.setattr(Session, "ask", ask)
    monkeypatch.setattr(checks_offered, "BATCH", ("cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync"))

    class Anywhere:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(Session, "place", lambda _: Anywhere())
    result = checks_offered.prefetch_batch(session(tmp_path))
    assert result.note == "cuMemPrefetchBatchAsync; the shim has it, too; one of 2 MiB gave 0, and went to the device"
    assert result.values["trial"] == {"bytes": 2 << 20, "code": 0, "last_location": 0}
