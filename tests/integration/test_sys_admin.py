"""CAP_SYS_ADMIN can undo the `ro` of every mount: policy for containers that have it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.apart import allow_traversal, chown_root, with_user_namespace
from tests.security import owners
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
ENV = {"GPUSHARE_MEMORY": "1Gi"}


def admin(spec: dict[str, Any]) -> None:
    """Like `--cap-add SYS_ADMIN`."""
    for name in ("bounding", "effective", "permitted"):
        spec["process"]["capabilities"][name].append("CAP_SYS_ADMIN")


def admin_apart(spec: dict[str, Any]) -> None:
    """The same in a user namespace that does not map the host's root."""
    admin(spec)
    with_user_namespace(spec)


def test_sys_admin_over_the_host_needs_a_policy_entry(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, way: str
) -> None:
    node = make_node(simhost, policy={"privileged_containers": ["allowed"]})
    one = container(["true"], env=ENV, edit=admin, **node.way(way))
    with pytest.raises(RuntimeFailed, match=r"CAP_SYS_ADMIN .*not among policy\.privileged_containers") as refused:
        one.create()
    assert one.id in refused.value.last_line and "config.yaml" in refused.value.last_line
    assert node.leases() == []
    allowed = container(["true"], env=ENV, edit=admin, id="allowed", **node.way(way))
    assert allowed.run() == 0, allowed.stderr


def test_sys_admin_in_a_user_namespace_needs_no_policy_entry(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, way: str, tmp_path: Path
) -> None:
    allow_traversal(tmp_path)
    node = make_node(simhost, policy={"privileged_containers": []})
    one = container(["true"], env=ENV, edit=admin_apart, **node.way(way))
    chown_root(one)
    assert one.run() == 0, one.stderr


def test_sys_admin_in_a_user_namespace_cannot_write_mounted_files(
    container: MakeContainer, node: Node, way: str, tmp_path: Path
) -> None:
    """It once truncated a neighbour's activity file, and the neighbour's processes died by SIGBUS."""
    allow_traversal(tmp_path)
    one, other = (
        container(["sleep", "inf"], env=ENV, edit=admin_apart, mounts=python_mounts(), **node.way(way))
        for _ in range(2)
    )
    for each in (one, other):
        chown_root(each)
        each.start()
    done = [one.exec(PYTHON, "-c", textwrap.dedent(program)) for program in (owners.WRITES, owners.LEASES)]
    assert [one.returncode for one in done] == [0, 0], done
    changed, leased = (json.loads(one.stdout) for one in done)
    assert [line for line in changed if "not made writable" not in line] == []
    assert leased == []
