"""A suspended container: every call waits before the driver, and the usage file has what the host must know."""

from __future__ import annotations

import time

import pytest
from gpushare.state.shm_abi import DEVICE_SUSPENDED, offset
from gpushare.state.usage_reader import DOES_EXCHANGE, DOES_MANAGE, DOES_WAIT

from tests.shim.box import GIB, Box
from tests.shim.inside import usage
from tests.shim.test_live import talk

WAITING = """
context, address, stream, event = start(), c_uint64(), new_stream(), c_void_p()
ok(cuda.cuEventCreate(byref(event), 0))
ok(cuda.cuMemAlloc_v2(byref(address), c_size_t(4096)))
function, block = kernel("spin_us_10"), ctypes.create_string_buffer(4096)
CALLS = {
    "cuMemAlloc_v2": lambda: alloc(4096),
    "cuMemAllocAsync": lambda: alloc_async(4096),
    "cuLaunchKernel": lambda: launch(function),
    "cuMemcpyHtoDAsync_v2": lambda: cuda.cuMemcpyHtoDAsync_v2(address, block, c_size_t(4096), stream),
    "cuMemcpyDtoH_v2": lambda: cuda.cuMemcpyDtoH_v2(block, address, c_size_t(4096)),
    "cuMemsetD8Async": lambda: cuda.cuMemsetD8Async(address, 0, c_size_t(4096), stream),
    "cuStreamSynchronize": lambda: cuda.cuStreamSynchronize(stream),
    "cuCtxSynchronize": lambda: cuda.cuCtxSynchronize(),
    "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(byref(c_void_p())),
    "cuMemGetInfo_v2": lambda: info(),
    "cuEventSynchronize": lambda: cuda.cuEventSynchronize(event),
    "cuEventRecord": lambda: cuda.cuEventRecord(event, stream),
    "cuEventQuery": lambda: cuda.cuEventQuery(event),
    "cuStreamQuery": lambda: cuda.cuStreamQuery(stream),
}
for name in CALLS:
    CALLS[name]()
ok(cuda.cuCtxSynchronize())
say("ready")
returned, threads = [], []
def call(name):
    real = cuda.cuCtxSetCurrent  # waits, too
    real(context)
    CALLS[name]()
    returned.append(name)
def launched():
    "A launch like an earlier one of its thread costs a comparison."
    ok(launch(function))
    returned.append("cuLaunchKernel again")
for name in CALLS:
    threads.append(threading.Thread(target=call, args=(name,)))
    threads[-1].start()
threads.append(threading.Thread(target=launched))
time.sleep(0.5)
say("returned", len(returned))
for thread in threads[:-1]:
    thread.join()
ok(launch(function))
say("returned", len(returned), len(CALLS))
"""
DOING = {
    "nothing": ("alloc(4096)", 0),
    "managed": ("cuda.cuMemAllocManaged(byref(out), c_size_t(4096), 1)", DOES_MANAGE),
    "memory handle": ("ok(alloc(4096, mine)); cuda.cuIpcGetMemHandle(block, mine[0])", DOES_EXCHANGE),
    "event handle": ("cuda.cuEventCreate(byref(out), 6); cuda.cuIpcGetEventHandle(block, out)", DOES_EXCHANGE),
}


def wait_until(box: Box, does: int) -> None:
    until = time.monotonic() + 10
    while usage(box).slots[0].does != does:
        assert time.monotonic() < until


def test_each_call_waits_while_the_container_is_suspended() -> None:
    with Box([4 * GIB], gpu_bytes=16 * GIB) as box, talk(box, WAITING) as following:
        assert following() == ["ready"]
        box.set_limit(flags=DEVICE_SUSPENDED)
        wait_until(box, DOES_WAIT)
        assert following() == ["returned", "0"]
        assert usage(box).calls
        with box.usage.open("r+b") as file:
            file.seek(offset("gs_usage", "asks"))
            file.write(b"1")
        assert usage(box).asks
        box.set_limit(flags=0)
        _, returned, calls = following()
        assert returned == calls
        assert not usage(box).calls
        wait_until(box, 0)
        assert not usage(box).asks  # otherwise it would be suspended again


@pytest.mark.parametrize("name", DOING)
def test_usage_shows_what_a_checkpoint_cannot_move(name: str) -> None:
    line, does = DOING[name]
    program = (
        f"start()\nout, block, mine = c_uint64(), ctypes.create_string_buffer(64), []\n{line}\nsay('done')\nsay()\n"
    )
    with Box([4 * GIB], gpu_bytes=16 * GIB) as box, talk(box, program) as following:
        assert following() == ["done"]
        (slot,) = usage(box).slots
        assert slot.does == does


def test_usage_shows_when_the_container_called_last() -> None:
    program = "start()\nsay('ready')\nok(cuda.cuCtxSynchronize())\nsay('called')\nsay()\n"
    with Box([4 * GIB], gpu_bytes=16 * GIB) as box, talk(box, program) as following:
        assert following() == ["ready"]
        seen, since = 0, time.monotonic_ns()
        while seen < usage(box).called_ns or time.monotonic_ns() < seen + 3 * 10**9:  # three seconds without a call
            seen = usage(box).called_ns or since
        following()
        until = time.monotonic() + 10
        while usage(box).called_ns <= seen:
            assert time.monotonic() < until
