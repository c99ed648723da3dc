"""`make demo`, complete and interrupted by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.__main__ import judged
from tests.support import host
from tools import pictures

DEMO = [sys.executable, "-m", "demo"]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_files_left() -> Iterator[None]:
    before = set(host.BUILD.glob("demo-*"))
    yield
    assert set(host.BUILD.glob("demo-*")) == before


def test_demo_runs_twice() -> None:
    """As a pipe, and on a terminal, where it looks like its picture."""
    done = subprocess.run(DEMO, cwd=host.TREE, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout  # only terminals get colours
    for word in ("alice", "bob"):
        assert f"  {word}-" in done.stdout, "gpushare list shows both"
    assert done.stdout.count(" exact") == 2 and "not a byte more" in done.stdout
    assert "300 MiB of each limit is the program's CUDA context" in done.stdout
    assert pictures.texts(pictures.draw("demo")) == pictures.drawn("demo"), "run `make pictures`"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(number: int) -> None:
    demo = subprocess.Popen(
        DEMO, cwd=host.TREE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert demo.stdout and demo.stderr
    for line in demo.stdout:
        if "bob" in line and "is started" in line:
            break
    os.kill(demo.pid, number)
    demo.stdout.read()
    assert "containers and mounts are gone" in demo.stderr.read()
    assert demo.wait() == 130
    demo.stdout.close()
    demo.stderr.close()
    in_session = [p for p in Path("/proc").glob("[0-9]*/stat") if _session(p) == demo.pid]
    assert not in_session


def _session(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except OSError:
        return 0


SEEN = {"cuda_free_bytes": 4 * GIB - 300, "cuda_total_bytes": 4 * GIB, "nvml_total_bytes": 4 * GIB}


def test_kept_limit_passes() -> None:
    assert judged("alice", {"got_bytes": 4 * GIB - 300}, SEEN, 4 * GIB).verdict == ""


@pytest.mark.parametrize(
    ("full", "seen", "taken"),
    [
        ({"got_bytes": 4 * GIB}, SEEN, 4 * GIB + 1),
        ({"got_bytes": 3 * GIB}, SEEN, 3 * GIB),
        ({"got_bytes": 4 * GIB - 300}, {**SEEN, "nvml_total_bytes": 16 * GIB}, 4 * GIB),
    ],
)
def test_missed_limit_fails(full: dict[str, int], seen: dict[str, int], taken: int) -> None:
    assert judged("alice", full, seen, taken).verdict.startswith("MISSED")
