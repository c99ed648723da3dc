"""Functions of newer drivers than the simulated one, and functions that the shim does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.simhost import BUILT, VERSION
from tests.shim.box import GIB, Box
from tests.shim.inside import compile_c, run
from tests.shim.launches import HELPERS


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the newer functions. It loads the simulated driver, under another soname, for all others."""
    directory = tmp_path_factory.mktemp("newer")
    simulated = (BUILT / f"libcuda.so.{VERSION}").read_bytes()
    (directory / "libsimu.so.1").write_bytes(simulated.replace(b"\0libcuda.so.1\0", b"\0libsimu.so.1\0"))
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")
    rest = ("-Wl,--no-as-needed", directory / "libsimu.so.1", f"-Wl,-rpath,{directory}")
    return compile_c(directory, "newer_driver.c", *shared, *rest)


CAPTURE = """
def finished(spin, stream):
    "Launches that finish in a quarter of a second."
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 0.25:
        ok(launch(spin, stream))
        n += 1
    ok(cuda.cuStreamSynchronize(stream))
    return n

def capture(begin, first):
    start()
    stream, spin = new_stream(), kernel("spin_us_100")
    if first == "marks":
        finished(spin, stream)
    ok(getattr(cuda, begin)(stream, 0, None, None, None))
    took = timed(lambda: any(launch(spin, stream) for _ in range(300)))
    graph, nodes = c_void_p(), c_size_t()
    if begin == "cuStreamBeginCaptureToCig":
        ok(cuda.cuStreamEndCaptureToCig(stream))
    else:
        ok(cuda.cuStreamEndCapture(stream, byref(graph)))
        ok(cuda.cuGraphGetNodes(graph, None, byref(nodes)))
    print(begin, first, nodes.value, took < 5, finished(spin, stream) > 50)

for begin in sys.argv[1:]:
    for first in ("marks", "capture"):
        apart(capture, begin, first)
"""
BEGINS = {
    "cuStreamBeginRecaptureToGraph": "300",
    "cuStreamBeginCaptureToCig": "0",
    "cuStreamBeginNovelCapture": "300",  # the shim does not know this call
    "cuStreamBeginHiddenCapture": "300",  # and the driver denies this capture, so its marks are captured and lost
}


def test_no_capture_limits_a_stream_for_good(newer: Path) -> None:
    """Launches into a capture run later. If they wait, they take 28 s; afterwards 9 launches a second are left."""
    with Box([GIB], driver=newer, compute=[30]) as box:
        found = run(box, CAPTURE, *BEGINS, helpers=HELPERS)
    rows = [[begin, first, nodes, "True", "True"] for begin, nodes in BEGINS.items() for first in ("marks", "capture")]
    assert found == [word for row in rows for word in row]


ENDPOINT = """
start()
SIZE = 400 * MIB
handle, address = c_uint64(), c_uint64()

def create():
    ok(cuda.cuMemCreate(byref(handle), c_size_t(SIZE), (c_uint32 * 8)(1, 0, 1, 0), c_uint64(0)))
    ok(cuda.cuMemAddressReserve(byref(address), c_size_t(SIZE), c_size_t(0), c_uint64(0), c_uint64(0)))
    ok(cuda.cuMemMap(address, c_size_t(SIZE), c_size_t(0), handle, c_uint64(0)))

def bind(how, flags):
    if how == "address":
        return cuda.cuLogicalEndpointBindAddr(7, 0, c_uint64(0), address, c_uint64(SIZE), c_uint64(flags))
    return cuda.cuLogicalEndpointBindMem(7, 0, c_uint64(0), handle, c_uint64(0), c_uint64(SIZE), c_uint64(flags))

def let_go():
    ok(cuda.cuMemUnmap(address, c_size_t(SIZE)))
    ok(cuda.cuMemRelease(handle))

for how in ("handle", "address"):
    for end in (None, lambda: cuda.cuLogicalEndpointUnbind(7, 0, c_uint64(0), c_uint64(SIZE)),
                lambda: cuda.cuLogicalEndpointDestroy(7)):
        create()
        assert bind(how, int(end is None)) == int(end is None)
        let_go()
        held = info()[1] - info()[0] >= SIZE
        ok(end() if end else 0)
        print(held, info()[1] - info()[0] >= SIZE)
"""


def test_memory_bound_to_an_endpoint_stays_charged(newer: Path) -> None:
    """After a failed bind nothing is held; otherwise until the range is unbound or the endpoint destroyed."""
    with Box([GIB], driver=newer) as box:
        assert run(box, ENDPOINT) == ["False", "False", *["True", "False"] * 2] * 2


def test_newer_versions_are_found_and_called(newer: Path) -> None:
    program = """
    start()
    called = threading.Event()
    function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: called.set())
    ok(cuda.cuLaunchHostFunc_v2(None, function, None, 0))
    print(called.wait(30), cuda.cuLaunchHostFunc_v2(None, function, None, 1), hasattr(cuda, "cuGraphAddNode_v3"))
    """
    with Box([GIB], driver=newer) as box:
        assert run(box, program) == ["True", "1", "False"]
