"""Migration slices: which tenant with memory on the host has it on the device, from the device's ledger."""

from __future__ import annotations

import mmap
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from gpushare.state.shm_abi import offset

from simulator.ledger import Ledger
from simulator.simhost import make_simhost
from tests.shim.box import GIB, Box
from tests.shim.inside import MIB
from tests.shim.test_live import talk

ON_DEVICE = 902 * MIB  # context, the allocation in the device part, and code
ON_HOST = 128 * MIB
SETUP = """
start()
held, function = [], kernel("sweep_ns_arg")
ok(alloc(600 * MIB, held)), ok(alloc(128 * MIB, held))

def read(ms=0.2):
    sweep(function, held[1], 128 * MIB, int(1e6 * ms))

def work(seconds):
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        read()
        ok(cuda.cuCtxSynchronize())
        rounds += 1
    return rounds
say("ready")
"""


@contextmanager
def tenants(
    directory: Path, slice_ms: int, count: int = 2, memory: int = GIB, room: int = 256 * MIB
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
                    migration_slice=(1000 * slice_ms, room),
                )
            )
            for _ in range(count)
        ]


def at_once(*programs: Callable[[], list[str]]) -> list[list[str]]:
    """Let all of them go on at once; return what they say."""
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda one: one(), programs))


def device_ms(directory: Path, place: int, slice_ms: int, rounds: int = 30) -> float:
    """Return the mean device time of a sweep, including all migration, with two tenants that make `rounds` sweeps each.

    `place`: what they sweep, 0 for memory on the device, 1 for memory on the host.
    """
    program = SETUP.replace("held[1], 128", f"held[{place}], 128") + (
        f"for _ in range({rounds}):\n    read()\n    ok(cuda.cuCtxSynchronize())\nsay()"
    )
    with tenants(directory, slice_ms) as (a, b), talk(a, program) as first, talk(b, program) as second:
        assert first() == second() == ["ready"]
        at_once(first, second)
        with Ledger(a.device()) as ledger:
            return sum(group.work_ns for group in ledger.groups()) / 2 / rounds / 1e6


def test_migration_slices_avoid_most_transfers(tmp_path: Path) -> None:
    """Uses device time, not a clock: moving 128 MiB takes 11 ms, with each sweep or once in a migration slice."""
    fits, thrashes = device_ms(tmp_path / "fits", 0, 0), device_ms(tmp_path / "thrashes", 1, 0)
    cured = device_ms(tmp_path / "cured", 1, 400)
    bus_ms = ON_HOST / 12e6
    assert fits < 0.3, fits
    assert abs(thrashes - fits - bus_ms) < 0.2 * bus_ms, (fits, thrashes)
    assert fits < cured < thrashes / 3, (fits, cured, thrashes)


def held_bytes(box: Box) -> list[int]:
    with Ledger(box.device()) as ledger:
        return [client.bytes for client in ledger.clients() if client.alive]


def test_only_one_tenant_at_a_time_has_its_memory_on_the_device(tmp_path: Path) -> None:
    with tenants(tmp_path, 400) as (a, b):
        program = SETUP + "say(work(1.5))"
        with talk(a, program) as first, talk(b, program) as second:
            assert first() == second() == ["ready"]
            seen: list[list[int]] = []
            over = threading.Event()

            def watch() -> None:
                while not over.wait(0.002):
                    seen.append(held_bytes(a))

            watcher = threading.Thread(target=watch)
            watcher.start()
            results = at_once(first, second)
            over.set()
            watcher.join()
    assert all(int(rounds) > 150 for (rounds,) in results), results  # without migration some 66
    both = sum(sum(size > ON_DEVICE for size in sizes) > 1 for sizes in seen)
    # Without slices this is all of the time. A tenant that other load delays may count as idle.
    assert both < len(seen) / 4, (both, len(seen))
    swapped = {tuple(size > ON_DEVICE + ON_HOST // 2 for size in sizes) for sizes in seen}
    assert {(True, False), (False, True)} <= swapped


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "time.sleep(20)", "pass"])
def test_slice_of_a_dead_or_idle_tenant_is_given_up_early(tmp_path: Path, end: str) -> None:
    """After the first tenant was killed, sleeps or ended, the other gets the slice early, and migrates its memory."""
    with tenants(tmp_path, 2000) as (a, b):
        with talk(b, SETUP + "began = time.monotonic()\nwork(0.3)\nsay(time.monotonic() - began)") as second:
            assert second() == ["ready"]
            with talk(a, SETUP + f"say(work(0.2))\n{end}\nsys.stdout.close()") as first:
                assert first() == ["ready"]
                first()
                assert max(held_bytes(a)) == ON_DEVICE + ON_HOST
                first_goes = threading.Thread(target=_run_to_end, args=(first,))
                first_goes.start()
                (took,) = second()
                assert float(took) < 1.5
                assert ON_DEVICE + ON_HOST in held_bytes(b)
        first_goes.join()


