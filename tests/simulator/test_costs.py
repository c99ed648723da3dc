"""The driver's costs beyond a program's allocations: each one alone, and those measured on an H100."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import models, simhost
from simulator.ledger import Ledger
from simulator.simhost import LIBDIR, Costs
from tests.simulator.test_ledger import CONTEXT, MIB
from tests.simulator.test_sharing import pass_descriptor
from tests.support.remote import Remote

Start = Callable[..., Remote]
MakeHost = Callable[..., Path]
H100 = "NVIDIA H100 80GB HBM3"

LIST = """
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print([(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(h)])
"""


def listed(root: Path, *wrapper: str) -> list[tuple[int, int]]:
    """Return the processes that NVML lists, as (pid, bytes)."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(root / LIBDIR)}
    command = [*wrapper, sys.executable, "-c", LIST]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return sorted(eval(done.stdout))


def opened(root: Path) -> Ledger:
    return Ledger(str(root / "dev/nvidia0"))


def test_default_model_has_no_costs(start: Start, simhost: Path) -> None:
    p = start()
    with opened(simhost) as ledger:
        p.do("cuda.init()")
        assert ledger.clients() == ()
        p.do("cuda.context()")
        assert ledger.used_bytes == CONTEXT and listed(simhost) == [(p.pid, CONTEXT)]


def test_context_of_the_h100_is_the_measured_one(start: Start, make_host: MakeHost) -> None:
    root = make_host(model=H100)
    p = start(root)
    with opened(root) as ledger:
        p.do("cuda.init()")
        assert ledger.used_bytes == 3407872 and listed(root) == []
        p.do("cuda.context()")
        assert ledger.used_bytes == 552402944 and listed(root) == [(p.pid, 543162368)]
        p.do("second = cuda.out('cuCtxCreate_v2', 0, 0)")
        assert ledger.used_bytes == 552402944 + 548995072 and listed(root) == [(p.pid, 2 * 543162368)]
        p.do("cuda.ok('cuCtxDestroy_v2', second); cuda.ok('cuDevicePrimaryCtxReset_v2', 0)")
        assert ledger.used_bytes == 3407872 and listed(root) == []
        (client,) = ledger.clients()
        assert client.unlisted_bytes == 3407872


def test_cuinit_takes_memory_of_each_device(start: Start, make_host: MakeHost) -> None:
    root = make_host(gpus=2, costs=Costs(init_bytes=MIB))
    start(root).do("cuda.init()")
    for minor in range(2):
        with Ledger(str(root / f"dev/nvidia{minor}")) as ledger:
            assert ledger.used_bytes == MIB


def test_cuinit_fails_on_a_full_device(start: Start, make_host: MakeHost) -> None:
    root = make_host(memory_bytes=CONTEXT, costs=Costs(init_bytes=MIB))
    with pytest.raises(Exception, match="cuDevicePrimaryCtxRetain gave 2"):
        start(root).do("cuda.context()")
    full = make_host("full", memory_bytes=2 * MIB, costs=Costs(init_bytes=3 * MIB))
    with pytest.raises(Exception, match="cuInit gave 2"):
        start(full).do("cuda.init()")


def test_command_sets_single_costs(tmp_path: Path) -> None:
    command = [sys.executable, simhost.__file__, str(tmp_path / "h"), "--model", H100, "--init-bytes", "5"]
    subprocess.run(command, check=True)
    with opened(tmp_path / "h") as ledger:
        assert ledger.costs == models.MODELS[H100].costs._replace(init_bytes=5)


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
HERE = """
import subprocess, sys
def listed(script):
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return sorted(eval(done.stdout))
"""


def tenant(start: Start, root: Path) -> Remote:
    """A process with a context in its own pid namespace, where its pid is 1."""
    p = start(root, wrapper=CONTAINER, env={"LD_LIBRARY_PATH": str(root / LIBDIR)})
    p.do(HERE)
    p.do("cuda.context()")
    return p


def host_pid(ledger: Ledger) -> int:
    """Return the host pid of the only tenant."""
    (pid,) = (c.host_pid for c in ledger.clients() if c.pid == 1)
    return pid


def test_processes_have_the_pids_of_the_caller(start: Start, simhost: Path) -> None:
    a, outside = tenant(start, simhost), start()
    outside.do("cuda.context()")
    with opened(simhost) as ledger:
        assert listed(simhost) == sorted([(host_pid(ledger), CONTEXT), (outside.pid, CONTEXT)])
    assert a.get(f"listed({LIST!r})") == [(1, CONTEXT)]


def test_process_is_listed_twice_in_a_container(start: Start, make_host: MakeHost) -> None:
    root = make_host(costs=Costs(duplicates=True))
    p = tenant(start, root)
    assert p.get(f"listed({LIST!r})") == [(1, CONTEXT)] * 2
    assert len(listed(root)) == 1


def test_old_driver_lists_host_pids_in_a_container(start: Start, make_host: MakeHost) -> None:
    root = make_host(costs=Costs(host_pids=True, duplicates=True))
    p = tenant(start, root)
    ((unseen, size),) = p.get(f"listed({LIST!r})")
    assert unseen >= 1 << 22 and size == CONTEXT  # no process of the host has seen it yet
    with opened(root) as ledger:
        expected = [(host_pid(ledger), CONTEXT)]
    assert listed(root) == expected and p.get(f"listed({LIST!r})") == expected
    assert listed(root, *CONTAINER) == expected


IMAGE = "b'SIMMOD globals=0 code=1 functions=spin_us_1,spin_us_2\\n\\0'"
LIBRARY = f"""
from ctypes import byref, c_char_p, c_uint, c_uint64
def library(image={IMAGE}):
    return cuda.out("cuLibraryLoadData", c_char_p(image), None, None, c_uint(0), None, None, c_uint(0))
def kernel(of, name=b"spin_us_1"):
    return cuda.out("cuLibraryGetKernel", of, c_char_p(name))
def graph(kernels):
    s = cuda.stream(1)
    cuda.ok("cuStreamBeginCapture_v2", s, c_uint(1))
    for _ in range(kernels):
        cuda.launch(f, s)
    g = c_uint64()
    cuda.ok("cuStreamEndCapture", s, byref(g))
    cuda.ok("cuStreamDestroy_v2", s)
    return g.value
def instantiate(g):
    return cuda.out("cuGraphInstantiateWithFlags", g, 0)
"""


class Costly:
    """A process with a context on a host with these costs; `taken` is what it takes beyond the context."""

    def __init__(self, start: Start, root: Path) -> None:
        self.root, self.process = root, start(root)
        self.do = self.process.do
        self.do(LIBRARY)
        self.do(f"cuda.context(); f = cuda.function(cuda.load({IMAGE}), 'spin_us_1')")
        self.base = self.used()

    def used(self) -> int:
        with opened(self.root) as ledger:
            return ledger.used_bytes

    @property
    def taken(self) -> int:
        taken = self.used() - self.base
        ((_, size),) = listed(self.root)
        with opened(self.root) as ledger:
            assert size == ledger.used_bytes - sum(c.unlisted_bytes for c in ledger.clients())  # all of it is listed
        return taken


@pytest.fixture
def costly(start: Start, make_host: MakeHost) -> Callable[..., Costly]:
    """costly(stream_bytes=1 << 20, ...) -> a process on a host with only these costs."""
    return lambda **costs: Costly(start, make_host(costs=Costs(**costs)))


def test_stream_takes_memory_until_it_is_destroyed(costly: Callable[..., Costly]) -> None:
    p = costly(stream_bytes=3 * MIB)
    p.do("cuda.launch(f); cuda.launch(f, 2); cuda.synchronize()")
    assert p.taken == 0  # default streams cost nothing
    p.do("a, b = cuda.stream(), cuda.stream(1)")
    assert p.taken == 6 * MIB
    p.do("cuda.launch(f, a); cuda.ok('cuStreamDestroy_v2', a); cuda.synchronize()")
    assert p.taken == 3 * MIB
    p.do("cuda.ok('cuStreamDestroy_v2', b)")
    assert p.taken == 0


def test_stream_is_refused_on_a_full_device(costly: Callable[..., Costly]) -> None:
    p = costly(stream_bytes=3 * MIB)
    p.do("cuda.alloc(cuda.free_bytes() - (2 << 20))")
    with pytest.raises(Exception, match="cuStreamCreate gave 2"):
        p.do("cuda.stream()")


def test_graph_nodes_share_blocks_until_the_executable_graph_is_destroyed(costly: Callable[..., Costly]) -> None:
    p = costly(graph_bytes=4096)
    p.do("g = graph(300); x = instantiate(g)")
    assert p.taken == 2 * MIB
    p.do("y = instantiate(g); cuda.ok('cuGraphUpload', x, 0); cuda.ok('cuGraphLaunch', x, 0); cuda.synchronize()")
    assert p.taken == 4 * MIB  # 600 nodes of 4 KiB
    p.do("cuda.ok('cuGraphExecDestroy', x)")
    assert p.taken == 2 * MIB
    p.do("cuda.ok('cuGraphExecDestroy', y); cuda.ok('cuGraphDestroy', g)")
    assert p.taken == 0


@pytest.mark.parametrize("call", ["cuGraphUpload", "cuGraphLaunch"])
def test_late_graph_takes_memory_at_its_first_use(costly: Callable[..., Costly], call: str) -> None:
    p = costly(graph_bytes=4096, graph_late=True)
    p.do("x = instantiate(graph(3))")
    assert p.taken == 0
    p.do(f"cuda.ok({call!r}, x, 0); cuda.synchronize()")
    assert p.taken == 2 * MIB
    p.do("cuda.ok('cuGraphLaunch', x, 0); cuda.ok('cuDevicePrimaryCtxReset_v2', 0)")
    assert p.used() == 0
    p.do("cuda.ok('cuGraphExecDestroy', x)")  # its context has ended
    assert p.used() == 0


def test_library_takes_memory_with_its_first_kernel(costly: Callable[..., Costly]) -> None:
    p = costly(library_bytes=5 * MIB)
    p.do("one, two = library(), library(); kernels = [kernel(one), kernel(one, b'spin_us_2'), kernel(two)]")
    assert p.taken == 0
    p.do("cuda.launch(kernels[0])")
    assert p.taken == 5 * MIB
    p.do("cuda.launch(kernels[1]); cuda.launch(kernels[2]); cuda.synchronize()")
    assert p.taken == 10 * MIB
    p.do("m = cuda.load(); cuda.function(m); cuda.ok('cuModuleUnload', m)")
    assert p.taken == 10 * MIB  # a module is not a library
    p.do("cuda.ok('cuLibraryUnload', one)")
    assert p.taken == 5 * MIB


def test_module_takes_memory_with_its_first_kernel(start: Start, make_host: MakeHost) -> None:
    p = Costly(start, make_host(costs=Costs(module_bytes=5 * MIB)))
    assert p.used() == CONTEXT + 2 * MIB + 5 * MIB
    p.do(f"m = cuda.load({IMAGE})")
    assert p.taken == 0
    p.do("cuda.function(m, 'spin_us_1'); cuda.function(m, 'spin_us_2')")
    assert p.taken == 5 * MIB
    p.do("cuda.ok('cuModuleUnload', m)")
    assert p.taken == 0


def test_events_take_memory_in_pools(costly: Callable[..., Costly]) -> None:
    p = costly(event_pool_bytes=2 * MIB)
    p.do("e = [cuda.event() for _ in range(512)]")
    assert p.taken == 2 * MIB
    p.do("e.append(cuda.event())")
    assert p.taken == 4 * MIB
    p.do("[cuda.ok('cuEventDestroy_v2', one) for one in e]; e = [cuda.event() for _ in range(600)]")
    assert p.taken == 4 * MIB
    p.do("cuda.ok('cuDevicePrimaryCtxReset_v2', 0)")
    assert p.used() == 0


def test_program_like_pytorch_takes_what_the_h100_showed(start: Start, make_host: MakeHost) -> None:
    """44 libraries in use and a few events take 90 MiB beyond the images, and 32 streams 70 MiB more."""
    p = Costly(start, make_host(model=H100))
    p.do(
        "[cuda.launch(kernel(library())) for _ in range(44)]; e = [cuda.event() for _ in range(20)]; cuda.synchronize()"
    )
    assert p.taken == 90 * MIB
    p.do("s = [cuda.stream(1) for _ in range(32)]")
    assert p.taken == 160 * MIB


MEASURE = """
import time, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
before = time.process_time()
for _ in range(10):
    n.nvmlDeviceGetComputeRunningProcesses(h)  # asks for the number first
print(time.process_time() - before)
"""


def test_list_of_processes_takes_processor_time(make_host: MakeHost) -> None:
    root = make_host(costs=Costs(query_ns=20_000_000))
    env = {**os.environ, "LD_LIBRARY_PATH": str(root / LIBDIR)}
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, env=env)
    assert 0.2 <= float(done.stdout) < 1


