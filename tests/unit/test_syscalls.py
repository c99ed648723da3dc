"""Errors of syscalls.py and path lookup of inroot.py: the kernel's lookup and gpushare's own must agree on the same
trees."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.core import errors
from gpushare.core.errors import KernelError
from gpushare.system import inroot, syscalls

Opener = Callable[..., int]


def walk(root_fd: int, path: str, flags: int = os.O_PATH, mode: int = 0) -> int:
    return inroot._walk(root_fd, path, flags | os.O_CLOEXEC, mode)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    tree = tmp_path / "root"
    for directory in ("usr/lib/deep", "etc", "tmp"):
        (tree / directory).mkdir(parents=True)
    (tmp_path / "outside").write_text("host")
    (tree / "etc/passwd").write_text("container")
    (tree / "usr/lib/libz.so").write_text("z")
    for name, text in {
        "lib": "usr/lib",
        "absolute": "/etc/passwd",
        "climbing": "../../../../../../../etc/passwd",
        "escape": "../outside",
        "escape-absolute": str(tmp_path / "outside"),
        "usr/up": "../../../..",
        "loop": "loop",
        "dangling": "nothing",
        "usr/lib/chain": "../up/lib/deep/../libz.so",
    }.items():
        os.symlink(text, tree / name)
    os.mkfifo(tree / "fifo")
    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture(params=["kernel", "walk"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return walk if request.param == "walk" else inroot.open_in


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        ("/etc/passwd", "/etc/passwd"),
        ("etc//./passwd", "/etc/passwd"),
        ("/lib/libz.so", "/usr/lib/libz.so"),
        ("/absolute", "/etc/passwd"),
        ("/climbing", "/etc/passwd"),
        ("/../../../etc/passwd", "/etc/passwd"),
        ("/usr/up", "/"),
        ("/usr/lib/chain", "/usr/lib/libz.so"),
        ("/lib/deep/", "/usr/lib/deep"),
        ("/", "/"),
        ("/fifo", "/fifo"),
    ],
)
def test_path_resolves_inside_root(root: int, opener: Opener, path: str, ends: str) -> None:
    fd = opener(root, path)
    assert inroot.path_of(root, fd) == ends
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/escape", errno.ENOENT),
        ("/escape-absolute", errno.ENOENT),
        ("/dangling", errno.ENOENT),
        ("/nothing/there", errno.ENOENT),
        ("/loop", errno.ELOOP),
        ("/etc/passwd/x", errno.ENOTDIR),
        ("/etc/passwd/", errno.ENOTDIR),
        ("/" + "x" * 300, errno.ENAMETOOLONG),
    ],
)
def test_impossible_path_is_refused(root: int, opener: Opener, path: str, reason: int) -> None:
    with pytest.raises(syscalls.SyscallError) as caught:
        opener(root, path)
    assert caught.value.errno == reason
    assert path[:200] in str(caught.value)
    assert os.strerror(reason) in str(caught.value)


@pytest.mark.parametrize("path", ["/proc/self/root/etc", "/proc/self/cwd", "/proc/self/fd/0", "/proc/self/exe"])
def test_magic_links_are_refused(opener: Opener, path: str) -> None:
    fd = os.open("/", os.O_PATH)
    try:
        with pytest.raises(syscalls.SyscallError) as caught:
            opener(fd, path)
        assert caught.value.errno == errno.ELOOP
    finally:
        os.close(fd)


def test_ordinary_links_in_proc_are_followed(opener: Opener) -> None:
    fd = os.open("/", os.O_PATH)
    try:
        status = opener(fd, "/proc/self/status", os.O_RDONLY)
        assert f"Pid:\t{os.getpid()}\n" in os.read(status, 4096).decode()
        os.close(status)
    finally:
        os.close(fd)


def test_nofollow_opens_link_itself(root: int, opener: Opener) -> None:
    fd = opener(root, "/absolute", os.O_PATH | os.O_NOFOLLOW)
    assert os.readlink("", dir_fd=fd) == "/etc/passwd"
    os.close(fd)


def test_exclusive_creation_does_not_follow_link(root: int, opener: Opener) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with pytest.raises(syscalls.SyscallError) as caught:
        opener(root, "/dangling", flags, 0o600)
    assert caught.value.errno == errno.EEXIST
    os.close(opener(root, "/lib/new", flags, 0o600))
    assert os.stat("usr/lib/new", dir_fd=root).st_mode & 0o777 == 0o600


def test_missing_openat2_is_tried_once(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def missing(dir_fd: int, path: str, *rest: int) -> int:
        calls.append(path)
        raise syscalls.SyscallError("openat2", path, errno.ENOSYS)

    monkeypatch.setattr(syscalls, "openat2", missing)
    monkeypatch.setattr(inroot, "_kernel_has_openat2", True)
    for _ in range(3):
        os.close(inroot.open_in(root, "/etc/passwd"))
    assert calls == ["/etc/passwd"]


def test_raced_lookup_is_retried(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = syscalls.openat2, [3]

    def racing(dir_fd: int, path: str, *rest: int) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise syscalls.SyscallError("openat2", path, errno.EAGAIN)
        return real(dir_fd, path, *rest)

    monkeypatch.setattr(syscalls, "openat2", racing)
    os.close(inroot.open_in(root, "/etc/passwd"))
    assert left == [-1]


def test_special_file_is_not_opened_for_reading(root: int, tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "root/socket"))
    for path in ("/fifo", "/socket", "/etc", "/dangling", "/loop"):
        assert inroot.open_regular(root, path) == -1
    server.close()
    fd = inroot.open_regular(root, "/absolute")
    assert os.read(fd, 100) == b"container"
    os.close(fd)


def test_deleted_file_has_no_path(root: int, tmp_path: Path) -> None:
    fd = inroot.open_in(root, "/etc/passwd")
    os.unlink(tmp_path / "root/etc/passwd")
    assert inroot.path_of(root, fd) == ""
    os.close(fd)


def test_file_moved_out_of_root_has_no_path(root: int, tmp_path: Path) -> None:
    fd = inroot.open_in(root, "/etc/passwd")
    os.rename(tmp_path / "root/etc/passwd", tmp_path / "moved")
    assert inroot.path_of(root, fd) == ""
    os.close(fd)


def test_failed_lookup_leaks_no_descriptors(root: int, opener: Opener) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/usr/lib/chain", "/loop", "/dangling", "/etc/passwd/x", "/climbing"):
        fd = -1
        try:
            fd = opener(root, path)
        except syscalls.SyscallError:
            continue
        finally:
            if fd >= 0:
                os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_error_names_call_path_and_reason() -> None:
    with pytest.raises(KernelError, match='umount2 "/nowhere/at-all": No such file or directory'):
        syscalls.umount("/nowhere/at-all")
    with open("/proc/self/status") as file, pytest.raises(KernelError, match='setns "a file": '):
        syscalls.setns(file.fileno(), "a file")
    with pytest.raises(KernelError, match='pidfd_open "pid 4194304"'):
        syscalls.pidfd_open(4194304)


WITHOUT = """
import builtins
given = builtins.__import__
def find(name, globals=None, *rest):
    if name == "_ctypes" and globals["__name__"] == "gpushare.system.syscalls":
        raise ImportError(name)
    return given(name, globals, *rest)
