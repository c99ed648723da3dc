"""The program `gpushare agent`, killed 200 times while it takes memory back: the borrowers are processes over the shim
and the simulated driver, with leases, limits files and usage files as containers have them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.model import Share
from gpushare.state import leasefile, leases, shm_abi, storage, usage_reader
from gpushare.system import procs

from simulator.ledger import Ledger
from simulator.simhost import make_simhost
from tests.shim.box import GIB, Box
from tests.shim.inside import PRELUDE
from tests.shim.test_live import TALK
from tests.support import host, kills
from tests.support.lending import Strace, children, killed
from tests.support.rootfs import run
from tests.unit import pure

KILLS = 200
SOME = range(0, KILLS, 1 if kills.PARTS else 40)  # make test-kills, make test
REQUEST, LIMIT, ASKED = 4 * GIB, 12 * GIB, 3 * GIB
DEVICE_BYTES = LIMIT + (GIB >> 1)
ENDS_S = 60.0  # more than an agent needs on a busy machine

BORROW = """
start()
held = []
while alloc(256 * MIB, held) == SUCCESS:
    pass
say(len(held))
"""
ASK = f"""
start()
say("ready")
while True:
    held, refused = [], 0
    while alloc({ASKED}, held) == OUT_OF_MEMORY:
        refused += 1
    say(refused)
    ok(cuda.cuMemFree_v2(held[0]))
    say("freed")
