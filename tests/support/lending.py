"""Run `gpushare agent` for tests, and wait until it lends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpushare.monitor.eviction import HOLD_S
from gpushare.state import shm_abi, storage

from .host import BIN, Node


def start_agent(node: Node) -> subprocess.Popen[str]:
    """Start an agent, and return when it lends."""
    words = [str(BIN / "gpushare"), "--config", str(node.config), "--state", str(node.state), "agent"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("lending memory"), process.communicate()[1]
    return process


@contextmanager
def agent(node: Node, said: list[str]) -> Iterator[None]:
    """Run an agent until the end of the block; its standard error is then in `said`."""
    with start_agent(node) as process:
        try:
            yield
        finally:
            process.terminate()
            said.append(process.communicate()[1])


def wait_until_lent(node: Node) -> None:
    """Wait for the agent's next round, which lends again some time after the last need."""
    end = time.monotonic() + HOLD_S + 10
    for path in node.state.glob("containers/*/share/limits"):
        while not storage.read_limits(str(path)).devices[0].flags & shm_abi.DEVICE_LENDING:
            assert time.monotonic() < end, f"{path}: not lent"
            time.sleep(0.02)
