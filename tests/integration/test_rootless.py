"""Containers of an unprivileged user, as rootless podman starts them: hook and runtime run as "root" of the user's
namespace. Without such a namespace they are refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import make_simhost
from tests.support import judge
from tests.support.engines.image import PROBE, make_root
from tests.support.host import BUILD, Node
from tests.support.spec import Hook, spec

GIB = 1 << 30
UID = 4711
USER = ("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--")


class Host:
    """A simulated host, one image, and a user's own runtime directory."""

    def __init__(self, folder: Path) -> None:
        self.runtime_dir, self.rootfs, self.bundle = folder / "runtime", folder / "rootfs", folder / "bundle"
        self.node = Node(folder / "node", make_simhost(folder / "host", gpus=1, memory_bytes=16 * GIB))
        make_root(self.rootfs)
        for directory in (self.runtime_dir, self.bundle):
            directory.mkdir(0o700)
        for path in (self.runtime_dir, self.bundle, self.rootfs, *self.rootfs.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)

    @property
    def state(self) -> Path:
        return self.runtime_dir / "gpushare"

    def run(self, way: str, memory: str, namespace: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a container with the probe, under runc."""
        hook = Hook(BUILD / "bin" / "gpushare-hook", self.node.config, self.state) if way == "hook" else None
        content = spec(
            rootfs=self.rootfs,
            args=[PROBE],
            env={"GPUSHARE_MEMORY": memory},
            annotations={},
            hook=hook,
            mounts=[],
            user=(0, 0),
            cgroups_path="",
        )
        self._without_rights(content, namespace)
        (self.bundle / "config.json").write_text(json.dumps(content))
        os.chown(self.bundle / "config.json", UID, UID)
        runtime = ["runc"]
        if way == "runtime":
            runtime = [str(BUILD / "bin" / "gpushare-runtime"), "--gpushare-config", str(self.node.config)]
        inside = ["unshare", "--user", "--map-root-user", "--mount", "--"] if namespace else []
        command = [*USER, *inside, *runtime, "--root", f"{self.runtime_dir}/runc", "run", "--bundle", self.bundle, "c"]
        environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(self.runtime_dir)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, stdin=-3)

    @staticmethod
    def _without_rights(content: dict[str, Any], namespace: bool) -> None:
        """Remove what podman omits for an unprivileged user: devpts' group, sysfs, cgroup rules."""
        content["mounts"] = [mount for mount in content["mounts"] if mount["type"] not in ("sysfs", "devpts")]
        content["linux"]["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
        content["linux"].pop("resources")
        content["process"]["capabilities"] = {}
        if not namespace:
            content["linux"]["namespaces"].append({"type": "user"})
            for name in ("uidMappings", "gidMappings"):
                content["linux"][name] = [{"containerID": 0, "hostID": UID, "size": 1}]


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Host(Path(folder))
        yield made
        made.node.close()


def test_rootless_container_gets_its_share(host: Host, way: str) -> None:
    done = host.run(way, "4Gi")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["total_bytes"], report["nvml_total_bytes"]) == (4 * GIB, 4 * GIB)
    assert 3 * GIB < report["got_bytes"] <= judge.peak_bytes(host.node.driver_root, report["pidns"]) <= 4 * GIB
    assert list((host.state / "containers").iterdir()) == [] and list((host.state / "trash").iterdir()) == []
    owners = {os.lstat(path).st_uid for path in host.rootfs.rglob("*")}
    assert owners == {UID}  # also of files made in the image


def test_rootless_container_is_refused_without_free_memory(host: Host, way: str) -> None:
    done = host.run(way, "17Gi")
    assert done.returncode == 1 or (way == "runtime" and done.returncode == 75)
    assert "17 GiB requested, 16 GiB free of 16 GiB" in done.stderr and done.stdout == ""
    assert list((host.state / "containers").iterdir()) == []


def test_missing_user_namespace_is_refused(host: Host, way: str) -> None:
    """A plain runc calls its hooks outside the container's user namespace, where a user cannot mount."""
    done = host.run(way, "4Gi", namespace=False)
    assert done.returncode != 0 and done.stdout == ""
    assert f"user {UID} may not change the mounts of a container that is started this way; use rootless" in done.stderr
    assert list((host.state / "containers").iterdir()) == []
