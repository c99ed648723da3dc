"""Report what NVML counts of this process, how long that takes, and what single objects of a process cost."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple, Optional

from tests.conformance.driver import MIB, PTX, SPIN, SPIN_US, DriverError
from tests.hardware.tenant import absent, listen, say
from tests.hardware.tenants import device
from tests.hardware.tenants.cuda import HEAD, Gpu, Parameters
from tests.hardware.tenants.frameworks import torch_module

INITS = 5
QUERY = "nvmlDeviceGetComputeRunningProcesses_v3"


class Nvml:
    """NVML without a wrapper, so that a query takes what the library takes."""

    def __init__(self, path: str, uuid: str) -> None:
        self.library, self.uuid, self.handle = ctypes.CDLL(path), uuid, c_void_p()
        if not hasattr(self.library, QUERY):
            absent(f"this NVML has no {QUERY}")
        self.rows = (device.ProcessInfo * device.MOST_PROCESSES)()

    def init(self) -> None:
        code = self.library.nvmlInit_v2()
        assert not code, f"nvmlInit_v2 gave {code}"

    def find(self) -> None:
        code = self.library.nvmlDeviceGetHandleByUUID(c_char_p(self.uuid.encode()), byref(self.handle))
        assert not code, f"nvmlDeviceGetHandleByUUID gave {code}"

    def shutdown(self) -> None:
        code = self.library.nvmlShutdown()
        assert not code, f"nvmlShutdown gave {code}"

    def processes(self) -> list[tuple[int, int]]:
        """Return (pid, bytes) of each row, in order: a process may have several."""
        count = c_uint(device.MOST_PROCESSES)
        code = self.library[QUERY](self.handle, byref(count), self.rows)
        assert not code, f"{QUERY} gave {code}"
        return [(row.pid, row.used) for row in self.rows[: count.value]]

    def own_bytes(self) -> Optional[int]:
        """Return the bytes of this process; None if NVML does not list it."""
        seen = [used for pid, used in self.processes() if pid == os.getpid() and used != device.NOT_AVAILABLE]
        return max(seen, default=None)


def took_ns(call: Callable[[], Any]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def count(library: str, nvml: str, uuid: str) -> None:
    """Report what NVML lists of this process; for a line {queries, run_s, kernels} report how long each query takes.

    It asks so often, but no longer than `run_s`. `kernels`: launches of 2 ms that are pending meanwhile.
    """
    try:
        manager = Nvml(nvml, uuid)
    except OSError as error:
        absent(f"NVML cannot be loaded ({error})")
    inits, shutdowns = [took_ns(manager.init)], []
    for _ in range(INITS):
        shutdowns.append(took_ns(manager.shutdown))
        inits.append(took_ns(manager.init))
    manager.find()
    gpu = Gpu(library)
    function = gpu.kernel(PTX, SPIN)
    gpu.launch(function)
    gpu.synchronize()
    said = {"pid": os.getpid(), "rows": manager.processes(), "init_ns": inits, "shutdown_ns": shutdowns}
    say(**said)
    while True:
        asked = listen()
        for _ in range(asked["kernels"]):
            gpu.launch(function)
        end = time.monotonic() + asked["run_s"]
        query_ns = [took_ns(manager.processes)]
        while len(query_ns) < asked["queries"] and time.monotonic() < end:
            query_ns.append(took_ns(manager.processes))
        gpu.synchronize()
        say(query_ns=query_ns, kernel_us=SPIN_US)


def churn(library: str) -> None:
    """On a line create and destroy contexts for `run_s`; report how many."""
    gpu = Gpu(library)
    say(ready=True)
    while True:
        end, made = time.monotonic() + listen()["run_s"], 0
        while time.monotonic() < end:
            gpu.ok("cuCtxDestroy_v2", gpu.out("cuCtxCreate_v2", c_uint(0), c_int(0)))
            made += 1
        say(contexts=made)


# ---- the costs of objects ------------------------------------------------------------------------------------------


class Costs:
    """Measures calls by the device's free memory (cuMemGetInfo), and by what NVML counts for this process."""

    def __init__(self, gpu: Gpu, nvml: str, uuid: str, held: Callable[[], int] = lambda: 0) -> None:
        """`held`: bytes that a framework keeps in its own pool, which are no cost of a call."""
        self.gpu, self.held, self.rows = gpu, held, list[dict[str, Any]]()
        self.manager: Optional[Nvml] = None
        try:
            self.manager = Nvml(nvml, uuid)
            self.manager.init()
            self.manager.find()
        except (OSError, AssertionError):
            self.manager = None

    def now(self) -> tuple[int, Optional[int], int]:
        self.gpu.synchronize()
        return self.gpu.free_bytes(), self.manager.own_bytes() if self.manager else None, self.held()

    def of(self, item: str, make: Callable[[], Any], undo: Optional[Callable[[Any], Any]] = None) -> None:
        """Measure what `make` takes, and what is left after `undo` is called with its result."""
        row: dict[str, Any] = {"item": item}
        free, own, held = self.now()
        try:
            made = make()
            free_after, own_after, held_after = self.now()
            kept = held_after - held
            row["device_bytes"] = free - free_after - kept
            row["process_bytes"] = None if own is None or own_after is None else own_after - own - kept
            if undo:
                undo(made)
                row["left_bytes"] = free - self.now()[0] - (self.held() - held)
        except (DriverError, RuntimeError, OSError, AttributeError, AssertionError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        self.rows.append(row)


CALLS = """
.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 arguments);
.extern .func (.param .b64 result) malloc(.param .b64 size);
.global .align 1 .b8 text[2] = {37, 0};
.visible .entry calls_spin_us_10(.param .u64 never)
{
    .reg .u64 %l<4>;
    .reg .u32 %r1;
    .reg .pred %p;
    ld.param.u64 %l1, [never];
    setp.eq.u64 %p, %l1, 0;
    @%p bra done;
    {
        .param .b64 size;
        .param .b64 result;
        st.param.b64 [size], %l1;
        call.uni (result), malloc, (size);
        ld.param.b64 %l2, [result];
    }
    mov.u64 %l3, text;
    cvta.global.u64 %l3, %l3;
    {
        .param .b64 format;
        .param .b64 arguments;
        .param .b32 result;
        st.param.b64 [format], %l3;
        st.param.b64 [arguments], %l2;
        call.uni (result), vprintf, (format, arguments);
        ld.param.b32 %r1, [result];
    }
done:
    ret;
}
"""
STREAMS, EVENTS, NODES = (1, 7, 24, 32), (1000, 9000), (100, 1000, 10_000)  # streams and events add up
PRINTF_FIFO, MALLOC_HEAP = 1, 2  # CUlimit
RELAXED, NON_BLOCKING = 2, 1


class Objects:
    """Objects of the driver's interface that programs create."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.function, self.stream = gpu.kernel(PTX, SPIN), gpu.stream(NON_BLOCKING)
        gpu.launch(self.function, self.stream)
        gpu.synchronize()

    def streams(self, number: int) -> list[int]:
        made = [self.gpu.stream(NON_BLOCKING) for _ in range(number)]
        for stream in made:
            self.gpu.launch(self.function, stream)
        return made

    def destroy_streams(self, made: Sequence[int]) -> None:
        for stream in made:
            self.gpu.ok("cuStreamDestroy_v2", stream)

    def events(self, number: int) -> list[int]:
        made = [self.gpu.event() for _ in range(number)]
        for event in made:
            self.gpu.ok("cuEventRecord", event, self.stream)
        return made

    def destroy_events(self, made: Sequence[int]) -> None:
        for event in made:
            self.gpu.ok("cuEventDestroy_v2", event)

    def graph(self, nodes: int, function: int) -> int:
        """Return an executable graph of kernels, captured from a stream."""
        graph = c_uint64()
        self.gpu.ok("cuStreamBeginCapture_v2", self.stream, c_int(RELAXED))
        for _ in range(nodes):
            self.gpu.launch(function, self.stream)
        self.gpu.ok("cuStreamEndCapture", self.stream, byref(graph))
        executable = self.gpu.out("cuGraphInstantiateWithFlags", graph.value, c_uint64(0))
        self.gpu.ok("cuGraphDestroy", graph.value)
        return executable

    def run(self, executable: int) -> int:
        self.gpu.ok("cuGraphLaunch", executable, self.stream)
        return executable

    def destroy_graph(self, executable: int) -> None:
        self.gpu.ok("cuGraphExecDestroy", executable)

    def prints(self) -> None:
        """Launch a kernel that could print and allocate."""
        self.gpu.start(self.gpu.kernel((HEAD + CALLS).encode(), "calls_spin_us_10"), Parameters(0), self.stream)

    def pooled(self) -> int:
        address = self.gpu.out("cuMemAllocAsync", MIB, self.stream)
        self.gpu.ok("cuMemFreeAsync", address, self.stream)
        return 0

    def exported(self) -> int:
        """Return an address whose memory was allocated and exported to other processes."""
        address = self.gpu.alloc(2 * MIB)
        self.gpu.ipc_handle(address)
        return address


SHORT_PTX = HEAD.encode() + b".visible .entry empty_spin_us_1()\n{\n    ret;\n}\n"


def driver_costs(library: str, nvml: str, uuid: str) -> None:
    """Report what objects of the driver's interface take. A graph's launch is measured apart from its making."""
    gpu = Gpu(library)
    objects, costs = Objects(gpu), Costs(gpu, nvml, uuid)
    streams, events = list[int](), list[int]()
    for number in STREAMS:
        name = f"{number} more streams" if streams else "1 stream"
        costs.of(name, lambda number=number: streams.extend(objects.streams(number)))  # type: ignore[misc]
    costs.of(f"all {len(streams)} streams destroyed", lambda: objects.destroy_streams(streams))
    for number in EVENTS:
        name = f"{number} {'more ' if events else ''}events"
        costs.of(name, lambda number=number: events.extend(objects.events(number)))  # type: ignore[misc]
    costs.of(f"all {len(events)} events destroyed", lambda: objects.destroy_events(events))
    empty = gpu.kernel(SHORT_PTX, "empty_spin_us_1")
    for nodes in NODES:
        made: list[int] = []
        what = f"a graph of {nodes} kernels"
        costs.of(f"{what}, instantiated", lambda n=nodes, m=made: m.append(objects.graph(n, empty)))  # type: ignore[misc]
        if made:
            costs.of(f"{what}, launched", lambda m=made: objects.run(m[0]), objects.destroy_graph)  # type: ignore[misc]
    costs.of("a kernel that prints and allocates", objects.prints)
    costs.of("the first use of the memory pool (1 MiB, freed)", objects.pooled)
    costs.of("the first export to other processes (2 MiB)", objects.exported, gpu.free)
    costs.of("the second export (2 MiB)", objects.exported, gpu.free)
    costs.of("a second context", lambda: second_context(gpu), lambda handle: gpu.ok("cuCtxDestroy_v2", handle))
    say(rows=costs.rows)


def limit_costs(library: str, nvml: str, uuid: str) -> None:
    """Report what higher limits of a context take. They can only be set before a kernel that prints or allocates."""
    gpu = Gpu(library)
    objects, costs = Objects(gpu), Costs(gpu, nvml, uuid)
    costs.of("a printf FIFO of 64 MiB", lambda: gpu.ok("cuCtxSetLimit", c_int(PRINTF_FIFO), 64 * MIB))
    costs.of("a malloc heap of 256 MiB", lambda: gpu.ok("cuCtxSetLimit", c_int(MALLOC_HEAP), 256 * MIB))
    costs.of("a kernel that prints and allocates, with these", objects.prints)
    say(rows=costs.rows)


def second_context(gpu: Gpu) -> int:
    """Create a context beside the primary one, which stays current."""
    primary = gpu.out("cuCtxGetCurrent")
    handle = gpu.out("cuCtxCreate_v2", c_uint(0), c_int(0))
    gpu.ok("cuCtxSetCurrent", primary)
    return handle


class Library(NamedTuple):
    """A library of NVIDIA whose handles take memory. `create`: its function that makes one."""

    title: str
    stem: str
    create: str


LIBRARIES = (
    Library("a cuBLAS handle", "libcublas.so", "cublasCreate_v2"),
    Library("a cuBLASLt handle", "libcublasLt.so", "cublasLtCreate"),
    Library("a cuDNN handle", "libcudnn.so", "cudnnCreate"),
)


def loaded(stem: str) -> ctypes.CDLL:
    """Return a library that this process has loaded. OSError: it has not."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(None, 5)[5].strip() for line in maps if line.count("/"))
        path = next((path for path in paths if os.path.basename(path).startswith(stem)), None)
    if path is None:
        raise OSError(f"{stem} is not loaded")
    return ctypes.CDLL(path)


def handle_of(library: Library) -> c_void_p:
    handle = c_void_p()
    code = loaded(library.stem)[library.create](byref(handle))
    assert not code, f"{library.create} gave {code}"
    return handle


def torch_costs(library: str, nvml: str, uuid: str) -> None:
    """Report what the objects of PyTorch and of its libraries take, beside its own pool of memory."""
    torch = torch_module()
    torch.ones(1, device="cuda")
    gpu = Gpu(library)
    costs = Costs(gpu, nvml, uuid, torch.cuda.memory_reserved)
    for one in LIBRARIES:
        costs.of(one.title, lambda one=one: handle_of(one))  # type: ignore[misc]
        costs.of(f"{one.title}, the second", lambda one=one: handle_of(one))  # type: ignore[misc]
    costs.of("the first torch.cuda.Stream()", torch.cuda.Stream)
    costs.of("31 more of them", lambda: [torch.cuda.Stream() for _ in range(31)])
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    matrix, image = torch.ones(512, 512, **half), torch.ones(1, 16, 32, 32, **half)
    weight = torch.ones(16, 16, 3, 3, **half)
    functional = torch.nn.functional
    costs.of("the first torch.mm", lambda: torch.mm(matrix, matrix))
    costs.of("the first linear with a bias", lambda: functional.linear(matrix, matrix, matrix[0]))
    costs.of("the first conv2d", lambda: functional.conv2d(image, weight))
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            torch.mm(matrix, matrix)

    costs.of("the first torch.cuda.graph", capture)
    costs.of("its replay", graph.replay)
    say(rows=costs.rows)
