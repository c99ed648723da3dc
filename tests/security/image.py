"""Attacks by the image's content: links, special files and crafted files at paths that a root hook reads or writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from tests.support.rootfs import run

from .scene import LIBCUDA, LIBDIR, VERSION, Scene

Prepare = Callable[[Scene], None]
OURS = "usr/lib/gpushare"
CACHE = "etc/ld.so.cache"
COMPAT = "usr/local/cuda-99/compat"
ELF = (
    b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 1 << 62, 0, 64, 56, 9, 64, 9, 8)
)


def _clear(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(at: str, text: str) -> Prepare:
    """Link `at` to `text`; `{host}` in it is the sentinel directory of the host."""

    def prepare(scene: Scene) -> None:
        _clear(scene.root / at)
        os.symlink(text.format(host=scene.host), scene.root / at)

    return prepare


KINDS = {
    "fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "character device": stat.S_IFCHR, "block device": stat.S_IFBLK,
}  # fmt: skip


def special(at: str, kind: str) -> Prepare:
    def prepare(scene: Scene) -> None:
        _clear(scene.root / at)
        if kind == "directory":
            (scene.root / at).mkdir()
        else:
            os.mknod(scene.root / at, 0o666 | KINDS[kind], os.makedev(7, 0) if "device" in kind else 0)

    return prepare


def content(at: str, data: bytes, size: int = 0) -> Prepare:
    """Make a file with `data`, sparse and `size` bytes long."""

    def prepare(scene: Scene) -> None:
        _clear(scene.root / at)
        (scene.root / at).write_bytes(data)
        if size:
            os.truncate(scene.root / at, size)

    return prepare


def hard_link(scene: Scene) -> None:
    """Make two names of one file: an operation on the first must not change the second."""
    (scene.root / "etc/victim").write_text("the image's\n")
    os.link(scene.root / "etc/victim", scene.root / LIBCUDA)

    def look(_: object) -> None:
        assert (scene.root / "etc/victim").read_text() == "the image's\n"

    scene.inside.append(look)


def baked_state(scene: Scene) -> None:
    """Bring gpushare's private directory in the image: unlimited limits, a usage file, a 'real' driver."""
    for name in ("rw", "driver", "pages", "peers", "mps"):
        (scene.root / OURS / name).mkdir(parents=True, exist_ok=True)
    for name in ("limits", "rw/usage", "driver/libcuda-real.so.1"):
        (scene.root / OURS / name).write_bytes(b"\xff" * 4096)
        (scene.root / OURS / name).chmod(0o666)


def own_driver(directory: str, name: str) -> Prepare:
    """Put a working libcuda of the image where a loader or a program prefers it."""

    def prepare(scene: Scene) -> None:
        real = next(scene.node.driver_root.rglob(f"libcuda.so.{VERSION}"))
        (scene.root / directory).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real, scene.root / directory / name)

    return prepare


def compat_link_out(scene: Scene) -> None:
    """Make a 'newer driver' that is a link to a secret of the host, which must never appear in the container."""
    (scene.root / COMPAT).mkdir(parents=True)
    os.symlink(f"{scene.host}/secret", scene.root / COMPAT / "libcuda.so.999.1")
    os.symlink("libcuda.so.999.1", scene.root / COMPAT / "libcuda.so.1")


def _remove_etc(scene: Scene) -> None:
    """Remove the image's /etc, whose lower layer is the host's: a file that appears there meanwhile fails the rmdir."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            shutil.rmtree(scene.root / "etc")
            return
    shutil.rmtree(scene.root / "etc")


def without_etc(scene: Scene) -> None:
    _remove_etc(scene)


def etc_is_a_link(scene: Scene) -> None:
    _remove_etc(scene)
    os.symlink(f"../../../../../../..{scene.host}/etc", scene.root / "etc")


def many_names(scene: Scene) -> None:
    """Fill the directories that are searched for drivers with very many entries."""
    (scene.root / COMPAT).mkdir(parents=True)
    for number in range(20_000):
        (scene.root / COMPAT / f"libcuda.so.{number}").symlink_to("nothing")


def device_link(scene: Scene) -> None:
    """Use an image with its own /dev, which the container keeps: a GPU's node is a link to a file of the host."""
    scene.unmount("/dev")
    scene.unmount("/dev/pts")
    scene.unmount("/dev/shm")
    shutil.rmtree(scene.root / "dev")
    (scene.root / "dev").mkdir()
    os.symlink("/etc/passwd", scene.root / "dev/nvidia0")
    os.symlink(f"../../../../../..{scene.host}/passwd", scene.root / "dev/nvidiactl")


def swapped_null(scene: Scene) -> None:
    """Make /dev/null, which other tools mount over masked paths, a link to a kernel file that only the host may
    write."""
    device_link(scene)
    for name in ("nvidia0", "nvidiactl"):
        (scene.root / "dev" / name).unlink()
    os.symlink("/proc/sys/kernel/core_pattern", scene.root / "dev/null")


def immutable(scene: Scene) -> None:
    """Make the library directory immutable."""
    upper = scene.one.bundle / "disk" / "upper" / LIBDIR
    (scene.root / LIBDIR / "touched").write_text("")  # moves the directory into the upper layer
    run("chattr", "+i", upper)
    scene.after.append(lambda: run("chattr", "-i", upper))


def cache_is_a_fifo(scene: Scene) -> None:
    """Make the cache a FIFO. Every open blocks, also the container's own loader: it is removed before the proof starts
    programs."""
    special(CACHE, "fifo")(scene)
    scene.inside.append(lambda _: (scene.root / CACHE).unlink())
