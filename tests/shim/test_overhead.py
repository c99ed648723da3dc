"""Containers are charged what the driver counts: programs in the shape of PyTorch on a device with an H100's costs."""

from __future__ import annotations

import struct
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import pytest

from simulator import layout
from simulator.ledger import Ledger
from simulator.simhost import Costs, make_simhost
from tests.shim.box import GIB, LIBDIR, TREE, Box
from tests.shim.inside import MIB, PRELUDE, compile_c, run, usage
from tests.shim.launches import HELPERS
from tests.shim.test_live import talk

H100 = "NVIDIA H100 80GB HBM3"
LIMIT_S = 1.0  # how long a container may exceed its limit when its driver takes more without an allocation

# A program in the shape of PyTorch: libraries with many kernels, of which each run uses more, 32 streams, events,
# graphs, and an allocator that takes all that the limit has and frees a part when it is refused.
TORCH = """
import mmap, random, struct
limit, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
counts = mmap.mmap(os.open(sys.argv[4], os.O_RDWR), 16)
random.seed(seed)
start()

def kernels(n, size):
    image = b"SIMMOD globals=%d code=%d\\n" % (256 << 10, size)
    library = c_void_p()
    ok(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0))
    found = [c_void_p() for _ in range(n)]
    for i, one in enumerate(found):
        ok(cuda.cuLibraryGetKernel(byref(one), library, b"k%d_us_1" % i))
    return found

def launch(kernel, stream=None):
    return cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

libraries = [kernels(8, 1 << 20) for _ in range(40)]
for kernel in libraries[0] + [library[0] for library in libraries[:24]]:
    ok(launch(kernel))
streams = [c_void_p() for _ in range(32)]
for stream in streams:
    ok(cuda.cuStreamCreate(byref(stream), 1))
events = [c_void_p() for _ in range(600)]
for event in events:
    ok(cuda.cuEventCreate(byref(event), 2))

def graph(n):
    made, exec_ = c_void_p(), c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(streams[0], 2))
    for i in range(n):
        ok(launch(libraries[0][i % 8], streams[0]))
    ok(cuda.cuStreamEndCapture(streams[0], byref(made)))
    ok(cuda.cuGraphInstantiateWithFlags(byref(exec_), made, c_uint64(0)))
    ok(cuda.cuGraphDestroy(made))
    return exec_

counts[8:] = struct.pack("<Q", 1)
while any(open(path, "rb").read()[8:] == bytes(8) for path in sys.argv[4:]):
    time.sleep(0.01)
granted = refused = 0
blocks, graphs, until = [], [], time.monotonic() + seconds
while time.monotonic() < until:
    size = random.choice([2, 20, 64, 256, 1024]) * MIB
    if alloc(min(size, limit // 8), blocks) == SUCCESS:
        granted += 1
        counts[:8] = struct.pack("<Q", granted)  # after it was granted
        continue
    refused += 1
    for _ in range(max(1, len(blocks) // 4)):
        if blocks:
            ok(cuda.cuMemFree_v2(blocks.pop(random.randrange(len(blocks)))))
    step = random.random()
    if step < 0.3:  # a kernel that has not run yet
        assert launch(random.choice(random.choice(libraries))) in (SUCCESS, OUT_OF_MEMORY)
    elif step < 0.5:
        graphs.append(graph(random.choice([10, 200, 1000])))
        ok(cuda.cuGraphLaunch(graphs[-1], streams[1]))
        if len(graphs) > 4:
            ok(cuda.cuGraphExecDestroy(graphs.pop(0)))
    elif step < 0.6:
        again = random.randrange(len(streams) - 2) + 2
        ok(cuda.cuStreamDestroy_v2(streams[again]))
        ok(cuda.cuStreamCreate(byref(streams[again]), 1))
    ok(cuda.cuStreamSynchronize(streams[1]))
os.write(1, f"{granted} {refused} {info()[1]}{chr(10)}".encode())  # one piece, beside other processes
"""


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_simhost(tmp_path_factory.mktemp("h100") / "host", model=H100)


class Sample(NamedTuple):
    at_s: float
    granted: tuple[int, ...]  # allocations so far, of each process
    held_bytes: int  # by the device's own account


