"""Run one containerd for the tests, with its own directories, image and configuration; end it by pid."""

from __future__ import annotations

import itertools
import json
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

from . import pods
from .cri import CriError
from .image import IMAGE, make_archive

NAMESPACE = "k8s.io"  # containerd's namespace of CRI containers
_numbers = itertools.count(1)

# Plugins that this machine lacks or no test needs. `opt` would create a directory outside the test's directory.
_DISABLED = ("internal.v1.opt", "snapshotter.v1.aufs", "snapshotter.v1.btrfs", "snapshotter.v1.devmapper")
MAIN = """version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = {disabled}
imports = {imports}
[grpc]
  address = "{directory}/sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{directory}/cni"
"""


class Daemon(pods.Daemon):
    """start() takes the path of a config.toml; text() returns the content of one. The caller mounts a private
    /run before."""

    process_name = "containerd-shim"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.socket = directory / "sock"
        self.log = directory / "containerd.log"

    def text(self, *imports: str) -> str:
        """Return a config.toml without gpushare's handler."""
        disabled = json.dumps([f"io.containerd.{name}" for name in _DISABLED])
        return MAIN.format(directory=self.directory, disabled=disabled, imports=json.dumps(list(imports)), image=IMAGE)

    def start(self, config: Path, wait_for_cri: bool = True) -> None:
        """Start containerd, and wait until CRI has loaded the existing containers. Raises AssertionError."""
        self.start_program("containerd", "--config", str(config))
        if wait_for_cri:
            self._wait_for("the CRI service", self._initialized)

    def _initialized(self) -> bool:
        try:
            self.cri.call("ListPodSandbox")
        except CriError as error:
            if "not initialized" not in error.detail:
                raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from None
            return False
        return True

    def _wait_for(self, what: str, done: Callable[[], bool]) -> None:
        """Poll until done() is true, because containerd sends no event for it."""
        for _ in range(1000):
            if done():
                return
            select.select([], [], [], 0.01)
        raise AssertionError(f"timed out waiting for {what}\n{self.log.read_text()[-3000:]}")

    def load(self, image_root: Path) -> None:
        """Import the one image of sandboxes and containers."""
        archive = make_archive(image_root, self.directory)
        self.ctr("images", "import", str(archive))
        archive.unlink()
        self._wait_for("the image", lambda: bool(self.cri.call("ImageStatus", image={"image": IMAGE}).image.id))

    def ctr(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `ctr` with these words. Raise RuntimeError if it fails."""
        done = self.try_ctr(*words, timeout_s=timeout_s)
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(words)}: {done.stderr}")
        return done

    def try_ctr(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        command = ["ctr", "--address", str(self.socket), "--namespace", NAMESPACE, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)

    def exec_as(self, user: str, container: str, *args: str) -> subprocess.CompletedProcess[str]:
        return self.try_ctr("tasks", "exec", "--user", user, "--exec-id", f"exec{next(_numbers)}", container, *args)
