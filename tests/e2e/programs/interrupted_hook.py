"""The hook, with a signal sent to itself at a chosen point of its work. For tests only: the product has no such switch.

The points lie before and after each system call that can change something, counted by the interpreter's profiler.
`write_hook` makes the program; with `at` 0 it sends nothing and writes down how many points it passed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[3]

_TEMPLATE = """#!{python} -ISs
import os, sys
sys.path[:0] = [{hook!r}]
sys.path.append({site!r})
CALLS = frozenset((
    "chmod", "chown", "fchmod", "flock", "link", "mkdir", "mknod", "open", "posix_fallocate", "rename", "rmdir",
    "symlink", "truncate", "unlink", "write",
))
LINUX = frozenset(("bpf", "detached_tmpfs", "mount_setattr", "move_mount", "setns", "umount"))
passed = 0

def watch(frame, event, called):
    global passed
    path = frame.f_code.co_filename
    if not path.startswith({hook!r} + "/gpushare/"):
        return
    if event in ("c_call", "c_return"):
        if called.__name__ not in CALLS or called.__module__ not in ("posix", "fcntl"):
            return
    elif not path.endswith("/linux.py") or frame.f_code.co_name not in LINUX:
        return
    passed += 1
    if passed == {at}:
        sys.setprofile(None)
        os.kill(os.getpid(), {number})

from gpushare import hook
sys.setprofile(watch if sys.argv[-1] != "poststop" else None)
code = hook.main()
sys.setprofile(None)
if {at} == 0 and sys.argv[-1] != "poststop":
    with open({count!r}, "w") as file:
        file.write(str(passed))
os._exit(code)
"""


def write_hook(directory: Path, at: int = 0, number: int = signal.SIGKILL) -> Path:
    """A program with the hook's command line that sends itself `number` at point `at` (counted from 1)."""
    site = next((TREE / "build" / "venv" / "lib").glob("python3*/site-packages"))
    program = directory / f"interrupted-hook-{at}-{int(number)}"
    program.write_text(
        _TEMPLATE.format(
            python="/usr/bin/python3",
            hook=str(TREE / "hook"),
            site=str(site),
            at=at,
            number=int(number),
            count=str(directory / "points"),
        )
    )
    program.chmod(0o755)
    return program


def points(directory: Path) -> int:
    """How many points the last run with at=0 passed."""
    return int((directory / "points").read_text())


if __name__ == "__main__":
    print(write_hook(Path(sys.argv[1])))