class Watch:
    """Sample what the device counts for a box's processes, and how many allocations they were granted before."""

    def __init__(self, box: Box, counts: list[Path]) -> None:
        self.samples: list[Sample] = []
        self._box, self._counts, self._stop = box, counts, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _granted(self) -> tuple[int, ...]:
        return tuple(int.from_bytes(path.read_bytes()[:8], "little") for path in self._counts)

    def _run(self) -> None:
        with Ledger(self._box.device()) as ledger:
            while not self._stop.wait(0.002):
                granted = self._granted()
                held = sum(client.bytes for client in ledger.clients() if client.alive)
                self.samples.append(Sample(time.monotonic(), granted, held))

    def longest_excess_s(self, limit: int) -> float:
        since, longest = 0.0, 0.0
        for one in self.samples:
            since = (since or one.at_s) if one.held_bytes > limit else 0.0
            longest = max(longest, one.at_s - since) if since else longest
        return longest

    def grants_above(self, limit: int) -> list[tuple[Sample, Sample]]:
        """Pairs of samples above the limit between which an allocation was granted."""
        pairs = zip(self.samples, self.samples[1:])
        return [
            (a, b)
            for a, b in pairs
            if min(a.held_bytes, b.held_bytes) > limit and any(y > x + 1 for x, y in zip(a.granted, b.granted))
        ]


@pytest.mark.parametrize(("limit_gib", "processes"), [(1, 1), (4, 4)])
def test_device_never_counts_more_than_the_limit_for_long(
    limit_gib: int, processes: int, h100: Path, tmp_path: Path
) -> None:
    """4 processes do not fit in 1 GiB: each needs 0.7 GiB before its first allocation."""
    limit, counts = limit_gib * GIB, [tmp_path / str(i) for i in range(processes)]
    for path in counts:
        path.write_bytes(bytes(16))
    # all in one pid namespace, like the processes of a container
    program = f"""
        import json, subprocess, sys
        command = [sys.executable, "-c", sys.argv[1]]
        paths = sys.argv[2:]
        words = [["{limit}", "3", str(i), *paths[i:], *paths[:i]] for i in range(len(paths))]
        running = [subprocess.Popen([*command, *one]) for one in words]
        sys.exit(max(one.wait() for one in running))
    """
    words = [PRELUDE + textwrap.dedent(TORCH), *map(str, counts)]
    with Box([limit], simhost=h100) as box, Watch(box, counts) as watch:
        done = box.run(["python3", "-c", textwrap.dedent(program), *words])
    assert done.returncode == 0 and not done.stderr, done.stderr
    results = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(results) == processes
    assert all(granted > 20 and refused > 20 and total == limit for granted, refused, total in results)
    assert max(one.held_bytes for one in watch.samples) > limit * 0.98  # the limit was reached
    assert not watch.grants_above(limit)
    assert watch.longest_excess_s(limit) < LIMIT_S


def costly(**costs: Any) -> Callable[..., Box]:
    """A box on a device that has these costs alone."""
    return lambda *limits, **options: Box(list(limits), costs=Costs(**costs), **options)


def held(box: Box) -> int:
    with Ledger(box.device()) as ledger:
        return sum(client.bytes for client in ledger.clients() if client.alive)


def grow(box: Box, size: int) -> None:
    """Let the driver take memory for the only client without any call that the shim sees."""
    with Ledger(box.device()) as ledger:
        (client,) = (one for one in ledger.clients() if one.alive)
    at = layout.CLIENTS_OFFSET + client.index * layout.CLIENT.size + 40  # of `bytes` in struct sim_client
    with open(box.device(), "r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", client.bytes + size))


STREAMS = """
def streams(n):
    made = [c_void_p() for _ in range(n)]
    for one in made:
        ok(cuda.cuStreamCreate(byref(one), 1))
    return made
"""


