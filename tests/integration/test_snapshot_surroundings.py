"""The snapshot in a restricted process: like the ordinary program, it starts with few rights, little memory and another
address layout (docs/internals/snapshot.md)."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.test_snapshot import SHARE, SNAPSHOT, MakeContainer, with_snapshot
from tests.support import host, processes
from tests.support.host import BUILD, WITHOUT_SNAPSHOT, Node, write_config

pytestmark = pytest.mark.skipif(WITHOUT_SNAPSHOT, reason="no snapshot: SNAPSHOT=no, or not Python 3.11")
__all__ = ["with_snapshot"]  # a fixture
MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
STATE = b'{"ociVersion": "1.0.2", "id": "c1", "pid": 0, "status": "stopped", "bundle": "/"}'

Create = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def create(
    container: MakeContainer,
    node: Node,
    with_snapshot: Callable[[Path | None], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Create:
    """Run `create` of a container with a share: create(snapshot or None, prefix, preexec_fn=...). The low-level runtime
    is `true`, so all effects are gpushare's."""
    write_config(node.config, node.driver_root, runtime={"path": shutil.which("true")})
    monkeypatch.setattr(host, "BIN", BUILD / "bin")  # the tree's: a bundle's would compile for another shim
    assert node.cli("refresh").returncode == 0
    programs: dict[Path | None, Path] = {}

    def call(snapshot: Path | None, *front: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        if snapshot not in programs:
            programs.clear()
            programs[snapshot] = with_snapshot(snapshot)
        one = container(["true"], env=SHARE)
        words = [*front, programs[snapshot] / "gpushare-runtime", *node.runtime()[1:]]
        words += ["create", "--bundle", one.bundle, one.id]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
        node.cli("prune")
        assert node.leases() == []
        return done  # type: ignore[no-any-return]

    return call


def least_mib(works: Callable[[int], bool], most: int = 128) -> int:
    """Return the smallest sufficient number of MiB."""
    low, high = 1, most
    assert works(high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low


def test_address_space_is_close_to_the_ordinary_program_s(create: Create) -> None:
    """The snapshot maps all its modules. The ordinary program maps the C library's locales and shared libraries."""
    needed = [
        least_mib(lambda mib, one=one: create(one, "prlimit", f"--as={mib * MIB}").returncode == 0)  # type: ignore[misc]
        for one in (SNAPSHOT, None)
    ]
    assert needed[0] <= needed[1] + 4, needed


@pytest.fixture
def limited() -> Iterator[Callable[[int], tuple[str, ...]]]:
    """The prefix that starts a command in a memory cgroup with so many MiB and no swap."""
    second = (CGROUP / "cgroup.controllers").exists()
    group = (CGROUP if second else CGROUP / "memory") / f"gpushare-test-{os.getpid()}"
    group.mkdir()

    def front(mib: int) -> tuple[str, ...]:
        (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(mib * MIB))
        return "sh", "-c", f'echo 0 >{group}/cgroup.procs; exec "$@"', "sh"

    yield front
    for pid in (group / "cgroup.procs").read_text().split():  # a warm-up that waits for a container that never starts
        processes.wait_exit(int(pid), 10)
    group.rmdir()


def test_memory_cgroup_of_the_ordinary_program_suffices(
    create: Create, limited: Callable[[int], tuple[str, ...]]
) -> None:
    needed = [
        least_mib(lambda mib, one=one: create(one, *limited(mib)).returncode == 0)  # type: ignore[misc]
        for one in (SNAPSHOT, None)
    ]
    assert needed[0] <= needed[1], needed


def used_calls(create: Create, snapshot: Path | None, trace: Path) -> set[str]:
    assert create(snapshot, "strace", "-f", "-qq", "-o", trace).returncode == 0
    return set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M))


