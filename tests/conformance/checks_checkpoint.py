"""Checks of the checkpoint API: one process suspends another. A driver before 570 lacks it."""

from __future__ import annotations

import functools
import os
import select
import signal
import struct
from collections.abc import Callable, Iterator
from ctypes import c_uint
from types import TracebackType

from tests.conformance import driver as d
from tests.conformance.driver import MIB, Driver

FIRST_DRIVER = "570"
SIZE = 64 * MIB
BLOCKED_S = 0.05  # a call that does not wait returns much sooner
ANSWER_S = 30
Program = Callable[[Driver], Iterator[bytes]]


class Other:
    """Another process with the driver. `go` lets it go on to the next `yield` of its program."""

    def __init__(self, cuda: Driver, program: Program) -> None:
        (self._answers, answers), (told, self._tell) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for answer in program(cuda):
                os.write(answers, answer)
                os.read(told, 1)
            os._exit(0)
        os.close(answers)  # so that its end can be read
        cuda.init()
        assert self.answer() == b"ready"

    def go(self) -> None:
        os.write(self._tell, b".")

    def answers_within(self, seconds: float) -> bool:
        return bool(select.select([self._answers], [], [], seconds)[0])

    def answer(self) -> bytes:
        assert self.answers_within(ANSWER_S), "the other process does not answer"
        return os.read(self._answers, 100)

    def __enter__(self) -> Other:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for descriptor in (self._answers, self._tell):
            os.close(descriptor)


def since_first_driver(check: Callable[[Driver], None]) -> Callable[[Driver], None]:
    """Let an older driver pass if it has none of the calls."""

    @functools.wraps(check)
    def checked(cuda: Driver) -> None:
        if hasattr(cuda.library, "cuCheckpointProcessLock"):
            check(cuda)
            return
        cuda.init()
        pynvml, _ = cuda.nvml()
        assert pynvml.nvmlSystemGetDriverVersion() < FIRST_DRIVER

    return checked


def act(cuda: Driver, other: Other, *operations: str) -> None:
    for operation in operations:
        assert cuda.checkpoint(operation, other.pid) == d.SUCCESS, operation


def with_memory(cuda: Driver) -> Iterator[bytes]:
    cuda.context()
    address = cuda.alloc(SIZE)
    cuda.write(address + SIZE - 4, b"kept")
    yield b"ready"
    yield cuda.read(address + SIZE - 4, 4)


def with_objects(cuda: Driver) -> Iterator[bytes]:
    cuda.context()
    function, stream, first, second = cuda.function(cuda.load()), cuda.stream(), cuda.event(), cuda.event()
    cuda.launch(function, stream)
    cuda.ok("cuEventRecord", first, stream)
    cuda.ok("cuEventSynchronize", first)
    yield b"ready"
    cuda.launch(function, stream)
    cuda.ok("cuEventRecord", second, stream)
    cuda.ok("cuEventSynchronize", second)
    yield b"works" if cuda.milliseconds(first, second) > 0 else b"no time"


def with_endless_work(cuda: Driver) -> Iterator[bytes]:
    cuda.context()
    stream, flag = cuda.stream(d.NON_BLOCKING), cuda.alloc(4096)
    cuda.write(flag, bytes(4))
    cuda.ok("cuStreamWaitValue32_v2", stream, flag, c_uint(1), c_uint(0))
    yield b"ready"
    cuda.write(flag, b"\1\0\0\0")
    cuda.ok("cuStreamSynchronize", stream)
    yield b"ended"


def with_managed_memory(cuda: Driver) -> Iterator[bytes]:
    cuda.context()
    cuda.out("cuMemAllocManaged", SIZE, c_uint(1))
    yield b"ready"


def without_cuda(cuda: Driver) -> Iterator[bytes]:
    yield b"ready"


