"""Turns: which of the tenants that have memory on the host has it on the device, judged by the device's ledger."""

from __future__ import annotations

import mmap
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from gpushare.state.shm_abi import offset

from simulator.ledger import Ledger
from simulator.simhost import make_simhost
from tests.shim.box import GIB, Box
from tests.shim.inside import MIB
from tests.shim.launches import HELPERS
from tests.shim.test_live import talk

ON_DEVICE = 902 * MIB  # context, the allocation in the device part, and code
ON_HOST = 128 * MIB
SETUP = (
    HELPERS
    + """
def say(*words):
    print(*words, flush=True)
    sys.stdin.readline()
start()
held, function = [], kernel("sweep_ns_arg")
ok(alloc(600 * MIB, held)), ok(alloc(128 * MIB, held))

def sweep(ms=0.2):
    words = (c_uint64(int(1e6 * ms)), held[1], c_uint64(128 * MIB))
    places = (c_void_p * 3)(*(ctypes.addressof(word) for word in words))
    ok(cuda.cuLaunchKernel(function, 64, 1, 1, 1, 1, 1, 0, None, places, None))

def work(seconds):
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        sweep()
        ok(cuda.cuCtxSynchronize())
        rounds += 1
    return rounds
say("ready")
"""
)


@contextmanager
def tenants(
    directory: Path, turn_ms: int, count: int = 2, memory: int = GIB, room: int = 256 * MIB
) -> Iterator[Sequence[Box]]:
    simhost = make_simhost(directory / "host", gpus=1, memory_bytes=4 * memory)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Box(
                    [memory],
                    whole=[2 * memory],
                    gpu_bytes=4 * memory,
                    simhost=simhost,
                    compute=[100],
                    company=directory / "company",
                    turn=(1000 * turn_ms, room),
                )
            )
            for _ in range(count)
        ]


def device_ms(directory: Path, place: int, turn_ms: int, rounds: int = 50) -> float:
    """What a sweep took of the device, in the mean of two tenants that make so many, with all that had to be moved for
    them. `place`: of what they sweep, 0 on the device, 1 on the host."""
    program = SETUP.replace("held[1], c_uint64(128", f"held[{place}], c_uint64(128") + (
        f"for _ in range({rounds}):\n    sweep()\n    ok(cuda.cuCtxSynchronize())\nsay()"
    )
    with tenants(directory, turn_ms) as (a, b), talk(a, program) as first, talk(b, program) as second:
        assert first() == second() == ["ready"]
        other = threading.Thread(target=second)
        other.start()
        first()
        other.join()
        with Ledger(a.device()) as ledger:
            return sum(group.work_ns for group in ledger.groups()) / 2 / rounds / 1e6


def test_the_model_shows_what_memory_on_the_host_costs_and_that_turns_cure_it(tmp_path: Path) -> None:
    """Device time that was counted, no clock: 128 MiB take 11 ms on the bus, with each sweep or once in a turn."""
    fits, thrashes = device_ms(tmp_path / "fits", 0, 0), device_ms(tmp_path / "thrashes", 1, 0)
    cured = device_ms(tmp_path / "cured", 1, 400)
    bus_ms = ON_HOST / 12e6
    assert fits < 0.3, fits
    assert abs(thrashes - fits - bus_ms) < 0.2 * bus_ms, (fits, thrashes)
    assert fits < cured < thrashes / 3, (fits, cured, thrashes)


def held_bytes(box: Box) -> list[int]:
    with Ledger(box.device()) as ledger:
        return [client.bytes for client in ledger.clients() if client.alive]


def test_one_at_a_time_has_its_memory_on_the_device(tmp_path: Path) -> None:
    with tenants(tmp_path, 400) as (a, b):
        program = SETUP + "say(work(2.5))"
        with talk(a, program) as first, talk(b, program) as second:
            assert first() == second() == ["ready"]
            seen: list[list[int]] = []
            over = threading.Event()

            def watch() -> None:
                while not over.wait(0.002):
                    seen.append(held_bytes(a))

            watcher = threading.Thread(target=watch)
            watcher.start()
            results: list[list[str]] = []
            other = threading.Thread(target=lambda: results.append(second()))
            other.start()
            results.append(first())
            other.join()
            over.set()
            watcher.join()
    assert all(int(rounds) > 250 for (rounds,) in results), results  # over the bus there would be some 110
    both = sum(sum(size > ON_DEVICE for size in sizes) > 1 for sizes in seen)
    assert both < len(seen) / 10, (both, len(seen))  # one that is held up longer than it may be idle
    swapped = {tuple(size > ON_DEVICE + ON_HOST // 2 for size in sizes) for sizes in seen}
    assert {(True, False), (False, True)} <= swapped


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "time.sleep(20)", "pass"])
def test_a_holder_that_is_gone_or_idle_holds_nobody_up(tmp_path: Path, end: str) -> None:
    """Killed, asleep, ended: the other has its turn long before that of the first would be over, and its memory."""
    with tenants(tmp_path, 2000) as (a, b):
        with talk(b, SETUP + "began = time.monotonic()\nwork(0.3)\nsay(time.monotonic() - began)") as second:
            assert second() == ["ready"]
            with talk(a, SETUP + f"say(work(0.2))\n{end}\nsys.stdout.close()") as first:
                assert first() == ["ready"]
                first()
                assert max(held_bytes(a)) == ON_DEVICE + ON_HOST
                first_goes = threading.Thread(target=_ends, args=(first,))
                first_goes.start()
                (took,) = second()
                assert float(took) < 1.5
                assert ON_DEVICE + ON_HOST in held_bytes(b)
        first_goes.join()


