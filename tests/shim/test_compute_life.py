"""Compute limits while limits, processes, contexts and captures change, and beside neighbours with false activity."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
from gpushare.state.shm_abi import DEVICE_COMPUTE_SOFT, MAX_PAGES, offset

from tests.shim.attacker import TOOLS
from tests.shim.box import GIB, TREE, Box
from tests.shim.inside import PRELUDE, run
from tests.shim.launches import BUSY, HELPERS, POINTS, SETTLED_S, WINDOW_S
from tests.shim.tenants import boxes, holds, observe, tenants
from tests.shim.test_live import talk


def owners(pages: Path) -> list[int]:
    """Return the owners of the claimed pages of an activity file."""
    data = pages.read_bytes()
    at = offset("gs_pages", "owner")
    return [n for n in struct.unpack_from(f"<{MAX_PAGES}Q", data, at) if n]


@pytest.mark.parametrize("damage", ["no page", "short page", "other header", "no index"])
def test_damaged_activity_file_refuses_the_start(damage: str) -> None:
    with boxes(30) as (box,):
        page, index = box.pages(), box.pages().with_name("index")
        if damage == "short page":
            os.truncate(page, 4096)
        elif damage == "other header":
            page.write_bytes(b"x" + page.read_bytes()[1:])
        elif damage == "no index":
            index.unlink()
        else:
            box.page = []
        assert run(box, "print(cuda.cuInit(0))") == ["800"]


def test_unlimited_program_needs_no_activity_file() -> None:
    with Box() as box:
        assert run(box, "start(); print(launch(kernel('spin_us_10')))", helpers=HELPERS) == ["0"]


def test_killed_process_frees_its_share_and_its_page() -> None:
    with boxes(40) as (box,), tenants((box, BUSY), (box, BUSY)) as (first, second):
        observe(box, SETTLED_S, [first, second])
        first.kill()
        observe(box, SETTLED_S, [second])
        holds(second, 40, POINTS)
        with tenants((box, BUSY)) as (third,):
            observe(box, SETTLED_S, [second, third])
            assert len(owners(box.pages())) == 2


def test_abrupt_exit_leaves_no_debt_beyond_its_work() -> None:
    """All work was done or expected to be short, so the next process does not pay for the time in between."""
    program = """
    ends = []
    for _ in range(4):
        time.sleep(0.3)
        pid = os.fork()
        if pid == 0:
            start()
            function, stream = kernel("spin_us_20"), new_stream()
            def work():
                for _ in range(40):
                    ok(launch(function, stream))
                    ok(cuda.cuStreamSynchronize(stream))
                return 0
            took = timed(work)
            ok(launch(function, stream))
            os._exit(0 if took < 0.5 else 1)
        ends.append(os.waitpid(pid, 0)[1])
    print(*ends)
    """
    with boxes(20) as (box,):
        assert run(box, program, helpers=HELPERS) == ["0"] * 4


def test_more_contexts_than_pages_are_limited() -> None:
    with boxes(30) as (box,), tenants((box, {"kernel": 500, "processes": MAX_PAGES + 4})) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        got = observe(box, WINDOW_S, [tenant])
        assert len(owners(box.pages())) == MAX_PAGES
    assert 3 < got.of[tenant.pidns] < 30 + POINTS


def test_activity_file_that_is_truncated_again_and_again_takes_no_share() -> None:
    """A neighbour that does that kills no process and takes no share; at most it gives up its own.
    tests/limiter/test_spoof.py has other false activity, in virtual time."""
    with boxes(40, 40) as (box, neighbour), tenants((box, BUSY)) as (tenant,):
        page, stop = neighbour.pages(), threading.Event()
        data = page.read_bytes()
        head = bytearray(data[: offset("gs_pages", "page")])
        struct.pack_into("<I", head, offset("gs_pages", "high"), MAX_PAGES)
        for i in range(MAX_PAGES):
            struct.pack_into("<Q", head, offset("gs_pages", "owner") + 8 * i, 1)
        page.write_bytes(bytes(head) + os.urandom(len(data) - len(head)))

        def vary() -> None:
            while not stop.wait(0.0005):
                os.truncate(page, 0)
                os.truncate(page, len(data))
                with page.open("r+b") as file:
                    file.write(head)

        writer = threading.Thread(target=vary)
        writer.start()
        try:
            observe(box, SETTLED_S, [tenant])
            holds(tenant, 80, POINTS, least=40 - POINTS)
        finally:
            stop.set()
            writer.join()


@pytest.mark.parametrize("case", ["hidden", "no page"])
def test_soft_limit_holds_where_neighbours_cannot_be_read(case: str) -> None:
    """The program must not take the device for idle: its bucket pays for what it launches."""
    program = f"""
    start()
    function = kernel("k_ns_arg")
    if sys.argv[1] == "hidden":
        ok(ctypes.CDLL(None).umount2(b"/usr/lib/gpushare/peers", 2))
    else:  # all pages are this process's own: it has the first slot
        folder = "/usr/lib/gpushare/pages/"
        with open(folder + os.listdir(folder)[0], "r+b") as file:
            file.seek({offset("gs_pages", "owner")})
            file.write((1 | 1 << 32).to_bytes(8, "little") * {MAX_PAGES})
    began = time.monotonic_ns()
    ok(timed_launch(function, 100 * 10**6))
    ok(cuda.cuCtxSynchronize())
    print(began)
    """
    with boxes(5, 90) as (box, _):
        box.set_limit(flags=DEVICE_COMPUTE_SOFT)
        (began,) = run(box, program, case, helpers=HELPERS + TOOLS)
        (due,) = struct.unpack_from("<Q", box.usage.read_bytes(), offset("gs_usage", "bucket"))
        assert due > int(began) + 10**9


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "/libcuda.so."))
        abort();
    return (int)syscall(SYS_clock_gettime, clock, now);
}
"""