USES = {
    "stream_bytes": "made = streams(20)",
    "graph_bytes": "made = graph(1000)",
    "graph_late": "made = graph(1000)",
    "library_bytes": "made = [library() for _ in range(10)]",
    "module_bytes": "made = [module() for _ in range(10)]",
    "event_pool_bytes": "made = events(5000)",
    "unlisted_bytes": "pass",
    "init_bytes": "pass",
}
MAKE = """
def launch(kernel, stream=None):
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None))

def module():
    made, kernel = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadData(byref(made), b"SIMMOD globals=0 code=4096\\n"))
    ok(cuda.cuModuleGetFunction(byref(kernel), made, b"k_us_1"))
    launch(kernel)
    return kernel

def library():
    made, kernel = c_void_p(), c_void_p()
    ok(cuda.cuLibraryLoadData(byref(made), b"SIMMOD globals=0 code=4096\\n", None, None, 0, None, None, 0))
    ok(cuda.cuLibraryGetKernel(byref(kernel), made, b"k_us_1"))
    launch(kernel)

def events(n):
    made = [c_void_p() for _ in range(n)]
    for one in made:
        ok(cuda.cuEventCreate(byref(one), 2))

def graph(nodes):
    kernel, stream, made, exec_ = module(), streams(1)[0], c_void_p(), c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(stream, 2))
    for _ in range(nodes):
        launch(kernel, stream)
    ok(cuda.cuStreamEndCapture(stream, byref(made)))
    ok(cuda.cuGraphInstantiateWithFlags(byref(exec_), made, c_uint64(0)))
    ok(cuda.cuGraphLaunch(exec_, stream))
    return exec_
"""


@pytest.mark.parametrize("cost", USES)
def test_full_container_is_within_a_block_of_its_limit(cost: str, h100: Path) -> None:
    """Each cost of the driver, before the program fills its share and in a nearly full one. The memory that
    NVML does not list is known for real cards only."""
    costs: dict[str, Any] = {cost: 3 * MIB}
    if cost == "graph_late":
        costs = {"graph_bytes": 64 << 10, "graph_late": True}
    elif cost == "graph_bytes":
        costs = {"graph_bytes": 64 << 10}
    program = f"""
        start()
        for room in (GIB, 100 * MIB):
            while info()[0] > room:
                ok(alloc(10 * MIB))
            {USES[cost]}
        fill()
        say("full")
    """
    unlisted = cost in ("unlisted_bytes", "init_bytes")
    with (
        Box([1 * GIB], simhost=h100) if unlisted else costly(**costs)(1 * GIB) as box,
        talk(box, STREAMS + MAKE + textwrap.dedent(program)) as following,
    ):
        following()
        assert 1 * GIB - 2 * MIB <= held(box) <= 1 * GIB


@pytest.mark.parametrize("costs", [{}, {"duplicates": True}])
def test_overhead_is_charged_while_it_lasts(costs: dict[str, bool]) -> None:
    """Also where NVML lists the process twice, as NVIDIA's kernel module can in a container."""
    program = """
        start()
        before = info()[0]
        made = streams(40)
        print((before - info()[0]) // MIB)
        for one in made:
            ok(cuda.cuStreamDestroy_v2(one))
        print((before - info()[0]) // MIB)
    """
    with costly(stream_bytes=2 * MIB, **costs)(1 * GIB) as box:
        assert run(box, program, helpers=STREAMS) == ["80", "0"]


def test_program_goes_on_when_its_overhead_exceeds_the_limit() -> None:
    """Streams are not refused. Then nothing is free and allocations are refused, until the program frees memory."""
    program = """
        start()
        blocks = []
        while alloc(16 * MIB, blocks) == SUCCESS:
            pass
        fill()
        made = streams(64)
        print(info()[0], alloc(2 * MIB), cuda.cuCtxSynchronize())
        for block in blocks[:10]:
            ok(cuda.cuMemFree_v2(block))
        print(info()[0] // MIB, alloc(16 * MIB), alloc(32 * MIB))
    """
    with costly(stream_bytes=2 * MIB)(1 * GIB) as box:
        words = ["python3", "-c", PRELUDE + STREAMS + textwrap.dedent(program)]
        done = box.run(["env", "GPUSHARE_LOG=1", *words])
        assert done.stdout.split() == ["0", "2", "0", "32", "0", "2"], done.stderr
        assert done.stderr.count("the limit is exceeded without an allocation") == 1


