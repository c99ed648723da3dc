"""Oversubscribed shares: allocations continue in host memory; how they are counted and which are refused."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from simulator.ledger import Ledger
from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, peak, run, usage
from tests.shim.launches import HELPERS as KERNELS
from tests.shim.test_live import talk

DEVICE, WHOLE = 1 * GIB, 2 * GIB
CONTEXT = CONTEXT_BYTES
HELPERS = """
def managed(address):
    value = c_uint()
    ok(cuda.cuPointerGetAttribute(byref(value), 8, address))
    return value.value

def free(address):
    ok(cuda.cuMemFree_v2(address))

def pitched(out):
    pitch = c_size_t()
    return cuda.cuMemAllocPitch_v2(out, byref(pitch), c_size_t(1 << 20), c_size_t(512), c_uint(4))

TAKE = {
    "plain": lambda out: cuda.cuMemAlloc_v2(out, c_size_t(512 * MIB)),
    "pitch": pitched,
    "managed": lambda out: cuda.cuMemAllocManaged(out, c_size_t(512 * MIB), c_uint(1)),
    "async": lambda out: cuda.cuMemAllocAsync(out, c_size_t(512 * MIB), None),
    "pool": lambda out: cuda.cuMemAllocFromPoolAsync(out, c_size_t(512 * MIB), pool(), None),
}

def pool():
    found = c_void_p()
    ok(cuda.cuDeviceGetDefaultMemPool(byref(found), 0))
    return found
