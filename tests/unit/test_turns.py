"""The choice of tests that run concurrently: a test must not observe what another test changes."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import turns
from tests.support.host import TREE

TESTS = sorted(str(path.relative_to(TREE)) for path in (TREE / "tests").rglob("test_*.py"))
FUNCTIONS = [
    f"{name}::{test}"
    for name in TESTS
    for test in re.findall(r"^def (test_\w+)", (TREE / name).read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(
    ("uses", "group"),
    [
        (r"\buserland: |real_box|import real_", "driver"),
        (
            r"support\.engines\.podman import|rootless import Rootless|support\.engines\.base import .*\bEngine\b",
            "podman",
        ),
        (r"support\.engines\.containerd import", "containerd"),
        (r"docker_host import", "docker"),
    ],
)
def test_tests_of_one_machine_resource_are_in_one_group(uses: str, group: str) -> None:
    takers = [name for name in TESTS if re.search(uses, (TREE / name).read_text()) and "test_turns" not in name]
    assert len(takers) > 1
    assert [name for name in takers if turns.group_of(f"{name}::test_x") != group] == []


def test_every_row_matches_a_test() -> None:
    for row in (row for rows in (*turns.GROUPS.values(), turns.CLOCK) for row in rows):
        assert any(test.startswith(row) for test in FUNCTIONS), row
    groups = {turns.group_of(test) for test in FUNCTIONS}
    assert [name for name in turns.FIRST if name not in groups] == []


def test_exclusive_tests_run_first_then_timed_tests() -> None:
    """Otherwise all workers would wait for each other once more. A group has one kind of test."""
    kinds = [kind for _, kind in sorted({(turns.rank(test), turns.kind_of(test)) for test in FUNCTIONS})]
    assert [kind for kind, before in zip(kinds, ["", *kinds]) if kind != before] == [
        turns.EXCLUSIVE,
        turns.TIMED,
        turns.ORDINARY,
    ]
    groups = {(turns.group_of(test), turns.kind_of(test)) for test in FUNCTIONS}
    assert len(groups) == len({group for group, _ in groups})


def test_test_that_ends_its_worker_runs_once(tmp_path: Path) -> None:
    """A test over its time limit ends its worker. The others of its group run in the next one."""
    (tmp_path / "conftest.py").write_text(
        "from tests.support import turns\ndef pytest_xdist_make_scheduler(config, log):\n"
        "    return turns.scheduler(config, log)\n"
    )
    body = "def test_before(): pass\ndef test_ends():\n    open('ran', 'a').write('x')\n    os._exit(1)\n"
    (tmp_path / "test_a.py").write_text(f"import os\n{body}def test_after(): pass\n")
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(TREE)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "1 failed, 8 passed" in done.stdout, done.stdout
    assert (tmp_path / "ran").read_text() == "x"


def test_only_a_test_of_the_real_clock_is_run_again_and_then_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests import conftest\n"
        "from tests.conftest import pytest_collection_modifyitems, pytest_runtest_protocol, pytest_runtest_setup\n"
        "class Seats:\n"
        "    def enter(self, kind, worker): open('seats', 'a').write(kind + chr(10))\n"
        "    def leave(self, kind=None): open('seats', 'a').write('left' + chr(10))\n"
        "conftest.SEATS = Seats()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\naddopts = --import-mode=importlib\n")
    body = "def test_fails_once():\n    to = open(__file__ + '.ran', 'a')\n    assert to.write('x') < to.tell()\n"
    for name in (turns.CLOCK[0], "tests/unit/test_ordinary.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(body)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", turns.CLOCK[0]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = f"{TREE}:{TREE}/hook"
    calm = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "1 passed, 1 rerun" in calm.stdout, calm.stdout
    assert (tmp_path / "seats").read_text().splitlines() == [turns.TIMED, "left", turns.EXCLUSIVE, "left"]
    words[-1] = "tests/unit/test_ordinary.py"
    ordinary = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "1 failed in" in ordinary.stdout, ordinary.stdout


class Worker:
    """A worker with several tests: `began` lists the tests that started, and each runs until `end`."""

    def __init__(self, folder: Path, number: int, *kinds: str) -> None:
        self.began: list[str] = []
        self._in, self._out = threading.Semaphore(0), threading.Semaphore(0)
        self._seats, self._worker = turns.Seats(folder), f"gw{number}"
        self._thread = threading.Thread(target=self._run, args=(kinds,))
        self._thread.start()

    def _run(self, kinds: tuple[str, ...]) -> None:
        for kind, after in zip(kinds, (*kinds[1:], None)):
            self._seats.enter(kind, self._worker)
            self.began.append(kind)
            self._in.release()
            self._out.acquire()
            self._seats.leave(after)

    def is_in(self) -> bool:
        """Wait until another test has started."""
        return self._in.acquire(timeout=60)

    def end(self) -> None:
        self._out.release()

    def gone(self) -> None:
        self.end()
        self._thread.join(60)
        assert not self._thread.is_alive()


def wait_for_waiter(folder: Path) -> None:
    """Wait until a worker waits for a seat."""
    with open(folder / ".tests-door", "rb") as door:
        while True:
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(door, fcntl.LOCK_UN)
            except BlockingIOError:
                return


@pytest.mark.parametrize(
    ("inside", "waits"),
    [
        (turns.ORDINARY, turns.EXCLUSIVE),
        (turns.ORDINARY, turns.TIMED),
        (turns.TIMED, turns.EXCLUSIVE),
        (turns.TIMED, turns.ORDINARY),
    ],
)
def test_test_of_other_kind_waits_and_blocks_later_tests(tmp_path: Path, inside: str, waits: str) -> None:
    present = [Worker(tmp_path, number, inside) for number in (0, 1)]
    assert all(one.is_in() for one in present)  # these two run together
    other = Worker(tmp_path, 2, waits)
    wait_for_waiter(tmp_path)
    later = Worker(tmp_path, 3, inside)
    present[0].gone()
    wait_for_waiter(tmp_path)
    assert other.began == later.began == []
    present[1].gone()
    assert other.is_in()
    wait_for_waiter(tmp_path)  # for the worker behind it
    assert later.began == []
    other.gone()
    assert later.is_in()
    later.gone()


@pytest.mark.parametrize("kind", [turns.EXCLUSIVE, turns.TIMED])
def test_timed_tests_of_worker_run_without_interruption(tmp_path: Path, kind: str) -> None:
    one = Worker(tmp_path, 0, kind, kind, turns.ORDINARY)
    assert one.is_in()
    other = Worker(tmp_path, 1, turns.ORDINARY)
    wait_for_waiter(tmp_path)
    one.end()
    assert one.is_in() and one.began == [kind, kind] and other.began == []
    one.end()
    assert other.is_in() and one.is_in()
    other.gone()
    one.gone()


def test_exclusive_test_waits_for_one_test_only(tmp_path: Path) -> None:
    """The first worker may have a hundred more tests."""
    one = Worker(tmp_path, 0, turns.TIMED, turns.TIMED)
    assert one.is_in()
    other = Worker(tmp_path, 1, turns.EXCLUSIVE)
    wait_for_waiter(tmp_path)
    one.end()
    assert other.is_in()
    wait_for_waiter(tmp_path)  # for the first worker
    assert one.began == [turns.TIMED]
    other.gone()
    assert one.is_in()
    one.gone()


def test_single_worker_never_waits(tmp_path: Path) -> None:
    for one in (turns.Seats(tmp_path), turns.Seats(tmp_path)):
        one.enter(turns.EXCLUSIVE, None)
    assert list(tmp_path.iterdir()) == []
