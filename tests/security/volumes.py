"""Attacks by mounts: users' mounts over gpushare's targets, host directories, and mounts that propagate to the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.support import rootfs

from .scene import LIBCUDA, LIBDIR, VERSION, Scene

Prepare = Callable[[Scene], None]


def over(target: str, *options: str, files: tuple[str, ...] = ()) -> Prepare:
    """Mount a host directory with these files at `target`."""

    def prepare(scene: Scene) -> None:
        volume = scene.host / "share"
        for name in files:
            (volume / name).parent.mkdir(parents=True, exist_ok=True)
            (volume / name).write_bytes(b"\xff" * 512)
        scene.mount(volume, target, "rbind", *options)

    return prepare


def over_file(target: str, *options: str) -> Prepare:
    """Mount a host file at `target`."""

    def prepare(scene: Scene) -> None:
        (scene.host / "file").write_bytes(b"\xff" * 4096)
        scene.mount(scene.host / "file", target, "bind", *options)

    return prepare


def tmpfs(target: str, *options: str) -> Prepare:
    return lambda scene: scene.mount("tmpfs", target, "mode=777", *options, kind="tmpfs")


def host_libraries(*options: str) -> Prepare:
    """Mount the machine's own library directory: nothing may be created there."""
    return lambda scene: scene.mount(f"/{LIBDIR}", f"/{LIBDIR}", "rbind", *options)


def host_dev(scene: Scene) -> None:
    for target in ("/dev", "/dev/pts", "/dev/shm"):
        scene.unmount(target)
    scene.mount("/dev", "/dev", "rbind")


def host_root(*options: str) -> Prepare:
    def prepare(scene: Scene) -> None:
        rootfs.run("mount", "--bind", scene.host, scene.host)
        rootfs.run("mount", "--make-shared", scene.host)
        scene.after.append(lambda: rootfs.unmount_below(scene.host))
        scene.mount(scene.host, "/opt/host", "rbind", *options)

    return prepare


def shared_library(scene: Scene) -> None:
    """A covered library is on a volume that is a shared mount: mounts there propagate to the host."""
    volume = scene.host / "share"
    (volume / "libcuda.so.1").write_bytes(next(scene.node.driver_root.rglob(f"libcuda.so.{VERSION}")).read_bytes())
    rootfs.run("mount", "--bind", volume, volume)
    rootfs.run("mount", "--make-shared", volume)
    scene.after.append(lambda: rootfs.unmount_below(volume))
    scene.set_env("LD_LIBRARY_PATH=/opt/v")
    scene.mount(volume, "/opt/v", "rbind", "rshared")


def library_in_a_volume(*options: str) -> Prepare:
    """The user's own libcuda in a volume: covered in the container, while the user's file stays unchanged."""

    def prepare(scene: Scene) -> None:
        volume = scene.host / "share"
        (volume / "libcuda.so.1").write_bytes(next(scene.node.driver_root.rglob(f"libcuda.so.{VERSION}")).read_bytes())
        scene.set_env("LD_LIBRARY_PATH=/opt/v")
        scene.mount(volume, "/opt/v", "rbind", *options)

    return prepare


def link_in_a_volume(scene: Scene) -> None:
    """In the volume, libcuda's name is a link to a host secret, by a path that exists on both sides."""
    volume = scene.host / "share"
    os.symlink(f"../../../../../../../..{scene.host}/secret", volume / "libcuda.so.1")
    scene.set_env("LD_LIBRARY_PATH=/opt/v")
    scene.mount(volume, "/opt/v", "rbind")


def host_proc(scene: Scene) -> None:
    """Mount the host's /proc instead of the container's own: its magic links lead to the host's files."""
    scene.unmount("/proc")
    scene.mount("/proc", "/proc", "rbind")
    link = scene.root / LIBCUDA
    os.symlink("/proc/1/root/etc/passwd", link)


def device_covered(scene: Scene) -> None:
    scene.mount("/dev/zero", "/dev/nvidia0", "bind")


def nested(scene: Scene) -> None:
    """Mount a host directory over gpushare's directory, and the user's mounts below it again."""
    volume = scene.host / "share"
    for name in ("driver", "rw", "pages", "peers"):
        (volume / name).mkdir()
    scene.mount(volume, "/usr/lib/gpushare", "rbind")
    scene.mount(Path("/etc"), "/usr/lib/gpushare/driver", "rbind", "ro")
