"""Containers with random requests and limits that borrow memory, with each way to take it back.

Containers and the agent are killed. At all times each lease and its limits file contain the request, and the requests
fit on the device; no container gets more than its limit, none is refused its request, and the agent ends none that
does not borrow."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpushare.state import leases, shm_abi, storage

from tests.support.host import PYTHON, Node, python_mounts
from tests.support.judge import taken
from tests.support.lending import start_agent
from tests.support.runc import Container

from .stage import GIB, MEMORY_BYTES, Stage
from .tenants import books

PROGRAM = Path(__file__).with_name("borrow.py")
WORKERS = 5
REQUESTS_GIB, MOST_GIB = (2, 8), 36  # five requests always fit on the device, limits do not
LOOK_S = 0.1
LATER_S = 60.0
WAYS: dict[str, dict[str, Any]] = {
    "movable": {"policy": {"lending": "movable"}, "oversubscription": {"host_memory": "200Gi"}},
    "evict": {"policy": {"lending": "evict"}},
}


class Borrowers:
    """The containers of one way. `requests`: container id -> bytes."""

    def __init__(self, stage: Stage, node: Node, until: float) -> None:
        self.stage, self.node, self.until = stage, node, until
        self.requests: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    @property
    def goes_on(self) -> bool:
        """Until the time is over and a container has borrowed, which takes longer on a busy machine."""
        late = 0 if self.counts["borrow"] else LATER_S
        return time.monotonic() < self.until + late and not self.stage.stopped.is_set()

    def worker(self, number: int) -> None:
        dice = random.Random(f"{self.stage.seed} {number}")
        while self.goes_on:
            self.once(dice)

    def once(self, dice: random.Random) -> None:
        request = dice.randrange(*REQUESTS_GIB)
        limit = dice.choice((request, dice.randint(request, MOST_GIB), MOST_GIB))
        seed = dice.randrange(1 << 30)
        with Container(
            self.stage.directory / "borrowers",
            [PYTHON, f"/opt/{PROGRAM.name}", str(request * GIB), str(seed)],
            env={"GPUSHARE_MEMORY": f"{request}Gi..{limit}Gi", "GPUSHARE_DEVICES": "0"},
            mounts=python_mounts(PROGRAM),
            name="soak",
            **self.node.way(dice.choice(("hook", "runtime"))),
        ) as one:
            self.requests[one.id] = request * GIB
            one.create()
            namespace = Path(f"/proc/{one.pid}/ns/pid").stat().st_ino
            before = taken(self.node.driver_root, namespace).peak_bytes  # of an earlier namespace with this number
            one.start()
            self.stage.stopped.wait(dice.uniform(0, 6))
            borrows = self.use_of(one.id) > request * GIB
            group = taken(self.node.driver_root, namespace)
            os.kill(one.pid, signal.SIGKILL)  # a zombie of this process if the agent has ended it
            code = one.wait()
            if group.peak_bytes > max(limit * GIB, before):
                self.stage.record_error(f"{one.id} had {group.peak_bytes} bytes, its limit is {limit} GiB")
            if one.stdout or code in (1, 3):
                self.stage.record_error(f"{one.id} of {request}..{limit} GiB: {one.stdout}{one.stderr}")
            if limit == request and one.id in self.evicted():
                self.stage.record_error(f"the agent ended {one.id}, which does not borrow")
            if borrows and limit == request:
                self.stage.record_error(f"{one.id} uses more than {limit} GiB")
            self.counts["borrow" if borrows else "within the request"] += 1

    def use_of(self, container_id: str) -> int:
        """Return what a container reports on device and host together; 0 if it has ended."""
        try:
            usage = storage.read_usage(str(self.node.state), container_id, 1)
        except shm_abi.RegionError:
            return 0
        return usage.used_bytes(0) + usage.host_bytes(0)

    def evicted(self) -> set[str]:
        return {line["id"] for line in self.node.decisions() if line["decision"] == "evicted"}

    def check(self) -> None:
        """Compare leases and limits files with what was requested."""
        state = str(self.node.state)
        while self.goes_on:
            seen = leases.view(state)
            if seen.damaged:
                self.stage.record_error(f"damaged leases: {seen.damaged}")
            for lease in seen.live:
                held = lease.shares[0].memory_limit_bytes
                if held != self.requests.get(lease.id):
                    self.stage.record_error(f"{lease.id} requested {self.requests.get(lease.id)} bytes and has {held}")
                self._compare(state, lease.id, held)
            if sum(lease.shares[0].memory_limit_bytes or 0 for lease in seen.live) > MEMORY_BYTES:
                self.stage.record_error("the requests exceed the device")
            self.counts["looks"] += 1
            self.stage.show.advance(f"{self.counts['looks']} looks", 0)
            self.stage.stopped.wait(LOOK_S)

    def _compare(self, state: str, container_id: str, held: int | None) -> None:
        path = Path(storage.container_dir(state, container_id), "share", "limits")
        try:
            stated = storage.read_limits(str(path)).devices[0].memory_limit_bytes
        except (OSError, shm_abi.RegionError):
            return  # it is starting or ending
        if stated != held:
            self.stage.record_error(f"the limits file of {container_id} has {stated} bytes, its lease {held}")

    def agents(self) -> None:
        """Run one agent after another, and kill each at a random moment."""
        dice = random.Random(self.stage.seed)
        while self.goes_on:
            with start_agent(self.node) as agent:
                self.stage.stopped.wait(min(dice.uniform(0.5, 6), max(0.5, self.until - time.monotonic())))
                agent.kill()
            self.counts["agents killed"] += 1


def run(stage: Stage, seconds: float) -> dict[str, Any]:
    """Run each way for half of the time."""
    return {way: _run(stage, way, seconds / len(WAYS)) for way in WAYS}


def _run(stage: Stage, way: str, seconds: float) -> dict[str, int]:
    stage.show.phase(f"borrowers, {way}", seconds)
    node = Node(stage.directory / way, stage.node.driver_root, **WAYS[way])
    borrowers = Borrowers(stage, node, time.monotonic() + seconds)
    try:
        with ThreadPoolExecutor(WORKERS + 2) as pool:
            working = [pool.submit(borrowers.worker, number) for number in range(WORKERS)]
            working.append(pool.submit(borrowers.check))
            if way == "evict":
                working.append(pool.submit(borrowers.agents))
            for one in working:
                one.result()
        stage.check_stopped()
        borrowers.counts["evicted"] = len(borrowers.evicted())
        if node.cli("prune").returncode or node.left():
            stage.record_error(f"containers that borrowed left {node.left()}")
    finally:
        node.close()
    for line in books(stage, 0)["clients"]:
        if line["alive"]:
            stage.record_error(f"the device still has a client: {line}")
    if not borrowers.counts["borrow"]:
        stage.record_error(f"no container borrowed with {way}, so the run proves nothing")
    stage.show.end(", ".join(f"{number} {what}" for what, number in sorted(borrowers.counts.items())))
    return dict(borrowers.counts)
