"""Memory above a request, up to its limit: containers of 4..12 GiB on one device."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import shm_abi

from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, on_device, usage
from tests.shim.test_live import talk

REQUEST, LIMIT = 4 * GIB, 12 * GIB
CODE = 2 * MIB  # of the kernel
DEVICE = 16 * GIB
HELPERS = """
def free(address):
    ok(cuda.cuMemFree_v2(address))

def created(size):
    handle = c_uint64()
    return cuda.cuMemCreate(byref(handle), c_size_t(size), (c_uint64 * 4)(1, 1, 0, 0), c_uint64(0))

def array(size):
    handle, shape = c_void_p(), (c_uint64 * 3)(1 << 16, size >> 16, 1 | 1 << 32)  # bytes of one channel
    return cuda.cuArrayCreate_v2(byref(handle), shape)

TAKE = {"plain": alloc, "async": alloc_async, "create": created, "array": array}

def bring(held, size):
    "Read all of it, so that it is on the device if there is room."
    function = kernel("sweep_ns_arg")
    for address in held:
        sweep(function, address, size)
    ok(cuda.cuCtxSynchronize())
"""
FILL = """
start()
held = []
while alloc(256 * MIB, held) == SUCCESS:
    pass
"""


def scripted(text: str, first: str = "") -> str:
    """Return a program that runs `first`, then `text`."""
    return HELPERS + first + textwrap.dedent(text)


@contextmanager
def containers(directory: Path, lending: str, *sizes: tuple[int, int], device: int = DEVICE) -> Iterator[list[Box]]:
    """Boxes of (request, limit) on one device; where both are equal, nothing is lent."""
    with ExitStack() as stack:
        simhost = make_simhost(directory / "host", gpus=1, memory_bytes=device)
        made = []
        for request, limit in sizes:
            options: dict[str, Any] = {"whole": [limit], "lending": lending} if limit > request else {}
            options.update(simhost=simhost, gpu_bytes=device, compute=[100], company=directory / "company")
            made.append(stack.enter_context(Box([request], **options)))
        yield made


# Movable: borrowed memory is managed memory, which the driver moves to the host


def test_movable_memory_is_borrowed_up_to_the_limit(tmp_path: Path) -> None:
    """Total is the limit, free what is left of it; one more block than the limit is refused."""
    with (
        containers(tmp_path, "movable", (REQUEST, LIMIT)) as (one,),
        talk(
            one,
            scripted(
                """
            total = c_size_t()
            ok(cuda.cuDeviceTotalMem_v2(byref(total), 0))
            bring(held, 256 * MIB)
            say(total.value, *info(), *nvml_memory()[:2], len(held))
            """,
                FILL,
            ),
        ) as following,
    ):
        left = (LIMIT - CONTEXT_BYTES) % (256 * MIB) - CODE
        count = (LIMIT - CONTEXT_BYTES) // (256 * MIB)
        assert following() == [str(n) for n in (LIMIT, left, LIMIT, LIMIT, left, count)]
        assert usage(one).host_bytes(0) == LIMIT - REQUEST - (LIMIT - REQUEST) % (256 * MIB)
        assert on_device(one) >= count * 256 * MIB + CONTEXT_BYTES  # borrowed memory is on the device


def test_request_is_available_at_once_while_movable_memory_fills_the_device(tmp_path: Path) -> None:
    """The borrower fills the device. The other container sees its request as free, allocates it with cuMemAlloc, and
    the borrower still has all of its memory."""
    sizes = ((REQUEST, LIMIT), (REQUEST, LIMIT), (REQUEST, REQUEST))
    with containers(tmp_path, "movable", *sizes, device=12 * GIB) as (borrower, other, plain), ExitStack() as stack:
        sweeping = "bring(held, 256 * MIB)\nsay(len(held))\nbring(held, 256 * MIB)\nsay(info()[0])\n"
        first = stack.enter_context(talk(borrower, scripted(sweeping, FILL)))
        count = (LIMIT - CONTEXT_BYTES) // (256 * MIB)
        assert first() == [str(count)]
        for box in (other, plain):
            own = REQUEST - CONTEXT_BYTES
            program = f"""
                start()
                say(info()[0], *nvml_memory()[:2])
                began = time.monotonic()
                ok(alloc({own - own % (2 * MIB)}))
                say(time.monotonic() - began)
            """
            second = stack.enter_context(talk(box, scripted(program)))
            free, total, nvml_free = map(int, second())
            assert free == nvml_free >= own and total == (LIMIT if box is other else REQUEST)
            assert float(second()[0]) < 1
            assert on_device(box) <= 12 * GIB
        assert first() == [str((LIMIT - CONTEXT_BYTES) % (256 * MIB) - CODE)]
        assert usage(borrower).used_bytes(0) <= REQUEST


# Evict: borrowed memory is memory of the device, and an agent ends the borrower


def test_limit_is_in_force_only_while_lending(tmp_path: Path) -> None:
    """Total is the limit throughout. When lending stops, new memory above the request is refused, and free is 0."""
    program = """
        start()
        held = []
        say(*info())
        say(alloc(8 * GIB, held), *info(), *nvml_memory()[:2])
        say(alloc(2 * MIB), *info())
        free(held[0])
        say(alloc(4 * GIB), alloc(3 * GIB), *info())
    """
    with containers(tmp_path, "evict", (REQUEST, LIMIT)) as (one,), talk(one, scripted(program)) as following:
        assert following() == [str(REQUEST - CONTEXT_BYTES), str(LIMIT)]
        lend(one, True)
        left = str(LIMIT - CONTEXT_BYTES - 8 * GIB)
        assert following() == ["0", left, str(LIMIT), str(LIMIT), left]
        lend(one, False)
        assert following() == ["2", "0", str(LIMIT)]
        assert following() == ["2", "0", str(GIB - CONTEXT_BYTES), str(LIMIT)]


def lend(box: Box, on: bool) -> None:
    """Let the limit be in force, or the request, as the agent does."""
    flags = shm_abi.DEVICE_LENT | (shm_abi.DEVICE_LENDING if on else 0)
    limits = shm_abi.read_limits(box.limits.read_bytes()).devices[0]
    box.set_limit(memory_limit_bytes=limits.memory_limit_bytes or 0, memory_virtual_bytes=LIMIT, flags=flags)


def end_when_wanted(waiting: Box, borrower: ExitStack) -> None:
    end = time.monotonic() + 20
    while usage(waiting).wanted_bytes(0) < 2 * GIB:
        assert time.monotonic() < end
    borrower.close()


@pytest.mark.parametrize("family", ["plain", "async", "create", "array"])
def test_request_waits_until_borrowed_memory_is_back(tmp_path: Path, family: str) -> None:
    """The device is full of borrowed memory. The allocation waits, reports it in its usage file, and succeeds once the
    borrower is gone."""
    program = f"""
        start()
        say(info()[0])
        say(TAKE["{family}"](2 * GIB))
        say(info()[0])
    """
    with containers(tmp_path, "evict", (REQUEST, LIMIT), (REQUEST, REQUEST), device=12 * GIB + 400 * MIB) as (a, b):
        lend(a, True)
        with ExitStack() as stack, talk(b, scripted(program)) as other:
            stack.enter_context(talk(a, scripted("say(len(held))", FILL)))()
            assert int(other()[0]) == REQUEST - CONTEXT_BYTES
            assert usage(b).wanted_bytes(0) == 0
            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(end_when_wanted, b, stack)
                assert other() == ["0"]
                ended.result()
            assert usage(b).wanted_bytes(0) == 0


@pytest.mark.long
def test_request_waits_for_as_long_as_a_container_is_being_suspended(tmp_path: Path) -> None:
    """A copy of 80 GiB to the host takes longer than the time after which an allocation fails."""
    with containers(tmp_path, "evict", (REQUEST, LIMIT), (REQUEST, REQUEST), device=12 * GIB + 400 * MIB) as (a, b):
        lend(a, True)
        with ExitStack() as stack, talk(b, scripted("start()\nsay()\nsay(alloc(2 * GIB))")) as other:
            stack.enter_context(talk(a, scripted("say(len(held))", FILL)))()
            other()
            a.set_limit(flags=shm_abi.DEVICE_LENT | shm_abi.DEVICE_MOVING)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(other)
                assert not wait([answer], 12).done
                stack.close()
                assert answer.result() == ["0"]


def test_container_above_its_request_does_not_wait(tmp_path: Path) -> None:
    """Of two borrowers that fill the device none waits: both get out of memory at once."""
    with containers(tmp_path, "evict", (REQUEST, LIMIT), (REQUEST, LIMIT)) as (a, b), ExitStack() as stack:
        for box in (a, b):
            lend(box, True)
        first = stack.enter_context(talk(a, scripted("say(len(held))", FILL)))
        first()
        program = "start()\nok(alloc(3 * GIB))\nbegan = time.monotonic()\nsay(alloc(GIB), time.monotonic() - began)"
        result, seconds = stack.enter_context(talk(b, HELPERS + program))()
        assert result == "2" and float(seconds) < 1
        assert usage(b).wanted_bytes(0) == 0