def test_preloaded_clock_has_no_effect_on_the_limit(tmp_path: Path) -> None:
    """As that of faketime. Processes with different clocks would void each other's payments."""
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    program = """
    start()
    function = kernel("k_ns_arg")
    for _ in range(10):
        ok(timed_launch(function, 10**6))
        ok(cuda.cuCtxSynchronize())
    """
    preload = ["sh", "-c", f'LD_PRELOAD="$LD_PRELOAD {library}" exec "$@"', "sh"]
    with boxes(20) as (box,):
        done = box.run([*preload, "python3", "-c", PRELUDE + HELPERS + TOOLS + textwrap.dedent(program)])
        assert (done.returncode, done.stderr) == (0, "")


def test_forked_child_cannot_launch_and_parent_stays_limited() -> None:
    program = """
    start()
    function, stream = kernel("spin_us_1000"), new_stream()
    for _ in range(30):
        ok(launch(function, stream))
    child = os.fork()
    if child == 0:
        os._exit(launch(function, stream))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(timed(lambda: [ok(launch(function, stream)) for _ in range(60)] and 0) > 0.08)
    """
    with boxes(30) as (box,):
        assert run(box, program, helpers=HELPERS) == ["3", "True"]


CONTEXTS = """
function, contexts = None, []
def work(seconds):
    until, n = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        ok(launch(function, None))
        n += 1
    return n
"""


@pytest.mark.parametrize(
    "again",
    [
        "ok(cuda.cuDevicePrimaryCtxReset_v2(0)); context = start(); function = kernel('spin_us_1000')",
        "ok(cuda.cuDevicePrimaryCtxRelease_v2(0)); context = start(); function = kernel('spin_us_1000')",
        "own = c_void_p(); ok(cuda.cuCtxCreate_v2(byref(own), 0, 0)); function = kernel('spin_us_1000'); "
        "work(0.1); ok(cuda.cuCtxDestroy_v2(own)); ok(cuda.cuCtxSetCurrent(context)); "
        "function = kernel('spin_us_1000')",
    ],
    ids=["reset", "release", "destroy"],
)
def test_share_holds_while_contexts_are_created_and_destroyed(again: str) -> None:
    """The share is the same before, during and after."""
    program = f"""
    context = start(); function = kernel('spin_us_1000')
    work(0.3)
    for _ in range(2):
        {again}
        n = work(0.8)
        assert 150 < n < 420, n
    print("ok")
    """
    with boxes(40) as (box,):
        assert run(box, program, helpers=HELPERS + CONTEXTS) == ["ok"]


def test_limiter_leaks_no_descriptor_and_keeps_errno() -> None:
    program = """
    start()
    function, stream = kernel("spin_us_500"), new_stream()
    before = set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(200):
        ok(launch(function, stream))
    assert (set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    print("ok")
    """
    with boxes(40, 40) as (box, other), tenants((other, BUSY)):
        assert run(box, program, helpers=HELPERS) == ["ok"]


