"""docs/recipes.md: its systemd unit under a real systemd. tests/docs/test_tour.py runs its commands with docker."""

from __future__ import annotations

import json
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import fenced
from tests.support.host import TREE, write_config
from tests.support.processes import reap_zombies
from tests.support.systemd import Systemd

UNIT, USER = "model.service", "www-data"
GIB = 1 << 30


def recipe(language: str) -> str:
    """The only block of the page in that language."""
    page = (TREE / "docs/recipes.md").read_text()
    (text,) = ("\n".join(lines) + "\n" for one, lines in fenced(page) if one == language)
    return text


@pytest.fixture
def machine(tmp_path: Path, simhost: Path) -> Iterator[Systemd]:
    etc = tmp_path / "etc"
    etc.mkdir()
    write_config(etc / "config.yaml", simhost, log={"decisions": "/run/decisions"})
    made = Systemd(tmp_path / "systemd", etc)
    yield made
    made.close()
    reap_zombies()


def test_service_has_its_share_and_ends_it(machine: Systemd) -> None:
    machine.unit(UNIT, recipe("ini"))
    machine.unit(f"{UNIT}.d/test.conf", "[Unit]\nDefaultDependencies=no\n[Service]\nStandardError=append:/run/said\n")
    machine.run("systemd-analyze", "verify", str(machine.units / UNIT))
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", UNIT)

    def listed() -> list[tuple[str, int]]:
        rows = json.loads(machine.run("gpushare", "list", "--format", "json"))
        return [(row["id"], row["shares"][0]["memory_limit_bytes"]) for row in rows if row["state"] == "running"]

    machine.until(lambda: listed() == [("model", 4 * GIB)])
    (pid,) = machine.show(UNIT, "MainPID")
    assert f"Uid:\t{pwd.getpwnam(USER).pw_uid}" in machine.run("cat", f"/proc/{pid}/status"), (
        "the program runs as that user"
    )
    machine.run("systemctl", "stop", UNIT)
    machine.until(lambda: listed() == [])
