"""The state directory: a private tmpfs, usage files of exact size, and removal that always completes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.core.model import Device, Share
from gpushare.core.ops import TenantTmpfs, WriteLimits
from gpushare.state import shm_abi, storage

from tests.support import rootfs
from tests.unit.together import at_once

GIB = 1 << 30
DEVICE = Device(0, "GPU-00112233-4455-6677-8899-aabbccddeeff", 0, "0000:01:00.0", "Test GPU", 16 * GIB, 512 << 20)
SHARES = (Share(0, DEVICE, 4 * GIB),)


@pytest.fixture
def state(state_dir: Path) -> str:
    storage.prepare(str(state_dir))
    return str(state_dir)


@pytest.fixture
def page(state: str) -> Iterator[Path]:
    """The host path of a container's usage file."""
    container = Path(storage.container_dir(state, "c1"))
    container.mkdir()
    share = storage.make_share_dir(state, "c1", SHARES)
    storage.execute(WriteLimits(SHARES, f"{share}/limits"))
    storage.execute(TenantTmpfs(str(container / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
    yield container / "rw" / "usage"


def mounts_on(path: Path) -> list[str]:
    """The mountinfo lines of all mounts on `path`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split(" ")[4] == str(path)]


def test_prepare_mounts_one_private_tmpfs(state_dir: Path) -> None:
    subprocess.run(["mount", "--make-rshared", "/"], check=True)  # as systemd leaves it; only in this mount namespace
    try:
        for _ in range(3):
            storage.prepare(str(state_dir))
        (line,) = mounts_on(state_dir)
        assert f" - tmpfs {state_dir} " in line and "nosuid,nodev" in line
        assert "shared:" not in line and "master:" not in line
    finally:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state_dir.iterdir()}
    folders = {"containers": 0o700, "trash": 0o700, "errors": 0o755}
    assert modes == {**folders, "lock": 0o600, "rebuild": 0o600, "place": 0o600}


def test_concurrent_first_starts_mount_once(state_dir: Path) -> None:
    def start() -> None:
        storage.prepare(str(state_dir))
        assert (state_dir / "lock").exists()

    assert at_once(*[start] * 8) == [0] * 8
    assert len(mounts_on(state_dir)) == 1


def test_prepare_completes_killed_start(state_dir: Path) -> None:
    """Killed after the mount, before folders and marker: no second tmpfs is mounted."""
    subprocess.run(["mount", "-t", "tmpfs", "none", state_dir], check=True)
    (state_dir / "containers").mkdir(mode=0o777)
    storage.prepare(str(state_dir))
    assert len(mounts_on(state_dir)) == 1
    assert stat.S_IMODE((state_dir / "containers").stat().st_mode) == 0o700
    assert (state_dir / "trash").is_dir()


def test_concurrent_prepare_succeeds(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other start came after this mount, so it did not wait: it makes each folder just before this one."""
    made = os.mkdir

    def mkdir(path: str, *mode: int) -> None:
        made(path, *mode)
        made(path, *mode)

    monkeypatch.setattr(storage.os, "mkdir", mkdir)
    storage.prepare(str(state_dir))
    assert storage.is_ready(str(state_dir))


def test_failed_prepare_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match=r"state directory \".*file/state\": Not a directory$"):
        storage.prepare(str(tmp_path / "file" / "state"))


@pytest.mark.parametrize("own_tmpfs", [False, True], ids=["a directory", "a tmpfs, as /run is"])
def test_foreign_directory_is_refused_and_kept(state_dir: Path, own_tmpfs: bool) -> None:
    """`--state /etc`, and `--state /run`."""
    if own_tmpfs:
        rootfs.mount_tmpfs(state_dir, "mode=755")
    before = len(mounts_on(state_dir))
    (state_dir / "passwd").write_text("root")
    (state_dir / "lock").mkdir()  # as in /run
    assert not storage.is_ready(str(state_dir))
    with pytest.raises(KernelError, match='"passwd" in it is not gpushare\'s; name an empty directory'):
        storage.prepare(str(state_dir))
    assert sorted(os.listdir(state_dir)) == ["lock", "passwd"] and len(mounts_on(state_dir)) == before
    (state_dir / "lock").rmdir()
    (state_dir / "passwd").rename(state_dir / "launcher")  # it is written even before the tmpfs is mounted
    storage.prepare(str(state_dir))
    assert storage.is_ready(str(state_dir))


def test_limits_are_complete_and_read_only_without_temporary_file(page: Path, state: str) -> None:
    share = Path(state, "containers", "c1", "share")
    limits = share / "limits"
    assert stat.S_IMODE(limits.stat().st_mode) == 0o444
    assert sorted(path.name for path in share.iterdir()) == ["driver", "limits", "mps", "pages", "peers", "rw"]
    assert sorted(path.name for path in (share / "driver").iterdir()) == [
        "libcuda-real.so.1",
        "libnvidia-ml-real.so.1",
        "libnvidia-ml.so.1",
    ]
    read = storage.read_limits(str(limits))
    assert read.devices[0].memory_limit_bytes == 4 * GIB
    assert read.nonce == storage.read_usage(state, "c1", 1).nonce != 0


def test_limits_contain_slice_and_switch_times(state: str) -> None:
    shares = (*SHARES, SHARES[0]._replace(slot=1))
    storage.execute(WriteLimits(shares, f"{state}/limits", 1500, 80))
    data = Path(state, "limits").read_bytes()
    for slot in range(2):
        at = shm_abi.offset("gs_limits", "device") + slot * shm_abi.DEVICE_SIZE
        fields = shm_abi.packer("gs_device_limit").unpack_from(data, at)
        assert fields[12:14] == (1_500_000, 80_000)  # slice_ns, switch_ns


def test_nonces_are_unique(state: str) -> None:
    seen = set()
    for number in range(8):
        path = f"{state}/limits-{number}"
        storage.execute(WriteLimits(SHARES, path))
        seen.add(storage.read_limits(path).nonce)
    assert len(seen) == 8


def test_modes_are_independent_of_umask(state: str) -> None:
    Path(storage.container_dir(state, "c2")).mkdir()
    old = os.umask(0o077)
    try:
        share = Path(storage.make_share_dir(state, "c2", SHARES))
        storage.execute(WriteLimits(SHARES, str(share / "limits")))
        storage.execute(TenantTmpfs(str(share.parent / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (share, share / "driver", share / "limits")]
    assert modes == [0o755, 0o755, 0o444]
    assert stat.S_IMODE((share.parent / "rw").stat().st_mode) == 0o1777
    assert stat.S_IMODE((share.parent / "rw" / "usage").stat().st_mode) == 0o666


def test_usage_file_has_exact_size_and_cannot_grow(page: Path) -> None:
    (line,) = mounts_on(page.parent)
    assert "nosuid,nodev,noexec" in line
    space = os.statvfs(page.parent)
    assert (space.f_blocks * space.f_frsize, space.f_bfree, space.f_files, space.f_ffree) == (
        shm_abi.USAGE_SIZE,
        0,
        2,
        0,
    )
    assert page.stat().st_blocks * 512 == shm_abi.USAGE_SIZE  # allocated, so no store can hit a full file system
    attempts: tuple[Callable[[], None], ...] = (
        (page.parent / "more").touch,
        (page.parent / "folder").mkdir,
        lambda: (page.parent / "link").symlink_to("x"),
    )
    for attempt in attempts:
        with pytest.raises(OSError) as failed:
            attempt()
        assert failed.value.errno == errno.ENOSPC
    with open(page, "r+b", buffering=0) as file:
        file.seek(shm_abi.USAGE_SIZE)
        with pytest.raises(OSError) as failed:
            file.write(b"x" * 4096)
        assert failed.value.errno == errno.ENOSPC


# Attacks of a tenant on its usage file: (attack, the resulting error)
def _shrink(page: Path) -> None:
    os.truncate(page, 100)


def _extend(page: Path) -> None:
    os.truncate(page, 1 << 40)  # a hole, which uses no space


def _punch(page: Path) -> None:
    subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", "4096", page], check=True)


def _unlink(page: Path) -> None:
    page.unlink()


def _fifo(page: Path) -> None:
    page.unlink()
    os.mkfifo(page)


def _folder(page: Path) -> None:
    page.unlink()
    page.mkdir()


def _link(page: Path) -> None:
    page.unlink()
    page.symlink_to("/etc/shadow")


def _device(page: Path) -> None:
    page.unlink()
    os.mknod(page, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero; the mount is nodev


ATTACKS = {
    _shrink: "100 bytes, must be",
    _extend: f"{1 << 40} bytes, must be",
    _punch: "magic 0x0",
    _unlink: "No such file",
    _fifo: "not a regular file",
    _folder: "not a regular file",
    _link: "Too many levels of symbolic links",
    _device: "Permission denied",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
def test_attacked_usage_file_is_only_damaged(page: Path, state: str, attack: object) -> None:
    """The host returns at once with a RegionError, and the container's directory can still be removed."""
    attack(page)  # type: ignore[operator]
    with pytest.raises(shm_abi.RegionError, match=ATTACKS[attack]):  # type: ignore[index]
        storage.read_usage(state, "c1", 1)
    assert storage.discard(state, "c1")
    assert storage.empty_trash(state) == []
    assert not mounts_on(page.parent)


def test_modes_and_locks_of_tenant_do_not_block_host(page: Path, state: str) -> None:
    page.chmod(0)
    page.parent.chmod(0)
    with open(page, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert storage.read_usage(state, "c1", 1).slots == ()


def test_write_lease_of_tenant_does_not_delay_host(page: Path, state: str) -> None:
    """fcntl(F_SETLEASE) delays an ordinary open by /proc/sys/fs/lease-break-time (45 s)."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease back with SIGIO
    fd = os.open(page, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(shm_abi.RegionError, match="cannot be read: a process of the container holds a lease on it"):
            storage.read_usage(state, "c1", 1)
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def test_concurrent_truncation_reads_whole_file_or_damaged(page: Path, state: str) -> None:
    """A tenant truncates and restores the file in a loop: each read is a whole file or "damaged"."""
    child = os.fork()
    if child == 0:
        try:
            fd = os.open(page, os.O_RDWR)
            while True:
                os.ftruncate(fd, 10)
                os.ftruncate(fd, shm_abi.USAGE_SIZE)
        finally:
            os._exit(1)
    outcomes = set()
    try:
        for _ in range(2000):
            try:
                storage.read_usage(state, "c1", 1)
                outcomes.add("read")
            except shm_abi.RegionError:
                outcomes.add("damaged")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "damaged" in outcomes


def test_charges_written_through_mapping_are_read(page: Path, state: str) -> None:
    with open(page, "r+b") as file, mmap.mmap(file.fileno(), shm_abi.USAGE_SIZE) as memory:
        slot = shm_abi.packer("gs_slot").pack(77, 77, 1, 5, 9, 123 << 20, *(0,) * 15)
        start = shm_abi.offset("gs_usage", "slot")
        memory[start : start + len(slot)] = slot
        assert storage.read_usage(state, "c1", 1).used_bytes(0) == 123 << 20


def test_discard_frees_name_and_removal_is_repeatable(page: Path, state: str) -> None:
    assert storage.discard(state, "c1")
    assert not storage.discard(state, "c1")
    Path(storage.container_dir(state, "c1")).mkdir()  # the name is free although the mount still exists
    assert len(storage.trash(state)) == 1
    with open(os.path.join(state, "trash", storage.trash(state)[0], "rw", "usage"), "rb"):  # busy
        assert storage.empty_trash(state) == []
    assert storage.empty_trash(state) == []
    assert storage.trash(state) == []
    assert [point for point in rootfs.mount_points() if point.startswith(state + "/")] == []


def test_removal_resumes_after_kill(page: Path, state: str) -> None:
    storage.discard(state, "c1")
    half = Path(state, "trash", storage.trash(state)[0])
    subprocess.run(["umount", half / "rw"], check=True)
    (half / "share" / "limits").unlink()
    assert storage.empty_trash(state) == []
    assert not half.exists()


def test_removal_stops_at_foreign_mount(page: Path, state: str, tmp_path: Path) -> None:
    """A foreign mount inside is reported, and none of its files is changed."""
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("keep")
    subprocess.run(["mount", "--bind", treasure, Path(state, "containers", "c1", "share", "mps")], check=True)
    storage.discard(state, "c1")
    (problem,) = storage.empty_trash(state)
    assert "is still a mount point" in problem
    assert (treasure / "file").read_text() == "keep"


def test_removal_follows_no_link_that_replaces_a_directory(
    page: Path, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rootless container that has the directory open can exchange it between two steps."""
    (tmp_path / "treasure/inside").mkdir(parents=True)
    (tmp_path / "treasure/file").write_text("keep")
    folder = Path(state, "containers", "c1", "share", "mps", "swapped")
    folder.mkdir()
    storage.discard(state, "c1")
    opened, folder = os.open, Path(state, "trash", storage.trash(state)[0], "share", "mps", "swapped")

    def swap(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "swapped":
            folder.rename(folder.with_name("away"))
            folder.symlink_to(tmp_path / "treasure")
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", swap)
        (problem,) = storage.empty_trash(state)
    assert "swapped" in problem and sorted(os.listdir(tmp_path / "treasure")) == ["file", "inside"]
    assert storage.empty_trash(state) == [] and storage.trash(state) == []


def test_stray_files_are_removed(state: str, tmp_path: Path) -> None:
    folder = Path(state, "containers")
    (folder / "file").write_text("x")
    (folder / "link").symlink_to(tmp_path)
    assert storage.discard(state, "file") and storage.discard(state, "link")
    assert storage.empty_trash(state) == []
    assert storage.trash(state) == [] and tmp_path.is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../../etc", "a\0b"])
def test_invalid_id_is_refused_as_path(name: str) -> None:
    with pytest.raises(KernelError, match="cannot name a directory"):
        storage.container_dir("/state", name)
