"""The engines of node_life_stage.py: where each has its files on the node, and how it starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from gpushare.engines import crio as configured_crio

from tests.support import processes
from tests.support.engines import containerd_daemon, crio, pods
from tests.support.engines.pods import Pod, PodContainer
from tests.support.rootfs import run, unmount_below


class NodeEngine:
    """An engine with the usual paths of a node. `name`: in commands of gpushare and systemd."""

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    config: ClassVar[Path]  # the administrator's file
    drop_ins: ClassVar[Path]
    key: ClassVar[str]  # of an entry: names the program
    breaking: ClassVar[tuple[str, Path]]  # script of sed(1), and a file: with that no container can start
    broken: ClassVar[str]  # part of the installer's message about that
    with_broken_file: ClassVar[str]  # the start of a file with which the engine does not start
    pause: ClassVar[bool]  # each pod has a pause container, which needs the version that it started with
    daemon: pods.Daemon

    @property
    def restart(self) -> str:
        return f"systemctl restart {self.name}"

    def files(self) -> dict[Path, str]:
        """All files that the engine reads."""
        found = self.drop_ins.iterdir() if self.drop_ins.exists() else ()
        return {path: path.read_text() for path in (*sorted(found), self.config)}

    @property
    def entry(self) -> str:
        """The program in gpushare's entry; "" without an entry."""
        lines = [line for text in self.files().values() for line in text.splitlines()]
        return next((one.partition('"')[2].rstrip('"') for one in lines if self.key in one and "gpushare" in one), "")

    def put_configuration(self) -> None:
        """Write the administrator's files, and no others."""
        shutil.rmtree(self.config.parent, ignore_errors=True)
        for path, text in self.usual_files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def usual_files(self) -> dict[Path, str]:
        raise NotImplementedError

    def make_run_folders(self) -> None:
        """Make what is in /run before the engine starts."""
        folder = Path("/run") / self.name
        folder.mkdir()
        (folder / f"{self.name}.sock").symlink_to(self.daemon.directory / "sock")

    def load(self, image_root: Path) -> None:
        """Give a node that has its configuration the one image of pods."""
        raise NotImplementedError

    def start(self, fails: bool = False) -> None:
        """Start the engine as systemd does: it has started when it notifies systemd. Raises AssertionError."""
        file = self.config
        if fails:
            file = self.daemon.directory / "broken"
            file.write_text(self.with_broken_file + self.config.read_text())
        self.start_with(file)

    def start_with(self, file: Path) -> None:
        raise NotImplementedError

    def what_uses(self, one: Pod | PodContainer) -> str:
        """How the log of a removal names a pod, or a container of it."""
        raise NotImplementedError

    def unmount(self) -> None:
        """Unmount what a killed engine has left."""
        unmount_below(self.daemon.directory)

    def close(self) -> None:
        self.daemon.close()


class Containerd(NodeEngine):
    name = "containerd"
    programs = ("containerd", "containerd-shim-runc-v2", "ctr", "runc")
    config = Path("/etc/containerd/config.toml")
    drop_ins = Path("/etc/containerd/conf.d")
    key = "BinaryName"
    # CRI refuses it, and containerd runs without CRI
    breaking = r's/^  stream_server_address/  stream_idle_timeout = "never"\n&/', config
    broken = "containerd runs without CRI"
    with_broken_file = 'required_plugins = ["io.containerd.none.v1.none"]\n'
    pause = True

    def __init__(self, directory: Path) -> None:
        self.daemon: containerd_daemon.Daemon = containerd_daemon.Daemon(directory)

    def usual_files(self) -> dict[Path, str]:
        return {self.config: self.daemon.text().replace(f'"{self.daemon.directory}/state"', '"/run/containerd"')}

    def load(self, image_root: Path) -> None:
        self.start()
        self.daemon.load(image_root)
        self.daemon.stop()

    def start_with(self, file: Path) -> None:
        self.daemon.start(file, wait_for_cri="never" not in file.read_text())

    def what_uses(self, one: Pod | PodContainer) -> str:
        return f"container {one.id} has gpushare's runtime"


class Crio(NodeEngine):
    """With the usual storage, where the installer looks for containers."""

    name = "crio"
    programs = ("crio", "pinns", "conmon", "runc")
    config = crio.MAIN
    drop_ins = crio.DROP_INS
    key = "runtime_path"
    breaking = "s/runtime_type = .*/runtime_type = 7/", Path(configured_crio.FILE)
    broken = "`systemctl restart crio` ended with 1"
    with_broken_file = "[[[\n"
    pause = False
    daemon: crio.Daemon
    _STORAGE = Path("/var/lib/containers/storage")
    _PLACES: ClassVar = {
        "root": "/var/lib/containers/storage",
        "runroot": "/run/containers/storage",
        "version": "/run/crio/version",
        "ns": "/run",
        "exits": "/run/crio/exits",
        "attach": "/run/crio",
        "runtime": "/run/runc",
    }

    def __init__(self, directory: Path) -> None:
        self.daemon = crio.Daemon(directory)

    def usual_files(self) -> dict[Path, str]:
        found = self.daemon.files()
        for path, text in found.items():
            for own, usual in self._PLACES.items():
                found[path] = text = text.replace(f'"{self.daemon.directory}/{own}"', f'"{usual}"')
        return found

    def load(self, image_root: Path) -> None:
        self.daemon.load(image_root)
        unmount_below(self.daemon.directory)
        self._STORAGE.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", self.daemon.directory / "root", self._STORAGE)

    def start_with(self, file: Path) -> None:
        self.daemon.start(*(() if file == self.config else ("--config", str(file))))

    def what_uses(self, one: Pod | PodContainer) -> str:
        """Only the record of a pod names the handler. The parent of a container's process is conmon."""
        if isinstance(one, Pod):
            return f"CRI-O's container {one.id} has the handler gpushare"
        return f"process {processes.parent(one.pid)} (conmon) runs"

    def unmount(self) -> None:
        for layers in self._STORAGE.glob("overlay*"):
            unmount_below(layers)


# Name in tests -> engine in a directory
ENGINES: dict[str, Callable[[Path], NodeEngine]] = {"newest containerd": Containerd, "trixie containerd": Containerd}
if shutil.which("crio"):  # no release of Debian has it: `make engines`
    ENGINES["crio"] = Crio
