"""Installation to removal of the wheel in a fresh Debian with Python, with real containers."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import version
from tests.support.rootfs import run
from tests.support.spec import Hook

from . import newer
from .check_cri import CONTAINERD, OWN, configure
from .cleanroot import PYTHON, CleanRoot
from .conftest import PACKAGES
from .held import GIB, POD, Held, listed, use_simulated_gpu

VENV = "/opt/venv"
PIP = (f"{VENV}/bin/pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
RUNTIME = f"{VENV}/bin/gpushare-runtime"
CLI = f"{VENV}/bin/gpushare"
HOOK = Hook(Path(f"{VENV}/bin/gpushare-hook"), Path("/etc/gpushare/config.yaml"), Path("/run/gpushare"))
SNAPSHOT = f"{VENV}/libexec/gpushare/snapshot"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[CleanRoot]:
    """Without a package index: the wheel's dependencies are in /srv."""
    root = CleanRoot(tmp_path / "debian", PYTHON)
    try:
        (wheel,) = PACKAGES.glob("*_x86_64.whl")
        run(sys.executable, "-m", "pip", "--quiet", "download", "--dest", root.path / "srv", wheel)
        root.run("python3", "-m", "venv", VENV)
        yield root
    finally:
        root.close()


def ours(root: CleanRoot) -> set[str]:
    return {path for path in root.files("/etc", "/opt", "/usr", "/run", "/var/lib") if "gpushare" in path}


def mount_points(one: Held) -> list[str]:
    return [line.split()[4] for line in one.mounts()]


@contextlib.contextmanager
def no_python(root: CleanRoot) -> Iterator[None]:
    """Make every Python there non-executable, also that of the virtual environment."""
    found = root.run("sh", "-c", f"readlink -f /usr/bin/python3* {VENV}/bin/python*").split()
    covered = sorted(set(found))
    root.put("/srv/empty", "")
    for path in covered:
        root.run("mount", "--bind", "/srv/empty", path)
    try:
        assert "Permission denied" in root.call(f"{RUNTIME}.py", "--version").stderr
        yield
    finally:
        for path in covered:
            root.run("umount", path)


def start_both_ways(root: CleanRoot) -> None:
    """With the runtime, and with the hook under runc: the container gets its share and ends."""
    for runtime, hook in ((RUNTIME, None), ("runc", HOOK)):
        one = Held(root, "short", runtime, hook=hook)
        try:
            assert one.said["total_bytes"] == GIB
            one.end()
        finally:
            one.kill()


def test_start_works_with_and_without_the_snapshot(root: CleanRoot) -> None:
    """The snapshot needs no Python. Where it cannot start, the Python of the virtual environment does."""
    root.run(*PIP, "install", "--no-index", "--find-links", "/srv", "gpushare")
    root.run("ln", "-s", CLI, "/usr/local/bin/gpushare")
    use_simulated_gpu(root)
    root.run("gpushare", "refresh")
    with no_python(root):
        start_both_ways(root)
    assert listed(root) == []

    root.put(SNAPSHOT, "\x7fELF")
    assert f"Python does not start from {SNAPSHOT}" in root.call("gpushare", "doctor").stdout
    said = root.call("gpushare", "runtime", "configure", "docker").stderr
    assert f'Python does not start from "{SNAPSHOT}", so it was removed' in said
    assert not (root.path / SNAPSHOT[1:]).exists()
    assert "does not start from" not in root.call("gpushare", "doctor").stdout
    start_both_ways(root)
    root.run("gpushare", "uninstall", "--yes", "--purge")


def test_wheel_is_installed_used_upgraded_and_removed(root: CleanRoot, tmp_path: Path) -> None:
    """Its programs find their files; upgrade and removal leave a running container unchanged."""
    root.run(*PIP, "install", "--no-index", "--find-links", "/srv", "gpushare")
    root.run("ln", "-s", CLI, "/usr/local/bin/gpushare")
    assert root.run("gpushare", "version").startswith(f"gpushare {version()},")
    assert not [path for path in ours(root) if path.startswith(("/etc", "/run", "/var"))]
    root.put("/etc/docker/daemon.json", '{"debug": false}\n')
    root.run("gpushare", "runtime", "configure", "docker", "--profile", "workstation")
    daemon = json.loads(root.run("cat", "/etc/docker/daemon.json"))
    assert daemon["runtimes"]["gpushare"]["path"] == RUNTIME
    use_simulated_gpu(root)
    made: list[Held] = []
    try:
        made.append(first := Held(root, "first", RUNTIME))
        assert first.said["total_bytes"] == first.said["nvml_total_bytes"] == GIB and first.said["refused"] == 2
        config = json.loads((root.path / "srv/first/config.json").read_text())
        assert configure(root) == f"{RUNTIME}-cri"
        assert root.run(f"{RUNTIME}-cri", "--version").startswith("runc version")
        made.append(pod := Held(root, "pod", f"{RUNTIME}-cri", env={}, annotations=POD))
        assert pod.said["total_bytes"] == GIB
        pod.end()
        programs = {hook["path"] for stage in config["hooks"].values() for hook in stage}
        assert programs == {f"{VENV}/bin/gpushare-hook"}
        content, places = first.shim(), mount_points(first)

        wheel = newer.wheel(tmp_path)
        shutil.copy(wheel, root.path / "srv")
        root.run(*PIP, "install", "--no-index", "--no-deps", "--upgrade", f"/srv/{wheel.name}")
        assert root.run("gpushare", "version").startswith(f"gpushare {newer.VERSION},")
        assert mount_points(first) == places  # pip renames replaced files, so the mounts' sources have another name
        made.append(second := Held(root, "second", RUNTIME))
        assert (first.shim(), second.shim()) == (content, content + newer.VERSION.encode())
        assert listed(root) == ["first", "second"]
        first.end()
        assert listed(root) == ["second"]
        refused = root.call("gpushare", "uninstall", "--yes")
        assert refused.returncode != 0 and "1 container holds a share: second" in refused.stderr
        second.end()
    finally:
        for one in made:
            one.kill()

    root.run("gpushare", "uninstall", "--yes", "--purge")
    root.run(*PIP, "uninstall", "--yes", "gpushare")
    made_by_hand = {"/usr/local/bin/gpushare", "/opt/driver/.gpushare-sim"}
    assert ours(root) == made_by_hand
    assert (root.path / CONTAINERD[1:]).read_text() == OWN
    assert root.run("cat", "/etc/docker/daemon.json") == '{"debug": false}\n'
