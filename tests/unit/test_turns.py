"""Which tests may run beside which: what one of them changes, another must not look at."""

from __future__ import annotations

import fcntl
import re
import threading
from pathlib import Path

import pytest

from tests.lib import turns
from tests.lib.host import TREE

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
        (r"lib\.engines\.podman import|rootless import Rootless|lib\.engines\.base import .*\bEngine\b", "podman"),
        (r"lib\.engines\.containerd import", "containerd"),
        (r"docker_host import", "docker"),
    ],
)
def test_who_takes_things_of_the_machine_is_in_one_group(uses: str, group: str) -> None:
    takers = [name for name in TESTS if re.search(uses, (TREE / name).read_text()) and "test_turns" not in name]
    assert len(takers) > 2
    assert [name for name in takers if turns.group_of(f"{name}::test_x") != group] == []


def test_every_row_names_something() -> None:
    for row in (row for rows in turns.GROUPS.values() for row in rows):
        assert any(test.startswith(row) for test in FUNCTIONS), row
    groups = {turns.group_of(test) for test in FUNCTIONS}
    assert [name for name in turns.FIRST if name not in groups] == []


def test_who_is_alone_comes_first() -> None:
    """Else all would have to wait for each other once more."""
    assert {turns.rank(test) for test in FUNCTIONS if turns.is_alone(test)} == {0}
    assert min(turns.rank(test) for test in FUNCTIONS if not turns.is_alone(test)) == 1


def test_who_wants_to_be_alone_waits_for_the_others_and_they_for_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    said: list[str] = []
    leave = {name: threading.Event() for name in ("alone", "later")}
    entered = {name: threading.Event() for name in leave}

    def come(name: str) -> None:
        mine = turns.Turns(tmp_path)
        for test in (name, f"{name} again"):
            mine.enter(alone=name == "alone")
            said.append(test)
            entered[name].set()
            leave[name].wait(60)
            mine.leave(name == "alone", alone_next=test == "alone")

    threads = {name: threading.Thread(target=come, args=(name,)) for name in leave}
    present = turns.Turns(tmp_path), turns.Turns(tmp_path)
    for one in present:  # these two, together
        one.enter(alone=False)
    threads["alone"].start()
    with open(tmp_path / ".tests-door", "rb") as door:
        while True:  # until he keeps the door
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(door, fcntl.LOCK_UN)
            except BlockingIOError:
                break
    threads["later"].start()
    assert said == []
    for one in present:
        one.leave(alone=False, alone_next=False)
    assert entered["alone"].wait(60)
    assert not entered["later"].wait(0.2) and said == ["alone"]
    leave["alone"].set()
    assert entered["later"].wait(60)
    assert said[:3] == ["alone", "alone again", "later"]  # who is alone stays until his last test
    leave["later"].set()
    for thread in threads.values():
        thread.join(60)


def test_one_worker_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    for one in (turns.Turns(tmp_path), turns.Turns(tmp_path)):
        one.enter(alone=True)
    assert list(tmp_path.iterdir()) == []
