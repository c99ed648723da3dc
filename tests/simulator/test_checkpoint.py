"""The checkpoint API: states, errors, what is released and kept, and the end of a process in each state."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from simulator import mpscontrol
from simulator.ledger import Ledger
from simulator.models import Costs
from simulator.simhost import CHECKPOINTS, LIBDIR, fail_next
from tests.conformance import driver as d
from tests.simulator.test_ledger import CONTEXT, MIB, wait_until
from tests.support.driverhost import divide
from tests.support.remote import Remote, RemoteError

GIB = 1 << 30
CLOCK_NANOSLEEP = 230  # on x86-64
FAST = 1 << 50  # bytes per second: a checkpoint takes no time
PREPARE = (
    "import ctypes, os, threading; from ctypes import byref, c_int, c_uint; from tests.conformance import driver as d"
)


class Scene:
    """A host whose driver has the API, a caller, and processes."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack = root, stack
        self.node = root / "dev/nvidia0"
        self.caller = self.process("cuda.init()")

    def process(self, code: str = "cuda.context()") -> Remote:
        process = self._stack.enter_context(Remote(self.root))
        process.do(PREPARE)
        process.do(code)
        return process

    def call(self, operation: str, process: Remote, arguments: bytes | None = None) -> int:
        return int(self.caller.get(f"cuda.checkpoint({operation!r}, {process.pid}, {arguments!r})"))

    def calls(self, process: Remote, *operations: str) -> None:
        for operation in operations:
            assert self.call(operation, process) == d.SUCCESS, operation

    def state(self, process: Remote) -> int:
        return int(self.caller.get(f"cuda.process_state({process.pid})"))

    def used(self) -> int:
        with Ledger(str(self.node)) as ledger:
            return ledger.used_bytes

    def listed(self) -> tuple[int, list[int]]:
        """Return what nvidia-smi prints: MiB in use, and the processes."""
        environment = {"LD_LIBRARY_PATH": str(self.root / LIBDIR)}
        text = subprocess.run(
            [str(self.root / "usr/bin/nvidia-smi")], check=True, capture_output=True, text=True, env=environment
        ).stdout
        (used,) = re.findall(r"(\d+)MiB /", text)
        return int(used), [int(pid) for pid in re.findall(r"pid (\d+)", text)]


@pytest.fixture
def make_scene(make_host: Callable[..., Path]) -> Iterator[Callable[..., Scene]]:
    with ExitStack() as stack:

        def make(**arguments: Any) -> Scene:
            arguments.setdefault("costs", Costs(host_rate=FAST))
            root = make_host(driver=CHECKPOINTS, late_return_ms=0, memory_bytes=16 * GIB, **arguments)
            return Scene(root, stack)

        yield make


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


STEPS = {"Lock": d.RUNNING, "Checkpoint": d.LOCKED, "Restore": d.CHECKPOINTED, "Unlock": d.LOCKED}


def test_lock_waits_for_submitted_work(scene: Scene) -> None:
    target = scene.process("cuda.context(); m = cuda.load(d.PTX); g = cuda.load(d.FLAG_PTX)")
    target.do("host = cuda.out('cuMemAllocHost_v2', 4096); word = ctypes.c_uint32.from_address(host)")
    target.do("spin, flag = cuda.function(m), cuda.function(g, 'set_flag')")
    target.do("values = [ctypes.c_uint64(host), ctypes.c_uint64(7)]")
    target.do("pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(v) for v in values])")
    target.do("[cuda.launch(spin) for _ in range(20)]")
    target.do("cuda.ok('cuLaunchKernel', flag, *[c_uint(1)] * 6, c_uint(0), 0, pointers, None)")
    scene.calls(target, "Lock")
    assert target.get("word.value") == 7


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("cuda.checkpoint('Lock', 0)", d.INVALID_VALUE),
        ("cuda.checkpoint('Lock', 1 << 30)", d.OPERATING_SYSTEM),
        ("cuda.checkpoint('Lock', os.getppid())", d.NOT_INITIALIZED),
        ("cuda.checkpoint('Lock', os.getpid(), b'\\0\\0\\0\\0\\1')", d.INVALID_VALUE),
        ("cuda.checkpoint('Unlock', os.getpid(), b'\\1')", d.INVALID_VALUE),
        ("cuda.code('cuCheckpointProcessGetState', c_int(os.getpid()), None)", d.INVALID_VALUE),
    ],
)
def test_bad_arguments(code: str, expected: int, scene: Scene) -> None:
    assert scene.caller.get(code) == expected


