"""Compute limits while things change: limits, processes, contexts, captures, and neighbours that lie."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from gpushare.region import DEVICE_PAUSED, MAX_PAGES, offset, packer

from tests.lib.busy import build, words
from tests.lib.host import BUILD
from tests.shim.box import TREE, Box
from tests.shim.inside import run
from tests.shim.tenants import boxes, holds, observe, tenants
from tests.sim.ledger import Ledger

POINTS = 5.0
SETTLED_S = 0.5
WINDOW_S = 1.0
BUSY = {"kernel": 1000}

HELPERS = """
def kernel(name):
    module, function = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadData(byref(module), b"SIMMOD globals=0 code=1\\n"))
    ok(cuda.cuModuleGetFunction(byref(function), module, name.encode()))
    return function

def launch(function, stream=None, grid=1):
    return cuda.cuLaunchKernel(function, grid, 1, 1, 1, 1, 1, 0, stream, None, None)

def new_stream(flags=1):
    stream = c_void_p()
    ok(cuda.cuStreamCreate(byref(stream), flags))
    return stream

def timed(call):
    "Seconds that a call took."
    began = time.monotonic()
    ok(call())
    return time.monotonic() - began
"""


def owners(pages: Path) -> list[int]:
    """The pages of a file that somebody claimed."""
    data = pages.read_bytes()
    at = offset("gs_pages", "owner")
    return [n for n in struct.unpack_from(f"<{MAX_PAGES}Q", data, at) if n]


def percent_held(box: Box, seconds: float) -> float:
    """Of a device's time by all that ran in the box so far, over so many seconds."""
    with Ledger(box.device()) as ledger:
        return 100 * sum(group.busy_ns for group in ledger.groups()) / seconds / 1e9


def test_a_limit_changes_while_it_runs() -> None:
    with boxes(60) as (box,), tenants((box, BUSY)) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        for percent in (20, 80):
            box.set_limit(compute_percent=percent)
            observe(box, SETTLED_S, [tenant])
            holds(tenant, percent, POINTS)


def test_a_pause_holds_launches_and_ends() -> None:
    with boxes(50) as (box,), tenants((box, BUSY)) as (tenant,):
        observe(box, SETTLED_S, [tenant])
        box.set_limit(flags=DEVICE_PAUSED)
        observe(box, 0.1, [tenant])  # what was under way
        assert observe(box, 0.5, [tenant]).device < 1
        box.set_limit(flags=0)
        observe(box, SETTLED_S, [tenant])
        holds(tenant, 50, POINTS)


@pytest.mark.parametrize("damage", ["no page", "short page", "other header", "no index"])
def test_a_limit_that_cannot_be_held_is_refused(damage: str) -> None:
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


def test_without_a_limit_pages_are_not_needed() -> None:
    with Box() as box:
        assert run(box, "start(); print(launch(kernel('spin_us_10')))", helpers=HELPERS) == ["0"]


def test_processes_that_are_killed_leave_their_share_and_their_page() -> None:
    with boxes(40) as (box,), tenants((box, BUSY), (box, BUSY)) as (first, second):
        observe(box, SETTLED_S, [first, second])
        first.kill()
        observe(box, SETTLED_S, [second])
        holds(second, 40, POINTS)
        with tenants((box, BUSY)) as (third,):
            observe(box, SETTLED_S, [second, third])
            got = observe(box, WINDOW_S, [second, third])
            assert 20 < got.of[second.pidns] + got.of[third.pidns] < 40 + POINTS
            assert len(owners(box.pages())) == 2


def test_processes_that_end_without_a_word_leave_no_debt_but_their_work() -> None:
    """What they had launched was done, or expected to be short; the next one does not pay for the time in between."""
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


def test_more_contexts_than_pages_are_limited_as_well() -> None:
    with boxes(30) as (box,), tenants((box, {"kernel": 500, "processes": MAX_PAGES + 4})) as (tenant,):
        observe(box, 2 * SETTLED_S, [tenant])
        got = observe(box, 2 * WINDOW_S, [tenant])
        assert len(owners(box.pages())) == MAX_PAGES
    assert 3 < got.of[tenant.pidns] < 30 + POINTS


@pytest.mark.parametrize("lie", ["zeros", "garbage", "truncated again and again"])
def test_a_neighbour_that_lies(lie: str) -> None:
    """Nobody is killed by it, and nobody gets less than his share: what he gets more, the liar's limit is worth."""
    with boxes(40, 40) as (box, liar), tenants((box, BUSY)) as (tenant,):
        page, stop = liar.pages(), threading.Event()
        data = page.read_bytes()
        head = bytearray(data[: offset("gs_pages", "page")])
        struct.pack_into("<I", head, offset("gs_pages", "high"), MAX_PAGES)
        for i in range(MAX_PAGES):
            struct.pack_into("<Q", head, offset("gs_pages", "owner") + 8 * i, 1)
        body = len(data) - len(head)
        page.write_bytes(bytes(head) + (bytes(body) if lie == "zeros" else os.urandom(body)))

        def vary() -> None:
            while not stop.wait(0.0005):
                os.truncate(page, 0)
                os.truncate(page, len(data))
                with page.open("r+b") as file:
                    file.write(head)

        liar_thread = threading.Thread(target=vary)
        if lie.startswith("truncated"):
            liar_thread.start()
        try:
            observe(box, SETTLED_S, [tenant])
            holds(tenant, 80, POINTS, least=40 - POINTS)
        finally:
            stop.set()
            if liar_thread.is_alive():
                liar_thread.join()