@pytest.mark.parametrize(("limit_mib", "logged"), [(250, 1), (500, 1), (1024, 0)])
def test_refusal_names_a_limit_that_cannot_hold_a_start(limit_mib: int, logged: int) -> None:
    program = """
        ok(cuda.cuInit(0))
        context = c_void_p()
        result = cuda.cuDevicePrimaryCtxRetain(byref(context), 0)
        cuda.cuCtxSetCurrent(context)
        print(result or alloc(900 * MIB), result or alloc(900 * MIB))
    """
    with Box([limit_mib * MIB]) as box:
        done = box.run(["env", "GPUSHARE_LOG=1", "python3", "-c", PRELUDE + textwrap.dedent(program)])
        assert done.stdout.split() == ["2", "2"], done.stderr
        assert done.stderr.count("PyTorch needs about 0.7 GiB before its first tensor") == logged


def test_host_sees_what_the_driver_takes() -> None:
    program = """
        start()
        made = streams(50)
        say("ready")
    """
    with costly(stream_bytes=2 * MIB)(1 * GIB) as box, talk(box, STREAMS + textwrap.dedent(program)) as following:
        following()
        now = usage(box)
        assert now.driver_bytes(0) == now.used_bytes(0) == held(box) == 400 * MIB


@pytest.mark.parametrize("missing", ["host pids", "no NVML", "another NVML"])
def test_model_is_charged_where_the_driver_has_no_count(missing: str) -> None:
    """A driver before 535.113 lists host pids; a container without the capability `utility` has no libnvidia-ml."""
    program = """
        start()
        before = info()[0]
        made = streams(10)
        print((before - info()[0]) // MIB)
        ok(cuda.cuStreamDestroy_v2(made.pop()))
        print((before - info()[0]) // MIB)
        image = b"SIMMOD globals=%d code=4096\\n" % (100 * MIB)
        modules = [c_void_p() for _ in range(3)]
        for module in modules:
            ok(cuda.cuModuleLoadData(byref(module), image))
            result = cuda.cuModuleGetFunction(byref(c_void_p()), module, b"k")
        print(result, (before - info()[0]) // MIB)
        ok(cuda.cuModuleUnload(modules[0]))
        print((before - info()[0]) // MIB)
        fill()
    """
    limit = 300 * MIB + 300 * MIB
    setup = {"host pids": "true", "no NVML": f"rm {LIBDIR}/libnvidia-ml.so*"}
    setup["another NVML"] = f"rm {LIBDIR}/libnvidia-ml.so*; cp {LIBDIR}/libz.so.1 {LIBDIR}/libnvidia-ml.so.1"
    words = ["python3", "-c", PRELUDE + STREAMS + textwrap.dedent(program)]
    with costly(stream_bytes=2 * MIB, host_pids=missing == "host pids")(limit) as box:
        done = box.run(["sh", "-c", setup[missing] + '; exec "$@"', "sh", *words])
        assert done.stdout.split() == ["20", "18", "2", "218", "118"], done.stderr
        with Ledger(box.device()) as ledger:
            assert max(group.peak_bytes for group in ledger.groups()) <= limit


def test_program_that_opens_nvml_later_gets_the_shim() -> None:
    """The dynamic linker must not find the real library first, which the shim uses."""
    program = """
        start()
        nvml, _ = nvml_device()
        print(nvml_memory()[0] // MIB, nvml.nvmlShutdown(), nvml.nvmlShutdown())
        nvml.nvmlShutdown()  # once more than it was initialised
        nvml.nvmlShutdown()  # once more than it was initialised
        print(alloc(100 * MIB), info()[1] // MIB)  # the shim still counts
        made = streams(50)
        print(info()[0] // MIB)
    """
    with costly(stream_bytes=2 * MIB)(1 * GIB) as box:
        assert run(box, program, helpers=HELPERS + STREAMS) == ["1024", "0", "0", "0", "1024", "524"]