def test_caller_must_be_initialised(scene: Scene) -> None:
    caller = scene.process("pass")
    assert caller.get(f"cuda.checkpoint('Lock', {scene.process().pid})") == d.NOT_INITIALIZED


def test_forked_child_has_no_state_of_its_own(scene: Scene) -> None:
    target = scene.process(
        "cuda.context(); r, w = os.pipe(); child = os.fork()\nif not child: os.read(r, 1); os._exit(0)"
    )
    assert scene.caller.get(f"cuda.checkpoint('Lock', {target.get('child')})") == d.NOT_INITIALIZED
    assert scene.state(target) == d.RUNNING
    target.do("os.write(w, b'.'); os.waitpid(child, 0)")


def test_process_can_be_named_by_its_restore_thread(scene: Scene) -> None:
    target = scene.process()
    thread = scene.caller.get(f"cuda.restore_thread({target.pid})")
    assert thread != target.pid and Path(f"/proc/{target.pid}/task/{thread}").exists()
    assert scene.caller.get(f"cuda.checkpoint('Lock', {thread})") == d.SUCCESS
    assert scene.state(target) == d.LOCKED


def test_process_can_lock_itself(scene: Scene) -> None:
    target = scene.process()
    for operation in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert target.get(f"cuda.checkpoint({operation!r}, os.getpid())") == d.SUCCESS
    target.do("cuda.alloc(1 << 20)")