def test_processes_of_a_container_share_one_slice_and_its_room(tmp_path: Path) -> None:
    """Two processes migrate no more than one; one is killed with its memory; the other container gets its slice."""
    room = 192 * MIB
    memory = 2 * ON_DEVICE + 64 * MIB  # the host part of one does not fit beside the migrated memory of the other
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
        workers = [threading.Thread(target=_run_to_end, args=(both[0],))]
        workers += [threading.Thread(target=lambda one=one: rounds.extend(map(int, one()))) for one in (both[1], other)]
        for worker in workers:
            worker.start()
        while workers[1].is_alive() or workers[2].is_alive():
            seen.append(held_bytes(a))
            time.sleep(0.001)
        for worker in workers:
            worker.join()
    assert len(rounds) == 2 and min(rounds) > 300, rounds  # without migration some 140
    brought = [sum(sizes) - before for sizes in seen if len(sizes) == 3]
    assert room - 4 * MIB <= max(brought)
    # With a room for each process this is half of the time. A process that other load delays may count as idle.
    assert sum(one > room for one in brought) < len(brought) / 4
    assert any(len(sizes) == 2 for sizes in seen)


def test_memory_left_on_the_device_counts_in_the_containers_next_slice(tmp_path: Path) -> None:
    """A process that slept past the end of a slice keeps its memory on the device while no other tenant needs the room.

    When it wakes in a slice that another process of its container began, it gets only the room that process left.
    """
    room = 192 * MIB
    memory = 2 * ON_DEVICE + 64 * MIB
    fill = SETUP.replace("ok(alloc(128 * MIB, held))", "say('started'), ok(alloc(128 * MIB, held))")
    step = "read()\nok(cuda.cuCtxSynchronize())\nsay()\n"
    with tenants(tmp_path, 2000, memory=memory, room=room) as (a, b), ExitStack() as stack:
        sleeps, goes_on = (stack.enter_context(talk(a, fill + 2 * step)) for _ in range(2))
        works = "read()\nok(cuda.cuCtxSynchronize())\nprint('works', flush=True)\nwork(0.3)\nsay()"
        other = stack.enter_context(talk(b, SETUP + "ok(alloc(940 * MIB, held))\n" + works))
        for one in (sleeps, goes_on):
            assert one() == ["started"]
        for one in (sleeps, goes_on, other):
            assert one() == ["ready"]
        sleeps()
        assert other() == ["works"]  # runs once the first slice is given up as idle
        goes_on()
        sleeps()
        *own, most = sorted(held_bytes(a))  # the largest is the other container's
        assert most > ON_DEVICE + room and sum(own) == 2 * ON_DEVICE + room


def _run_to_end(following: object) -> None:
    try:
        following()  # type: ignore[operator]
    except (AssertionError, OSError, ValueError):
        pass  # the program has ended


@pytest.mark.parametrize("sign", ["SIGSTOP", "SIGKILL"])
def test_slice_of_a_stopped_process_times_out(tmp_path: Path, sign: str) -> None:
    """The process advertised that it is busy until its work is done and cannot withdraw that: its slice times out.

    The slice is long, so that its timeout differs from giving up the slice, which takes twice as long.
    """
    with tenants(tmp_path, 1900) as (a, b):
        end = f"threading.Timer(0.1, os.kill, (os.getpid(), signal.{sign})).start()"
        with (
            talk(b, SETUP + "began = time.monotonic()\nwork(0.01)\nsay(time.monotonic() - began)") as second,
            talk(a, f"import signal\n{SETUP}read(9000)\n{end}\nsay('holds')\nok(cuda.cuCtxSynchronize())") as first,
        ):
            assert second() == first() == ["ready"]
            assert first() == ["holds"]
            first_goes = threading.Thread(target=_run_to_end, args=(first,))
            first_goes.start()
            (took,) = second()
            assert float(took) < 3.5  # 4 without the timeout
            assert ON_DEVICE + ON_HOST in held_bytes(b)
        first_goes.join()