def test_forked_child_can_use_nvml_while_threads_compare() -> None:
    """A fork in the middle of a comparison would leave NVML's locks held in the child."""
    program = """
        start()
        def compare():
            context = c_void_p()
            ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
            ok(cuda.cuCtxSetCurrent(context))
            while not done:
                ok(cuda.cuStreamDestroy_v2(streams(1)[0]))
        done = []
        threads = [threading.Thread(target=compare) for _ in range(3)]
        for thread in threads:
            thread.start()
        fill()  # near the limit each growth is compared
        codes = set()
        for _ in range(60):
            child = os.fork()
            if child == 0:
                nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), c_void_p()
                count = c_uint(64)
                room = ctypes.create_string_buffer(64 * 24)
                nvml.nvmlInit_v2()
                nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device))
                nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), room)
                os._exit(7)
            codes.add(os.waitpid(child, 0)[1])
        done.append(1)
        for thread in threads:
            thread.join()
        print(*codes)
    """
    with costly(query_ns=200_000)(1 * GIB) as box:
        assert run(box, program, helpers=STREAMS) == [str(7 << 8)]


def test_memory_freed_in_a_stream_stays_charged_until_it_is_free() -> None:
    program = """
        start()
        function, stream, block = kernel("spin_us_300000"), new_stream(), []
        ok(alloc(256 * MIB, block))
        before = info()[0]
        ok(launch(function, stream))
        ok(cuda.cuMemFreeAsync(block[0], stream))
        print((info()[0] - before) // MIB)
        ok(cuda.cuStreamSynchronize(stream))
        print((info()[0] - before) // MIB)
    """
    with Box([1 * GIB]) as box:
        assert run(box, program, helpers=HELPERS) == ["0", "256"]


def test_managed_memory_is_charged_once() -> None:
    """The driver lists it for no process, so it must neither hide overhead nor count as overhead."""
    program = """
        start()
        address = c_uint64()
        ok(cuda.cuMemAllocManaged(byref(address), c_size_t(200 * MIB), 1))
        before = info()[0]
        made = streams(20)
        print((before - info()[0]) // MIB)
        ok(cuda.cuMemFree_v2(address))
        print((info()[0] - before) // MIB)
    """
    with costly(stream_bytes=2 * MIB)(1 * GIB) as box:
        assert run(box, program, helpers=STREAMS) == ["40", "160"]


def test_destroyed_context_takes_its_streams_and_graphs_with_it() -> None:
    """Where the driver has no count their models are charged, which nothing else would release."""
    program = """
        start()
        context, before = c_void_p(), info()[0]
        ok(cuda.cuCtxCreate_v2(byref(context), 0, 0))
        made, graphs = streams(10), graph(1000)
        print((before - info()[0]) // MIB > 20)
        ok(cuda.cuCtxDestroy_v2(context))
        start()
        print((before - info()[0]) // MIB)
    """
    words = ["python3", "-c", PRELUDE + STREAMS + MAKE + textwrap.dedent(program)]
    with Box([1 * GIB]) as box:
        done = box.run(["sh", "-c", f'rm {LIBDIR}/libnvidia-ml.so*; exec "$@"', "sh", *words])
        assert done.stdout.split() == ["True", "0"], done.stderr


@pytest.mark.parametrize(("then", "within_s"), [("pass", 8), ("ok(cuda.cuCtxSynchronize())", 4)])
def test_growth_without_a_call_of_the_program_is_charged(then: str, within_s: float) -> None:
    """Once a second before a call that blocks; a program that never waits compares at a launch after some seconds."""
    program = f"""
        start()
        function = kernel("spin_us_10")
        print("ready", flush=True)
        until = time.monotonic() + {within_s}
        while time.monotonic() < until:
            ok(launch(function))
            {then}
            time.sleep(0.001)
    """
    words = ["python3", "-c", PRELUDE + HELPERS + textwrap.dedent(program)]
    with Box([1 * GIB]) as box, box.popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        hidden = 50 * MIB
        grow(box, hidden)
        while process.poll() is None:
            if usage(box).used_bytes(0) >= 300 * MIB + hidden:
                break
            time.sleep(0.05)
        assert process.poll() is None, "not charged"
        process.kill()


def test_growth_that_no_call_showed_is_compared_near_the_limit() -> None:
    """100 MiB seem free and 50 are: within a second an allocation of 60 is refused, whatever the program calls."""
    program = """
        start()
        block = []
        ok(alloc(info()[0] - 100 * MIB, block))
        say("ready")
        until = time.monotonic() + 10
        while (result := alloc(60 * MIB, block)) == SUCCESS and time.monotonic() < until:
            ok(cuda.cuMemFree_v2(block.pop()))  # nothing here blocks
        say(result)
    """
    with Box([1 * GIB]) as box, talk(box, program) as following:
        following()
        grow(box, 50 * MIB)
        assert following() == ["2"]