def test_pid_is_the_callers_own_namespaces(scene: Scene) -> None:
    with Remote(scene.root, wrapper=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")) as inside:
        inside.do("cuda.context(); import os")
        assert inside.get("os.getpid()") == 1
        pid = int(Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text())
        assert scene.caller.get(f"cuda.checkpoint('Lock', {pid})") == d.SUCCESS
        assert scene.caller.get(f"cuda.process_state({pid})") == d.LOCKED
        assert Path(f"/proc/{pid}/task/{scene.caller.get(f'cuda.restore_thread({pid})')}").exists()


def test_copying_takes_the_time_of_the_bus(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(context_bytes=0, costs=Costs(host_rate=4 * GIB))
    target = scene.process("cuda.context(); cuda.alloc(1 << 29)")
    scene.calls(target, "Lock")
    for operation in ("Checkpoint", "Restore"):
        began = time.monotonic()
        scene.calls(target, operation)
        assert 0.125 <= time.monotonic() - began < 5, operation


@pytest.mark.parametrize("once", [False, True])
def test_restore_without_room_changes_nothing(once: bool, make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(costs=Costs(host_rate=FAST, restore_once=once))
    target = scene.process("cuda.context(); cuda.alloc(8 << 30)")
    scene.calls(target, "Lock", "Checkpoint")
    other = scene.process("cuda.context(); q = cuda.alloc(8 << 30)")
    used = scene.used()
    assert scene.call("Restore", target) == d.OUT_OF_MEMORY
    assert (scene.state(target), scene.used()) == (d.CHECKPOINTED, used)
    other.do("cuda.free(q)")
    assert scene.call("Restore", target) == (d.OPERATING_SYSTEM if once else d.SUCCESS)


def test_restore_takes_the_memory_of_all_devices_or_of_none(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(gpus=2)
    target = scene.process("[(cuda.context(i), cuda.alloc(8 << 30)) for i in (0, 1)]")
    scene.calls(target, "Lock", "Checkpoint")
    other = scene.process("cuda.context(1); q = cuda.alloc(8 << 30)")
    assert scene.call("Restore", target) == d.OUT_OF_MEMORY and scene.used() == 0
    other.do("cuda.free(q)")
    scene.calls(target, "Restore")
    assert scene.used() == 8 * GIB + CONTEXT


UNSUPPORTED = {
    "managed": "cuda.out('cuMemAllocManaged', 1 << 20, c_uint(1))",
    "exported by IPC": "cuda.ipc_handle(cuda.alloc(2 << 20))",
    "imported by IPC": "cuda.ipc_open({handle!r})",
    "exported descriptor": "h = cuda.create(2 << 20, 1); "
    "cuda.ok('cuMemExportToShareableHandle', byref(c_int()), h, c_int(1), 0)",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_memory_that_the_driver_cannot_save_loses_the_process(kind: str, scene: Scene) -> None:
    owner = scene.process()
    target = scene.process()
    handle = owner.get("cuda.ipc_handle(cuda.alloc(2 << 20))") if "imported" in kind else b""
    target.do(UNSUPPORTED[kind].format(handle=handle))
    scene.calls(target, "Lock")
    assert scene.call("Checkpoint", target) == d.NOT_SUPPORTED
    assert scene.state(target) == d.FAILED
    assert target.get("d.error_of(cuda.alloc, 1 << 20)") == d.UNKNOWN
    assert {scene.call(step, target) for step in STEPS} == {d.ILLEGAL_STATE}


def test_memory_that_could_be_exported_can_be_saved(scene: Scene) -> None:
    target = scene.process("cuda.context(); p, h = cuda.reserve(4 << 20), cuda.create(4 << 20, 1)")
    target.do("cuda.map(p, 4 << 20, h); cuda.write(p, b'kept')")
    used = scene.used()
    scene.calls(target, "Lock", "Checkpoint")
    assert scene.used() == 0
    scene.calls(target, "Restore", "Unlock")
    assert scene.used() == used and target.get("cuda.read(p, 4)") == b"kept"


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_injected_error_loses_the_process_once(operation: str, scene: Scene) -> None:
    target, other = scene.process(), scene.process()
    fail_next(scene.node, operation)
    before = ("Lock", "Checkpoint") if operation == "restore" else ("Lock",)
    scene.calls(target, *before)
    assert scene.call(operation.title(), target) == d.UNKNOWN
    assert scene.state(target) == d.FAILED
    assert target.get("d.error_of(cuda.alloc, 1 << 20)") == d.UNKNOWN
    scene.calls(other, *STEPS)
    target.kill()
    wait_until(lambda: scene.listed() == (300, [other.pid]))


ENDS = {
    "locked": ("Lock",),
    "checkpointed": ("Lock", "Checkpoint"),
    "while it is checkpointed": ("Lock", "(Checkpoint"),
    "while it is restored": ("Lock", "Checkpoint", "(Restore"),
}


@pytest.mark.parametrize("when", ENDS)
@pytest.mark.parametrize("victim", ["process", "caller"])
def test_process_or_caller_killed(when: str, victim: str, make_scene: Callable[..., Scene]) -> None:
    """A killed process leaves nothing. A killed caller's request is done; the next caller goes on from there."""
    slow = "(" in ENDS[when][-1]
    scene = make_scene(costs=Costs(host_rate=4 * GIB if slow else FAST))
    target = scene.process("cuda.context(); cuda.alloc(1 << 30)")
    used, results = scene.used(), []
    scene.calls(target, *[step for step in ENDS[when] if "(" not in step])
    first = scene.caller
    last = ENDS[when][-1].strip("(")
    thread = Thread(target=lambda: results.append(ended(first, f"cuda.checkpoint({last!r}, {target.pid})")))
    if slow:
        thread.start()
        wait_until(lambda: is_copying(target))
    if victim == "process":
        target.kill()
        if slow:
            thread.join()
            assert results == [d.OPERATING_SYSTEM]
        wait_until(lambda: scene.listed() == (0, []))
        return
    first.kill()
    if slow:
        thread.join()
    scene.caller = scene.process("cuda.init()")
    reached = scene.state(target)
    assert reached == (d.CHECKPOINTED if last == "Checkpoint" else d.LOCKED)
    scene.calls(target, *(("Restore",) if reached == d.CHECKPOINTED else ()), "Unlock")
    assert scene.used() == used
    target.do("cuda.alloc(1 << 20)")


def ended(caller: Remote, expression: str) -> Any:
    try:
        return caller.get(expression)
    except RemoteError:
        return None


def is_copying(target: Remote) -> bool:
    """Return whether the process's own thread is in clock_nanosleep, which stands for the copy."""
    tasks = Path(f"/proc/{target.pid}/task").iterdir()
    (thread,) = [t for t in tasks if (t / "comm").read_text() == "sim-checkpoint\n"]
    return (thread / "syscall").read_text().startswith(f"{CLOCK_NANOSLEEP} ")


def states_of_threads(process: Remote) -> set[str]:
    stats = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_stopped_process_keeps_its_caller_waiting(scene: Scene) -> None:
    target = scene.process()
    os.kill(target.pid, signal.SIGSTOP)
    wait_until(lambda: states_of_threads(target) == {"T"})
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(scene.call("Lock", target, struct.pack("<I", 1))))
    thread.start()
    thread.join(0.1)
    assert results == []
    os.kill(target.pid, signal.SIGCONT)
    thread.join()
    assert results == [d.SUCCESS]


def test_client_of_mps_cannot_be_locked(scene: Scene) -> None:
    mpscontrol.install(scene.root)
    with tempfile.TemporaryDirectory(dir="/tmp") as pipe:  # short, since a socket's path must be
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe}
        control = [str(scene.root / "usr/bin" / mpscontrol.NAME)]
        subprocess.run([*control, "-d"], check=True, env=environment)
        try:
            with Remote(scene.root, environment) as target:
                target.do("cuda.context()")
                assert scene.call("Lock", target) == d.NOT_SUPPORTED and scene.state(target) == d.RUNNING
                target.do("cuda.alloc(1 << 20)")
        finally:
            subprocess.run(control, env=environment, input="quit -f\n", text=True, capture_output=True)


def test_process_of_a_mig_device(scene: Scene) -> None:
    divide(scene.root)
    scene.caller = scene.process("cuda.init()")
    target = scene.process()
    scene.calls(target, *STEPS)


def test_device_never_holds_more_than_it_has(scene: Scene) -> None:
    first, second = (scene.process("cuda.context()") for _ in range(2))
    first.do("p = cuda.alloc(12 << 30)")
    scene.calls(first, "Lock", "Checkpoint")
    second.do("p = cuda.alloc(12 << 30)")
    scene.calls(second, "Lock", "Checkpoint")
    for process in (first, second) * 3:
        scene.calls(process, "Restore", "Unlock")
        process.do("cuda.write(p, b'x')")
        scene.calls(process, "Lock", "Checkpoint")
    with Ledger(str(scene.node)) as ledger:
        assert max(g.peak_bytes for g in ledger.groups()) <= ledger.total_bytes and ledger.used_bytes == 0


def test_first_wait_of_a_checkpointed_process_can_crash(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(costs=Costs(host_rate=FAST, sync_crashes=True))
    target = scene.process()
    scene.calls(target, "Lock", "Checkpoint")
    with pytest.raises(RemoteError, match=f"ended with -{int(signal.SIGSEGV)}"):
        target.do("cuda.synchronize()")


@pytest.mark.parametrize("whole", [False, True])
def test_saved_memory_is_the_processs_own(whole: bool, make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(context_bytes=0, costs=Costs(host_rate=FAST, saved_whole=whole))
    target = scene.process("cuda.context(); cuda.alloc(64 << 20)")

    def resident() -> int:
        return int(Path(f"/proc/{target.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    scene.calls(target, "Lock", "Checkpoint")
    assert (resident() - before >= 60 * MIB) is whole
    scene.calls(target, "Restore")
    assert resident() - before < 30 * MIB
