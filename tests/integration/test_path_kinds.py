"""More attacks on paths that root uses in a tenant's file system: special files, the user's volumes, and the image's
own metadata."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare.core.model import LdEntry
from gpushare.core.ops import DeviceNode, LdCache, Link, Mount, Plan
from gpushare.inject import rootfs

from tests.integration import ns_util, scene
from tests.integration.scene import LIBDIR, NAME, RO, read, shim

base, image, source, host = scene.base, scene.image, scene.source, scene.host


# Special files


@contextlib.contextmanager
def special_file(path: Path, kind: str) -> Iterator[None]:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "character device":
        os.mknod(path, 0o020666, os.makedev(1, 3))
    elif kind == "block device":
        os.mknod(path, 0o060666, os.makedev(7, 0))
    else:
        server = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 108 bytes
        server.bind(path.name)
        os.chdir(here)
        server.close()
    yield


KINDS = ("FIFO", "folder", "character device", "block device", "socket")


@pytest.mark.parametrize("kind", KINDS)
def test_special_file_at_a_mount_target_is_refused(image: Path, source: Path, host: Path, kind: str) -> None:
    with special_file(image / NAME[1:], kind), ns_util.sandbox(image) as box:
        assert box.refuses(shim(source)) == f'"{NAME}" is a {kind} where a file must be; remove it from the image'


@pytest.mark.parametrize("kind", KINDS)
def test_special_file_at_a_link_s_name_is_refused(image: Path, source: Path, host: Path, kind: str) -> None:
    name = f"{LIBDIR}/libcuda.so.1"
    with special_file(image / name[1:], kind), ns_util.sandbox(image) as box:
        message = box.refuses(shim(source), Link(name, "libcuda.so.535.1", "name"))
    assert message == f'"{name}" is a {kind} where a link must be; remove it from the image'


@pytest.mark.parametrize("kind", KINDS)
def test_special_file_behind_a_link_s_name_is_refused(image: Path, source: Path, host: Path, kind: str) -> None:
    name = f"{LIBDIR}/libcuda.so.1"
    os.symlink("libodd.so", image / name[1:])
    with special_file(image / LIBDIR[1:] / "libodd.so", kind), ns_util.sandbox(image) as box:
        assert f"is a {kind} where a " in box.refuses(shim(source), Link(name, "libcuda.so.535.1", "name"))


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "block device"])
def test_special_file_at_a_device_target_is_refused(image: Path, source: Path, host: Path, kind: str) -> None:
    with special_file(image / "dev/nvidia0", kind), ns_util.sandbox(image) as box:
        message = box.refuses(DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False))
    assert message.startswith(f'"/dev/nvidia0" is a {kind} where a file must be')


def test_file_in_place_of_a_directory_is_refused(image: Path, source: Path, host: Path) -> None:
    (image / "usr/lib/gpushare").write_text("x")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Mount(str(source / "share"), "/usr/lib/gpushare", "dir", RO, "share"))
        assert message.startswith('"/usr/lib/gpushare" is a regular file where a directory must be')
        message = box.refuses(shim(source, "/usr/lib/gpushare/a/b"))
        assert "is not a directory" in message


def test_hard_link_is_covered_and_its_file_unchanged(image: Path, source: Path, host: Path) -> None:
    os.link(image / "etc/passwd", image / NAME[1:])
    before = (image / "etc/passwd").read_text()
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source),)))
        assert box.enter(read("/etc/passwd")) == before
    assert (image / "etc/passwd").read_text() == before


def test_immutable_directory_is_refused(image: Path, source: Path, host: Path) -> None:
    subprocess.run(["chattr", "+i", image / LIBDIR[1:]], check=True)
    try:
        with ns_util.sandbox(image) as box:
            message = box.refuses(shim(source))
    finally:
        subprocess.run(["chattr", "-i", image / LIBDIR[1:]], check=True)
    assert message == f'create "{NAME}": Operation not permitted'


# The user's volumes


def test_file_is_not_created_in_a_volume(image: Path, source: Path, host: Path) -> None:
    with ns_util.sandbox(image, f"mount --bind {host}/lib {image}{LIBDIR}/") as box:
        message = box.refuses(shim(source))
    where = f'(on the host: "{host}/lib")'
    assert message.startswith(f'"{NAME}" would be created in the volume at "{LIBDIR}" {where}')


def test_link_is_not_created_in_a_volume(image: Path, source: Path, host: Path) -> None:
    (image / "opt/v").mkdir(parents=True)
    with ns_util.sandbox(image, f"mount --bind {host}/lib {image}/opt/v") as box:
        message = box.refuses(Link("/opt/v/libcuda.so.1", "x", "name"))
    assert message.startswith('"/opt/v/libcuda.so.1" would be created in the volume at "/opt/v"')


def test_file_in_a_volume_is_covered(image: Path, source: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "libcuda.so.535.1").write_text("the user's")
    (image / "opt/v").mkdir(parents=True)
    mounts = ns_util.host_mounts()
    for options in ("", f" && mount -o remount,bind,ro {image}/opt/v"):
        with ns_util.sandbox(image, f"mount --bind {volume} {image}/opt/v{options}") as box:
            box.apply(Plan("test", (shim(source, "/opt/v/libcuda.so.535.1"),)))
            assert box.enter(read("/opt/v/libcuda.so.535.1")) == "the shim"
            assert ns_util.host_mounts() == mounts
    assert (volume / "libcuda.so.535.1").read_text() == "the user's"


def test_mount_in_a_shared_volume_does_not_propagate_to_the_host(image: Path, source: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_text("the user's")
    (image / "opt/v").mkdir(parents=True)
    for path in (volume, image / "opt/v"):
        subprocess.run(["mount", "--bind", volume, path], check=True)
        subprocess.run(["mount", "--make-shared", path], check=True)
    try:
        mounts = ns_util.host_mounts()
        with ns_util.sandbox(image, f"mount --rbind {image} {image} && mount --make-private {image}", True) as box:
            box.apply(Plan("test", (shim(source, "/opt/v/file"),)))
            assert box.enter(read("/opt/v/file")) == "the shim"
            assert [m for m in ns_util.host_mounts() if "source/shim.so" in m] == []
            assert (volume / "file").read_text() == "the user's"
        assert len(ns_util.host_mounts()) == len(mounts)
    finally:
        for path in (image / "opt/v", volume):
            subprocess.run(["umount", path], check=True)


def test_runtime_s_own_file_systems_may_be_written(image: Path, source: Path, host: Path) -> None:
    """/dev and /run are the container's own new file systems, although they are separate mounts."""
    with ns_util.sandbox(image, f"mount -t tmpfs none {image}/dev") as box:
        box.apply(Plan("test", (DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False),)))
        assert box.enter(lambda: os.stat("/dev/nvidia0").st_rdev) == os.makedev(195, 0)


