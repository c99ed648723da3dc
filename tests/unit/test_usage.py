"""gpushare usage: sums over a period, over reboots, clock changes and unreported ends."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.model import Config
from gpushare.monitor import usage
from gpushare.state import accounts, journal
from gpushare.state.accounts import Account
from gpushare.state.journal import Entry, Held
from gpushare.system import procs

from tests.unit import pure
from tests.unit.clihost import GIB, charge, cli, init, start, state

__all__ = ["cli", "init", "start", "state"]  # fixtures
S = 10**9
HOUR = 3600 * S
BOOT = "earlier"  # the boot of most entries here
NOW = 1_800_000_000.0


def entry(what: str = journal.END, hours: float = 1, **fields: Any) -> Entry:
    """An entry of a container that began at hour 100 of an earlier boot, has 50% and 4 GiB, and uses half of it. The
    clock said 0 at its boot, in `fields` another time."""
    took = int(hours * HOUR)
    account = Account(took // 2, took * 4 * GIB, took // 4, took * 2 * GIB, 3 * GIB, 5, took // 100)
    whose = {"uid": 1000, "namespace": "team", "pod": "p", "container": "c", "image": "i:1"}
    at = 100 * HOUR + took
    made = Entry(
        *(what, NOW - 200 * 3600 + at / S, BOOT, at, "web", 100 * HOUR, at, True),
        **whose,
        by="poststop",
        shares=(Held("GPU-1", 4 * GIB, 50, account),),
    )
    return made._replace(**fields)


def report(monkeypatch: pytest.MonkeyPatch, *found: Entry, hours: float, by: str = usage.USER) -> usage.Report:
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(journal, "entries", lambda path: (list(found), 0))
    config = Config(state_dir="/none", usage_journal="/none/usage.log")
    return usage.collect(config, "/none", NOW - hours * 3600, by)


def test_container_within_the_period_counts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran from 100 to 99 hours ago."""
    (group,) = report(monkeypatch, entry(journal.START, 0), entry(), hours=101).groups
    assert (group.name, group.containers, group.running, group.unreported) == ("1000", 1, 0, 0)
    assert group.total == usage.Total(HOUR // 2, HOUR * 4 * GIB, HOUR // 4, HOUR * 2 * GIB, 5, HOUR // 100)
    assert group.peak_bytes == 3 * GIB


def test_container_that_began_earlier_counts_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = report(monkeypatch, entry(), hours=99.5).groups
    assert group.total.granted_ns == pytest.approx(HOUR // 4, rel=1e-6)
    assert group.total.used_byte_ns == pytest.approx(HOUR * GIB, rel=1e-6)
    assert report(monkeypatch, entry(), hours=98).groups == ()


def test_checkpoints_tell_when_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its device time was used in the first half hour."""
    early = entry(journal.SO_FAR, 0.5)
    (share,) = early.shares
    early = early._replace(shares=(share._replace(account=share.account._replace(used_ns=HOUR // 4)),))
    (group,) = report(monkeypatch, early, entry(), hours=99.5).groups
    assert group.total.used_ns == 0 and group.total.granted_ns > 0


@pytest.mark.parametrize(("by", "name"), [("user", "1000"), ("namespace", "team"), ("image", "i:1")])
def test_sums_by_user_namespace_and_image(monkeypatch: pytest.MonkeyPatch, by: str, name: str) -> None:
    other = entry(id="other", uid=-1, namespace="", image="")
    found = report(monkeypatch, entry(), entry(id="more"), other, hours=101, by=by).groups
    assert [(one.name, one.containers) for one in found] == [(name, 2), ("", 1)]
    assert found[0].total.granted_ns == HOUR


def test_end_that_no_entry_reports_is_counted_as_far_as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot: a later start of the same boot proves that it still ran, since it would have found it dead."""
    begun = entry(journal.START, 0)
    (group,) = report(monkeypatch, begun, hours=101).groups
    assert (group.unreported, group.total.granted_ns) == (1, 0)
    later = entry(journal.START, 0, id="later", uid=1, began_ns=102 * HOUR, end_ns=102 * HOUR)
    found = {one.name: one for one in report(monkeypatch, begun, later, hours=101).groups}
    assert found["1000"].unreported == 1
    assert found["1000"].total.granted_ns == HOUR and found["1000"].total.granted_byte_ns == 2 * HOUR * 4 * GIB
    (group,) = report(monkeypatch, entry(journal.SO_FAR), hours=101).groups
    assert (group.unreported, group.total.used_ns) == (1, HOUR // 4)


def test_end_found_late_is_counted_as_unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = report(monkeypatch, entry(known=False), hours=101).groups
    assert group.unreported == 1


def test_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock said 1970 at the start, as on a board without a battery, and was right at the end."""
    (group,) = report(monkeypatch, entry(journal.START, 0, time_s=1000.0), entry(), hours=101).groups
    assert group.total.granted_ns == HOUR // 2
    (group,) = report(monkeypatch, entry(journal.START, 0, time_s=4e9), entry(), hours=101).groups
    assert group.total.granted_ns == HOUR // 2


def test_ids_and_boots_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    again = entry(began_ns=99 * HOUR, end_ns=100 * HOUR)  # the same id before
    other = entry(boot="another")
    (group,) = report(monkeypatch, entry(), again, other, hours=120).groups
    assert group.containers == 3


def test_values_that_fall_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container can write its usage file, and set it back."""
    more = entry(journal.SO_FAR, 0.9)
    (share,) = more.shares
    more = more._replace(shares=(share._replace(account=share.account._replace(used_ns=HOUR, refused=1000)),))
    (group,) = report(monkeypatch, more, entry(), hours=101).groups
    assert group.total.used_ns == HOUR and group.total.refused == 1000


def test_unknown_use_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    one = entry()
    bare = one._replace(shares=(one.shares[0]._replace(account=Account(HOUR, HOUR)),))
    (group,) = report(monkeypatch, bare, hours=101).groups
    assert (group.unmeasured, group.total.used_ns, group.total.granted_ns) == (1, 0, HOUR)


# The command


@pytest.fixture
def book(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of the state directory's configuration."""
    from gpushare.config import node

    path = tmp_path / "usage.log"
    config = Config(state_dir=str(state), usage_journal=str(path))
    monkeypatch.setattr(node, "read_node", lambda *_: pure.node()._replace(config=config))
    return path


def run_for(container_id: str, state: Path, book: Path, seconds: int, **labels: Any) -> None:
    """Write the start and the end of a container of this boot."""
    config = Config(state_dir=str(state), usage_journal=str(book), log="none")
    one = pure.lease(pure.share(0, 0, 4 * GIB), container_id=container_id)
    one = one._replace(boot_id=procs.boot_id(), began_ns=accounts.now_ns() - seconds * S, **labels)
    fd = journal.opened(config)
    journal.started(fd, one)
    os.close(fd)
    now = accounts.now_ns()
    closed = accounts.Closed(one, accounts.accounts(one, None, now), now, True)
    journal.ending(config, str(state), "poststop")(closed)


def test_json_csv_and_table(cli: Callable[..., Any], state: Path, book: Path, start: Callable[..., Path]) -> None:
    run_for("one", state, book, 100, uid=0, namespace="team")
    run_for("two", state, book, 50, uid=54321, namespace="=1+1\n")
    charge(start("three", pure.share(0, 0, GIB)), 0, 1, GIB, refused=3)
    code, text, _ = cli("usage", "--format", "json", "--since", "2h")
    value = json.loads(text)
    assert code == 0 and (value["by"], value["journal"], value["unreadable_lines"]) == ("user", str(book), 0)
    assert [(one["name"], one["containers"], one["running"]) for one in value["groups"]] == [
        ("root", 1, 0),
        ("54321", 1, 0),
        (None, 1, 1),
    ]
    assert 99 < value["groups"][0]["gpu_seconds_granted"] < 110 and value["groups"][2]["refused"] == 3
    rows = list(csv.DictReader(io.StringIO(cli("usage", "--format", "csv", "--by", "namespace")[1])))
    assert [row["name"] for row in rows] == ["team", "=1+1\\x0a", ""]
    assert rows[0].keys() == value["groups"][0].keys()
    code, text, _ = cli("usage")
    assert code == 0 and text.splitlines()[0].startswith("NAME") and text.splitlines()[1].startswith("root")


def test_state_directory_that_is_gone_loses_only_what_ran(
    cli: Callable[..., Any], state: Path, book: Path, tmp_path: Path
) -> None:
    """As after a reboot: /run is empty, the journal stays."""
    run_for("one", state, book, 100, uid=0)
    before = json.loads(cli("usage", "--format", "json")[1])["groups"]
    os.rename(book, tmp_path / "kept")
    assert json.loads(cli("usage", "--format", "json")[1])["groups"] == []
    os.rename(tmp_path / "kept", book)
    gone = cli("--state", str(tmp_path / "gone"), "usage", "--format", "json")[1]
    assert json.loads(gone)["groups"] == before != []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24", "not a duration and not a date"),
        ("-1h", "not a duration and not a date"),
        ("1e3s", "not a duration and not a date"),
        ("99999999999999999999d", "not a duration and not a date"),
        ("2999-01-01", "is in the future"),
        ("\x1b[2J", "not a duration and not a date"),
    ],
)
def test_wrong_since_is_one_line(cli: Callable[..., Any], book: Path, text: str, message: str) -> None:
    code, out, err = cli("usage", f"--since={text}")
    assert code == 64 and out == "" and err.count("\n") == 1 and message in err and "24h" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{journal: here}", 'usage.journal: "here" is wrong; expected auto, none, or an absolute path'),
        ("{journal: no}", 'usage.journal: "false" is wrong'),
        ("{journa: auto}", "usage.journa: unknown key; did you mean usage.journal?"),
        ("{journal_size: 64}", 'usage.journal_size: "64" is wrong'),
        ('{journal_size: "1"}', 'usage.journal_size: "1" is too small for a journal; give at least 1 MiB'),
        ("{journal_size: 10%}", 'usage.journal_size: "10%": unknown unit "%"'),
        ('{journal_size: ""}', "usage.journal_size"),
    ],
)
def test_wrong_configuration_is_one_line(line: str, message: str) -> None:
    from gpushare.config import config
    from gpushare.core.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        config.parse_config(f"version: 1\nusage: {line}\n", "f.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["30s", "90m", "7d", "3w", "999999999w", "2020-01-01", "2020-01-01T08:00"])
def test_since_takes_durations_and_dates(cli: Callable[..., Any], book: Path, text: str) -> None:
    assert cli("usage", "--since", text)[0] == 0


def test_missing_and_damaged_journals_are_reported(cli: Callable[..., Any], state: Path, book: Path) -> None:
    assert "has no entries" in cli("usage")[2]
    run_for("one", state, book, 100, uid=0)
    with book.open("ab") as file:
        file.write(b"{torn")
    code, _, err = cli("usage")
    assert code == 0 and "1 line of the usage journal could not be read and is left out" in err
    assert "begins at" in err
    book.unlink()
    book.mkdir()
    code, out, err = cli("usage")
    assert code == 1 and out == "" and err.count("\n") == 1 and str(book) in err
