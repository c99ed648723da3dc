"""Starts by gpushare-runtime that must be refused in one line and leave nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.host import Node
from tests.support.runc import Container

MakeContainer = Callable[..., Container]
MakeNode = Callable[..., Node]
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
USAGE, CONFIG, DEVICE, KERNEL = 64, 78, 69, 71  # errors.py
MAX_LINE = 600  # the longest acceptable message


def traces(node: Node) -> list[str]:
    """Return all traces of starts in the state directory, and its mounts."""
    return node.left()


def files(directory: Path) -> dict[str, Any]:
    """Return a bundle's files: the content of regular files, the kind and inode of others."""
    found: dict[str, Any] = {}
    for path in directory.iterdir():
        status = path.lstat()
        small = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
        found[path.name] = path.read_bytes() if small else (status.st_mode, status.st_ino, status.st_size)
    return found


def refused(node: Node, one: Container, code: int, *quoted: str, prefix: tuple[str, ...] = (), id: str = "") -> str:
    """Run `create` of a bundle that must fail with `code`, and return its line. Assert that both places have exactly
    one line, that the line names each of `quoted`, and that nothing was done."""
    log = one.bundle.parent / f"{one.id}.log"
    flags = ["--log", str(log), "--log-format", "json"]
    before = files(one.bundle)
    command = [*prefix, *node.runtime(), *flags, "create", "--bundle", str(one.bundle), id or one.id]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b""), text
    assert text.startswith("gpushare: ") and text.count("\n") == 1 and text.endswith("\n"), text
    assert text[:-1].isprintable() and len(text) < MAX_LINE, text
    assert "internal error" not in text and not [part for part in quoted if part not in text], text
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert (entry["level"], entry["msg"]) == ("error", text[:-1])
    log.unlink()
    assert files(one.bundle) == before
    assert traces(node) == []
    return text


def starts(node: Node, container: MakeContainer) -> None:
    """Assert that the host still starts containers."""
    one = container(["true"], env={"GPUSHARE_MEMORY": "16Gi"}, runtime=node.runtime())
    assert one.run() == 0, one.stderr
    one.delete()
    assert traces(node) == []
