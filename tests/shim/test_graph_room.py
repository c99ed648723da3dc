"""Memory of graphs: each device is charged its own part, and each launch has room for what it allocates."""

from __future__ import annotations

from tests.shim.box import CONTEXT_BYTES, Box
from tests.shim.inside import MIB, peak, run

GRAPHS = """
def graph_of(*sizes, freed=False):
    "An executable graph that allocates (device, bytes) each."
    graph, executable, before = c_void_p(), c_void_p(), c_void_p()
    ok(cuda.cuGraphCreate(byref(graph), 0))
    for device, size in sizes:
        node = c_void_p()
        params = (c_uint64 * 15)()
        words = ctypes.cast(params, ctypes.POINTER(c_uint32))
        words[0], words[2], words[3] = 1, 1, device
        params[13] = size
        ok(cuda.cuGraphAddMemAllocNode(byref(node), graph, None, c_size_t(0), params))
        if freed:
            free = c_void_p()
            ok(cuda.cuGraphAddMemFreeNode(byref(free), graph, byref(node), c_size_t(1), c_uint64(params[14])))
    ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
    return executable

def launch(executable):
    return cuda.cuGraphLaunch(executable, None)
"""


def test_launched_graph_keeps_no_claim_to_memory_allocated_since() -> None:
    limit = CONTEXT_BYTES + 500 * MIB
    program = """
        start()
        a, b = graph_of((0, 200 * MIB), freed=True), graph_of((0, 200 * MIB))
        print(launch(a), launch(b), alloc(250 * MIB), launch(a))
    """
    with Box([limit]) as box:
        assert run(box, program, helpers=GRAPHS) == ["0", "0", "0", "2"]
        assert peak(box) <= limit


def test_graph_runs_again_at_a_full_limit() -> None:
    limit = CONTEXT_BYTES + 300 * MIB
    program = """
        start()
        a = graph_of((0, 200 * MIB), freed=True)
        print(launch(a), alloc(99 * MIB), launch(a), launch(a))
    """
    with Box([limit]) as box:
        assert run(box, program, helpers=GRAPHS) == ["0", "0", "0", "0"]
        assert peak(box) <= limit


def test_graph_on_two_devices_is_charged_on_each() -> None:
    limit = CONTEXT_BYTES + 300 * MIB
    program = """
        start()
        print(launch(graph_of((0, 200 * MIB), (1, 2 * MIB))), launch(graph_of((0, 200 * MIB), (1, 2 * MIB))))
    """
    with Box([limit, limit], gpus=2) as box:
        assert run(box, program, helpers=GRAPHS) == ["0", "2"]
        assert peak(box, 0) <= limit and peak(box, 1) <= limit
