"""A podman for the tests alone, its users' actions, and its messages to them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration import engines
from tests.support.engines.base import Refused, Want
from tests.support.engines.podman import IMAGE, Podman
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
ROWS = ["podman, hook", "podman with crun, hook", "podman with crun, runtime"]  # the suite of all engines has all rows
OURS = "/usr/lib/gpushare/limits"


@contextmanager
def podman_host(row: str, image_root: Path) -> Iterator[Podman]:
    """The podman of a row of engines.ENGINES."""
    unified = Path("/sys/fs/cgroup/unified")
    hybrid = "crun" in row and os.path.ismount(unified)
    if hybrid:  # crun refuses a host with cgroup v1 and v2 at once
        run("umount", unified)
    try:
        with engines.engine(row, Path(tempfile.mkdtemp(prefix="gs-")), image_root) as made:
            assert isinstance(made, Podman)
            made.node.cli("refresh")  # mounts the state directory, which stays
            yield made
    finally:
        if hybrid:
            run("mount", "-t", "cgroup2", "none", unified)


def refusal(podman: Podman, want: Want, *more: str, image: str = IMAGE) -> str:
    """Return the message to podman's user; where podman shows only an exit code, that of `gpushare inspect`."""
    with pytest.raises(Refused) as refused:
        podman.start(want, *more, image=image)
    result = refused.value.result
    assert result.code == 126  # podman-run(1): the contained command cannot be invoked
    if podman.shows_reason:
        return result.err
    assert "gpushare-hook` (exit code: " in result.err
    kept = max((podman.node.state / "errors").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return podman.node.cli("inspect", kept.name).stdout
