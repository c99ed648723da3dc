"""Records of tasks that real containerd 1.7 and 2.1 keep: the installer reads them to keep the versions in use."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import engines
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd import Containerd
from tests.support.host import TREE

INSTALL = TREE / "packaging/kubernetes/installer/install.py"


@pytest.fixture(scope="module", params=["newest containerd", "trixie containerd"])
def engine(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Containerd]:
    with engines.programs(request.param), engines.containerd("runtime", image_root) as made:
        yield made


def found(install: dict[str, Any], name: bytes) -> set[str]:
    """The ids of tasks whose runtime is in this directory."""
    return {one for one, runtime, _ in install["tasks"]() if name in runtime}


def test_records_of_containerd_name_the_runtime(engine: Containerd) -> None:
    """Also of a pause container and of a container without a share. containerd deletes the task of a container that has
    ended. Its state is in another directory than usual here, as in k3s."""
    install = runpy.run_path(str(INSTALL))
    # The engine has the mounts of this process, which the tests unshare from those of the host
    install["on_node"].__globals__.update(HOST="", FIRST="self")
    program = bytes(engine.programs.runtime.parent) + b"/"
    with engine.pod() as pod:
        plain, ended = pod.run(Want(SLEEP), "plain"), pod.run(Want(("true",)), "ended")
        ended.wait()
        assert found(install, program) == {pod.id, plain.id}
        plain.remove()
        assert found(install, program) == {pod.id}
    assert found(install, program) == set()
