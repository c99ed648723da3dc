"""CRI-O, controlled over the CRI socket like kubelet. Its programs come from PATH: crio, pinns, conmon, podman.

The handler is what `gpushare runtime configure crio` writes. Way "runtime": gpushare's handler; way "hook": the default
handler, and gpushare's hooks in hooks_dir.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .. import host
from ..host import Node
from ..rootfs import run
from . import pods
from .cri import CriError
from .image import IMAGE, make_archive
from .places import DefaultPlaces
from .pods import HANDLER, Pod, PodEngine

MAIN = Path("/etc/crio/crio.conf")
DROP_INS = Path("/etc/crio/crio.conf.d")
# The handler is in a drop-in, as CRI-O's own packages have it
DEFAULT = """[crio.runtime]
default_runtime = "{name}"
[crio.runtime.runtimes.{name}]
runtime_path = "{path}"
runtime_root = "{directory}/runtime"
"""
_MAIN = """[crio]
root = "{directory}/root"
runroot = "{directory}/runroot"
storage_driver = "overlay"
log_dir = "{directory}/log"
version_file = "{directory}/version"
clean_shutdown_file = "{directory}/clean"
[crio.api]
listen = "{directory}/sock"
stream_address = "127.0.0.1"
[crio.runtime]
cgroup_manager = "cgroupfs"
namespaces_dir = "{directory}/ns"
container_exits_dir = "{directory}/exits"
container_attach_socket_dir = "{directory}/attach"
[crio.image]
pause_image = "{image}"
pause_command = "/usr/bin/sleep inf"
[crio.network]
network_dir = "{directory}/cni"
plugin_dirs = ["{directory}/cni"]
[crio.nri]
enable_nri = false
"""


class Daemon(pods.Daemon):
    """One CRI-O; the caller makes /etc/crio private before."""

    process_name = "conmon"

    def __init__(self, directory: Path, low_level: str = "runc") -> None:
        super().__init__(directory)
        self.log = directory / "crio.log"
        self._low_level = low_level
        for name in ("ns", "exits", "attach", "cni"):
            (directory / name).mkdir(parents=True)
        DROP_INS.mkdir(parents=True, exist_ok=True)
        for path, text in self.files().items():
            path.write_text(text)

    def files(self) -> dict[Path, str]:
        """The configuration without gpushare's handler."""
        path = shutil.which(self._low_level)
        return {
            MAIN: _MAIN.format(directory=self.directory, image=IMAGE),
            DROP_INS / "10-crio.conf": DEFAULT.format(name=self._low_level, path=path, directory=self.directory),
        }

    def start(self, *options: str) -> None:
        """Start CRI-O, and wait until it answers. Raises AssertionError."""
        self.start_program("crio", *options)
        try:
            self.cri.call("ListPodSandbox")
        except CriError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from None

    def load(self, image_root: Path) -> None:
        """Put the one image of sandboxes and containers into the storage, which podman can share."""
        archive = make_archive(image_root, self.directory)
        storage = ("--root", self.directory / "root", "--runroot", self.directory / "runroot")
        run("podman", *storage, "--storage-driver", "overlay", "load", "--quiet", "--input", archive)
        archive.unlink()

    def status(self) -> str:
        """The configuration that the running daemon has, with all keys, as TOML."""
        return run("crio", "status", "--socket", self.directory / "sock", "config")

    def exec_as(self, user: str, container: str, *args: str) -> subprocess.CompletedProcess[str]:
        words = [self._low_level, "--root", str(self.directory / "runtime"), "exec", "--user", user, container, *args]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


class Crio(PodEngine):
    """`node` moves to the default paths, because CRI-O passes no arguments to a runtime."""

    name = "CRI-O"
    daemon: Daemon

    def __init__(self, node: Node, directory: Path, image_root: Path, way: str, low_level: str = "runc") -> None:
        self.node, self.way, self.directory = node, way, directory
        self.shows_reason = (low_level, way) != ("crun", "hook")  # crun discards a hook's output
        self._places = DefaultPlaces(directory / "places")
        try:
            node.move("/etc/gpushare/config.yaml", "/run/gpushare")
            self.daemon = Daemon(directory / "d", low_level)
            program = ("--program", str(host.BIN / "gpushare-runtime"))
            self.done = node.cli("runtime", "configure", "crio", *program, *(("--hook-only",) if way == "hook" else ()))
            assert self.done.returncode == 0, self.done.stderr
            self.daemon.load(image_root)
            self.daemon.start()
        except BaseException:
            self.close()
            raise

    def pod(self, annotations: Mapping[str, str] = {}, handler: str = HANDLER) -> Pod:
        """With hooks there is no handler of gpushare's."""
        return super().pod(annotations, "" if self.way == "hook" else handler)

    def close(self) -> None:
        if hasattr(self, "daemon"):
            self.daemon.close()
        self._places.close()
        run("rm", "-rf", self.directory)
