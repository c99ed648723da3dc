"""Checks of green contexts, private tables and runtime libraries, with a driver of known answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import checks_handles, processes
from tests.hardware.machine import Machine
from tests.hardware.place import TREE
from tests.hardware.session import Session
from tests.hardware.tenants import handles

# A driver with green contexts (declared as in cuda.h 13.0) and the runtime library's private table. An event may be
# recorded only in streams of its own context, and REFUSES says from which launch on they fail.
DRIVER = r"""
#include <stddef.h>
#include <string.h>
typedef void *handle;
enum { PRIMARY = 1, GREEN = 2, GREEN_STREAM = 100, PRIMARY_STREAM = 200 };
static long current, events, launches;
static long owner[64]; /* of each event */
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxRetain(handle *context, int device) { *context = (handle)PRIMARY; return 0; }
int cuCtxSetCurrent(handle context) { current = (long)context; return 0; }
int cuCtxGetCurrent(handle *context) { *context = (handle)current; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamSynchronize(handle stream) { return 0; }
int cuStreamCreate(handle *stream, unsigned flags) { *stream = (handle)PRIMARY_STREAM; return 0; }
int cuEventCreate(handle *event, unsigned flags) {
    *event = (handle)++events;
    owner[events] = current;
    return 0;
}
int cuEventRecord(handle event, handle stream) {
    return owner[(long)event] == ((long)stream == GREEN_STREAM ? GREEN : PRIMARY) ? 0 : 400;
}
int cuEventElapsedTime(float *ms, handle start, handle end) { return 400; }
struct resource { int type; unsigned char private[92]; unsigned processors, least, aligned; char rest[36]; };
_Static_assert(sizeof(struct resource) == 144, "CUdevResource");
int cuDeviceGetDevResource(int device, struct resource *all, int type) {
    *all = (struct resource){.type = type, .processors = 132, .least = 8, .aligned = 8};
    return type != 1;
}
int cuDevSmResourceSplitByCount(struct resource *parts, unsigned *count, const struct resource *all,
                                struct resource *rest, unsigned flags, unsigned least) {
    *parts = *all;
    parts->processors = least;
    return *count != 1 || all->processors != 132 || rest || flags;
}
int cuDevResourceGenerateDesc(handle *desc, struct resource *parts, unsigned count) {
    *desc = parts;
    return count != 1 || parts->processors != 8;
}
int cuGreenCtxCreate(handle *context, handle desc, int device, unsigned flags) {
    *context = (handle)GREEN;
    return !desc || device || flags != 1;
}
int cuGreenCtxDestroy(handle context) { return 0; }
int cuCtxFromGreenCtx(handle *context, handle green) { *context = green; return 0; }
int cuGreenCtxStreamCreate(handle *stream, handle green, unsigned flags, int priority) {
    *stream = (handle)GREEN_STREAM;
    return (long)green != GREEN || flags != 1 || priority;
}
int cuModuleLoadData(handle *module, const void *image) { *module = (handle)1; return 0; }
int cuModuleGetFunction(handle *function, handle module, const char *name) { *function = (handle)1; return 0; }
int cuMemAlloc_v2(unsigned long long *address, size_t size) { *address = 4096; return 0; }
int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t size) { return 0; }
int cuLaunchKernel(handle function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, handle stream, void **parameters, void **extra) {
    return (long)stream != GREEN_STREAM || x != 32 || a != 256 || launches++ >= REFUSES ? 700 : 0;
}
static const size_t table[] = {80};
int cuGetExportTable(const void **out, const unsigned char *uuid) {
    *out = uuid[0] == 0x6b && uuid[15] == 0xf9 ? table : NULL;
    return *out ? 0 : 500;
}
"""


def driver(tmp_path: Path, refuses: int = 1 << 30) -> str:
    library = tmp_path / f"libcuda-{refuses}.so"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-DREFUSES={refuses}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True, timeout=60)
    return str(library)


def ask(what: str, **arguments: Any) -> dict[str, Any]:
    """Run a program of tests/hardware/tenants and return its answer."""
    command = [sys.executable, "-m", "tests.hardware.tenant", what, json.dumps(arguments)]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True, timeout=60)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_events_and_launches_of_green_contexts_are_reported(tmp_path: Path) -> None:
    said = ask("green", library=driver(tmp_path), kernel_us=100, rounds=1, run_s=0.05)
    assert said["processors"] == 8 and said["launched"] > 0 and said["refused"] == {}
    assert said["codes"] == {
        "event of primary in stream of primary": 0,
        "event of primary in stream of green": 400,
        "event of green in stream of primary": 400,
        "event of green in stream of green": 0,
        "green event recorded": 0,
        "time between contexts": 400,
    }


class Place:
    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def session(tmp_path: Path) -> Session:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "libcuda.so").touch()
    where: tuple[Any, ...] = ("libcuda.so.1", "libnvidia-ml.so.1", tmp_path / "shim", {}, (), None)
    what = ("some GPU", "GPU-0", "0000:01:00.0", 1 << 34, (9, 0), 132, "580.0", 13000)
    machine = Machine._make([*where, *what, "", None, (0, 0)])
    return Session(machine, time.monotonic() + 60, True, tmp_path, None, 0)  # type: ignore[arg-type]


def test_refused_launches_under_the_shim_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    def answer(_: Session, what: str, place: Any = None, **arguments: Any) -> dict[str, Any]:
        if what == "calibrate":
            return {"rounds": 7}
        return ask(what, library=driver(tmp_path, 64 if place else 1 << 30), **{**arguments, "run_s": 0.05})

    monkeypatch.setattr(Session, "ask", answer)
    monkeypatch.setattr(Session, "place", lambda *_: Place())
    result = checks_handles.green(session)
    assert result.values["shim"]["launched"] == 64 and set(result.values["shim"]["refused"]) == {"700"}
    assert "event of primary in stream of green: 400" in result.note and "launches refused" in result.note


def test_private_table_is_measured(tmp_path: Path) -> None:
    tables = ask("tables", library=driver(tmp_path))["tables"]
    assert tables.pop("CUDART_INTERFACE") == {"code": 0, "bytes": 80}
    assert {one["code"] for one in tables.values()} == {500} and len(tables) == 3


# A runtime library whose module takes TAKES bytes
RUNTIME = r"""
#include <stddef.h>
#include <string.h>
static size_t used;
static int registered;
void **__cudaRegisterFatBinary(const int *wrapper) {
    const unsigned char *image = *(const unsigned char **)(wrapper + 2);
    registered = wrapper[0] == 0x466243b1 && *(const unsigned *)image == 0xba55ed50 &&
                 strstr((const char *)image + 16 + 80, "runtime_spin_us_10") != NULL;
    return (void **)&registered;
}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e) { registered &= limit == -1; }
int cudaRuntimeGetVersion(int *version) { *version = 11080; return 0; }
int cudaFree(void *address) { return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = (1 << 30) - used; *total = 1 << 30; return 0; }
struct dim3 { unsigned x, y, z; };
int cudaLaunchKernel(const void *host, struct dim3 grid, struct dim3 block, void **args, size_t shared, void *stream) {
    used = TAKES;
    return !registered || grid.x * block.z != 1 || shared || stream;
}
int cudaDeviceSynchronize(void) { return 0; }
"""


@pytest.mark.parametrize(("takes", "verdict"), [(16 << 20, "is charged 16 MiB"), (0, "is charged 0 bytes")])
def test_modules_of_an_old_runtime_library_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Session, takes: int, verdict: str
) -> None:
    library = tmp_path / "libcudart.so.11.0"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-DTAKES={takes}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=RUNTIME, text=True, check=True, timeout=60)
    cuda = driver(tmp_path)
    monkeypatch.setattr(checks_handles, "RUNTIMES", (str(library),))
    monkeypatch.setattr(Session, "ask", lambda _, what, place=None, **words: ask(what, library=cuda, **words))
    monkeypatch.setattr(Session, "place", lambda *_: Place())
    monkeypatch.setattr(Session, "idle_bytes", lambda _: 0)
    result = checks_handles.private_loader(session)
    assert result.values["runtimes"]["11"]["shim"]["version"] == 11080
    assert not any(result.values["runtimes"]["11"]["shim"]["steps"].values())
    assert verdict in result.note and "no libcudart 11" not in result.note


# The beginning of the file that `fatbinary --create=f --image3=kind=ptx,sm=50,file=f.ptx --compress=false` of CUDA 13.5
# writes for 69 bytes of PTX
FATBINARY = bytes.fromhex(
    "50ed55ba01001000980000000000000001000101500000004800000000000000000000004000000000000600320000000000000000000000"
    "110000000000000000000000000000000000000000000000480000000000000000000000000000002e76657273696f6e"
)


def test_fat_binary_is_that_of_nvidias_program() -> None:
    """NVIDIA's driver follows an offset in it: another layout made the runtime library crash on hardware."""
    ptx = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry k() {}\n\n\n\n"
    made = handles.fat_binary(ptx[:69])
    assert made.startswith(FATBINARY)
    assert len(made) == 16 + 80 + 72 and made.endswith(b"\0")


def test_crash_names_the_call(tmp_path: Path) -> None:
    library = tmp_path / "libcudart.so.11.0"
    program = "void **__cudaRegisterFatBinary(void *w) { return *(void ***)1; }\n"
    program += "".join(f"int {name}(void) {{ return 0; }}\n" for name in list(handles.SIGNATURES)[1:])
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=program, text=True, check=True, timeout=60)
    where = {"library": driver(tmp_path), "path": str(library)}
    with pytest.raises(processes.Failed, match=r"SIGSEGV \(in handles.py, line \d+\)"):
        processes.ask("runtime", time.monotonic() + 60, None, **where)
