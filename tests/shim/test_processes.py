"""Forks, closed descriptors, deaths at any instant: the limit holds, and memory of a dead process is free again."""

from __future__ import annotations

import random
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from gpushare.state import shm_abi

from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, GIB, TREE, Box
from tests.shim.inside import MIB, PRELUDE, peak, run
from tests.shim.test_live import talk


def test_forked_child_cannot_use_the_share() -> None:
    """As with the driver alone; the child's exit does not release the parent's memory."""
    program = """
        start()
        kept = []
        ok(alloc(100 * MIB, kept))
        before = info()
        child = os.fork()
        if child == 0:
            size = c_size_t()
            codes = {alloc(4096), alloc_async(4096), cuda.cuMemFree_v2(kept[0]), cuda.cuInit(0),
                     cuda.cuMemGetInfo_v2(byref(size), byref(size))}
            os._exit(0 if codes == {NOT_INITIALIZED} else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert info() == before
        taken = fill()
        ok(cuda.cuMemFree_v2(kept[0]))
        print(taken, fill())
    """
    with Box([GIB]) as box:
        room = (GIB - CONTEXT_BYTES) // (2 * MIB) * 2 * MIB
        assert run(box, program) == [str(room - 100 * MIB), str(100 * MIB)]
        assert peak(box) <= GIB


def test_oversized_requests_cause_no_refusals_in_other_processes() -> None:
    """An allocation that fits succeeds each time, beside processes that keep requesting too much."""
    program = """
        ready, told = os.pipe()
        children = []
        for _ in range(3):
            children.append(os.fork())
            if children[-1] == 0:
                start()
                out, much = byref(c_uint64()), c_size_t(info()[1])
                os.write(told, b".")
                while True:
                    cuda.cuMemAlloc_v2(out, much)
        try:
            start()
            for _ in children:
                os.read(ready, 1)
            out, size, refused = c_uint64(), c_size_t(2 * MIB), 0
            for _ in range(200000):
                if cuda.cuMemAlloc_v2(byref(out), size) == SUCCESS:
                    cuda.cuMemFree_v2(out)
                else:
                    refused += 1
        finally:
            for child in children:
                os.kill(child, 9)
                os.waitpid(child, 0)
        print(refused)
    """
    with Box([4 * GIB]) as box:
        assert run(box, program) == ["0"]


@pytest.mark.parametrize("environment", ["dict(os.environ)", "{}"])
def test_child_that_executes_a_program_shares_the_limit(environment: str) -> None:
    program = f"""
        if len(sys.argv) > 1:
            start()
            print(fill())
            sys.exit()
        start()
        first = fill()
        ok(alloc(1)) if alloc(1) == SUCCESS else None
        code = open("/proc/self/cmdline").read().split(chr(0))[2]
        sanitizer = "LD_PRELOAD", "ASAN_OPTIONS"  # of make test-asan
        env = {{name: os.environ[name] for name in sanitizer if name in os.environ}}
        env.update({environment})
        child = subprocess.run([sys.executable, "-c", code, "again"], env=env, capture_output=True, text=True)
        print(first, child.returncode, child.stderr.strip().split()[-1])
    """
    with Box([GIB]) as box:
        done = box.run(["python3", "-c", PRELUDE + textwrap.dedent(program)])
        first, code, refusal = done.stdout.split()
        assert int(first) > 600 * MIB
        assert (code, refusal) == ("1", "2")  # not even a context: the parent holds all memory
        assert peak(box) <= GIB


def test_share_survives_closing_every_descriptor() -> None:
    """The driver loses its devices; the share keeps its charge, and the limit of other processes is unchanged."""
    program = """
        start()
        ok(alloc(500 * MIB))
        os.closerange(3, 1 << 20)
        result = alloc(900 * MIB)
        assert result != SUCCESS, result
        child = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
        print(result, child.stdout.strip(), child.stderr.strip())
    """
    other = PRELUDE + "start(); print(fill())"
    with Box([GIB]) as box:
        done = box.run(["python3", "-c", PRELUDE + textwrap.dedent(program), other])
        assert done.returncode == 0, done.stderr
        assert peak(box) <= GIB


def test_limit_holds_with_descriptors_closed_before_the_first_call() -> None:
    with Box([GIB]) as box:
        (taken,) = run(box, "os.closerange(3, 1 << 20)\n        start()\n        print(fill())".replace("        ", ""))
        assert GIB - CONTEXT_BYTES - int(taken) < 2 * MIB
        assert peak(box) <= GIB


def test_shim_keeps_no_descriptor_of_its_files() -> None:
    """A program may close it, and get its number for a file of its own."""
    program = """
        start()
        ok(alloc(2 * MIB))
        for fd in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{fd}"
            if os.path.lexists(path) and "gpushare" in os.readlink(path):
                print(os.readlink(path))
    """
    with Box([GIB]) as box:
        assert run(box, program) == []