def test_a_forked_child_has_no_law_and_the_parent_keeps_its_own() -> None:
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


def test_captures_are_not_broken_nor_held() -> None:
    """In the strictest mode, while another thread launches and waits; a captured launch is none, even in a pause."""
    program = """
    context = start()
    function, mine, other = kernel("spin_us_300"), new_stream(), new_stream()
    for _ in range(20):
        ok(launch(function, mine))
        ok(launch(function, other))
    stop = threading.Event()
    def busy():
        ok(cuda.cuCtxSetCurrent(context))
        while not stop.is_set():
            ok(launch(function, other))
    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(20):
        graph, executable = c_void_p(), c_void_p()
        ok(cuda.cuStreamBeginCapture_v2(mine, 0))
        took = timed(lambda: [ok(launch(function, mine)) for _ in range(100)] and 0)
        ok(cuda.cuStreamEndCapture(mine, byref(graph)))
        ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
        assert took < 0.5, took
        ok(cuda.cuGraphDestroy(graph))
    stop.set()
    thread.join()
    def graphs():
        for _ in range(8):
            ok(cuda.cuGraphLaunch(executable, mine))
        return cuda.cuStreamSynchronize(mine)
    print(timed(graphs) > 0.3)
    """
    with boxes(50) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_long_capture_is_not_broken(blocks: bool) -> None:
    """In the strictest mode, while another stream is held by its limit, and is timed again after some time. Launches
    of before, in the capturing stream and in the legacy one, are not marked in it."""
    program = f"""
    start()
    function, other, mine, graph = kernel("spin_us_300"), new_stream(), new_stream({0 if blocks else 1}), c_void_p()
    for _ in range(3):
        ok(launch(function, mine))
        ok(launch(function, None))
        ok(cuda.cuCtxSynchronize())
    ok(launch(function, None))
    ok(launch(function, mine))
    ok(cuda.cuStreamBeginCapture_v2(mine, 0))
    ok(launch(function, mine))
    until, n = time.monotonic() + 1, 0
    while time.monotonic() < until:
        ok(launch(function, other))
        n += 1
    ok(cuda.cuStreamEndCapture(mine, byref(graph)))
    print(n * 300e-6 < 0.7)
    """
    with boxes(50) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


def test_an_abandoned_capture_does_not_stop_the_clockwork() -> None:
    """One that the program broke by waiting for its stream ends in an error, and ends."""
    program = """
    start()
    function, stream, plain, graph = kernel("spin_us_2000"), new_stream(), new_stream(), c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(stream, 0))
    ok(launch(function, stream))
    assert cuda.cuStreamSynchronize(stream) == 900
    assert cuda.cuStreamEndCapture(stream, byref(graph)) == 901
    print(timed(lambda: [ok(launch(function, plain)) for _ in range(100)] and 0) > 0.3)
    """
    with boxes(40) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


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
def test_contexts_come_and_go(again: str) -> None:
    """Before, between and after them the share is the same."""
    program = f"""
    context = start(); function = kernel('spin_us_1000')
    work(0.3)
    for _ in range(3):
        {again}
        n = work(0.8)
        assert 150 < n < 420, n
    print("ok")
    """
    with boxes(40) as (box,):
        assert run(box, program, helpers=HELPERS + CONTEXTS) == ["ok"]


def test_a_launch_counts_where_its_stream_is() -> None:
    """Another context is current."""
    program = """
    first = start()
    second, function = c_void_p(), kernel("spin_us_1000")
    stream = new_stream()
    ok(cuda.cuCtxCreate_v2(byref(second), 0, 0))
    began = time.monotonic()
    results = {launch(function, stream) for _ in range(100)}
    took = time.monotonic() - began
    print(took > 0.2 if results == {0} else results)
    """
    with boxes(30) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


def test_many_streams_and_functions_come_and_go() -> None:
    """More than are remembered; destroyed with work in them."""
    program = """
    start()
    functions = [kernel(f"spin_us_{100 + i}") for i in range(5)]
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 1.5:
        streams = [new_stream() for _ in range(40)]
        for i, stream in enumerate(streams * 2):
            ok(launch(functions[i % 5], stream, grid=1 + n % 700))
            n += 1
        for stream in streams:
            ok(cuda.cuStreamDestroy_v2(stream))
    ok(cuda.cuCtxSynchronize())
    print(time.monotonic() - began)
    """
    with boxes(40) as (box,):
        (took,) = run(box, program, helpers=HELPERS)
        assert 20 < percent_held(box, float(took)) < 40 + POINTS


