"""Podman and docker of an unprivileged user: a range of subordinate ids, a runtime directory, and no rights over the
host."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .. import processes
from ..host import Node
from ..rootfs import run, unmount_below
from .base import SLEEP, Engine, Refused, Want
from .docker import Docker
from .dockerd import Dockerd
from .podman import Podman

UID = 4242
RUNTIME_DIR = Path(f"/run/user/{UID}")
STATE = RUNTIME_DIR / "gpushare"
_NAME = "gpushare-test"
_FILES = {
    "/etc/passwd": f"{_NAME}:x:{UID}:{UID}::{{home}}:/bin/sh\n",
    "/etc/group": f"{_NAME}:x:{UID}:\n",
    "/etc/subuid": f"{_NAME}:400000:65536\n",
    "/etc/subgid": f"{_NAME}:400000:65536\n",
}


@contextmanager
def user(directory: Path) -> Iterator[Path]:
    """Add a user to this host until the block ends, and yield the home in the new `directory`. The session's runtime
    directory is where a login would create it. Only processes in this mount namespace see any of it."""
    home = directory / "home"
    home.mkdir(parents=True)
    for name, line in _FILES.items():
        text = Path(name).read_text() if Path(name).exists() else ""
        copy = directory / Path(name).name
        copy.write_text(text + line.format(home=home))
        run("mount", "--bind", copy, name)
    run("mount", "-t", "tmpfs", "-o", "mode=755", _NAME, "/run")
    try:
        RUNTIME_DIR.mkdir(parents=True, mode=0o700)
        for place in (home, RUNTIME_DIR):
            os.chown(place, UID, UID)
        yield home
    finally:
        run("umount", "--lazy", "/run")
        for name in _FILES:
            run("umount", name)


class RootlessPodman(Podman):
    """Podman whose gpushare programs derive the state directory from their user. `home`: see user()."""

    def __init__(self, node: Node, home: Path, image_root: Path, low_level: str, way: str) -> None:
        self._home = home
        node.state = STATE
        super().__init__(node, home / "podman", image_root, low_level, way)

    def prepare(self) -> None:
        run("chown", "-R", f"{UID}:{UID}", self._directory)

    def runtime(self) -> tuple[str, ...]:
        program, flag, config, *_ = self.node.runtime()
        return program, flag, config

    def hooks(self, *stages: str) -> None:
        super().hooks(*stages)
        for path in self.hooks_dir.iterdir():
            value = json.loads(path.read_text())
            args = value["hook"]["args"]
            at = args.index("--state")
            value["hook"]["args"] = args[:at] + args[at + 2 :]
            path.write_text(json.dumps(value))

    def words(self, *args: str) -> list[str]:
        return [*as_user(), *super().words(*args)]

    def storage_driver(self) -> str:
        return "vfs"

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **session(self._home)}

    def close(self) -> None:
        self.podman("rm", "--all", "--force", "--time", "0")
        for pid in processes.children():  # the process that keeps the user namespace for the user's next podman
            if os.stat(f"/proc/{pid}").st_uid == UID:
                processes.kill_and_reap(pid)
        unmount_below(self._directory)
        shutil.rmtree(self._directory, ignore_errors=True)


class RootlessDockerd(Dockerd):
    """The daemon in namespaces that rootlesskit makes, as dockerd-rootless.sh starts it; without a network."""

    def __init__(self, directory: Path, home: Path) -> None:
        super().__init__(directory)
        self._home = home

    def start(self, *options: str) -> None:
        """Without --gpushare-state in daemon.json: the programs derive the state directory."""
        value = json.loads(self.config_file.read_text())
        args = value["runtimes"]["gpushare"]["runtimeArgs"]
        if "--gpushare-state" in args:
            del args[(at := args.index("--gpushare-state")) : at + 2]
        self.config_file.write_text(json.dumps(value))
        run("chown", "-R", f"{UID}:{UID}", self.directory)
        super().start(*options)

    def command_line(self) -> list[str]:
        kit = ["rootlesskit", f"--state-dir={self.directory}/kit", "--net=host", "--copy-up=/etc", "--copy-up=/run"]
        words = [word for word in super().command_line() if not word.startswith(("--cgroup-parent", "--storage"))]
        own = ["sh", "-c", 'rm -f /run/docker /run/containerd; exec "$@"', "sh"]  # links into the host's /run
        return [*as_user(), *kit, "--propagation=rslave", *own, *words, "--rootless", "--storage-driver=vfs"]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **session(self._home)}


class RootlessDocker(Docker):
    """docker whose gpushare programs derive the state directory from their user. `home`: see user()."""

    def __init__(self, node: Node, home: Path, image_root: Path) -> None:
        self.home = home
        node.state = STATE
        super().__init__(node, home / "docker", image_root)

    def make_daemon(self, directory: Path, config: dict[str, object] | None) -> Dockerd:
        return RootlessDockerd(directory, self.home)


def as_user() -> list[str]:
    return ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]


def session(home: Path) -> dict[str, str]:
    """The environment of a login session."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(RUNTIME_DIR),
    }


def require_device_is_not_exceeded(engine: Engine) -> None:
    """Start containers of one user on a device of 16 GiB: the one that does not fit is refused."""
    with engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "10Gi"})):
        with pytest.raises(Refused) as refused:
            engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "7Gi"}))
        assert "7 GiB" in refused.value.result.err
    assert engine.run(Want(env={"GPUSHARE_MEMORY": "16Gi"})).answer()["total_bytes"] == 16 << 30