def test_processes_of_a_container_have_one_turn_and_its_room_together(tmp_path: Path) -> None:
    """Two of them bring no more than one could, one is killed with its part, and the other container has its turn."""
    room = 192 * MIB
    memory = 2 * ON_DEVICE + 64 * MIB  # what one has on the host does not fit beside what the other has on the device
    fill = SETUP.replace("ok(alloc(128 * MIB, held))", "say('started'), ok(alloc(128 * MIB, held))")
    dies = "import signal, threading\nthreading.Timer(0.6, os.kill, (os.getpid(), signal.SIGKILL)).start()\nwork(9)"
    with tenants(tmp_path, 100, memory=memory, room=room) as (a, b), ExitStack() as stack:
        both = [stack.enter_context(talk(a, fill + end)) for end in (dies, "say(work(1.6))")]
        other = stack.enter_context(talk(b, SETUP + "ok(alloc(940 * MIB, held))\nsay(work(1.6))"))
        assert [one() for one in both] == [["started"]] * 2
        assert [one() for one in both] + [other()] == [["ready"]] * 3
        before = sum(held_bytes(a))
        seen: list[list[int]] = []
        rounds: list[int] = []
        workers = [threading.Thread(target=_ends, args=(both[0],))]
        workers += [threading.Thread(target=lambda one=one: rounds.extend(map(int, one()))) for one in (both[1], other)]
        for worker in workers:
            worker.start()
        while workers[1].is_alive() or workers[2].is_alive():
            seen.append(held_bytes(a))
            time.sleep(0.001)
        for worker in workers:
            worker.join()
    assert len(rounds) == 2 and min(rounds) > 300, rounds  # over the bus there would be some 140
    brought = [sum(sizes) - before for sizes in seen if len(sizes) == 3]
    assert room - 4 * MIB <= max(brought)
    assert sum(one > room for one in brought) < len(brought) / 10  # as above
    assert any(len(sizes) == 2 for sizes in seen)


def test_what_a_process_left_there_counts_when_its_container_has_the_next_turn(tmp_path: Path) -> None:
    """One that slept through the end of a turn: its memory stayed, since nobody needed the room. When it wakes up in a
    turn that another process of its container has begun, it has no more than what that one left."""
    room = 192 * MIB
    memory = 2 * ON_DEVICE + 64 * MIB
    fill = SETUP.replace("ok(alloc(128 * MIB, held))", "say('started'), ok(alloc(128 * MIB, held))")
    step = "sweep()\nok(cuda.cuCtxSynchronize())\nsay()\n"
    with tenants(tmp_path, 2000, memory=memory, room=room) as (a, b), ExitStack() as stack:
        sleeps, goes_on = (stack.enter_context(talk(a, fill + 2 * step)) for _ in range(2))
        works = "sweep()\nok(cuda.cuCtxSynchronize())\nprint('works', flush=True)\nwork(0.3)\nsay()"
        other = stack.enter_context(talk(b, SETUP + "ok(alloc(940 * MIB, held))\n" + works))
        for one in (sleeps, goes_on):
            assert one() == ["started"]
        for one in (sleeps, goes_on, other):
            assert one() == ["ready"]
        sleeps()
        assert other() == ["works"]  # which it does when that turn is idle
        goes_on()
        sleeps()
        *own, most = sorted(held_bytes(a))  # that of the other container has most
        assert most > ON_DEVICE + room and sum(own) == 2 * ON_DEVICE + room


def _ends(following: object) -> None:
    try:
        following()  # type: ignore[operator]
    except (AssertionError, OSError, ValueError):
        pass  # it says nothing more


