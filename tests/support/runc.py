"""Real containers for the tests, under runc or (host.use_low_level) crun.

    with Container(tmp_path, ["sh", "-c", "echo hi"]) as container:
        assert container.run() == 0
        assert container.stdout == "hi\n"

Each has a unique id, its own root file system and its own runtime state directory, so tests can run in parallel, and
close() leaves nothing behind in any case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import processes
from .rootfs import OverlayRoot, mount_points, unmount_below
from .spec import Hook, Mount, spec

LOW_LEVEL = "runc"  # for containers that name no runtime; see host.use_low_level
_numbers = itertools.count(1)
_CLOSED_AT_ONCE = 8  # runc waits for a tenth of a second after it has killed a container


class RuntimeFailed(Exception):
    """The runtime refused. `message` is its whole output; `last_line` is the line that a user reads first."""

    def __init__(self, command: str, code: int, message: str) -> None:
        super().__init__(f"{command} ended with {code}: {message.strip()}")
        self.code = code
        self.message = message
        self.last_line = (message.strip().splitlines() or [""])[-1]


class Container:
    """One container, called `id` or something unique with `name` in it.

    `edit` may change the spec before it is written; `prefix` precedes the runtime's command, which may have options.
    """

    def __init__(
        self,
        directory: Path,
        args: list[str],
        *,
        env: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        hook: Hook | None = None,
        mounts: list[Mount] | None = None,
        user: tuple[int, int] = (0, 0),
        rootfs: Path | None = None,
        runtime: str | tuple[str, ...] = "",
        prefix: tuple[str, ...] = (),
        edit: Callable[[dict[str, Any]], None] | None = None,
        name: str = "c",
        id: str = "",
    ) -> None:
        processes.become_subreaper()
        self.id = id or f"gpushare-{name}-{os.getpid()}-{next(_numbers)}"
        self.bundle = directory / self.id
        self.bundle.mkdir(parents=True)
        self.pid = 0
        self.exit_code: int | None = None
        self._created = False
        self._hook = hook
        self._runtime = (
            *prefix,
            *((runtime or LOW_LEVEL,) if isinstance(runtime, str) else runtime),
            "--root",
            str(self.bundle / "runtime"),
        )
        self._overlay = None if rootfs else OverlayRoot(self.bundle / "disk")
        self.rootfs = rootfs or self.bundle / "disk" / "root"
        self.spec = spec(
            rootfs=self.rootfs,
            args=args,
            env=env or {},
            annotations=annotations or {},
            hook=hook,
            mounts=mounts or [],
            user=user,
            cgroups_path=f"/{self.id}",
        )
        if edit:
            edit(self.spec)
        (self.bundle / "config.json").write_text(json.dumps(self.spec, indent=1))

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Output of the container so far. The runtime's own output comes first on the same standard error.

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    def _text(self, name: str) -> str:
        path = self.bundle / name
        return path.read_text(errors="replace") if path.exists() else ""

    # Life cycle

    def create(self) -> None:
        """`runc create`: run the hooks, but not the program. Raises RuntimeFailed if a hook refuses."""
        code = self.begin_create().wait()
        if code:
            raise RuntimeFailed("create", code, self.with_hook_line(self.stderr))
        self.pid = int((self.bundle / "pid").read_text())

    def with_hook_line(self, text: str) -> str:
        """`text`, which the runtime printed, and the hook's line, which crun discards and `gpushare inspect` shows."""
        kept = self._hook.state / "errors" / self.id if self._hook else None
        if "gpushare: " in text or kept is None or not kept.exists():
            return text
        return f"{text.rstrip()}\n{kept.read_text()}"

    def begin_create(self) -> subprocess.Popen[bytes]:
        """Start `runc create`. Afterwards the pid is in the bundle's file `pid`, unless it failed."""
        pid_file = self.bundle / "pid"
        command = [*self._runtime, "create", "--bundle", str(self.bundle), "--pid-file", str(pid_file), self.id]
        self._created = True
        for name in ("stdout", "stderr"):
            (self.bundle / name).write_bytes(b"")
        # Append, as to a pipe: a process that reopens the file by name overwrites nothing.
        with open(self.bundle / "stdout", "ab") as out, open(self.bundle / "stderr", "ab") as err:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def start(self) -> Container:
        """Create the container if necessary, and start the program."""
        if not self.pid:
            self.create()
        self.command("start", self.id)
        return self

    def wait(self, timeout_s: float = 60) -> int:
        """The program's exit code, 128 + signal if killed; AssertionError with its output if it does not end."""
        if self.exit_code is None:
            self.exit_code = processes.wait_exit(self.pid, timeout_s)
        if self.exit_code is None:
            raise AssertionError(f"{self.id} still runs after {timeout_s} s\n{self.stdout}\n{self.stderr}")
        return self.exit_code

    def run(self, timeout_s: float = 60) -> int:
        """Create, start and wait."""
        self.start()
        return self.wait(timeout_s)

    def exec(
        self, *args: str, options: tuple[str, ...] = (), timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """`runc exec`: a second program in the running container."""
        return self._run("exec", *options, self.id, *args, timeout_s=timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.command("kill", self.id, str(int(number)))

    def state(self) -> dict[str, Any]:
        """The runtime's state of the container (`runc state`)."""
        state: dict[str, Any] = json.loads(self.command("state", self.id))
        return state

    def delete(self) -> None:
        """`runc delete --force`: run the poststop hooks. The overlay and the captured output stay until close()."""
        self.command("delete", "--force", self.id)
        self._created = False

    def command(self, *args: str) -> str:
        """Run any other command of the runtime; raises RuntimeFailed on failure."""
        done = self._run(*args)
        if done.returncode:
            raise RuntimeFailed(args[0], done.returncode, done.stderr)
        return done.stdout

    def _run(self, *args: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._runtime, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    def after_kill(self) -> None:
        """Remove remains of a killed runc that no later runc removes: while runc starts a container, its binary is
        mounted in its state directory for a moment (CVE-2019-5736), and it creates cgroups before it records them.
        gpushare makes none of them, so only tests that kill runc call this."""
        for point in mount_points():
            if os.path.dirname(point) == f"{self.bundle}/runtime/{self.id}" and os.path.basename(point)[:5] == "runc.":
                unmount_below(Path(point))
        for group in Path("/sys/fs/cgroup").glob(f"*/{self.id}"):
            with contextlib.suppress(OSError):  # a container runs in it
                group.rmdir()

    def close(self) -> None:
        """Remove container, process, mounts and files."""
        if self._created:
            self._run("delete", "--force", self.id)
            self._created = False
        if self.pid and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                self.exit_code = processes.wait_exit(self.pid, 10)
        if self._overlay:
            self._overlay.close()
        shutil.rmtree(self.bundle, ignore_errors=True)


def close_all(containers: Iterable[Container]) -> None:
    """Close them several at once, the last one first."""
    with ThreadPoolExecutor(_CLOSED_AT_ONCE) as pool:
        for done in [pool.submit(one.close) for one in reversed([*containers])]:
            done.result()