SANDBOX = """
import ctypes, os, struct, sys
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 324), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]  # membarrier gives EPERM
class Filter(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("at", ctypes.c_void_p)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(len(rows), ctypes.cast(code, ctypes.c_void_p)))) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("query_ns", "sandbox", "threads"),
    [(0, False, 4), (300_000, False, 4), (300_000, True, 4), (5_000_000, False, 1)],
)
def test_overhead_is_exact_while_threads_allocate(query_ns: int, sandbox: bool, threads: int, tmp_path: Path) -> None:
    """Memory that another thread has reserved and not allocated, or freed and not released, is no overhead, and hides
    none. So no allocation is refused that fits, and free memory is never shown as more than it is."""
    size, limit = 64 * MIB, 600 * MIB + 4 * 64 * MIB + 8 * MIB
    program = str(compile_c(tmp_path, "crowd.c", "-lpthread"))
    words = [*(("python3", "-c", SANDBOX) if sandbox else ()), program, "1", "100", str(size), str(threads)]
    free = limit - 300 * MIB - 200 * MIB
    with (
        costly(stream_bytes=2 * MIB, query_ns=query_ns)(limit) as box,
        box.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout
        least, most, after, refused = map(int, process.stdout.readline().split())
        assert (refused, after) == (0, free)
        assert most <= free and least >= free - threads * size - 16 * MIB  # models of streams since a comparison
        assert held(box) == 500 * MIB
        process.communicate("\n")


def test_unsure_count_releases_nothing(tmp_path: Path) -> None:
    """While another thread has reserved 2 MiB that the driver has not allocated, its count is as much too low."""
    program = tmp_path / "unsure_count"
    sources = [TREE / name for name in ("tests/shim/unsure_count.c", "shim/core/overhead.c", "shim/core/now.c")]
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{TREE}/shim")
    subprocess.run(["gcc", *flags, "-o", program, *sources, "-ldl"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["100", "104", "104", "102", "102", "108", "102"], done.stderr


def test_charge_follows_primary_contexts() -> None:
    """+ retain, - release, R reset, c create, d destroy: the driver's own number of uses decides."""
    sequences = ("+R+-", "+R+R+R+-", "+-+-+-", "+c-+-+d", "+cR+d", "+R++--")
    program = f"""
        def act(steps):
            ok(cuda.cuInit(0))
            context, other = c_void_p(), c_void_p()
            for step in steps:
                if step == "+":
                    ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
                elif step == "-":
                    cuda.cuDevicePrimaryCtxRelease_v2(0)
                elif step == "R":
                    ok(cuda.cuDevicePrimaryCtxReset_v2(0))
                elif step == "c":
                    ok(cuda.cuCtxCreate_v2(byref(other), 0, 0))
                else:
                    ok(cuda.cuCtxDestroy_v2(other))
                say()
        for steps in {sequences}:
            apart(act, steps)
    """
    with Box([2 * GIB]) as box, talk(box, program) as following:
        for steps in sequences:
            for place in range(len(steps)):
                following()
                used = usage(box).used_bytes(0)
                assert used == held(box), (steps, place)


CONSTRUCTOR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
__attribute__((constructor)) static void retain(void) {
    void *context, *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*call)(void **, int) = 0;
    *(void **)&call = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    usleep(300000);
    call(&context, 0);
}
"""


def test_context_in_a_constructor_does_not_hang(tmp_path: Path) -> None:
    """The dynamic linker's lock and the shim's: a thread that creates the first context must not need the first while
    it holds the second."""
    (tmp_path / "constructor.c").write_text(CONSTRUCTOR)
    library = tmp_path / "constructor.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "constructor.c", "-ldl"], check=True)
    program = """
        ok(cuda.cuInit(0))
        thread = threading.Thread(target=ctypes.CDLL, args=[sys.argv[1]])
        thread.start()
        time.sleep(0.1)
        context = c_void_p()
        print(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
        thread.join()
    """
    with Box([2 * GIB]) as box:
        assert run(box, program, str(library), timeout_s=30) == ["0"]