@pytest.mark.parametrize("first", ["", "assert cuda.cuInit(1) == INVALID_VALUE"])
def test_memory_of_killed_processes_is_free_at_once(first: str) -> None:
    """Several: a new process clears the slot of one of them. After a failed cuInit they share a mapping of it."""
    program = f"""
        {first}
        ready, say = os.pipe()
        children = []
        for _ in range(3):
            children.append(os.fork())
            if children[-1] == 0:
                start()
                ok(alloc(256 * MIB))
                os.write(say, b".")
                time.sleep(60)
        for child in children:
            os.read(ready, 1)
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
        start()
        print(fill())
    """
    with Box([2 * GIB]) as box:
        (taken,) = run(box, program)
        assert 2 * GIB - CONTEXT_BYTES - int(taken) < 2 * MIB


@pytest.mark.parametrize(
    ("case", "free_mib"),
    [
        ("child waits", 896),
        ("child waits, no descriptor left", 896),
        ("child executes a program", 1728),
        ("parent exits", 1728),
    ],
)
def test_memory_of_a_killed_process_stays_charged_while_a_forked_child_lives(case: str, free_mib: int) -> None:
    """The child has the driver's descriptors, so the driver frees nothing; a program that it executes has not. The
    driver itself frees all memory of a process that exits."""
    program = """
        import resource, signal
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        from_child, ready = os.pipe()
        waits, end = os.pipe()
        dead = os.fork()
        if dead == 0:  # CUDA starts here
            start()
            ok(alloc(512 * MIB))
            if os.fork() == 0:
                os.close(end)
                if sys.argv[1] != "child executes a program":
                    os.write(ready, b".")
                    os.read(waits, 1)
                else:
                    os.dup2(ready, 1)
                    os.dup2(waits, 0)
                    os.execlp("sh", "sh", "-c", "echo; read line")
                os._exit(0)
            if sys.argv[1] == "parent exits":
                sys.exit()
            signal.pause()
        os.read(from_child, 1)
        if sys.argv[1] != "parent exits":
            os.kill(dead, signal.SIGKILL)
        os.waitpid(dead, 0)
        start()
        taken = []
        try:
            if "no descriptor" in sys.argv[1]:
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            while "no descriptor" in sys.argv[1]:
                taken.append(os.dup(0))
        except OSError:
            pass
        first = fill(64 * MIB)
        for fd in [*taken, end]:
            os.close(fd)
        os.wait()
        print(first // MIB, (first + fill(64 * MIB)) // MIB)
    """
    with Box([2 * GIB]) as box:
        assert run(box, program, case) == [str(free_mib), "1728"]


