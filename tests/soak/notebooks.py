"""Six notebooks of 12 GiB on a device of 16 GiB, which work at random moments, with an agent that suspends idle ones.

Each round of work compares all that the notebook has written with what it wrote. No notebook is ended, no container has
more than its limit by the device's ledger, and each call is served. The agent is killed now and then."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from simulator.models import Costs
from simulator.simhost import CHECKPOINTS, make_simhost
from tests.support.host import TREE, Node
from tests.support.judge import peak_bytes
from tests.support.lending import start_agent
from tests.support.tenant import CHANNEL_IN_CONTAINER, Tenant

from .stage import GIB, Stage

PROGRAM = TREE / "tests" / "integration" / "programs" / "notebook.py"
NOTEBOOKS, LIMIT_BYTES, DEVICE_BYTES = 6, 12 * GIB, 16 * GIB
SERVED_S = 180.0  # the longest wait for one's turn, on a busy machine
POLICY = {"suspend": {"idle": "1s", "least": "1s"}}
# As drivers 580 and 595: see docs/suspend.md
COSTS = Costs(host_rate=48 * GIB, restore_once=True, sync_crashes=True)


class Notebooks:
    def __init__(self, stage: Stage, node: Node, until: float) -> None:
        self.stage, self.node, self.until = stage, node, until
        self.counts: Counter[str] = Counter()
        self.agent_runs = threading.Event()

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until and not self.stage.stopped.is_set()

    def worker(self, number: int) -> None:
        dice = random.Random(f"{self.stage.seed} {number}")
        words = (CHANNEL_IN_CONTAINER, str(dice.randint(30, 44) * (GIB >> 2)), dice.choice(("", "cuCtxSynchronize")))
        one = Tenant(
            *(self.stage.directory / "notebooks", f"soak-{number}", {"GPUSHARE_MEMORY": "12Gi"}, self.node),
            way=dice.choice(("hook", "runtime")),
            program=PROGRAM,
            words=words,
        )
        try:
            self.agent_runs.wait()  # a start for which there is no room needs one
            one.container.start()
            self.counts["begun"] += 1
            one.expect("started")
            one.go()
            one.expect("ready", SERVED_S)
            while self.goes_on:
                self.stage.stopped.wait(dice.expovariate(1 / 4))
                one.go()
                worked = one.expect("worked", SERVED_S)
                self.counts["rounds"] += 1
                self.counts["slow rounds"] += worked["seconds"] > 1
                if not worked["right"]:
                    self.stage.record_error(f"{one.container.id} read something else than it wrote")
                self.stage.show.advance(f"{self.counts['rounds']} rounds", 0)
            most = peak_bytes(self.node.driver_root, one.pid_namespace())
            if most > LIMIT_BYTES:
                self.stage.record_error(f"{one.container.id} had {most} bytes, its limit is {LIMIT_BYTES}")
        except AssertionError as error:
            self.stage.record_error(f"{one.container.id}: {error}")
        finally:
            one.close()

    def agents(self) -> None:
        """Run one agent after another. Each is killed at a random moment, the first one after all starts."""
        dice = random.Random(self.stage.seed)
        while self.counts["working"] and not self.stage.stopped.is_set():
            with start_agent(self.node) as agent:
                self.agent_runs.set()
                left = dice.randrange(50, 300)
                while left and self.counts["working"] and not self.stage.stopped.wait(0.1):
                    left -= self.counts["begun"] == NOTEBOOKS
                agent.kill()
                said = agent.communicate()[1]
            self.counts["agents killed"] += 1
            self.counts["suspended"] += said.count(" was suspended ")
            self.counts["resumed"] += said.count(" was resumed ")


def run(stage: Stage, seconds: float) -> dict[str, Any]:
    stage.show.phase("notebooks", seconds)
    root = make_simhost(stage.directory / "suspending", memory_bytes=DEVICE_BYTES, driver=CHECKPOINTS, costs=COSTS)
    node = Node(stage.directory / "notebook", root, policy=POLICY)
    notebooks = Notebooks(stage, node, time.monotonic() + seconds)
    notebooks.counts["working"] = 1
    try:
        with ThreadPoolExecutor(NOTEBOOKS + 1) as pool:
            agents = pool.submit(notebooks.agents)
            working = [pool.submit(notebooks.worker, number) for number in range(NOTEBOOKS)]
            wait(working)
            notebooks.counts["working"] = 0
            for one in (*working, agents):
                one.result()
        stage.check_stopped()
        if node.cli("prune").returncode or node.left():
            stage.record_error(f"notebooks left {node.left()}")
    finally:
        node.close()
    del notebooks.counts["working"], notebooks.counts["begun"]
    if not notebooks.counts["suspended"]:
        stage.record_error("no notebook was suspended, so the run proves nothing")
    stage.show.end(", ".join(f"{number} {what}" for what, number in sorted(notebooks.counts.items())))
    return dict(notebooks.counts)