STREAMS_OF_THREADS = """
def per_thread(function):
    return cuda.cuLaunchKernel_ptsz(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_streams_of_threads(threads: int) -> None:
    program = f"""
    context, function = start(), kernel("spin_us_500")
    began = time.monotonic()
    def work():
        ok(cuda.cuCtxSetCurrent(context))
        while time.monotonic() - began < 2:
            ok(per_thread(function))
    workers = [threading.Thread(target=work) for i in range({threads})]
    [w.start() for w in workers], [w.join() for w in workers]
    ok(cuda.cuCtxSynchronize())
    print(time.monotonic() - began)
    """
    with boxes(40) as (box,):
        (took,) = run(box, program, helpers=HELPERS + STREAMS_OF_THREADS)
        assert 20 < percent_held(box, float(took)) < 40 + POINTS


def test_the_legacy_stream_beside_streams_that_wait_for_it() -> None:
    program = """
    start()
    function, blocking, free = kernel("spin_us_500"), [new_stream(0), new_stream(0)], new_stream()
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 2:
        ok(launch(function, (None, *blocking, free)[n % 4]))
        n += 1
    ok(cuda.cuCtxSynchronize())
    print(time.monotonic() - began)
    """
    with boxes(40) as (box,):
        (took,) = run(box, program, helpers=HELPERS)
        assert 20 < percent_held(box, float(took)) < 40 + POINTS


def test_our_markers_make_no_circle_of_waiting() -> None:
    """A kernel in one blocking stream spins for a later one in another: a marker in the legacy stream between them
    would wait for the first and hold the second."""
    program = """
    start()
    wait, write, flag = kernel("wait_flag"), kernel("set_flag"), c_uint64()
    ok(cuda.cuMemAlloc_v2(byref(flag), c_size_t(4096)))
    ok(cuda.cuMemsetD32_v2(flag, 0, c_size_t(1)))
    short, waiter, releaser = kernel("spin_us_50"), new_stream(0), new_stream(0)
    def flagged(function, stream, value):
        values = (c_uint64 * 1)(flag.value), (c_uint64 * 1)(value)
        arguments = (c_void_p * 2)(*(ctypes.cast(v, c_void_p) for v in values))
        ok(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
    for i in range(1, 6):
        for _ in range(30):
            ok(launch(short, None))
        flagged(wait, waiter, i)
        for _ in range(3):
            ok(launch(short, releaser))
        flagged(write, releaser, i)
        ok(cuda.cuCtxSynchronize())
    print("through")
    """
    with boxes(60) as (box,):
        assert run(box, program, helpers=HELPERS, timeout_s=50) == ["through"]


def test_nothing_is_left_open_and_errno_is_the_programs() -> None:
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


def test_index_and_pages_have_the_sizes_of_the_header() -> None:
    assert packer("gs_pages").size == 20 * 4096 and packer("gs_peers").size == 4096


def test_nvml_tells_the_containers_own_utilisation() -> None:
    """Not what its neighbours do."""
    program = """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    ok(nvml.nvmlInit_v2())
    device, rates = c_void_p(), (c_uint * 2)()
    ok(nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device)))
    ok(nvml.nvmlDeviceGetUtilizationRates(device, byref(rates)))
    print(rates[0])
    """
    with boxes(30, 60) as (a, b), tenants((a, BUSY)) as (tenant,):
        observe(a, 1.5, [tenant])
        assert float(*run(a, program)) == pytest.approx(30, abs=POINTS)
        assert run(b, program) == ["0"]
    with Box() as plain:
        assert run(plain, program) == ["0"]


def test_more_contexts_than_are_kept_apart_are_refused() -> None:
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
def test_launches_that_nothing_can_time_are_refused_where_there_is_a_limit(percent: int, tmp_path: Path) -> None:
    """A driver without events: the first launches go ahead on what is expected of them."""
    driver = tmp_path / "driver.so"
    flags = ("-shared", "-fPIC", "-O2", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-DSTUB_RECORDS=0")
    include = TREE / "build" / "include" / "cuda"
    source = TREE / "tests" / "bench" / "stub_driver.c"
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
        limits[at : at + 16] = b"\x5a" * 16  # the device that this driver has
        box.limits.write_bytes(limits)
        assert run(box, program) == ["0", "801" if percent < 100 else "0"]


def test_sanitizers_find_nothing() -> None:
    """Threads, streams and processes at once, while limits change and a neighbour is killed."""
    subprocess.run(["make", "-s", "shim-asan"], cwd=TREE, check=True)
    names = ("libasan.so", "libubsan.so")
    preload = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = ["env", f"LD_PRELOAD={' '.join(preload)}", "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0"]
    options = words(kernel="bimodal", threads=3, streams=3, processes=2, seconds=2.5)
    with boxes(50, 40) as (box, other), tenants((other, BUSY)) as (neighbour,):
        box.shim = BUILD / "shim-asan"
        busy = box.popen([*environment, str(build()), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            for percent in (20, 70):
                observe(box, 0.5, [neighbour])
                box.set_limit(compute_percent=percent)
            neighbour.kill()
            out, err = busy.communicate(timeout=60)
        finally:
            busy.kill()
    assert err == ""
    said = json.loads(out)
    assert said["failed"] == "" and said["stuck"] == 0 and said["done"] > 100
