"""Containers that run in a fresh Debian while packages change."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.simhost import make_simhost
from tests.support.engines.image import PROBE, make_root
from tests.support.spec import Hook, spec

from .cleanroot import CleanRoot

GIB = 1 << 30
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
# The container `cuda` of a pod that requests 1 GiB, as containerd's CRI describes it
POD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "cuda",
    "io.kubernetes.cri.sandbox-namespace": "default",
    "cuda.gpushare.io/memory": "1Gi",
}
IN_CONTAINER = "usr/lib/x86_64-linux-gnu/libcuda.so.1"


class Held:
    """A container that has allocated up to its limit, until `end`."""

    def __init__(
        self,
        root: CleanRoot,
        name: str,
        runtime: str,
        env: Mapping[str, str] = ONE_GIB,
        annotations: Mapping[str, str] = {},
        hook: Hook | None = None,
    ) -> None:
        self.root, self.name = root, name
        self.config = spec(
            rootfs=Path("/srv/image"),
            args=[PROBE, "hold"],
            env=dict(env),
            annotations=dict(annotations),
            hook=hook,
            mounts=[],
            user=(0, 0),
            cgroups_path=f"/gpushare-packages-{os.getpid()}-{name}",
        )
        root.put(f"/srv/{name}/config.json", json.dumps(self.config))
        self.process = root.start(runtime, "run", "--bundle", f"/srv/{name}", name)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("{"), line + self.process.communicate()[0]
        self.said = json.loads(line)

    @property
    def view(self) -> Path:
        """The container's root, as its init sees it."""
        (state,) = [one for one in json.loads(self.root.run("runc", "list", "-f", "json")) if one["id"] == self.name]
        return Path(f"/proc/{state['pid']}/root")

    def mounts(self) -> list[str]:
        """Mounts in the kernel's list. A replaced source is marked deleted and stays the old file."""
        return (self.view.parent / "mountinfo").read_text().replace("//deleted ", " ").splitlines()

    def shim(self) -> bytes:
        return (self.view / IN_CONTAINER).read_bytes()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.root.call("runc", "kill", self.name, "KILL")
            self.process.communicate(timeout=60)

    def end(self) -> None:
        output, _ = self.process.communicate("", timeout=60)
        assert self.process.returncode == 0, output


def use_simulated_gpu(root: CleanRoot) -> None:
    """Name the simulated driver in the configuration, as an administrator would; by default the host's is used."""
    make_simhost(root.path / "opt/driver", memory_bytes=16 * GIB)
    make_root(root.path / "srv/image")
    config = {"version": 1, "driver": {"root": "/opt/driver"}, "log": {"decisions": "/var/log/gpushare"}}
    root.put("/etc/gpushare/config.yaml", json.dumps(config))


def listed(root: CleanRoot) -> list[str]:
    found: list[dict[str, Any]] = json.loads(root.run("gpushare", "list", "--format", "json"))
    return [one["id"] for one in found]