def test_slot_is_free_after_a_kill_at_any_instant_of_starting() -> None:
    """Processes are killed while loading, in cuInit, claiming a slot or creating a context:

    every slot is free at once.
    """
    chance = random.Random(0)
    program = textwrap.dedent("""
        for line in sys.stdin:
            child = os.fork()
            if child == 0:
                start()
                alloc(64 * MIB)
                time.sleep(60)
            time.sleep(float(line))
            os.kill(child, 9)
            os.waitpid(child, 0)
        start()
        limit_left = info()[1] - info()[0]
        print(limit_left, fill())
    """)
    delays = "".join(f"{chance.random() ** 2 * 0.01:.6f}\n" for _ in range(120))
    with Box([GIB]) as box:
        done = subprocess.run(
            box.command(["python3", "-c", PRELUDE + program]), input=delays, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        used, taken = map(int, done.stdout.split())
        assert used == CONTEXT_BYTES
        assert GIB - CONTEXT_BYTES - taken < 2 * MIB


@contextmanager
def two_on_a_device(directory: Path) -> Iterator[tuple[Box, Box, ExitStack]]:
    """Yield two boxes whose limit is the device's memory each, and a stack for what runs in them."""
    simhost = make_simhost(directory / "host", gpus=1, memory_bytes=GIB, late_return_ms=40)
    with ExitStack() as stack:
        before, after = (stack.enter_context(Box([GIB], gpu_bytes=GIB, simhost=simhost)) for _ in range(2))
        yield before, after, stack


@pytest.mark.parametrize(
    "call", ["cuDevicePrimaryCtxRetain(byref(context), 0)", "cuCtxCreate_v2(byref(context), 0, 0)"]
)
def test_context_waits_for_memory_of_a_dead_container(tmp_path: Path, call: str) -> None:
    """A container that filled the device has just ended:

    the next share is granted, its memory is free a moment later.
    """
    with two_on_a_device(tmp_path) as (before, after, _):
        run(before, "start()\nfill()")
        (result,) = run(after, f"context = c_void_p()\nok(cuda.cuInit(0))\nprint(cuda.{call})")
        assert result == "0"


def test_allocation_waits_for_memory_of_a_dead_container(tmp_path: Path) -> None:
    """As after `gpushare resume`, which lets a program go on in the middle of its work."""
    with two_on_a_device(tmp_path) as (before, after, stack):
        waiting = stack.enter_context(talk(after, "start()\nsay()\nsay(alloc(512 * MIB))"))
        waiting()
        run(before, "start()\nfill()")
        assert waiting() == ["0"]


def test_context_is_refused_if_the_device_stays_full(tmp_path: Path) -> None:
    with two_on_a_device(tmp_path) as (before, after, stack):
        stack.enter_context(talk(before, "start()\nfill()\nsay()"))()
        assert run(after, "ok(cuda.cuInit(0))\nprint(cuda.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0))") == ["2"]


def test_process_beyond_the_slots_is_refused() -> None:
    """More processes than slots: cuInit of the next one returns CUDA_ERROR_NOT_PERMITTED and prints nothing."""
    from gpushare.state.shm_abi import MAX_SLOTS

    program = f"""
        import resource
        read, write = os.pipe()
        told, tell = os.pipe()
        children = []
        for _ in range({MAX_SLOTS}):
            child = os.fork()
            if child == 0:
                os.write(tell, bytes([cuda.cuInit(0) & 255]))
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            children.append(child)
        codes = b""
        while len(codes) < len(children):
            codes += os.read(told, 4096)
        last = os.fork()
        if last == 0:
            os._exit(0 if cuda.cuInit(0) == 800 else 1)
        refused = os.waitpid(last, 0)[1]
        os.close(write)
        for child in children:
            os.waitpid(child, 0)
        print(set(codes), refused, cuda.cuInit(0))
    """
    with Box([GIB]) as box:
        assert run(box, program) == ["{0}", "0", "0"]


def test_process_that_loses_the_shim_s_thread_gets_no_more_memory() -> None:
    """A program confines itself by a seccomp filter that the shim's thread violates, so that only this thread ends.
    The kernel then frees the process's slot, and no process counts what it holds."""
    program = """
        import struct
        start()
        held = []
        ok(alloc(256 * MIB, held))
        LOAD, IF_EQUAL, RETURN, KILL_THREAD, ALLOW = 0x20, 0x15, 0x06, 0, 0x7FFF0000
        NUMBER, SECOND_ARGUMENT, FUTEX_WAIT = 0, 24, 0
        PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, TSYNC = 38, 1, 1
        arm = os.uname().machine == "aarch64"
        futex, seccomp = (98, 277) if arm else (202, 317)
        steps = [
            (LOAD, 0, 0, NUMBER), (IF_EQUAL, 0, 3, futex),
            (LOAD, 0, 0, SECOND_ARGUMENT), (IF_EQUAL, 0, 1, FUTEX_WAIT), (RETURN, 0, 0, KILL_THREAD),
            (RETURN, 0, 0, ALLOW),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
        libc = ctypes.CDLL(None)
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert libc.syscall(seccomp, SET_MODE_FILTER, TSYNC, program) == 0
        while len(os.listdir("/proc/self/task")) > 1:
            os.sched_yield()
        print(fill(256 * MIB))
    """
    with Box([GIB]) as box:
        assert run(box, program) == ["0"]
        assert peak(box) < GIB


def test_process_that_is_restored_in_another_container_gets_no_memory() -> None:
    """A checkpoint (CRIU) restores the mapping, but the usage file is the other container's, where the process has no
    slot."""
    program = """
        start()
        held = []
        ok(alloc(256 * MIB, held))
        say("ready")
        say(fill(256 * MIB))
    """
    with Box([GIB]) as box, talk(box, program) as following:
        following()
        with box.usage.open("r+b") as other:
            other.write(shm_abi.pack_usage(box.nonce + 1, 1))
        assert following() == ["0"]


@pytest.mark.parametrize("kib", [1024, 65536])
def test_large_thread_local_variables_leave_enough_stack(tmp_path: Path, kib: int) -> None:
    """They reduce the stack of each thread, also of the shim's thread that holds the slot."""
    source = tmp_path / "large.c"
    source.write_text(
        f"static __thread volatile char large[{kib} << 10];\n"
        "int cuInit(unsigned int flags);\n"
        "int main(void) { large[0] = 1; return cuInit(0); }\n"
    )
    driver = next((TREE / "build" / "sim").glob("libcuda.so.*"))
    subprocess.run(["gcc", "-o", tmp_path / "large", source, driver], check=True)
    with Box([GIB]) as box:
        assert box.run([str(tmp_path / "large")]).returncode == 0


def test_signals_and_umask_are_unchanged() -> None:
    """The shim sets no handler, changes no mask, keeps no descriptor open and prints nothing."""
    program = """
        import signal
        def state():
            with open("/proc/self/status") as lines:
                fields = dict(line.split(":", 1) for line in lines)
            caught = int(fields.pop("SigCgt"), 16) & ~(3 << 31)  # 32 and 33 are the C library's own, for threads
            return caught, [fields[name] for name in ("SigBlk", "SigIgn", "SigPnd", "Umask")]
        def opened():
            links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            return {os.readlink(link) for link in links if os.path.lexists(link)}
        before, files = state(), opened()
        ok(cuda.cuInit(0))
        print(before == state(), all(path.startswith("/dev/nvidia") for path in opened() - files))
    """
    with Box([GIB]) as box:
        assert run(box, program) == ["True", "True"]
