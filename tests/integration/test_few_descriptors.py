"""Starts that may open few files: each ends, a refusal is one line, and nothing is left."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host import Node
from tests.support.runc import Container

ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}


def outcome(one: Container, command: str, files: int) -> tuple[int, str]:
    """(exit code, all output) of a start that may open `files` files. runc alone hangs with 12 and 18."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    out = one.bundle / "out"
    one._created = True
    with open(out, "ab") as file:  # as in Container.begin_create
        done = subprocess.run(
            [*one._runtime, command, "--bundle", str(one.bundle), one.id],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=limit,
            timeout=60,
        )
    return done.returncode, one.with_hook_line(out.read_text())


@pytest.mark.parametrize("files", [8, 12, 18, 63])
@pytest.mark.parametrize("command", ["create", "run"])
def test_runtime_with_few_descriptors_is_refused_before_any_reservation(
    container: Callable[..., Container], node: Node, files: int, command: str
) -> None:
    one = container(["true"], env=ONE_GIB, runtime=node.runtime())
    before = (one.bundle / "config.json").read_bytes()
    code, text = outcome(one, command, files)
    assert code == 71
    assert text.startswith(f"gpushare: RLIMIT_NOFILE is {files}: ") and text.count("\n") == 1, text
    assert (one.bundle / "config.json").read_bytes() == before
    assert node.leases() == [] and node.left() == []


@pytest.mark.parametrize(("way", "files"), [("runtime", 64), ("runtime", 67), ("hook", 24), ("hook", 32), ("hook", 40)])
def test_later_lack_of_descriptors_is_no_internal_error(
    container: Callable[..., Container], node: Node, way: str, files: int
) -> None:
    one = container(["true"], env=ONE_GIB, **node.way(way))
    code, text = outcome(one, "create", files)
    assert code != 0 and "internal error" not in text and "Traceback" not in text, text
    assert "Too many open files" in text, text
    node.after_failed_create()
    assert node.leases() == [] and node.left() == []


def test_exhaustion_error_names_the_remedy(tmp_path: Path) -> None:
    from gpushare.core import errors
    from gpushare.state import log

    for number in errors.EXHAUSTED:
        line, code = log.line_of(OSError(number, "text of the kernel", str(tmp_path)))
        assert code == 71 and "internal error" not in line and errors.EXHAUSTED[number] in line
    assert "internal error" in log.line_of(OSError(5, "Input/output error"))[0]
