"""Containers with their own user namespace, started by root of the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.runc import Container

ROOT = 100000  # uid and gid on the host for the container's root


def with_user_namespace(spec: dict[str, Any]) -> None:
    """Add a user namespace that does not map the host's root."""
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"]["uidMappings"] = spec["linux"]["gidMappings"] = [{"containerID": 0, "hostID": ROOT, "size": 65536}]


def allow_traversal(directory: Path) -> None:
    """Let the root of a user namespace traverse the path."""
    for path in (directory, *directory.parents):
        if path.stat().st_uid == 0 and len(path.parts) > 2:
            path.chmod(path.stat().st_mode | 0o011)


def chown_root(one: Container) -> None:
    """Give the root file system to the container's root, as an engine with user namespaces does."""
    libdirs = [f"usr/lib/{libdir.name}" for libdir in (one.rootfs / "usr/lib").glob("*-linux-gnu")]
    for path in ("dev", "opt", "usr/bin", "usr/lib", *libdirs):
        os.chown(one.rootfs / path, ROOT, ROOT)