def test_no_node_is_created_in_the_host_s_dev(image: Path, source: Path, host: Path) -> None:
    """`-v /dev:/dev`: a node made there would be in the host's /dev."""
    before = sorted(os.listdir("/dev"))
    with ns_util.sandbox(image, f"mount --rbind /dev {image}/dev") as box:
        message = box.refuses(DeviceNode(str(source / "nvidia0"), "/dev/nvidia0-gpushare", 195, 0, False))
    assert 'would be created in the volume at "/dev"' in message
    assert sorted(os.listdir("/dev")) == before


def test_read_only_parent_is_refused(image: Path, source: Path, host: Path) -> None:
    setup = f"mount -t tmpfs none {image}/opt && mkdir {image}/opt/x && mount -o remount,ro {image}/opt"
    (image / "opt").mkdir()
    with ns_util.sandbox(image, setup) as box:
        message = box.refuses(shim(source), shim(source, "/opt/x/file"))
    assert message.startswith(
        'create "/opt/x/file": Read-only file system; the image is read-only: create an empty file'
    )


# The image's own metadata


@pytest.mark.parametrize(
    "value",
    [
        "/proc/self/root{host}:/proc/1/root",
        "{host}:{host}/lib",
        "/lib/../../../..{host}",
        "/fifo:/socket:/loop",
        "\x00:/",
    ],
)
def test_hostile_library_paths_stay_inside_the_root(image: Path, host: Path, source: Path, value: str) -> None:
    shutil.copy(image / LIBDIR[1:] / "libc.so.6", host / "lib/libcuda.so.1")
    os.mkfifo(image / "fifo")
    os.symlink("loop", image / "loop")
    with ns_util.sandbox(image, f"mount -t proc proc {image}/proc") as box:

        def probe() -> list[str]:
            fd = rootfs.open_root(box.bundle, box.pid)
            return [path for path, _ in rootfs.probe(fd, [("LD_LIBRARY_PATH", value.format(host=host))]).other_drivers]

        assert ns_util.in_child(probe) == []
    (host / "lib/libcuda.so.1").unlink()


@pytest.mark.parametrize(
    "content", [b"\xff" * 5000, b"glibc-ld.so.cache1.1" + b"\xff" * 5000, b"", b"ld.so-1.7.0\0\xff\xff\xff\x7f"]
)
def test_malformed_cache_does_not_prevent_the_share(image: Path, source: Path, host: Path, content: bytes) -> None:
    (image / "etc/ld.so.cache").write_bytes(content)
    entry = LdCache((LdEntry("libcuda.so.1", NAME, 0x0303),))
    with ns_util.sandbox(image) as box:
        notes = box.apply(Plan("test", (shim(source), entry)), lambda applied: applied.notes)
        assert "malformed" in notes[0]
        assert box.enter(read(NAME)) == "the shim"
    assert (image / "etc/ld.so.cache").read_bytes() == content


def test_mount_table_does_not_grow(image: Path, source: Path, host: Path) -> None:
    """Twenty starts and ends of one container leave the host's table unchanged (see the fixture) and no process."""
    for _ in range(20):
        with ns_util.sandbox(image) as box:
            box.apply(Plan("test", (shim(source),)))
            assert box.mounts() == [NAME]
