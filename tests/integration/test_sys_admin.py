"""CAP_SYS_ADMIN can undo the `ro` of every mount, but not of the host's files in a user namespace of its own."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.apart import allow_traversal, chown_root, with_user_namespace
from tests.security import owners
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.runc import Container

MakeContainer = Callable[..., Container]
ENV = {"GPUSHARE_MEMORY": "1Gi"}


def admin_apart(spec: dict[str, Any]) -> None:
    """Like `--cap-add SYS_ADMIN` in a user namespace that does not map the host's root."""
    for name in ("bounding", "effective", "permitted"):
        spec["process"]["capabilities"][name].append("CAP_SYS_ADMIN")
    with_user_namespace(spec)


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
