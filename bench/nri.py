"""The time that `gpushare nri` adds to CreateContainer of containerd 2.1: creates with and without the plugin."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integration.test_nri import Engine, running
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import make_root

ROUNDS = 10
CREATES = 10


def _creates_ms(engine: Engine) -> list[float]:
    found = []
    with engine.pod() as pod:
        for number in range(CREATES):
            began = time.perf_counter()
            one = pod.container(Want(SLEEP), f"c{number}")
            found.append((time.perf_counter() - began) * 1000)
            one.remove()
    return found


def added_ms(directory: Path) -> list[float]:
    """One difference of medians for each round."""
    found = []
    with running(make_root(directory / "image")) as engine:
        for _ in range(ROUNDS):
            without = sorted(_creates_ms(engine))
            engine.start_plugin()
            try:
                with_plugin = sorted(_creates_ms(engine))
            finally:
                engine.plugin.end()
            found.append(with_plugin[CREATES // 2] - without[CREATES // 2])
    return found