"""


class Program:
    """A program in a box, with a lease in the state directory."""

    def __init__(self, name: str, box: Box, text: str) -> None:
        self.name, self.box = name, box
        source = PRELUDE + TALK + textwrap.dedent(text)
        self.process = box.popen(["python3", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.init = 0

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        assert line, f"{self.name} has ended"
        return line

    def wants(self) -> int:
        return usage(self.box).wanted_bytes(0)


def usage(box: Box) -> usage_reader.Usage:
    return usage_reader.read_usage(box.usage.read_bytes(), 1)


class Stage:
    """A simulated device, a state directory, and agents."""

    def __init__(self, directory: Path) -> None:
        self.simhost = make_simhost(directory / "host", gpus=1, memory_bytes=DEVICE_BYTES)
        self.state = directory / "state"
        storage.prepare(str(self.state))
        self.log = directory / "decisions"
        self.config = host.write_config(directory / "config.yaml", self.simhost, policy={"lending": "evict"})
        self.company = directory / "company"
        self.strace = Strace(self.config, self.state, directory / "calls")

    @contextmanager
    def program(self, name: str, text: str, limit: int) -> Iterator[Program]:
        lent: dict[str, Any] = {"whole": [limit], "lending": constants.EVICT} if limit > REQUEST else {}
        arguments: dict[str, Any] = {
            "simhost": self.simhost,
            "gpu_bytes": DEVICE_BYTES,
            "compute": [100],
            "company": self.company,
        }
        with Box([REQUEST], **arguments, **lent) as box, ExitStack() as stack:
            one = Program(name, box, text)
            stack.callback(self.end, one)
            self.hold(one, limit)
            yield one

    def hold(self, one: Program, limit: int) -> None:
        """Give the program the lease and the files of a container."""
        until(lambda: bool(children(one.process.pid)), "no first process")
        (one.init,) = children(one.process.pid)
        found, me = procs.find(one.init), procs.myself()
        assert found is not None
        lent: dict[str, Any] = {"virtual_bytes": limit, "lending": constants.EVICT} if limit > REQUEST else {}
        share = Share(0, one.box.devices[0], REQUEST, page=one.box.page[0], **lent)
        lease = pure.lease(share, container_id=one.name)._replace(
            boot_id=procs.boot_id(), creator_pid=me.pid, creator_start=me.start, created=time.time()
        )
        folder = Path(storage.container_dir(str(self.state), one.name))
        folder.mkdir()
        (folder / "lease.json").write_bytes(leasefile.to_json(lease))
        limits = Path(storage.make_share_dir(str(self.state), one.name, lease.shares), "limits")
        limits.touch()
        (folder / "rw").mkdir()
        run("mount", "--bind", one.box.limits, limits)
        run("mount", "--bind", one.box.usage.parent, folder / "rw")
        leases.hold(str(self.state), lease, found, "")

    def end(self, one: Program) -> None:
        one.process.kill()
        one.process.communicate()
        folder = Path(storage.container_dir(str(self.state), one.name))
        for point in (folder / "share" / "limits", folder / "rw"):
            run("umount", point)
        shutil.rmtree(folder)

    def agent(self) -> subprocess.Popen[str]:
        words = [host.BIN / "gpushare", "--config", self.config, "--state", self.state, "agent"]
        agent = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
        assert agent.stdout and agent.stdout.readline().startswith("lending memory")
        return agent

    @contextmanager
    def borrower(self, name: str) -> Iterator[Program]:
        """A program that has borrowed all of the device, from an agent that was killed then."""
        with killed(self.agent()) as agent, self.program(name, "say('begin')\n" + BORROW, LIMIT) as one:
            assert one.says() == "begin"
            until(lambda: lends(one), "the agent does not lend")
            one.go()
            assert int(one.says()) * (256 << 20) > LIMIT - GIB
            agent.kill()
            agent.wait()
            yield one

    def check(self, *running: Program) -> None:
        """Leases and limits files have the requests, whatever was borrowed; no lease is damaged or missing."""
        seen = leases.view(str(self.state))
        assert not seen.damaged
        found = {lease.id: lease.shares[0].memory_limit_bytes for lease in seen.live}
        assert found == {one.name: REQUEST for one in running}
        for one in running:
            (limit,) = shm_abi.read_limits(one.box.limits.read_bytes()).devices
            assert limit.memory_limit_bytes == REQUEST and limit.virtual_bytes in (0, LIMIT)

    def completed(self, waiting: Program, borrower: Program) -> None:
        """The waiting program has its memory, the borrower has ended with a reason, and nothing else has."""
        waiting.says()
        assert borrower.process.wait(ENDS_S) != 0  # that of unshare, whose child was killed
        self.check(waiting)
        held = usage(waiting.box).used_bytes(0)
        assert ASKED < held <= REQUEST
        until(lambda: self.used_bytes() == held, "the driver has memory of a program that has ended")
        assert f"id={borrower.name} " in self.log.read_text()
        waiting.go()
        assert waiting.says() == "freed"
        assert waiting.wants() == 0

    def used_bytes(self) -> int:
        with Ledger(str(self.simhost / "dev" / "nvidia0")) as ledger:
            return ledger.used_bytes


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ENDS_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def lends(one: Program) -> bool:
    (limit,) = shm_abi.read_limits(one.box.limits.read_bytes()).devices
    return bool(limit.flags & shm_abi.DEVICE_LENDING)


@pytest.mark.timeout(3600)
def test_agent_killed_200_times_while_it_takes_memory_back_loses_nothing(tmp_path: Path) -> None:
    """kill -9 at points from the first search of an agent to the end of the borrower: the next agent completes it."""
    stage, unfinished = Stage(tmp_path), 0
    with stage.program("waiting", ASK, REQUEST) as waiting:
        assert waiting.says() == "ready"

        def ask() -> None:
            waiting.go()
            until(lambda: waiting.wants() > 0, "no need was stated")

        with stage.borrower("recorded") as one:
            ask()
            stage.strace.record(lambda: stage.completed(waiting, one))
        for number in SOME:
            with stage.borrower(f"borrower{number}") as one:
                ask()
                with killed(stage.strace.start_to_be_killed(number, KILLS)) as agent:
                    assert agent.wait(ENDS_S) == -signal.SIGKILL, f"kill {number}"
                if one.process.poll() is None and procs.find(one.init) is not None:
                    unfinished += 1
                    stage.check(waiting, one)
                with killed(stage.agent()):
                    stage.completed(waiting, one)
    assert unfinished > 0
