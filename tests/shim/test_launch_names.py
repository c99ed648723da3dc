"""A function launched through one entry point can be launched through another after the thread cached it."""

from __future__ import annotations

from pathlib import Path

from tests.shim.box import GIB, Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS

# A program that finds the driver's functions with dlsym, not cuGetProcAddress: each is the first of its kind.
PROGRAM = """
class Config(ctypes.Structure):
    _fields_ = [(name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
    _fields_ += [("stream", c_void_p), ("attributes", c_void_p), ("n", c_uint)]

def through_both(first, then):
    start()
    stream = c_void_p(2 if "_ptsz" in first + then else None)  # CU_STREAM_PER_THREAD
    if "Graph" in first:
        mine, graph, function = new_stream(), c_void_p(), c_void_p()
        ok(cuda.cuStreamBeginCapture_v2(mine, 0))
        ok(launch(kernel("spin_us_10"), mine))
        ok(cuda.cuStreamEndCapture(mine, byref(graph)))
        ok(cuda.cuGraphInstantiateWithFlags(byref(function), graph, c_uint64(0)))
    else:
        function = kernel("spin_us_10")

    def by(name):
        if "Graph" in name:
            return getattr(cuda, name)(function, stream)
        if "Ex" in name:
            return getattr(cuda, name)(byref(Config(1, 1, 1, 1, 1, 1, 0, stream, None, 0)), function, None, None)
        return getattr(cuda, name)(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

    for _ in range(50):
        ok(by(first))
    ok(cuda.cuCtxSynchronize())
    ok(by(first))
    print(first, then, by(then), *(by(first) for _ in range(3)), cuda.cuCtxSynchronize())

for first, then in zip(sys.argv[1::2], sys.argv[2::2]):
    apart(through_both, first, then)
"""
PAIRS = [
    ("cuLaunchKernel", "cuLaunchKernelEx"),
    ("cuLaunchKernelEx", "cuLaunchKernel"),
    ("cuLaunchKernel", "cuLaunchKernel_ptsz"),
    ("cuLaunchKernel", "cuLaunchKernelEx_ptsz"),
    ("cuGraphLaunch", "cuGraphLaunch_ptsz"),
]


def test_cached_function_launches_through_another_entry_point() -> None:
    with Box([GIB], compute=[50]) as box:
        found = run(box, PROGRAM, *(name for pair in PAIRS for name in pair), helpers=HELPERS)
    assert found == [word for pair in PAIRS for word in (*pair, *["0"] * 5)]


LINKED = """
int cuInit(unsigned), cuLaunchKernelEx(const void *, void *, void **, void **);
int main(void) { return cuInit(0) != 0 || cuLaunchKernelEx(0, 0, 0, 0) != 801; }
"""


def test_launch_function_that_the_driver_lacks_is_not_found(tmp_path: Path) -> None:
    """A program that is linked with it gets CUDA_ERROR_NOT_SUPPORTED: bound at start, it finds the wrapper."""
    with Box([GIB]) as whole:
        older = tmp_path / whole.driver.name
        name = b"\0cuLaunchKernelEx\0"
        older.write_bytes(whole.driver.read_bytes().replace(name, name.replace(b"Ex", b"Xx")))
    with Box([GIB], driver=older, compute=[50]) as box:
        found = "print(*(hasattr(cuda, name) for name in sys.argv[1:]))"
        assert run(box, found, "cuLaunchKernel", "cuLaunchKernelEx") == ["True", "False"]
        source = tmp_path / "linked.c"
        source.write_text(LINKED)
        command = f"gcc -Wl,-z,now -o {tmp_path}/linked {source} -lcuda && {tmp_path}/linked"
        done = box.run(["sh", "-c", command])
        assert (done.returncode, done.stderr) == (0, "")