def _holds_the_slice(now: int) -> tuple[int, ...]:
    return now, now + 190_000_000, now + 2_000_000_000, 1, now + 90_000_000, 1


def _waits_longest(now: int) -> tuple[int, ...]:
    return 0, 0, 0, 1, now + 90_000_000, 0


def _garbage(now: int) -> tuple[int, ...]:
    chaos = random.Random(now)
    near = (0, 1, now, now + 90_000_000, now + 200_000_000, 2**63, 2**64 - 1)
    return tuple(chaos.choice((*near, chaos.getrandbits(64))) for _ in range(6))


BELIEVED_S = 0.09  # how long a published wait is believed


@contextmanager
def publishing(box: Box, claim: Callable[[int], tuple[int, ...]]) -> Iterator[list[float]]:
    """Write false claims to a box's activity file a thousand times a second.

    Yields a list of the pauses in seconds, caused by other load, after which the claims were no longer believed.
    """
    over = threading.Event()
    silent: list[float] = []

    def write(words: memoryview) -> None:  # word by word: struct.pack_into writes zeros first
        last, at = time.monotonic(), offset("gs_pages", "turn") // 8
        while not over.wait(0.001):
            for place, word in enumerate(claim(time.monotonic_ns()), at):
                words[place] = word
            last, before = time.monotonic(), last
            silent.extend([last - before] if last - before > BELIEVED_S else [])

    with (
        box.pages().open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as page,
        memoryview(page) as plain,
        plain.cast("Q") as words,
    ):
        writer = threading.Thread(target=write, args=(words,))
        writer.start()
        try:
            yield silent
        finally:
            over.set()
            writer.join()


@pytest.mark.parametrize("claim", [_holds_the_slice, _waits_longest, _garbage], ids=lambda claim: claim.__name__)
def test_false_claims_delay_only_one_launch(tmp_path: Path, claim: Callable[[int], tuple[int, ...]]) -> None:
    """The neighbour always claims that its slice has just begun, that it has waited longest, or random values.

    The first launch proceeds over the bus, and later ones as if there were no such neighbour.
    """
    program = (
        SETUP
        + """
def wait():
    began = time.monotonic()
    read()
    ok(cuda.cuCtxSynchronize())
    return time.monotonic() - began
say(wait())
end, waits = time.monotonic() + 1, []
while time.monotonic() < end:
    waits.append(wait())
say(sum(waited > 0.3 for waited in waits))
"""
    )
    with tenants(tmp_path, 200) as (a, b), publishing(a, claim) as silent, talk(b, program) as following:
        assert following() == ["ready"]
        (first,) = following()
        assert (0.3 if claim is _holds_the_slice else 0) < float(first) < 1.5
        if claim is _holds_the_slice:
            assert held_bytes(b) == [ON_DEVICE]
        (more,) = following()
        # At least 3 if each launch waited. Other load can delay one.
        assert (float(first) > 0.3) + int(more) <= 2 + len(silent), (first, more, silent)
        assert held_bytes(b) == [ON_DEVICE + ON_HOST]


def test_false_claims_do_not_keep_other_tenants_from_migrating(tmp_path: Path) -> None:
    with tenants(tmp_path, 200, count=3) as (a, b, c), publishing(a, _holds_the_slice):
        program = SETUP + "say(work(1.5))"
        with talk(b, program) as first, talk(c, program) as second:
            assert first() == second() == ["ready"]
            results = at_once(first, second)
    assert all(int(rounds) > 60 for (rounds,) in results), results  # 4 per tenant if each launch waited


@pytest.mark.parametrize("words", [(0, 2**64 - 1, 2**64 - 1, 0, 0, 0), (0, 0, 0, 1, 2**64 - 1, 0)])
def test_claims_in_the_far_future_are_ignored(tmp_path: Path, words: tuple[int, ...]) -> None:
    with tenants(tmp_path, 2000) as (a, b):
        with a.pages().open("r+b") as file:
            file.seek(offset("gs_pages", "turn"))
            file.write(struct.pack("<6Q", *words))
        with talk(b, SETUP + "began = time.monotonic()\nread()\nsay(time.monotonic() - began)") as following:
            following()
            assert float(following()[0]) < 2  # twice the slice if it was believed
