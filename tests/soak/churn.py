"""Start and end containers while killing processes: the hook, launcher, runtime, container, or a delete.

After a kill, the engine, which does not know gpushare, runs `delete --force`, or nothing if it was killed as well.
The next start, or a final `gpushare prune`, finds and removes the leftovers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpushare.state import leases, leftover
from gpushare.system import procs

from tests.support import processes
from tests.support.runc import Container, RuntimeFailed

from .stage import GIB, MEMORY_BYTES, MILL, Stage

WORKERS = 6
LIMIT_BYTES = GIB
ENGINE_DIES = 0.2  # then no delete runs
LET_LIVE = 0.3
HOOK_ENDS_S = 10.0  # on a busy machine


def role_of(pid: int) -> str:
    """Return the process's role in a start: hook, launcher, runtime or container; "" for a foreign process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    line = b" ".join(words)
    if words[:2] == [b"runc", b"init"]:
        return "container"
    if b"gpushare-hook" in line.partition(b"--")[0]:
        return "hook"
    if b"gpushare-runtime" in line.partition(b"--")[0]:
        return "launcher"
    return "runtime" if os.path.basename(words[0]) == b"runc" else ""


def descendants(pid: int) -> dict[int, str]:
    """`pid` and its descendants, by role."""
    found, look_at = {}, [pid]
    while look_at:
        one = look_at.pop()
        if kind := role_of(one):
            found[one] = kind
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                look_at += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue  # ended meanwhile
    return found


class Churn:
    """All workers' counts; `once` runs one container's lifecycle."""

    def __init__(self, stage: Stage, until: float) -> None:
        self.stage, self.until = stage, until
        self.counts: Counter[str] = Counter()
        self.create_s = 0.3  # rough duration of a create: kills are spread over it
        self._lock = threading.Lock()

    def worker(self, number: int) -> None:
        dice = random.Random(f"{self.stage.seed} {number}")
        while time.monotonic() < self.until and not self.stage.stopped.is_set():
            self.once(dice)
            with self._lock:
                self.counts["containers"] += 1
                left_s = max(0.0, self.until - time.monotonic())
                self.stage.show.advance(f"{self.counts['containers']} containers, {left_s:.0f} s to go", 0)

    def once(self, dice: random.Random) -> None:
        way = dice.choice(("hook", "runtime"))
        command = ["sh", "-c", f"sleep inf | {MILL} 1 2 {dice.randrange(1 << 30)}"]  # until it is killed
        with self.stage.container(command, memory=str(LIMIT_BYTES), way=way) as one:
            victim = "" if dice.random() < LET_LIVE else self.killed_create(one, dice)
            if one.pid or not victim:
                self.live(one, dice, victim)
            self.finish(one, dice)

    def killed_create(self, one: Container, dice: random.Random) -> str:
        """Run a create with a kill in it and return the victim's role; "" without one. The container may exist
        anyway."""
        begin = time.monotonic()
        create = one.begin_create()
        try:
            create.wait(dice.uniform(0, 1.2 * self.create_s))
        except subprocess.TimeoutExpired:
            pass
        victims = descendants(create.pid) if create.poll() is None else {}
        wanted = dice.choice(sorted(set(victims.values()))) if victims else ""
        for pid in [pid for pid, kind in victims.items() if kind == wanted][:1]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                wanted = ""
        code = create.wait(120)
        if code == 0 and not wanted:
            self.create_s += 0.1 * (time.monotonic() - begin - self.create_s)
        if wanted:
            self.count(f"killed {wanted}")
        if code == 0:
            one.pid = int((one.bundle / "pid").read_text())
        elif not wanted:
            self.stage.record_error(f"{one.id}: create ended with {code}, without a kill: {one.stderr}")
            return "none"
        return wanted

    def live(self, one: Container, dice: random.Random, victim: str) -> None:
        """Check that the running container has a lease; after a moment kill it, or leave it to its delete."""
        try:
            one.start()
        except RuntimeFailed as error:
            if not victim:
                self.stage.record_error(f"{one.id}: ended without a kill: {error}")
            return
        if not victim and one.id not in self.stage.node.leases():
            self.stage.record_error(f"{one.id} runs without a lease")
        self.stage.stopped.wait(dice.uniform(0, 0.3))
        if dice.random() < 0.5:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # ended with its victim
            one.wait()
            self.count("killed container")

    def finish(self, one: Container, dice: random.Random) -> None:
        """Delete it as an engine; or kill that delete, or run no engine at all."""
        if dice.random() < ENGINE_DIES:
            self.count("never deleted")
            self.dead_engine(one)
            return
        delete = subprocess.Popen(
            [*one._runtime, "delete", "--force", one.id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if dice.random() < 0.3:
            try:
                delete.wait(dice.uniform(0, 0.1))
            except subprocess.TimeoutExpired:
                delete.kill()
                self.count("killed delete")
        delete.wait(120)
        self.dead_engine(one)
        # A dead lease may wait for the next start: runc has no poststop for a container that it does not know (any
        # more). The hook of a killed runc runs on for a moment and keeps its reservation and activity file until then.
        until = time.monotonic() + HOOK_ENDS_S
        late = False
        while held := self.held(one.id):
            if not late:
                late = True
                self.count(f"lease lived a moment longer: {held}")
            if time.monotonic() > until:
                self.stage.record_error(f"{one.id} has ended and its lease is alive: {held}")
                return
            self.stage.stopped.wait(0.02)

    def held(self, container_id: str) -> str:
        """Return why its lease is alive; "" if it is dead or only reserved."""
        state = str(self.stage.node.state)
        for lease in leases.view(state).live:
            if (lease.id, lease.state) != (container_id, "held"):
                continue
            if procs.alive(lease.init_pid, lease.init_start):
                return "its init runs"
            if not lease.first and leftover.lives(state, lease):
                return "its cgroup is populated, or its usage file is mapped"
        return ""

    def dead_engine(self, one: Container) -> None:
        """Remove all processes and cgroups of the container, as an engine's restart does; poststop never ran."""
        self.stage.sweep(one.id)
        one.after_kill()
        one._created = False

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def poll(stage: Stage, until: float) -> int:
    """Poll like a monitor: every query succeeds, and grants never exceed the device. Return the number of queries."""
    looks = 0
    while time.monotonic() < until and not stage.stopped.is_set():
        stage.cli("list")
        for device in json.loads(stage.cli("devices", "--format", "json") or "[]"):
            if device["granted_bytes"] > MEMORY_BYTES:
                stage.record_error(f"grants exceed the device: {device}")
        looks += 1
        stage.stopped.wait(0.5)
    return looks


def run(stage: Stage, seconds: float) -> dict[str, Any]:
    stage.show.phase("churn with kills", seconds)
    until = time.monotonic() + seconds
    churn = Churn(stage, until)
    with ThreadPoolExecutor(WORKERS + 1) as pool:
        working = [pool.submit(churn.worker, number) for number in range(WORKERS)]
        looks = pool.submit(poll, stage, until)
        for one in working:
            one.result()
        churn.counts["looks"] = looks.result()
    stage.check_stopped()
    stage.sweep()
    for pid in processes.children():  # hooks whose runtime was killed
        if processes.wait_exit(pid, 60) is None:
            stage.record_error(f"pid {pid} does not end")
    stage.cli("prune")
    if left := stage.node.left():
        stage.record_error(f"prune left {left}")
    stage.show.end(", ".join(f"{number} {what}" for what, number in sorted(churn.counts.items())))
    return dict(churn.counts)
