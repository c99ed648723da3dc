"""Podman with separate storage and configuration, so that it does not see the host's containers.

gpushare is in its hook directory ("hook") or is one of its runtimes ("runtime").
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from gpushare.engines import hookfiles
from gpushare.engines.base import Settings

from .. import processes
from ..host import Node
from ..rootfs import mount_points, run, unmount_below
from .base import Refused, Result, Want
from .image import make_tar

IMAGE = "localhost/gpushare-test"
PAUSE = "localhost/gpushare-test-pause"  # holds the namespaces of a pod; built where a test needs it
_numbers = itertools.count(1)

# containers.conf of a test's podman, in its [engine]. default_ulimits: some test machines lack CAP_SYS_RESOURCE, and
# podman would raise limits above the maximum.
SETTINGS = """\
[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
log_driver = "k8s-file"

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
"""
_CONFIGURATION = """\
num_locks = 128
hooks_dir = ["{hooks}"]
infra_image = "{pause}"
runtime = "{runtime}"
runtime_supports_json = ["crun", "runc", "gpushare"]

[engine.runtimes]
runc = ["/usr/sbin/runc"]
crun = ["/usr/bin/crun"]
gpushare = ["{program}"]
"""


class Podman:
    """`low_level`: runc or crun. `stages`: of the hooks that start an allocation."""

    annotates = True
    restarts = True

    def __init__(
        self,
        node: Node,
        directory: Path,
        image_root: Path,
        low_level: str,
        way: str,
        stages: tuple[str, ...] = ("prestart",),
    ) -> None:
        processes.become_subreaper()
        self.node = node
        self.way = way
        self.low_level = low_level
        self.name = "podman"
        # crun discards a hook's output; with gpushare-runtime in front, the output is redirected.
        self.shows_reason = (low_level, way) != ("crun", "hook")
        self._directory = directory
        self.hooks_dir = directory / "hooks.d"
        for name in ("hooks.d", "root", "run", "tmp"):
            (directory / name).mkdir(parents=True)
        if way == "hook":
            self.hooks(*stages)
        program = directory / "gpushare-runtime"
        # podman passes no arguments to a runtime
        program.write_text(f'#!/bin/sh\nexec {" ".join(self.runtime())} "$@"\n')
        program.chmod(0o755)
        (directory / "containers.conf").write_text(
            SETTINGS
            + _CONFIGURATION.format(
                pause=PAUSE,
                hooks=self.hooks_dir,
                program=program,
                runtime="gpushare" if way == "runtime" else low_level,
            )
        )
        archive = make_tar(image_root, directory / "image.tar")
        self.prepare()
        self.command("import", str(archive), IMAGE)
        archive.unlink()

    def prepare(self) -> None:
        """Called when all files exist and podman has not run yet."""

    def runtime(self) -> tuple[str, ...]:
        return self.node.runtime()

    @property
    def copies_image_annotations(self) -> bool:
        """Whether an image's annotations reach config.json: podman 5 and later leave them out."""
        return int(self.podman("version", "--format", "{{.Client.Version}}").out.partition(".")[0]) < 5

    def storage_driver(self) -> str:
        return "overlay"

    def hooks(self, *stages: str) -> None:
        """Write gpushare's hook to the hook directory, for these stages and for poststop."""
        hook = self.node.hook()
        program = hook.program.with_name("gpushare-runtime")
        settings = Settings(str(program), str(hook.program), str(hook.config), str(hook.state))
        for stage in (*stages, "poststop"):  # the text that `gpushare runtime configure` writes
            (self.hooks_dir / f"gpushare-{stage}.json").write_text(hookfiles.text(settings, stage))

    def words(self, *args: str) -> list[str]:
        place = self._directory
        own = ("--root", place / "root", "--runroot", place / "run", "--tmpdir", place / "tmp")
        return ["podman", *(str(word) for word in own), "--storage-driver", self.storage_driver(), *args]

    def environment(self) -> dict[str, str]:
        quiet = {"PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}  # podman 5 warns on stderr, where tests expect a refusal
        return {**quiet, "PATH": os.environ["PATH"], "CONTAINERS_CONF": str(self._directory / "containers.conf")}

    def podman(self, *args: str, timeout_s: float = 60) -> Result:
        """Run any podman command."""
        done = subprocess.run(
            self.words(*args),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment(),
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def command(self, *args: str) -> str:
        """The output of a command that must succeed."""
        done = self.podman(*args)
        if done.code:
            raise RuntimeError(f"podman {' '.join(args)}: {done.code}\n{done.err}")
        return done.out

    def options(self, want: Want, name: str) -> list[str]:
        words = ["--name", name, "--user", want.user]
        for key, value in want.env.items():
            words += ["--env", f"{key}={value}"]
        for key, value in want.annotations.items():
            words += ["--annotation", f"{key}={value}"]
        for mount in want.mounts:
            words += ["--volume", f"{mount.source}:{mount.target}:{','.join(mount.options)}"]
        for point in want.tmpfs:
            words += ["--tmpfs", point]
        return words + (["--read-only"] if want.read_only else [])

    def run(self, want: Want, timeout_s: float = 60, *more: str, image: str = IMAGE) -> Result:
        name = f"gpushare-{os.getpid()}-{next(_numbers)}"
        try:
            return self.podman("run", "--rm", *self.options(want, name), *more, image, *want.args, timeout_s=timeout_s)
        finally:
            self.remove(name)

    def start(self, want: Want, *more: str, image: str = IMAGE) -> PodmanContainer:
        name = f"gpushare-{os.getpid()}-{next(_numbers)}"
        try:
            done = self.podman("run", "--detach", *self.options(want, name), *more, image, *want.args)
            if done.code:
                raise Refused(done)
            return PodmanContainer(self, name)
        except BaseException:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Remove the container and wait for its conmon, which ends after its own clean-up."""
        self.podman("rm", "--force", "--time", "0", "--ignore", "--volumes", name)
        self.wait_conmon(name)
        self.settle()

    def remove_pod(self, name: str) -> None:
        done = self.podman("ps", "--all", "--filter", f"pod={name}", "--format", "{{.Names}}")
        for one in done.out.split():  # "pod rm" has no option for a shorter timeout
            self.podman("kill", one)
        self.podman("pod", "rm", "--force", "--ignore", name)
        for one in done.out.split():
            self.wait_conmon(one)

    def settle(self) -> None:
        """podman mounts its storage over itself, and sometimes unmounts it. With a container in it, the mount stays."""
        storage = str((self._directory / "root").resolve())
        points = [point for point in mount_points() if point.startswith(storage)]
        if points == [f"{storage}/overlay"]:
            run("umount", points[0])

    def conmons(self, name: str) -> list[int]:
        """Pids of the conmons of the container `name`."""
        lines = processes.children().items()
        return [pid for pid, line in lines if "conmon" in line.split(" ")[0] and f" {name} " in line]

    def wait_conmon(self, name: str) -> None:
        for pid in self.conmons(name):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                processes.wait_exit(pid, 30)

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.command("container", "inspect", name))
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        self.podman("rm", "--all", "--force", "--time", "0")
        unmount_below(self._directory)
        shutil.rmtree(self._directory, ignore_errors=True)


class PodmanContainer:
    """See base.Running."""

    def __init__(self, engine: Podman, name: str) -> None:
        self.name = name
        self._engine = engine
        self.look()

    def look(self) -> None:
        """Read id and pid again: the first process can be another one by now."""
        found = self._engine.inspect(self.name)
        self.id: str = found["Id"]
        self.pid: int = found["State"]["Pid"]

    def exec(self, *args: str, user: str = "") -> Result:
        return self._engine.podman("exec", *(("--user", user) if user else ()), self.name, *args)

    def stop(self) -> None:
        self._engine.command("stop", "--time", "0", self.name)
        self._engine.wait_conmon(self.name)

    def restart(self) -> None:
        done = self._engine.podman("start", self.name)
        if done.code:
            raise Refused(done)
        self.look()

    def remove(self) -> None:
        self._engine.remove(self.name)

    def __enter__(self) -> PodmanContainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