builtins.__import__ = find
"""
CALLS = """
import os, struct, sys
from gpushare.system import syscalls
def error_of(call, *arguments):
    try:
        return call(*arguments)
    except syscalls.SyscallError as error:
        return f"{error.call} {error.path} {error.errno}"
fd = os.open("/proc", os.O_PATH)
print(error_of(syscalls.openat2, fd, "nothing", os.O_PATH), error_of(syscalls.openat2, -1, "x", os.O_PATH))
print(error_of(syscalls.umount, "/none"), error_of(syscalls.setns, fd, "ns"))
print(error_of(syscalls.pidfd_open, -5), error_of(syscalls.move_mount, -1, fd, "m"))
print(hex(syscalls.filesystem_magic(fd)), syscalls.buffer(3).raw, syscalls.buffer(b"").raw, syscalls.buffer(b"ab").raw)
one = syscalls.buffer(struct.pack("<QQQ", os.O_PATH, 0, 0))
other = syscalls._call("openat2", "self", 437, fd, b"self", syscalls.address(one), 24)
print(os.path.samestat(os.fstat(other), os.stat("/proc/self")), "ctypes" in sys.modules)
"""


def test_calls_with_and_without_ctypes_are_equal() -> None:
    path = str(Path(syscalls.__file__).parents[2])
    outputs = []
    for before in ("", WITHOUT):
        text = f"import sys; sys.path.insert(0, {path!r})\n{before}{CALLS}"
        done = subprocess.run([sys.executable, "-ISc", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0].endswith("True False\n") and outputs[1].endswith("True True\n")
    assert outputs[0].splitlines()[:-1] == outputs[1].splitlines()[:-1]
    assert f"umount2 /none {errno.ENOENT}" in outputs[0] and "0x9fa0 b'\\x00\\x00\\x00' b'\\x00' b'ab'" in outputs[0]


def test_too_many_mounts_are_no_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(call: str, path: str, *_: object) -> int:
        raise syscalls.SyscallError(call, path, errno.ENOSPC)

    monkeypatch.setattr(syscalls, "_call", full)
    with pytest.raises(syscalls.SyscallError, match="raise fs.mount-max"):
        syscalls.move_mount(3, 4, "/x")
    assert "free space there" in str(syscalls.SyscallError("openat2", "/x", errno.ENOSPC))


def test_folder_in_place_of_a_file_is_reported_in_other_words() -> None:
    """docker exits with 126, as for a program that cannot be executed, if an error contains the kernel's text."""
    failed = OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    for error in (syscalls.SyscallError("open", "/x", errno.EISDIR), errors.of_file(failed, "/x")):
        assert str(error).endswith('"/x": it is a folder') and "is a directory" not in str(error).lower()
    assert str(errors.of_file(OSError(errno.ENOENT, "gone"), "/x")).endswith('"/x": gone')


@pytest.mark.parametrize(
    ("selinux", "policy", "contexts"),
    [(False, True, [""]), (True, True, ["container_file_t"]), (True, False, ["container_file_t", ""])],
)
def test_tmpfs_has_the_label_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selinux: bool, policy: bool, contexts: list[str]
) -> None:
    """With SELinux, if its policy has the type."""
    seen = []

    def detached(kind: str, options: dict[str, str], attributes: int, what: str) -> int:
        label = options.get("context", "")
        seen.append(label.split(":")[2] if label else "")
        if label and not policy:
            raise OSError(errno.EINVAL, "fsconfig")
        return 7

    monkeypatch.setattr(syscalls, "_detached", detached)
    monkeypatch.setattr(syscalls, "_SELINUX", str(tmp_path if selinux else tmp_path / "no"))
    assert syscalls.detached_tmpfs({"mode": "755"}, 0, "x") == 7 and seen == contexts
