"""A fresh Debian: a package's view of an unprepared machine.

archive()              -> build/debian-root.tar, made once; or build/debian-root-PACKAGE.tar with that package. Run as
                       a program, this module makes all of them, which may exceed a test's time limit
CleanRoot(directory)   the unpacked archive in memory; `run` runs programs with it as their root
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.support import debian
from tests.support.host import BUILD
from tests.support.rootfs import run, unmount_below
from tools.matrix import this_suite

PYTHON = "python3-venv"  # for installing a wheel
DNF = "dnf"
# A host's programs: a runtime, systemd to check the units, and rpm, which installs .rpm anywhere
INCLUDED = ("runc", "systemd", "rpm")
_ENTER = """
set -e
for name in proc sys dev; do mount --rbind /$name "$1/$name"; done
cd "$1"
mkdir -p .before
pivot_root . .before
umount -l /.before
rmdir /.before
echo ready
exec sleep infinity
"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def archive(more: str = "") -> Path:
    """Make or find the archive, of this machine's release. `more` adds one package."""
    target = BUILD / ("debian-root" + f"-{more}" * bool(more) + ".tar")
    if target.exists():
        return target
    packages = (*INCLUDED, more) if more else INCLUDED
    root = debian.with_packages(this_suite(), "-".join(("packages", *packages[len(INCLUDED) :])), packages)
    new = target.with_suffix(".tar.new")
    run("tar", "--numeric-owner", "--one-file-system", "-C", root.path, "-cf", new, "--exclude=./var/cache", ".")
    new.rename(target)
    return target


class CleanRoot:
    """`path` is its root as seen from here. Mounts of its programs are visible only inside."""

    def __init__(self, directory: Path, more: str = "") -> None:
        self.path = directory
        directory.mkdir()
        run("mount", "-t", "tmpfs", "-o", "mode=755,size=2g", "gpushare-test", directory)
        try:
            run("tar", "-C", directory, "-xpf", archive(more))
            words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh", str(directory)]
            self._inside = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            assert self._inside.stdout is not None
            assert self._inside.stdout.readline() == "ready\n"
        except BaseException:
            self.close()
            raise

    def words(self, *command: str) -> list[str]:
        inside = ["nsenter", "--target", str(self._inside.pid), "--mount", "--root", "--wd", "--"]
        return [*inside, "env", "-i", f"PATH={_PATH}", "DEBIAN_FRONTEND=noninteractive", *command]

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end."""
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 120}
        return subprocess.run(self.words(*command), **options)

    def run(self, *command: str) -> str:
        """Return the standard output of a command that must succeed."""
        done = self.call(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.words(*command), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def put(self, path: str, text: str) -> None:
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def files(self, *folders: str) -> dict[str, bytes | str]:
        return debian.files_below(self.path, *folders)

    def close(self) -> None:
        inside = getattr(self, "_inside", None)
        if inside is not None:
            inside.kill()
            inside.communicate()
        unmount_below(self.path)
        self.path.rmdir()


if __name__ == "__main__":
    for one in ("", PYTHON, DNF):
        archive(one)
