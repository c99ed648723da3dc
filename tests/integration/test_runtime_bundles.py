"""gpushare-runtime reads the bundle that the low-level runtime then starts, however the arguments name it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
MakeNode = Callable[..., Node]
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
RUNTIMES = {"runc": "/usr/sbin/runc", "crun": "/usr/bin/crun"}
LOOK = ["sh", "-c", "test ! -e /usr/lib/gpushare/limits || exit 7"]

pytestmark = pytest.mark.usefixtures("no_hybrid_cgroups")


def run(one: Container, *args: str, cwd: Path) -> tuple[int, str]:
    """Run `gpushare-runtime run` in the directory `cwd`, with PWD as in a shell after `cd`."""
    environment = {**os.environ, "PWD": str(cwd)}
    done = subprocess.run(
        [*one._runtime, "run", *args, one.id],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("words", [["--bundle", "link"], ["--bundle", "disk/.."], []], ids=" ".join)
def test_bundle_behind_a_link_is_found(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, runtime: str, words: list[str]
) -> None:
    """Hooks get the bundle's real path; runc may also give the path in PWD."""
    node = make_node(simhost, runtime={"path": RUNTIMES[runtime]})
    one = container(LOOK, env=SHARE, runtime=node.runtime())
    (tmp_path / "link").symlink_to(one.bundle)
    (tmp_path / "disk").symlink_to(one.bundle / "disk")
    assert run(one, *words, cwd=tmp_path if words else tmp_path / "link") == (7, "")
    assert node.leases() == []


@pytest.mark.parametrize("first", ["--bundle", "-b"])
def test_last_bundle_option_counts_for_crun(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, first: str
) -> None:
    node = make_node(simhost, runtime={"path": RUNTIMES["crun"]})
    one, other = container(LOOK, env=SHARE, runtime=node.runtime()), container(LOOK)
    last = {"--bundle": "-b", "-b": "--bundle"}[first]
    assert run(one, first, str(other.bundle), last, str(one.bundle), cwd=tmp_path) == (7, "")


@pytest.mark.parametrize("absolute", [True, False])
def test_crun_s_config_option_is_followed(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, absolute: bool
) -> None:
    """crun resolves --config from its working directory, and paths inside that file from the bundle."""
    node = make_node(simhost, runtime={"path": RUNTIMES["crun"]})
    one, other = container(LOOK, env=SHARE, runtime=node.runtime()), container(LOOK)
    shutil.move(one.bundle / "config.json", tmp_path / "asks.json")
    for name in ("config.json", "asks.json"):
        shutil.copy(other.bundle / "config.json", one.bundle / name)
    name = str(tmp_path / "asks.json") if absolute else "asks.json"
    assert run(one, "--config", name, "--bundle", str(one.bundle), cwd=tmp_path) == (7, "")
    assert node.leases() == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_concurrent_edit_of_the_bundle_is_refused(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, runtime: str
) -> None:
    """Another start edits config.json between this start's edit and the low-level runtime's read."""
    low = tmp_path / "low"
    node = make_node(simhost, runtime={"path": str(low)})

    def own_cgroups(spec: dict[str, Any]) -> None:
        del spec["linux"]["cgroupsPath"]  # newer runc refuses a second container in one cgroup

    one = container(LOOK, env=SHARE, runtime=node.runtime(), edit=own_cgroups)
    other = f"{one.id}-other"
    begin = " ".join([*one._runtime, "create", "--bundle", str(one.bundle), other])
    cases = f'case "$*" in *create*{other}|*delete*) ;; *create*) {begin} ;; esac'
    low.write_text(f'#!/bin/sh\n{cases}\nexec {RUNTIMES[runtime]} "$@"\n')
    low.chmod(0o755)
    try:
        with pytest.raises(RuntimeFailed) as failed:
            one.create()
        message = failed.value.message
        assert "config.json was written for another container while" in message and one.id in message
        assert other in node.leases()
    finally:
        one.command("delete", "--force", other)