"""


def oversubscribed(device: int = DEVICE, whole: int = WHOLE, gpu_bytes: int = 16 * GIB) -> Box:
    return Box([device], whole=[whole], gpu_bytes=gpu_bytes)


def test_allocations_beyond_the_device_part_use_the_host() -> None:
    """Allocate beyond the device part up to the virtual total, no block more; free by either call; allocate again."""
    program = """
        def use(family):
            context, take = start(), TAKE[family]
            pooled = family in ("async", "pool")
            for give in (free, (lambda address: ok(cuda.cuMemFreeAsync(address, None))) if pooled else free):
                got = []
                for n in range(5):
                    address = c_uint64()
                    got.append(take(byref(address)) or address)
                print(family, sum(isinstance(one, c_uint64) for one in got), got[-1], managed(got[2]))
                ctypes.memset(got[2].value, 7, 4096)
                for address in got[:-2]:
                    give(address)
                give(got[-2]) if isinstance(got[-2], c_uint64) else None
                ok(cuda.cuCtxSynchronize())
            if pooled:
                ok(cuda.cuMemPoolTrimTo(pool(), c_size_t(0)))
            print(info()[0])
        for family in TAKE:
            apart(use, family)
    """
    with oversubscribed() as box:
        words = run(box, program, helpers=HELPERS)
        # 2 GiB minus a context: three of 512 MiB
        families = ("plain", "pitch", "managed", "async", "pool")
        want = [[*[family, "3", "2", "1"] * 2, str(WHOLE - CONTEXT)] for family in families]
        assert words == [word for row in want for word in row]
        assert peak(box) <= DEVICE
        assert usage(box).slots == ()


def test_both_parts_are_counted_and_programs_see_the_total() -> None:
    program = """
        start()
        total, held = c_size_t(), []
        ok(cuda.cuDeviceTotalMem_v2(byref(total), 0))
        say(total.value, *info())
        ok(alloc(512 * MIB)), ok(alloc(512 * MIB))
        nvml, device = nvml_device()
        count, rows = c_uint(4), (c_uint64 * 12)()
        ok(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), byref(rows)))
        say(*info(), *nvml_memory(), count.value, rows[1])
    """
    with oversubscribed() as box, talk(box, program) as following:
        assert following() == [str(n) for n in (WHOLE, WHOLE - CONTEXT, WHOLE)]
        held = CONTEXT + GIB
        assert following() == [str(n) for n in (WHOLE - held, WHOLE, WHOLE, WHOLE - held, held, 1, held)]
        now = usage(box)
        assert (now.used_bytes(0), now.host_bytes(0)) == (CONTEXT + 512 * MIB, 512 * MIB)
        with Ledger(box.device()) as ledger:
            assert ledger.used_bytes == CONTEXT + 512 * MIB


def test_allocation_that_fits_neither_part_is_divided() -> None:
    """1.7 GiB are free, 0.7 of them on the device: allocate 1.6 in one piece; freeing it returns all of it."""
    program = """
        context, held = start(), []
        for _ in range(2):
            ok(alloc(1638 * MIB, held))
            print(alloc(200 * MIB), info()[0])
            ok(cuda.cuMemFree_v2(held.pop()))
            print(info()[0])
        ok(alloc(info()[0] // (2 * MIB) * 2 * MIB))
        print(info()[0])
    """
    with oversubscribed() as box:
        left = WHOLE - CONTEXT - 1638 * MIB
        rest = (WHOLE - CONTEXT) % (2 * MIB)
        one = ["2", str(left), str(WHOLE - CONTEXT)]
        assert run(box, program) == [*one, *one, str(rest)]


def test_allocations_within_the_total_succeed_on_a_full_device() -> None:
    """A program without a share fills the device: then everything is on the host, even the device part."""
    with Box([15 * GIB]) as other:
        outsider = "start()\nok(alloc(14 * GIB))\nprint('full', flush=True)\nsys.stdin.readline()"
        with talk(other, outsider) as following, Box([2 * GIB], whole=[3 * GIB], simhost=other.simhost) as box:
            following()
            program = """
                start()
                n = 0
                while alloc(256 * MIB) == SUCCESS:
                    n += 1
                print(n, info()[0] < 256 * MIB, alloc_async(2 * MIB), alloc_async(256 * MIB))
            """
            assert run(box, program) == ["10", "True", "0", "2"]


def test_three_shares_on_a_full_device_get_their_totals(tmp_path: Path) -> None:
    """Three shares of one and a half times the device, allocating at once, each get their virtual total.

    In every order of allocations no share exceeds its device part, also while they free and allocate.
    """
    device, whole, step = 2 * GIB, 3 * GIB, 64 * MIB
    program = f"""
        start()
        say("ready")
        held = []
        def fill():
            while alloc({step}, held) == SUCCESS:
                pass
            return len(held)
        counts = [fill()]
        for _ in range(5):
            for address in held[::3]:
                free(address)
            del held[::3]
            counts.append(fill())
        say(*counts)
    """
    with ExitStack() as stack:
        simhost = make_simhost(tmp_path / "host", gpus=1, memory_bytes=3 * device)
        boxes = [
            stack.enter_context(Box([device], whole=[whole], gpu_bytes=3 * device, simhost=simhost)) for _ in range(3)
        ]
        all_three = [stack.enter_context(talk(box, HELPERS + textwrap.dedent(program))) for box in boxes]
        assert [one() for one in all_three] == [["ready"]] * 3
        with ThreadPoolExecutor(3) as pool:
            counts = list(pool.map(lambda one: one(), all_three))
        assert counts == [[str((whole - CONTEXT) // step)] * 6] * 3
        for box in boxes:
            now = usage(box)
            assert now.used_bytes(0) <= device and now.host_bytes(0) <= whole - device
        with Ledger(boxes[0].device()) as ledger:
            assert max(group.peak_bytes for group in ledger.groups()) <= device
            assert 3 * (device - step) < ledger.used_bytes <= 3 * device


def test_program_cannot_move_or_share_host_memory() -> None:
    """A program cannot bring it to the device with cuMemAdvise, and cannot share it."""
    program = """
        start()
        held = []
        ok(alloc(600 * MIB, held)), ok(alloc(600 * MIB, held))
        address, inside = held[1], c_uint64(held[1].value + 5 * MIB)
        handle = (ctypes.c_char * 64)()
        print(cuda.cuIpcGetMemHandle(handle, address), cuda.cuIpcGetMemHandle(handle, held[0]))
        for at in (address, inside):
            ok(cuda.cuMemAdvise(at, c_size_t(2 * MIB), 3, 0))
            ok(cuda.cuMemAdvise(at, c_size_t(2 * MIB), 4, 0))
        own, function = c_uint64(), kernel("sweep_ns_arg")
        ok(cuda.cuMemAllocManaged(byref(own), c_size_t(4 * MIB), 1))
        ok(cuda.cuMemPrefetchAsync(own, c_size_t(4 * MIB), 0, None))
        sweep(function, address, 600 * MIB)
        ok(cuda.cuCtxSynchronize())
    """
    with oversubscribed() as box:
        assert run(box, program, helpers=KERNELS) == ["801", "0"]
        # the program's own managed memory and code came to the device, nothing else
        assert peak(box) <= CONTEXT + 606 * MIB


def test_kernel_reading_host_memory_does_not_migrate_it() -> None:
    """The shim advises it to stay on the host; otherwise a read would take the device over its part."""
    program = """
        start()
        held, function = [], kernel("sweep_ns_arg")
        ok(alloc(600 * MIB, held)), ok(alloc(600 * MIB, held))
        for address in held:
            sweep(function, address, 600 * MIB)
        ok(cuda.cuCtxSynchronize())
    """
    with oversubscribed() as box:
        run(box, program, helpers=KERNELS)
        assert CONTEXT + 600 * MIB <= peak(box) < CONTEXT + 610 * MIB  # code is included


def test_stream_ordered_free_does_not_block() -> None:
    """The stream waits for a value that this thread writes after the free, so a free that blocks would never return.

    The address is not reused before the stream has reached the free.
    """
    program = """
        start()
        held, stream, flag = [], c_void_p(), c_void_p()
        ok(alloc(700 * MIB, held)), ok(alloc(700 * MIB, held))
        ok(cuda.cuMemHostAlloc(byref(flag), c_size_t(64), 0))
        ctypes.memset(flag, 0, 64)
        ok(cuda.cuStreamCreate(byref(stream), 1))
        ok(cuda.cuStreamWaitValue32(stream, flag, c_uint(1), 0))
        ok(cuda.cuMemFreeAsync(held[1], stream))
        print(alloc(700 * MIB), info()[0] < GIB)
        ctypes.memset(flag, 1, 1)
        ok(cuda.cuStreamSynchronize(stream))
        print(alloc(700 * MIB))
    """
    with oversubscribed() as box:
        assert run(box, program) == ["2", "True", "0"]


def test_host_part_is_free_after_process_and_context_end() -> None:
    """The host part of a process that was killed, reset its device or exited is free at once."""
    program = """
        start()
        pids = []
        me = [sys.executable, "-c", open("/proc/self/cmdline").read().split("\\0")[2], "child"]
        if len(sys.argv) > 1:
            ok(alloc(1200 * MIB))
            print("held", flush=True)
            os.kill(os.getpid(), 9)
        child = subprocess.Popen(me, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"held\\n"
        child.wait()
        ok(alloc(1000 * MIB)), ok(alloc(600 * MIB))
        ok(cuda.cuDevicePrimaryCtxReset_v2(0))
        start()
        print(info()[0])
    """
    with oversubscribed() as box:
        assert run(box, program) == [str(WHOLE - CONTEXT)]


def test_lowered_limit_sends_further_allocations_to_the_host() -> None:
    with oversubscribed() as box:
        program = """
            start()
            say(*info())
            say(alloc(512 * MIB), alloc(1024 * MIB), alloc(512 * MIB), *info())
        """
        with talk(box, program) as following:
            assert following() == [str(WHOLE - CONTEXT), str(WHOLE)]
            box.set_limit(memory_limit_bytes=512 * MIB, memory_virtual_bytes=WHOLE)
            assert following() == ["0", "0", "2", str(WHOLE - CONTEXT - 1536 * MIB), str(WHOLE)]
        assert peak(box) <= 512 * MIB


@pytest.mark.parametrize(("first", "dropped", "border"), [(11, 0, 512), (27, 11, 1792), (27, 11, 2048)])
def test_total_holds_while_the_residency_boundary_moves(first: int, dropped: int, border: int) -> None:
    """The shrinking part still holds its memory while the other part grew: together they do not exceed the total."""
    program = f"""
        start()
        held = []
        def fill(most):
            while len(held) < most and alloc(64 * MIB, held) == SUCCESS:
                pass
            return len(held)
        say(fill({first}))
        for address in held[:{dropped}]:
            free(address)
        del held[:{dropped}]
        say()
        handle = c_uint64()
        say(fill(99), cuda.cuMemCreate(byref(handle), c_size_t(64 * MIB), (c_uint64 * 4)(1, 1, 0, 0), c_uint64(0)))
    """
    with oversubscribed() as box, talk(box, HELPERS + textwrap.dedent(program)) as following:
        assert following() == [str(first)]
        assert following() == []
        box.set_limit(memory_limit_bytes=border * MIB, memory_virtual_bytes=WHOLE)
        assert following() == [str((WHOLE - CONTEXT) // (64 * MIB)), "2"]
        now = usage(box)
        assert now.used_bytes(0) + now.host_bytes(0) <= WHOLE


def test_virtual_total_is_ignored_without_the_flag() -> None:
    """Without the flag the virtual total in the limits file is ignored."""
    with Box([GIB]) as box:
        box.set_limit(memory_virtual_bytes=8 * GIB)
        assert run(box, "start()\nprint(alloc(GIB), *info())") == ["2", str(GIB - CONTEXT), str(GIB)]
