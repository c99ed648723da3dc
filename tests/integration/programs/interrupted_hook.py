"""The hook, the runtime, or `gpushare run`, which sends itself a signal at a chosen point of its work. For tests only:
the product has no such switch.

There is a point before and after each system call that can change something, counted by the interpreter's profiler.
The modules that read /proc have none: a first start opens files for each process of the host, so its number of points
would change from run to run.
`write_hook`, `write_runtime` and `write_cli` make the program; with `at` 0 it sends nothing and writes its number of
points. `write_adopt` wraps the hook, whose system calls strace counts. tests/support/kills.py chooses the points where
a test kills.
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
    "chmod", "chown", "fchmod", "fchown", "flock", "ftruncate", "link", "mkdir", "mknod", "open", "posix_fallocate",
    "pwrite", "rename", "rmdir", "symlink", "truncate", "unlink", "write",
))
LINUX = frozenset(("bpf", "detached_tmpfs", "mount_setattr", "move_mount", "setns", "umount"))
READ_ONLY = ("/procs.py", "/mounttables.py")
passed = 0

def watch(frame, event, called):
    global passed
    path = frame.f_code.co_filename
    if not path.startswith({hook!r} + "/gpushare/") or path.endswith(READ_ONLY) or frame.f_code.co_name == "lines_of":
        return
    if event in ("c_call", "c_return"):
        if called.__name__ not in CALLS or called.__module__ not in ("posix", "fcntl"):
            return
    elif not path.endswith("/syscalls.py") or frame.f_code.co_name not in LINUX:
        return
    passed += 1
    if passed == {at}:
        sys.setprofile(None)
        os.kill(os.getpid(), {number})

from gpushare.programs import hook
sys.setprofile(watch if sys.argv[-1] != "poststop" else None)
code = hook.main()
sys.setprofile(None)
if {at} == 0 and sys.argv[-1] != "poststop":
    with open({count!r}, "w") as file:
        file.write(str(passed))
os._exit(code)
"""


def write_hook(directory: Path, at: int = 0, number: int = signal.SIGKILL) -> Path:
    """Return a program with the hook's command line that sends itself `number` at point `at` (counted from 1)."""
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


_RUNTIME = """from gpushare.programs import runtime; from gpushare.config import oci_runtime
def count():
    sys.setprofile(None)
    if {at} == 0:
        with open({count!r}, "w") as file:
            file.write(str(passed))

execute = oci_runtime.execute
def become(program, words):
    sys.setprofile(None)
    if "create" in words:
        count()
    execute(program, words)

oci_runtime.execute = become
sys.setprofile(watch)
code = runtime.main()
os._exit(code)
"""


def write_runtime(directory: Path, at: int = 0, number: int = signal.SIGKILL, hook: Path | None = None) -> Path:
    """Return a program with the command line of gpushare-runtime that sends itself `number` at point `at` of a create.
    It puts `hook` into config.json, or the hook of this tree."""
    program = write_hook(directory, at, number)
    text = program.read_text()
    begin = text[: text.index("from gpushare.programs import hook")]
    place = directory / f"runtime-{at}-{int(number)}"
    for name in ("bin", "libexec"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "bin" / "gpushare-hook").unlink(missing_ok=True)
    (place / "bin" / "gpushare-hook").symlink_to(hook or TREE / "build" / "bin" / "gpushare-hook")
    runtime = place / "libexec" / "gpushare-runtime"
    runtime.write_text(begin + _RUNTIME.format(at=at, count=str(directory / "points")))
    runtime.chmod(0o755)
    return runtime


_RUN = """execve = os.execve
def become(*words):
    sys.setprofile(None)
    if {at} == 0:
        with open({count!r}, "w") as file:
            file.write(str(passed))
    execve(*words)
os.execve = become
from gpushare.cli import main
sys.setprofile(watch)
sys.exit(main())
"""


def write_cli(directory: Path, at: int = 0, number: int = signal.SIGKILL) -> Path:
    """Return the CLI for `gpushare run`, which sends itself `number` at point `at` before it executes the command."""
    program = write_hook(directory, at, number)
    text = program.read_text()
    begin = text[: text.index("from gpushare.programs import hook")]
    cli = directory / f"cli-{at}-{int(number)}"
    cli.write_text(begin + _RUN.format(at=at, count=str(directory / "points")))
    cli.chmod(0o755)
    return cli


_ADOPT = """#!/bin/sh
launcher={launcher}
for last; do :; done
[ "$last" = {stage} ] || exec $launcher "$@"
exec strace -f -qq -o {log} {inject} $launcher "$@"
"""


def write_adopt(directory: Path, at: int = 0, stage: str = "adopt") -> Path:
    """Return the hook, killed at its system call number `at` (from 1) when it adopts a container, or in another stage.
    With 0 its calls are logged in `directory`/calls, which any other number needs."""
    launcher = TREE / "build" / "bin" / "gpushare-hook"
    inject = ""
    if at:  # strace counts each call by its name
        names = [line.split()[1].partition("(")[0] for line in (directory / "calls").read_text().splitlines()]
        at += names[at - 1] == "execve"  # strace does not count a successful execve
        inject = f"-e inject={names[at - 1]}:signal=KILL:when={names[:at].count(names[at - 1])}"
    program = directory / f"{stage}-{at}"
    log = directory / "calls" if not at else "/dev/null"
    program.write_text(_ADOPT.format(launcher=launcher, stage=stage, log=log, inject=inject))
    program.chmod(0o755)
    return program


_BEFORE = """#!/bin/sh
for last; do :; done
[ "$last" = adopt ] || exec {adopt} "$@"
cat >{hook}-state
pid=$(sed 's/.*"pid":\\([0-9]*\\).*/\\1/' {hook}-state)
{commands}
exec {adopt} "$@" <{hook}-state
"""


def write_before(hook: Path, adopt: Path, commands: str) -> None:
    """Write `hook` as `adopt` (of `write_adopt`) whose adoption begins with shell commands; $pid is the container's."""
    hook.write_text(_BEFORE.format(hook=hook, adopt=adopt, commands=commands))
    hook.chmod(0o755)


def points(directory: Path) -> int:
    """Return the number of points that the last run with at=0 passed."""
    return int((directory / "points").read_text())


if __name__ == "__main__":
    print(write_hook(Path(sys.argv[1])))