@pytest.mark.parametrize("sign", ["SIGSTOP", "SIGKILL"])
def test_a_holder_that_is_stopped_while_it_waits_for_the_device_holds_nobody_up_for_longer(
    tmp_path: Path, sign: str
) -> None:
    """It has said that it is busy until its work is done, which nobody hears of any more: its turn ends with its time.
    Not sooner, so it is long enough to be told from a turn that is given up, which takes twice as long."""
    with tenants(tmp_path, 700) as (a, b):
        end = f"threading.Timer(0.1, os.kill, (os.getpid(), signal.{sign})).start()"
        with (
            talk(b, SETUP + "began = time.monotonic()\nwork(0.01)\nsay(time.monotonic() - began)") as second,
            talk(a, f"import signal\n{SETUP}sweep(9000)\n{end}\nsay('holds')\nok(cuda.cuCtxSynchronize())") as first,
        ):
            assert second() == first() == ["ready"]
            assert first() == ["holds"]
            first_goes = threading.Thread(target=_ends, args=(first,))
            first_goes.start()
            (took,) = second()
            assert float(took) < 1.2
            assert ON_DEVICE + ON_HOST in held_bytes(b)
        first_goes.join()


def _holds(now: int) -> tuple[int, ...]:
    return now, now + 190_000_000, now + 2_000_000_000, 1, now + 90_000_000, 1


def _wants(now: int) -> tuple[int, ...]:
    return 0, 0, 0, 1, now + 90_000_000, 0


def _garbage(now: int) -> tuple[int, ...]:
    chaos = random.Random(now)
    near = (0, 1, now, now + 90_000_000, now + 200_000_000, 2**63, 2**64 - 1)
    return tuple(chaos.choice((*near, chaos.getrandbits(64))) for _ in range(6))


BELIEVED_S = 0.09  # what it wants is believed no longer


@contextmanager
def lies(box: Box, lie: Callable[[int], tuple[int, ...]]) -> Iterator[list[float]]:
    """A tenant that does nothing but write this into its page, a thousand times a second. The list: seconds for which
    this machine did not let it, that were too long for it to be believed meanwhile."""
    over = threading.Event()
    silent: list[float] = []

    def write(words: memoryview) -> None:  # one by one: struct.pack_into writes zeros before it writes them
        last, at = time.monotonic(), offset("gs_pages", "turn") // 8
        while not over.wait(0.001):
            for place, word in enumerate(lie(time.monotonic_ns()), at):
                words[place] = word
            last, before = time.monotonic(), last
            silent.extend([last - before] if last - before > BELIEVED_S else [])

    with (
        box.pages().open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as page,
        memoryview(page) as plain,
        plain.cast("Q") as words,
    ):
        liar = threading.Thread(target=write, args=(words,))
        liar.start()
        try:
            yield silent
        finally:
            over.set()
            liar.join()


@pytest.mark.parametrize("lie", [_holds, _wants, _garbage], ids=lambda lie: lie.__name__)
def test_one_that_lies_is_waited_for_once(tmp_path: Path, lie: Callable[[int], tuple[int, ...]]) -> None:
    """It says all the time that its turn has just begun, that it is busy, that it has waited longest, or anything. The
    first launch goes ahead over the bus, and those after it as if there were no liar."""
    program = (
        SETUP
        + """
def wait():
    began = time.monotonic()
    sweep()
    ok(cuda.cuCtxSynchronize())
    return time.monotonic() - began
say(wait())
end, waits = time.monotonic() + 1, []
while time.monotonic() < end:
    waits.append(wait())
say(sum(waited > 0.3 for waited in waits))
"""
    )
    with tenants(tmp_path, 200) as (a, b), lies(a, lie) as silent, talk(b, program) as following:
        assert following() == ["ready"]
        (first,) = following()
        assert (0.3 if lie is _holds else 0) < float(first) < 1.5
        if lie is _holds:
            assert held_bytes(b) == [ON_DEVICE]
        (more,) = following()
        assert (float(first) > 0.3) + int(more) <= 1 + len(silent), (first, more, silent)  # 3 or more, if each waits
        assert held_bytes(b) == [ON_DEVICE + ON_HOST]


def test_a_liar_does_not_keep_the_others_from_taking_turns(tmp_path: Path) -> None:
    with tenants(tmp_path, 200, count=3) as (a, b, c), lies(a, _holds):
        program = SETUP + "say(work(1.5))"
        with talk(b, program) as first, talk(c, program) as second:
            assert first() == second() == ["ready"]
            results: list[list[str]] = []
            other = threading.Thread(target=lambda: results.append(second()))
            other.start()
            results.append(first())
            other.join()
    assert all(int(rounds) > 60 for (rounds,) in results), results  # 4 of one, if each launch waited


@pytest.mark.parametrize("words", [(0, 2**64 - 1, 2**64 - 1, 0, 0, 0), (0, 0, 0, 1, 2**64 - 1, 0)])
def test_one_that_overdoes_it_is_not_believed(tmp_path: Path, words: tuple[int, ...]) -> None:
    with tenants(tmp_path, 200) as (a, b):
        with a.pages().open("r+b") as file:
            file.seek(offset("gs_pages", "turn"))
            file.write(struct.pack("<6Q", *words))
        with talk(b, SETUP + "began = time.monotonic()\nsweep()\nsay(time.monotonic() - began)") as following:
            following()
            assert float(following()[0]) < 0.15