EXPORT = """
from ctypes import byref, c_int, c_void_p
from tests.conformance.driver import Properties, Location
def exported(name, handle):
    fd = c_int()
    cuda.ok(name, byref(fd), handle, c_int(1), 0)
    status = os.fstat(fd.value)
    return fd.value, (status.st_dev, status.st_ino, os.readlink(f"/proc/self/fd/{fd.value}"))
def memory(handle):
    return exported("cuMemExportToShareableHandle", handle)
def pool(handle):
    return exported("cuMemPoolExportToShareableHandle", handle)
def on_host():
    where = Properties(type=1, handle_types=1, location=Location(3, 0))
    return cuda.out("cuMemCreate", 2 << 20, byref(where), 0)
cuda.context()
a, b, c, d = cuda.create(2 << 20, 1), cuda.create(4 << 20, 1), cuda.pool(1), on_host()
descriptors = [memory(a), memory(a), memory(b), pool(c), memory(d)]
"""


def test_exported_memory_has_one_descriptor(start: Start, make_host: MakeHost, tmp_path: Path) -> None:
    root = make_host(costs=Costs(one_descriptor=True))
    p, other = start(root), start(root)
    p.do(EXPORT)
    identities = p.get("[identity for _, identity in descriptors]")
    assert len(set(identities)) == 1 and identities[0][2].endswith("/nvidiactl")
    p.do("v = cuda.reserve(4 << 20); cuda.map(v, 4 << 20, b); cuda.write(v, b'second')")
    p.do("w = cuda.reserve(2 << 20); cuda.map(w, 2 << 20, d); cuda.write(w, b'host')")
    assert p.get("cuda.read(w, 4)") == b"host"
    numbers = [pass_descriptor(p, other, f"descriptors[{i}][0]", tmp_path / f"s{i}") for i in (2, 3)]
    other.do("from ctypes import c_int, c_void_p; cuda.context()")
    other.do(f"h = cuda.out('cuMemImportFromShareableHandle', c_void_p({numbers[0]}), c_int(1))")
    other.do("v = cuda.reserve(4 << 20); cuda.map(v, 4 << 20, h)")
    assert other.get("cuda.read(v, 6)") == b"second"
    import_pool = "cuda.out('cuMemPoolImportFromShareableHandle', c_void_p({}), c_int(1), 0)"
    with pytest.raises(Exception, match="gave 1"):  # it stands for memory
        other.do(import_pool.format(numbers[0]))
    other.do("pool = " + import_pool.format(numbers[1]))
    p.do(
        "q = cuda.alloc_from(c, 5000); cuda.write(q, b'pooled'); import ctypes; data = ctypes.create_string_buffer(64)"
    )
    p.do("cuda.ok('cuMemPoolExportPointer', data, q)")
    raw = p.get("data.raw")
    other.do(f"import ctypes; q = cuda.out('cuMemPoolImportPointer', pool, ctypes.create_string_buffer({raw!r}, 64))")
    assert other.get("cuda.read(q, 6)") == b"pooled"


def test_exported_pool_has_a_descriptor_of_its_own_by_default(start: Start, simhost: Path) -> None:
    p = start()
    p.do(EXPORT)
    assert len(set(p.get("[identity for _, identity in descriptors]"))) == 3
