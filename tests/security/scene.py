"""The setting of an attack: a node, a sentinel directory of the host, and a container that is not started yet.

An attack is a function of a Scene. It edits `spec`, `root` (the container's root file system) or `image_env` before the
start, or appends to `inside`, which runs in the started container before the proof.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.host import TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import PROGRAM

from . import proof

GRAB = TREE / "tests" / "integration" / "programs" / "grab.py"
LIBDIR = f"usr/lib/{os.uname().machine}-linux-gnu"
VERSION = "535.261.03"
LIBCUDA = f"{LIBDIR}/libcuda.so.{VERSION}"


def make_sentinel(path: Path) -> Path:
    """Make a host directory that attacks aim at: files worth reading, or worth changing."""
    for name in ("lib", "etc", "dev", "share"):
        (path / name).mkdir(parents=True)
    (path / "passwd").write_text("the host's passwd\n")
    (path / "secret").write_text("the host's secret\n")
    (path / "secret").chmod(0o600)
    (path / "lib/libcuda.so.1").write_bytes(b"\x7fELF the host's\n")
    (path / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1 the host's\n")
    return path


class Scene:
    """One container and its host. `way` is how gpushare runs: "hook" or "runtime"."""

    def __init__(self, directory: Path, way: str, node: Node) -> None:
        self.directory, self.way, self.node = directory, way, node
        self.host = make_sentinel(directory / "sentinel")
        self.env = {"GPUSHARE_MEMORY": proof.LIMIT_WORD}
        self.inside: list[Callable[[Container], object]] = []
        self.after: list[Callable[[], object]] = []  # undoes the attack's own changes to the host
        self.raw: Callable[[str], str] = lambda text: text  # edits config.json as text, for invalid JSON values
        self.one = self.container(["sleep", "inf"])
        self.root = self.one.rootfs
        self.spec = self.one.spec

    def container(self, args: list[str], env: dict[str, str] | None = None, **arguments: Any) -> Container:
        """A container of this scene, not started; close it."""
        return Container(
            self.directory / "bundles",
            args,
            env=self.env if env is None else env,
            mounts=python_mounts(PROGRAM, GRAB),
            **{**self.node.way(self.way), **arguments},
        )

    def mount(self, source: Path | str, target: str, *options: str, kind: str = "bind") -> None:
        """Add a mount of the user's after the existing ones."""
        entry = {"type": kind, "source": str(source), "destination": target, "options": list(options or ("rbind",))}
        self.spec["mounts"].append(entry)

    def unmount(self, target: str) -> None:
        self.spec["mounts"] = [entry for entry in self.spec["mounts"] if entry["destination"] != target]

    def set_env(self, *lines: str) -> None:
        """Set variables of the image unchanged: duplicates and malformed ones too."""
        self.spec["process"]["env"] += lines

    def write_spec(self) -> None:
        (self.one.bundle / "config.json").write_text(self.raw(json.dumps(self.spec)))

    @staticmethod
    def write_of(one: Container) -> None:
        """Write config.json again after a change of the spec."""
        (one.bundle / "config.json").write_text(json.dumps(one.spec))

    def again(self) -> Container:
        """Another container with this one's spec and root file system. Close it."""
        one = self.container(["true"], rootfs=self.root, name="again")
        hooks, cgroup = one.spec["hooks"], one.spec["linux"]["cgroupsPath"]
        one.spec = json.loads(json.dumps(self.spec))
        one.spec["hooks"], one.spec["linux"]["cgroupsPath"] = hooks, cgroup
        self.write_of(one)
        return one

    def start(self) -> RuntimeFailed | None:
        """Start it and return the refusal, if any."""
        return self.refusal_of(self.one)

    def refusal_of(self, one: Container) -> RuntimeFailed | None:
        """Start `one` and return the refusal, if any."""
        try:
            one.start()
        except RuntimeFailed as error:
            return error
        return None

    def end(self) -> None:
        """End it, as an engine does."""
        if self.one.pid and self.one.exit_code is None:
            with contextlib.suppress(RuntimeFailed):  # it may have ended by itself
                self.one.kill()
            self.one.wait()
        if self.one._created:
            with contextlib.suppress(RuntimeFailed):  # nothing exists after a failed create
                self.one.delete()

    def close(self) -> None:
        try:
            for step in reversed(self.after):
                step()
        finally:
            self.after.clear()
            self.one.close()
