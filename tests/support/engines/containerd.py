"""containerd, controlled over the CRI socket like kubelet: each container in its own pod, or several in one.

The handler is what `gpushare runtime configure containerd` writes. Way "runtime": its BinaryName is gpushare-runtime;
way "hook": stock runc, and gpushare-hook in base_runtime_spec.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import tomlkit
from gpushare.engines import containerd

from .. import host
from ..host import Node
from ..rootfs import OverlayRoot, run
from .containerd_daemon import Daemon
from .places import DefaultPlaces
from .pods import CGROUP_PARENT, HANDLER, PodEngine

NO_ANNOTATIONS = "gpushare-no-annotations"


class Containerd(PodEngine):
    """`node` moves to the default paths, because BinaryName takes no arguments."""

    name = "containerd"
    daemon: Daemon

    def __init__(self, node: Node, directory: Path, image_root: Path, way: str) -> None:
        self.node = node
        self.programs = Programs(directory / "programs")
        self.way = way
        self.directory = directory
        self._image_root = image_root
        self._places = DefaultPlaces(directory / "places")
        try:
            node.move("/etc/gpushare/config.yaml", "/run/gpushare")
            self.daemon = Daemon(directory / "d")
            self.config = Path("/etc/containerd/config.toml")
            self.config.parent.mkdir(exist_ok=True)
            self.config.write_text(self.daemon.text())
            Path(containerd.DROP_IN).unlink(missing_ok=True)  # this /etc is a copy, also of another engine's
            words = ("--program", str(self.programs.runtime), *(("--hook-only",) if way == "hook" else ()))
            done = node.cli("runtime", "configure", "containerd", *words)
            assert done.returncode == 0, done.stderr
            self._add_second_handler()
            self.daemon.start(self.config)
            self.daemon.load(image_root)
        except BaseException:
            self.close()
            raise

    def _add_second_handler(self) -> None:
        """Add the configured handler again, without annotations of gpushare. containerd 2.1 has it in a drop-in."""
        drop_in = Path(containerd.DROP_IN)
        file = drop_in if drop_in.exists() else self.config
        runtimes = tomlkit.parse(file.read_text()).unwrap()["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]
        handler = {k: v for k, v in runtimes["runtimes"][HANDLER].items() if not k.endswith("_annotations")}
        value = {"plugins": {"io.containerd.grpc.v1.cri": {"containerd": {"runtimes": {NO_ANNOTATIONS: handler}}}}}
        file.write_text(f"{file.read_text()}\n{tomlkit.dumps(value)}")

    def base_spec(self) -> dict[str, Any]:
        """containerd's default spec, or the configured one with gpushare's hook."""
        configured = Path("/etc/gpushare/containerd-base-spec.json")
        text = configured.read_text() if self.way == "hook" else run("ctr", "oci", "spec")
        spec: dict[str, Any] = json.loads(text)
        return spec

    def ctr_run(self, name: str, spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """`ctr run` with a whole config.json, on the image's root file system, until the program ends."""
        with contextlib.closing(OverlayRoot(self.directory / "ctr", self._image_root)) as disk:
            spec["root"] = {"path": str(disk.path)}
            spec["linux"]["cgroupsPath"] = f"{CGROUP_PARENT}/{name}"
            file = self.directory / "ctr.json"
            file.write_text(json.dumps(spec))
            binary = ("--runc-binary", str(self.programs.runtime)) if self.way == "runtime" else ()
            for _ in range(3):  # ctr loses output of programs that end at once (containerd issue 5741)
                done = self.daemon.try_ctr("run", "--rm", *binary, "--config", str(file), name)
                if done.returncode or done.stdout:
                    break
            return done

    def close(self) -> None:
        if hasattr(self, "daemon"):
            self.daemon.close()
        self._places.close()
        run("rm", "-rf", self.directory)


class Programs:
    """The launchers (of the bundle with --programs), installed so that they start Python programs that first log the
    start."""

    def __init__(self, directory: Path) -> None:
        self._log, libexec = directory / "started", host.BIN.parent / "libexec"
        for name in ("gpushare-hook", "gpushare-runtime"):
            for place in ("bin", "libexec"):
                (directory / place).mkdir(parents=True, exist_ok=True)
            shutil.copy2(host.BIN / name, directory / "bin" / name)
            program = directory / "libexec" / name
            program.write_text(f'#!/bin/sh\necho {name} "$@" >>{self._log}\nexec {libexec}/{name} "$@"\n')
            program.chmod(0o755)
        shutil.copy2(host.BIN / "gpushare-runtime-cri", directory / "bin", follow_symlinks=False)
        self.hook = directory / "bin" / "gpushare-hook"
        self.runtime = directory / "bin" / "gpushare-runtime"

    def started(self) -> list[str]:
        """Command lines of the Python programs since the last call."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines
