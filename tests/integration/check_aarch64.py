"""The aarch64 snapshot that tools/aarch64 cross-compiles, run by qemu-user: make test-aarch64."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host import BUILD, TREE, Node
from tests.support.runc import Container

MakeContainer = Callable[..., Container]
THERE = BUILD / "aarch64"
SNAPSHOT = THERE / "libexec" / "snapshot"
PT_LOAD, WRITABLE, EXECUTABLE = 1, 2, 1
LARGEST_PAGE = 64 << 10  # of kernels for aarch64
STATE = {"ociVersion": "1.0.2", "id": "c1", "pid": 1, "status": "stopped", "bundle": "/nowhere"}


@pytest.fixture(scope="module", autouse=True)
def _made() -> None:
    done = subprocess.run([TREE / "tools/aarch64"], cwd=TREE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def segments(path: Path) -> list[tuple[int, ...]]:
    """(type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment) of each
    segment."""
    data = path.read_bytes()
    first, count = struct.unpack_from("<32xQ16xH", data)
    return [struct.unpack_from("<IIQQQQQQ", data, at) for at in range(first, first + 56 * count, 56)]


def outcome(program: str, node: Node, stage: str, text: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of "snapshot" or "ordinary". The state is a file, as from the
    launcher."""
    words = [THERE / "bin" / program, "--config", node.config, "--state", node.state, stage]
    with tempfile.TemporaryFile("w+") as state:
        state.write(text)
        state.seek(0)
        done = subprocess.run(words, stdin=state, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("page_bytes", [4096, 16384, LARGEST_PAGE])
def test_snapshot_starts_with_each_page_size(page_bytes: int) -> None:
    done = subprocess.run(["qemu-aarch64", "-p", str(page_bytes), SNAPSHOT], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_segments_fit_the_largest_page() -> None:
    """The kernel maps whole pages, and one page has one protection."""
    loaded = sorted((one for one in segments(SNAPSHOT) if one[0] == PT_LOAD), key=lambda one: one[3])
    assert len(loaded) >= 3
    for _, flags, offset, address, _, _, _, alignment in loaded:
        assert (offset - address) % LARGEST_PAGE == 0 and alignment == LARGEST_PAGE
        assert not (flags & WRITABLE and flags & EXECUTABLE)
    for one, other in zip(loaded, loaded[1:]):
        assert (one[3] + one[6] - 1) // LARGEST_PAGE < other[3] // LARGEST_PAGE


@pytest.mark.parametrize(
    "stage, text, code",
    [
        ("poststop", json.dumps(STATE), 0),
        ("poststop", '{"id":', 0),
        ("poststop", "", 0),
        ("nothing", "", 64),
    ],
)
def test_outcome_equals_that_of_the_ordinary_program(node: Node, stage: str, text: str, code: int) -> None:
    seen = outcome("snapshot", node, stage, text)
    assert seen == outcome("ordinary", node, stage, text)
    assert seen[0] == code and (seen[2].startswith("gpushare: ") or text == json.dumps(STATE))


def test_poststop_releases_the_share(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "1000"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook())
    one.start()
    assert node.leases() == [one.id]
    state = {**one.state(), "status": "stopped"}
    one.kill(signal.SIGKILL)
    one.wait()
    assert outcome("snapshot", node, "poststop", json.dumps(state)) == (0, "", "")
    assert node.leases() == []


def test_stale_configuration_starts_the_ordinary_program(container: MakeContainer, node: Node) -> None:
    """Reading it needs modules in C: the snapshot executes the ordinary program beside it, in this machine's Python."""
    one = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"})
    ended = subprocess.Popen(["true"])
    ended.wait()
    state = {**STATE, "id": one.id, "pid": ended.pid, "status": "creating", "bundle": str(one.bundle)}
    seen = outcome("snapshot", node, "prestart", json.dumps(state))
    assert seen[0] and str(ended.pid) in seen[2]
    assert (node.state / "node.json").exists()
    assert node.leases() == []