@since_first_driver
def checkpoint_frees_the_device_and_restore_fills_it(cuda: Driver) -> None:
    with Other(cuda, with_memory) as other:
        cuda.context()
        pynvml, device = cuda.nvml()

        def listed() -> bool:
            return other.pid in [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]

        before, seen = cuda.free_bytes(), listed()
        act(cuda, other, "Lock", "Checkpoint")
        assert cuda.free_bytes() - before >= SIZE and seen and not listed()
        act(cuda, other, "Restore", "Unlock")
        assert cuda.free_bytes() == before and listed()
        other.go()
        assert other.answer() == b"kept"


@since_first_driver
def states_follow_the_calls(cuda: Driver) -> None:
    with Other(cuda, with_memory) as other:
        states = [cuda.process_state(other.pid)]
        for operation in ("Lock", "Checkpoint", "Restore", "Unlock"):
            act(cuda, other, operation)
            states.append(cuda.process_state(other.pid))
        assert states == [d.RUNNING, d.LOCKED, d.CHECKPOINTED, d.LOCKED, d.RUNNING]


@since_first_driver
def call_in_another_state_is_illegal(cuda: Driver) -> None:
    with Other(cuda, with_memory) as other:
        for wrong in ("Checkpoint", "Restore", "Unlock"):
            assert cuda.checkpoint(wrong, other.pid) == d.ILLEGAL_STATE, wrong
        act(cuda, other, "Lock")
        assert cuda.checkpoint("Restore", other.pid) == d.ILLEGAL_STATE
        act(cuda, other, "Checkpoint")
        assert cuda.checkpoint("Unlock", other.pid) == d.ILLEGAL_STATE
        assert cuda.process_state(other.pid) == d.CHECKPOINTED


@since_first_driver
def calls_wait_until_the_process_is_unlocked(cuda: Driver) -> None:
    with Other(cuda, with_memory) as other:
        act(cuda, other, "Lock")
        other.go()
        assert not other.answers_within(BLOCKED_S)
        act(cuda, other, "Checkpoint", "Restore")
        assert not other.answers_within(BLOCKED_S)
        act(cuda, other, "Unlock")
        assert other.answer() == b"kept"


@since_first_driver
def streams_modules_and_events_are_restored(cuda: Driver) -> None:
    with Other(cuda, with_objects) as other:
        act(cuda, other, "Lock", "Checkpoint", "Restore", "Unlock")
        other.go()
        assert other.answer() == b"works"


@since_first_driver
def lock_gives_up_at_its_timeout(cuda: Driver) -> None:
    with Other(cuda, with_endless_work) as other:
        assert cuda.checkpoint("Lock", other.pid, struct.pack("<I", 100)) == d.NOT_READY
        assert cuda.process_state(other.pid) == d.RUNNING
        other.go()
        assert other.answer() == b"ended"
        act(cuda, other, "Lock")


@since_first_driver
def managed_memory_is_not_checkpointed(cuda: Driver) -> None:
    with Other(cuda, with_managed_memory) as other:
        act(cuda, other, "Lock")
        assert cuda.checkpoint("Checkpoint", other.pid) == d.NOT_SUPPORTED


@since_first_driver
def restore_without_room_is_out_of_memory(cuda: Driver) -> None:
    """A real driver may not restore the process later."""
    with Other(cuda, with_memory) as other:
        cuda.context()
        act(cuda, other, "Lock", "Checkpoint")
        cuda.alloc(cuda.free_bytes() - SIZE)
        assert cuda.checkpoint("Restore", other.pid) == d.OUT_OF_MEMORY
        assert cuda.process_state(other.pid) == d.CHECKPOINTED


@since_first_driver
def checkpointed_process_can_be_killed(cuda: Driver) -> None:
    with Other(cuda, with_memory) as other:
        act(cuda, other, "Lock", "Checkpoint")


@since_first_driver
def process_without_cuda_is_not_initialised(cuda: Driver) -> None:
    with Other(cuda, without_cuda) as other:
        assert cuda.checkpoint("Lock", other.pid) == d.NOT_INITIALIZED