def test_system_calls_are_a_subset_of_the_ordinary_program_s(create: Create, tmp_path: Path) -> None:
    """A seccomp filter made for the ordinary program therefore fits."""
    create(SNAPSHOT)  # the first mounts the state directory
    ours, theirs = (used_calls(create, one, tmp_path / "trace") for one in (SNAPSHOT, None))
    assert "mmap" in ours and ours - theirs == set()


def test_seccomp_filter_may_deny_unused_calls(create: Create) -> None:
    """The ordinary program makes these calls, which proves that the filter works."""

    def install() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = (25, 99, 202)  # mremap, sysinfo, futex on x86-64
        filters = [struct.pack("<HBBI", 0x20, 0, 0, 0)]  # load the number
        filters += [struct.pack("<HBBI", 0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
        filters += [struct.pack("<HBBI", 0x06, 0, 0, value) for value in (0x7FFF0000, 0x80000000)]  # allow, kill
        program = ctypes.create_string_buffer(b"".join(filters))
        head = ctypes.create_string_buffer(struct.pack("<H6xQ", len(filters), ctypes.addressof(program)))
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

    done = create(SNAPSHOT, preexec_fn=install)
    assert (done.returncode, done.stderr) == (0, "")
    assert create(None, preexec_fn=install).returncode == -signal.SIGSYS


@pytest.mark.parametrize(
    "front",
    [
        ("setarch", "--addr-no-randomize"),
        ("setarch", "--addr-compat-layout"),
        ("setarch", "--read-implies-exec", "--short-inode", "--whole-seconds"),
        ("prlimit", "--stack=unlimited"),
        ("prlimit", "--data=67108864"),
    ],
    ids=lambda front: " ".join(front),
)
def test_snapshot_starts_with_each_address_layout(create: Create, front: tuple[str, ...]) -> None:
    for _ in range(3):
        done = create(SNAPSHOT, *front)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "front", [("--map-root-user",), ("--map-root-user", "--mount", "--pid", "--fork"), ()], ids=str
)
def test_snapshot_behaves_like_the_ordinary_program_in_a_user_namespace(node: Node, front: tuple[str, ...]) -> None:
    ordinary = BUILD / "libexec" / "gpushare-hook"
    seen = []
    for program in (SNAPSHOT, ordinary):
        for text in (STATE, b"{"):
            words = ["unshare", "--user", *front, "bash", "-c", f'exec -a {ordinary} {program} "$@"', "bash"]
            words += ["--config", str(node.config), "--state", str(node.state), "poststop"]
            done = subprocess.run(words, input=text, capture_output=True, cwd="/")
            seen.append((done.returncode, done.stdout, done.stderr))
    assert seen[:2] == seen[2:]
    assert seen[1][2].startswith(b"gpushare: the state")


@pytest.mark.parametrize("hidden", [False, True], ids=["with vDSO", "without vDSO"])
def test_snapshot_starts_without_vdso(hidden: bool) -> None:
    """gdb removes AT_SYSINFO_EHDR from the process's auxiliary vector, like vdso=0 on the kernel's command line. The
    clock is a system call then."""
    script = """
import struct
memory, at = gdb.selected_inferior(), int(gdb.parse_and_eval("$sp"))
word = lambda: struct.unpack("<Q", memory.read_memory(at, 8))[0]
at += 8 * (word() + 2)  # arguments
while word():  # environment
    at += 8
at += 8
while word() not in (0, 33):
    at += 16
memory.write_memory(at, struct.pack("<Q", 1 if word() and HIDDEN else word()))
"""
    commands = ["starti", f"python exec({script.replace('HIDDEN', str(hidden))!r})", "catch syscall clock_gettime"]
    commands += ["continue", "delete", "continue"]
    words = ["gdb", "-nx", "-batch", *(word for one in commands for word in ("-ex", one)), str(SNAPSHOT)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ("call to syscall clock_gettime" in done.stdout) == hidden, done.stdout + done.stderr
    assert "exited normally" in done.stdout, done.stdout + done.stderr
