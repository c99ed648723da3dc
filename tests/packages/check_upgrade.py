"""Upgrade from the packages of 0.1.0: a running container survives and is listed, resized and deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

from tests.support.engines.image import PROBE
from tests.support.host import BUILD

from .check_install import Kind, held, kind  # noqa: F401, fixtures
from .cleanroot import CleanRoot
from .conftest import PACKAGES
from .held import GIB, Held, listed, use_simulated_gpu

BEFORE = BUILD / "before" / "build" / "packages"  # made by packages.mk
# The default answer to dpkg's question about an edited configuration
FORCE = {"dpkg": ("--force-confold",)}


def test_container_of_0_1_0_survives_the_upgrade(
    kind: Kind,  # noqa: F811
    clean_root: CleanRoot,
    held: Callable[..., Held],  # noqa: F811
) -> None:
    root = clean_root
    (old,), (new,) = BEFORE.glob(kind.pattern), PACKAGES.glob(kind.pattern)
    shutil.copy(old, root.path / "srv" / "old")
    shutil.copy(new, root.path / "srv" / "new")
    root.run(*kind.install, "/srv/old")
    root.put("/etc/docker/daemon.json", '{"debug": false}\n')
    root.run("gpushare", "runtime", "configure", "docker")
    use_simulated_gpu(root)
    first = held("first")
    mounts, shim = first.mounts(), first.shim()
    configured = root.run("cat", "/etc/docker/daemon.json")

    root.run(*kind.upgrade, *FORCE.get(kind.install[0], ()), "/srv/new")
    assert "snapshot" in root.run("ls", "/usr/libexec/gpushare/libexec")  # the new version
    assert first.process.poll() is None and first.mounts() == mounts and first.shim() == shim
    assert root.run("cat", "/etc/docker/daemon.json") == configured
    assert listed(root) == ["first"]
    inspected = json.loads(root.run("gpushare", "inspect", "first", "--format", "json"))
    assert inspected["id"] == "first" and inspected["shares"][0]["memory_limit_bytes"] == GIB

    # The limit changes for a new process and for accounting on the host.
    root.run("gpushare", "limit", "set", "first", "--memory", "2Gi")
    again = root.call("gpushare-runtime", "exec", first.name, PROBE)
    assert json.loads(again.stdout)["total_bytes"] == 2 * GIB, again.stdout + again.stderr
    root.run("gpushare", "pause", "first")
    root.run("gpushare", "resume", "first")

    # A container of the new version gets its own share of the remaining memory.
    second = held("second")
    assert second.said["total_bytes"] == GIB and listed(root) == ["first", "second"]
    second.end()

    # Its hooks are the old command lines: the new hook releases the lease.
    first.end()
    assert listed(root) == []
    assert root.run("sh", "-c", "ls /run/gpushare/containers /run/gpushare/trash").split() == [
        "/run/gpushare/containers:",
        "/run/gpushare/trash:",
    ]
    root.run(*kind.remove)
    assert root.run("cat", "/etc/docker/daemon.json") == '{"debug": false}\n'
    assert " /run/gpushare " not in root.run("cat", "/proc/self/mountinfo")
    left = [path for path in root.files("/usr", "/run") if "gpushare" in path]
    assert left == []