def test_activity_of_starting_and_ending_containers_is_read_consistently(tmp_path: Path) -> None:
    """All at once, some ten thousand times a second: a reader sees only containers that existed when it began."""
    over = threading.Event()

    def come_and_go(place: Path) -> None:
        at = offset("gs_peers", "used")
        with place.open("r+b") as file, mmap.mmap(file.fileno(), 0) as index:
            own = bytes(index[at : at + 16])
            while not over.is_set():
                for used in (b"\xff" * 16, own):
                    index[at : at + 16] = used
                    time.sleep(1e-5)

    program = """
    start()
    function, end = kernel("spin_us_10"), time.monotonic() + 1
    while time.monotonic() < end:
        ok(launch(function))
        ok(cuda.cuCtxSynchronize())
    print("ok")
    """
    with Box([GIB], compute=[50], company=tmp_path) as box:
        place = tmp_path / box.devices[0].uuid / "index"
        others = threading.Thread(target=come_and_go, args=(place,))
        others.start()
        try:
            assert run(box, program, helpers=HELPERS) == ["ok"]
        finally:
            over.set()
            others.join()


def test_index_that_is_truncated_under_a_running_program_does_not_kill_it(tmp_path: Path) -> None:
    """A mapping would raise SIGBUS. The last content counts: here a peer is granted 50 of 100 percent."""
    program = """
    start()
    function = kernel("spin_us_10")
    ok(launch(function))
    ok(cuda.cuCtxSynchronize())
    say("running")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        ok(launch(function))
        ok(cuda.cuCtxSynchronize())
    say("ok")
    """
    with Box([GIB], compute=[50], company=tmp_path) as box, talk(box, program) as following:
        assert following() == ["running"]
        os.truncate(tmp_path / box.devices[0].uuid / "index", 0)
        assert following() == ["ok"]


def test_nvml_reports_the_containers_own_utilisation() -> None:
    """NVML does not report the neighbours' utilisation."""
    program = """
    rates, (nvml, device) = (c_uint * 2)(), nvml_device()
    ok(nvml.nvmlDeviceGetUtilizationRates(device, byref(rates)))
    print(rates[0])
    """
    with boxes(30, 60) as (a, b), tenants((a, BUSY)) as (tenant,):
        observe(a, 1.5, [tenant])
        assert float(*run(a, program, helpers=HELPERS)) == pytest.approx(30, abs=POINTS)
        assert run(b, program, helpers=HELPERS) == ["0"]
    with Box() as plain:
        assert run(plain, program, helpers=HELPERS) == ["0"]


def test_contexts_beyond_the_table_are_refused() -> None:
    program = """
    ok(cuda.cuInit(0))
    results = []
    for _ in range(66):
        context = c_void_p()
        ok(cuda.cuCtxCreate_v2(byref(context), 0, 0))
        results.append(launch(kernel("spin_us_10")))
        ok(cuda.cuCtxPopCurrent_v2(byref(context)))
    print(*results)
    """
    with boxes(50, gpu_bytes=64 << 30) as (box,):
        assert run(box, program, helpers=HELPERS) == ["0"] * 64 + ["801"] * 2


@pytest.mark.parametrize("percent", [50, 100])
def test_launches_without_events_are_refused_under_a_limit(percent: int, tmp_path: Path) -> None:
    """The driver has no events: the first launches proceed on their expected duration, later ones are refused."""
    driver = tmp_path / "driver.so"
    flags = ("-shared", "-fPIC", "-O2", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-DSTUB_RECORDS=0")
    include = TREE / "build" / "include" / "cuda"
    source = TREE / "bench" / "stub_driver.c"
    subprocess.run(["gcc", *flags, "-isystem", include, "-o", driver, source], check=True)
    program = """
    context = c_void_p()
    ok(cuda.cuInit(0))
    ok(cuda.cuCtxCreate_v2(byref(context), 0, 0))
    results = [cuda.cuLaunchKernel(c_void_p(64), 1 + i, 1, 1, 1, 1, 1, 0, None, None, None) for i in range(200)]
    print(results[0], results[-1])
    """
    with boxes(percent, driver=driver) as (box,):
        limits = bytearray(box.limits.read_bytes())
        at = offset("gs_limits", "device") + offset("gs_device_limit", "uuid")
        limits[at : at + 16] = b"\x5a" * 16  # the UUID of this driver's device
        box.limits.write_bytes(limits)
        assert run(box, program) == ["0", "801" if percent < 100 else "0"]
