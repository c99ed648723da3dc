"""A complete root file system without any download: an overlay over the host's own root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

_MNT_DETACH = 2  # <sys/mount.h>
_libc = ctypes.CDLL(None, use_errno=True)


class OverlayRoot:
    """`path` is a writable view of `lower`. Writes go to a tmpfs that close() removes."""

    def __init__(self, directory: Path, lower: Path = Path("/")) -> None:
        self.directory = directory
        self.path = directory / "root"
        directory.mkdir()
        mount_tmpfs(directory, "size=256m,mode=755")
        try:
            for name in ("root", "upper", "work"):
                (directory / name).mkdir()
            # Relative to the directory: overlay's options cannot contain spaces, commas or colons.
            options = f"lowerdir={lower},upperdir=upper,workdir=work"
            run("mount", "-t", "overlay", "-o", options, "gpushare-test", "root", cwd=directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmount and remove; a second call does nothing."""
        unmount_below(self.directory)
        if self.directory.exists():
            self.directory.rmdir()


def mount_tmpfs(directory: Path, options: str) -> None:
    """Mount like mount(8), without its process: hundreds of tests mount one."""
    if _libc.mount(b"gpushare-test", os.fsencode(directory), b"tmpfs", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount tmpfs", str(directory))


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a host command that must succeed; return its output."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def mount_points() -> list[str]:
    """Mount points of this process, in mount order."""
    points = [line.split(" ", 5)[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point.encode().decode("unicode_escape") if "\\" in point else point for point in points]


def unmount_below(directory: Path) -> None:
    """Unmount everything on or below `directory`, the last mount first."""
    prefix = f"{directory.resolve()}/"
    for point in reversed(mount_points()):
        if f"{point}/".startswith(prefix) and _libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
            raise OSError(ctypes.get_errno(), "umount2", point)
