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
REAL_DRIVER = re.compile(r"\buserland: |real_box|import real_")


def test_who_takes_things_of_the_machine_is_in_one_group() -> None:
    takers = [name for name in TESTS if REAL_DRIVER.search((TREE / name).read_text()) and "test_turns" not in name]
    assert len(takers) > 3
    assert [name for name in takers if turns.group_of(f"{name}::test_x") != "machine"] == []


def test_every_row_names_something() -> None:
    for row in (*turns.MACHINE, *turns.CLOCK):
        assert any(name.startswith(row) for name in TESTS), row


def test_who_wants_to_be_alone_waits_for_the_others_and_they_for_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    said: list[str] = []
    leave = {name: threading.Event() for name in ("alone", "later")}
    entered = {name: threading.Event() for name in leave}

    def come(name: str) -> None:
        with turns.Turn(name == "alone", tmp_path):
            said.append(name)
            entered[name].set()
            leave[name].wait(60)

    threads = {name: threading.Thread(target=come, args=(name,)) for name in leave}
    with turns.Turn(False, tmp_path), turns.Turn(False, tmp_path):  # these two, together
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
    assert entered["alone"].wait(60)
    assert not entered["later"].wait(0.2) and said == ["alone"]
    leave["alone"].set()
    assert entered["later"].wait(60)
    leave["later"].set()
    for thread in threads.values():
        thread.join(60)


def test_one_worker_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with turns.Turn(True, tmp_path), turns.Turn(True, tmp_path):
        assert list(tmp_path.iterdir()) == []
