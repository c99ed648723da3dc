"""Device access of a container, measured: open and mknod for a matrix of nodes, in a runc container with one version of
cgroup. Used by test_cgroup_v1.py and test_cgroup_v2.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpushare.system import cgroup, syscalls

from tests.integration import ns_util

# name -> (type, major, minor): runtime defaults, devices with a rule in the spec, granted devices, and ungranted ones
NODES = {
    "null": ("c", 1, 3),
    "zero": ("c", 1, 5),
    "full": ("c", 1, 7),
    "urandom": ("c", 1, 9),
    "tty": ("c", 5, 0),
    "ptmx": ("c", 5, 2),
    "mem": ("c", 1, 1),
    "fuse": ("c", 10, 229),
    "nvidia0": ("c", 195, 0),
    "nvidia1": ("c", 195, 1),
    "nvidiactl": ("c", 195, 255),
    "uvm": ("c", 510, 0),
    "block": ("b", 195, 0),
    "loop0": ("b", 7, 0),
}
GRANTED = ((195, 0), (195, 255))
MODES = {"r": "<", "w": ">", "rw": "<>"}
EPERM, ENXIO = "Operation not permitted", "No such device or address"


def spec(rootfs: Path, cgroup_name: str) -> dict[str, Any]:
    """A container with an extra rule beside the runtime's defaults: fuse may be read."""
    made = ns_util.runc_spec(str(rootfs), cgroup_name)
    made["linux"]["resources"]["devices"] = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "r"},
    ]
    return made


def make_nodes(rootfs: Path) -> None:
    """Create the nodes in the image, so that only the cgroup decides whether they open."""
    (rootfs / "nodes").mkdir()
    for name, (kind, major, minor) in NODES.items():
        mode = 0o020000 if kind == "c" else 0o060000
        os.mknod(rootfs / "nodes" / name, 0o666 | mode, os.makedev(major, minor))


def matrix(container: ns_util.Runc, rootfs: Path) -> dict[str, str]:
    """Return "ok" or the kernel's error for each open (by node and mode) and mknod (by node) of a process in the
    container."""
    lines = []
    for name, (kind, major, minor) in NODES.items():
        for mode, redirection in MODES.items():
            path = "/dev/ptmx" if name == "ptmx" else f"/nodes/{name}"  # devpts expects its mount beside the node
            lines.append(f"t '{name} {mode}' 'exec 3{redirection}{path}'")
        lines.append(f"rm -f /tmp/made; t '{name} mknod' 'mknod /tmp/made {kind} {major} {minor}'")
    script = 't() { if e=$(sh -c "$2" 2>&1); then echo "$1|ok"; else echo "$1|$e"; fi; }\n' + "\n".join(lines)
    (rootfs / "matrix.sh").write_text(script)
    out = container.run("exec", container.id, "sh", "/matrix.sh").stdout
    rows = (line.rsplit("|", 1) for line in out.splitlines() if "|" in line)
    return {key: "ok" if text == "ok" else text.rpartition(": ")[2] for key, text in rows}


@contextlib.contextmanager
def running(directory: Path, image: Path, prefix: Sequence[str] = ()) -> Iterator[tuple[ns_util.Runc, Path, int]]:
    """(container, rootfs, init pid) of a started, sleeping container."""
    rootfs = Path(shutil.copytree(image, directory / "rootfs", symlinks=True))
    make_nodes(rootfs)
    container = ns_util.Runc(directory / "bundle", {}, prefix)
    (container.directory / "config.json").write_text(json.dumps(spec(rootfs, f"/{container.id}")))
    try:
        pid = container.create()
        container.run("start", container.id)
        yield container, rootfs, pid
    finally:
        container.delete()


class View:
    """A process whose mount namespace shows one version of cgroup at /sys/fs/cgroup; `run` calls a function there."""

    def __init__(self, setup: str) -> None:
        script = f"mount --make-rprivate / && {setup} && echo ready && exec sleep 1000"
        self._process = ns_util.started(["unshare", "-m", "sh", "-c", script])
        self.prefix = ("nsenter", "-m", "-t", str(self._process.pid))

    def run(self, body: Any) -> Any:
        def inside() -> Any:
            fd = os.open(f"/proc/{self._process.pid}/ns/mnt", os.O_RDONLY)
            syscalls.setns(fd, "view")
            return body()

        return ns_util.in_child(inside)

    def close(self) -> None:
        ns_util.ended(self._process)


def allow(view: View, pid: int, rules: Sequence[tuple[int, int]] = GRANTED) -> None:
    def body() -> None:
        cgroup.allow_devices(pid, rules)

    view.run(body)


def check_granted(before: dict[str, str], after: dict[str, str]) -> None:
    """Assert that only the granted devices changed: open now reaches the (absent) driver, mknod is unchanged."""
    expected = dict(before)
    for name in ("nvidia0", "nvidiactl"):
        for mode in MODES:
            assert before[f"{name} {mode}"] == EPERM
            expected[f"{name} {mode}"] = ENXIO
    different = {key: (expected[key], after[key]) for key in expected if after[key] != expected[key]}
    assert not different, different


def check_premises(before: dict[str, str]) -> None:
    """Assert that the matrix has all kinds of results, so that a comparison is meaningful."""
    expected = {"null rw": "ok", "zero r": "ok", "ptmx rw": "ok", "fuse mknod": "ok"}
    expected.update(dict.fromkeys(("fuse w", "mem r", "nvidia1 r", "block r", "uvm rw"), EPERM))
    found = {key: before[key] for key in expected}
    assert found == expected, found
    assert before["fuse r"] != EPERM
    assert len(before) == len(NODES) * 4


def update(container: ns_util.Runc) -> None:
    resources = container.directory / "resources.json"
    resources.write_text("{}")  # applies the whole cgroup configuration again, with any set of controllers
    container.run("update", "--resources", str(resources), container.id)


def pause_and_resume(container: ns_util.Runc) -> None:
    container.run("pause", container.id)
    container.run("resume", container.id)
