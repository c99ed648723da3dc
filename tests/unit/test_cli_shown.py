"""Output of `gpushare list`, `inspect` and `devices` for running, dead and damaged containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import output
from gpushare.core.errors import CapacityError
from gpushare.state import leases, log, shm_abi, storage
from gpushare.system import rootless

from tests.support.terminal import Terminal
from tests.unit import pure
from tests.unit.clihost import GIB, MIB, charge, compute


@pytest.mark.usefixtures("frozen")
def test_soft_limit_is_shown_and_use_is_at_most_the_device(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    soft = pure.share(0, 1, GIB)._replace(compute_percent=60, soft=True, priority=1)
    compute(start("c1", soft, created=time.time() - 130), 0, 250)
    assert "  100% of 60% soft  " in cli("list")[1]
    line = rf" +0 +1 +0 B +1 GiB +0  100% of 60% soft, high priority +0.0 s +0  {pure.UUIDS[1]}"
    assert "turns" not in cli("inspect", "c1")[1]  # they are for hard limits
    assert re.search(f"^{line}$", cli("inspect", "c1")[1], re.MULTILINE)


@pytest.mark.usefixtures("frozen")
def test_forged_compute_is_bounded_and_damaged_file_unknown(
    cli: Callable[..., Any], start: Callable[..., Path]
) -> None:
    page = start("c1", pure.share(0, 0, GIB)._replace(compute_percent=30), created=time.time() - 50)
    data = bytearray(page.read_bytes())
    at = shm_abi.offset("gs_usage", "bucket")
    data[at : at + 128] = b"\xff" * 128
    page.write_bytes(data)
    (share,) = json.loads(cli("list", "--format", "json")[1])[0]["shares"]
    assert 0 <= share["compute_used_percent"] <= 100
    for key in ("compute_throttled_ns", "compute_busy_ns"):
        assert 0 <= share[key] <= 51 * 10**9 * shm_abi.MAX_SLOTS, key
    os.truncate(page, 0)
    (share,) = json.loads(cli("list", "--format", "json")[1])[0]["shares"]
    assert (share["compute_used_percent"], share["compute_throttled_ns"], share["compute_busy_ns"]) == (None,) * 3
    assert "- of 30%" in cli("list")[1] and "- of 30%" in cli("inspect", "c1")[1]


def test_list_as_json_distinguishes_mig_devices(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    part = pure.device(1)._replace(uuid="MIG-cccccccc-2222-2222-2222-222222222222", parent=pure.UUIDS[1], mig_index=2)
    start("c1", pure.share(0, 1, 1 * GIB)._replace(device=part))
    (share,) = json.loads(cli("list", "--format", "json")[1])[0]["shares"]
    assert (share["device"], share["mig_index"]) == (1, 2)
    assert (share["uuid"], share["parent_uuid"]) == (part.uuid, pure.UUIDS[1])


def test_list_has_the_sums_of_all_processes(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    page = start("c1", pure.share(0, 1, 4 * GIB))
    charge(page, 0, 1, GIB)
    charge(page, 3, 2, 512 * MIB, refused=7)
    (one,) = json.loads(cli("list", "--format", "json")[1])
    (share,) = one["shares"]
    assert (one["process_count"], share["memory_used_bytes"], share["refused"]) == (2, GIB + 512 * MIB, 7)


def test_terminal_gets_a_bar_and_a_pipe_does_not(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path
) -> None:
    """The same command on a pseudo terminal."""
    charge(start("c1", pure.share(0, 0, 4 * GIB), created=time.time() - 7200), 0, 1, 3 * GIB)
    piped = cli("list")[1]
    assert "█" not in piped
    source = str(Path(leases.__file__).resolve().parents[2])
    program = f"import sys; sys.path.insert(0, {source!r}); from gpushare.cli import main; sys.exit(main())"

    def drawn(columns: int, line: str, **env: str) -> str:
        with Terminal([sys.executable, "-c", program, "--state", state, *line.split()], columns, env=env) as one:
            assert one.end() == 0
            return one.raw.decode().replace("\r", "")

    wide, narrow, coloured = drawn(120, "list --no-color"), drawn(72, "list --no-color"), drawn(120, "list")
    assert drawn(120, "--no-color list") == drawn(120, "list", NO_COLOR="1") == wide
    assert "███████░░░  75%" in wide and "c1" in wide and "\x1b" not in wide
    assert narrow == piped  # no room for the bar, which is dropped first
    assert "\x1b[33m███████░░░  75%\x1b[0m" in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == wide


def test_empty_rootless_list_points_to_root(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli("list") == (0, "no container has a share of a GPU\n", "")
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    assert cli("list") == (0, "you have no share of a GPU; root sees the shares of all users\n", "")


def test_narrow_terminal_drops_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Whole columns leave, the highest number first; their content moves below the table. A pipe gets all."""
    columns = (output.Column("a"), output.Column("b", leaves=1), output.BAR, output.Column("c", leaves=2))
    for tty, width, expected in (
        (True, 99, ["A", "B", "USED/LIMIT", "C"]),
        (True, 50, ["A", "B", "C"]),
        (True, 30, ["A", "B"]),
        (True, 5, ["A"]),
        (False, 5, ["A", "B", "C"]),
    ):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)  # noqa: B023  # used in this round only
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        output.write_table(columns, [["x" * 12] * 4])
        lines = capfd.readouterr().out.splitlines()
        assert (lines[0].split(), lines[1].split()) == (expected, ["x" * 12] * len(expected))
        left = ", ".join(f"{name} {'x' * 12}" for name in ("b", "c") if name.upper() not in expected)
        assert lines[2:] == (["", f"a {'x' * 12}: {left}"] if left else [])


def test_long_lines_wrap_with_indent_on_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    long = f"  1 mount    /a-b-c <- /{'x' * 60} (file ro nosuid): the shim"
    monkeypatch.setenv("TERM", "xterm")
    for tty, columns, expected in (
        (True, 40, ["  1 mount    /a-b-c <-", f"{' ' * 13}/{'x' * 60}", f"{' ' * 13}(file ro nosuid): the shim"]),
        (True, 200, [long]),
        (True, 20, [long]),  # too narrow to be readable
        (False, 40, [long]),
    ):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)  # noqa: B023  # used in this round only
        monkeypatch.setenv("COLUMNS", str(columns))
        output.write_text(f"{long}\n\nshort\n", 13)
        assert capfd.readouterr().out.splitlines() == [*expected, "", "short"]


def test_forged_usage_is_bounded_by_device(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    """A value above the device's memory is never shown."""
    charge(start("c1", pure.share(0, 0, 4 * GIB)), 0, 1, (1 << 64) - 1)
    (one,) = json.loads(cli("list", "--format", "json")[1])
    assert one["shares"][0]["memory_used_bytes"] == 16 * GIB
    assert f"reports {(1 << 64) - 1} bytes of device 0" in one["note"]


def test_inspect_shows_processes_and_the_last_refusal_of_a_running_container(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, init: subprocess.Popen[bytes]
) -> None:
    charge(start("c1", pure.share(0, 0, 4 * GIB)), 0, init.pid, 3 * GIB)
    log.record(str(state), "c1", "gpushare: no room; wait", CapacityError("no room"))
    text, value = cli("inspect", "c1")[1], json.loads(cli("inspect", "c1", "--format", "json")[1])
    assert re.search("^last refusal +no room; wait$", text, re.MULTILINE) and value["last_refusal"] == "no room; wait"
    assert value["processes"] == [{"pid": init.pid, "container_pid": init.pid, "memory_used_bytes": [3 * GIB]}]


def test_inspect_accepts_unique_prefix(cli: Callable[..., Any], start: Callable[..., Path], state: Path) -> None:
    start("web-1", pure.share(0, 0, GIB))
    start("web-12", pure.share(0, 0, GIB))
    log.record(str(state), "refused-1", "gpushare: no room", CapacityError("no room"))
    assert json.loads(cli("inspect", "web-12", "--format", "json")[1])["id"] == "web-12"
    assert json.loads(cli("inspect", "web-1", "--format", "json")[1])["id"] == "web-1"  # an exact id precedes a prefix
    assert json.loads(cli("inspect", "ref", "--format", "json")[1])["state"] == "refused"
    ambiguous = 'gpushare: ID prefix "web" is ambiguous (2 matches): web-1, web-12; type more characters\n'
    assert cli("inspect", "web") == (64, "", ambiguous)
    code, _, error = cli("inspect", "db")
    assert code == 64 and error.startswith('gpushare: no container "db"; ')
    assert cli("inspect", "")[0] == 64


def test_devices_sums_allocations(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    start("c1", pure.share(0, 0, 4 * GIB))
    start("c2", pure.share(0, 0, 2 * GIB), pure.share(1, 1, None))
    first = json.loads(cli("devices", "--format", "json")[1])[0]
    found = (first["granted_bytes"], first["free_bytes"], first["containers"], first["state"])
    assert found == (6 * GIB, 10 * GIB, 2, "open")


def test_devices_sums_only_hard_compute_limits(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    for name, percent, soft in (("c1", 30, False), ("c2", 50, False), ("c3", 90, True), ("c4", None, False)):
        start(name, pure.share(0, 0, GIB)._replace(compute_percent=percent, soft=soft))
    first, second = json.loads(cli("devices", "--format", "json")[1])
    assert (first["compute_granted_percent"], first["compute_grantable_percent"]) == (80, 100)
    assert second["compute_granted_percent"] == 0
    assert (first["compute_free_percent"], second["compute_free_percent"]) == (20, 100)
    assert "80%" in cli("devices")[1].splitlines()[1]


def test_dead_and_damaged_leases_are_shown_and_pruned(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path
) -> None:
    start("dead", pure.share(0, 0, GIB))
    start("damaged", pure.share(0, 1, GIB))
    start("live", pure.share(0, 0, GIB))
    path = state / "containers" / "dead" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "x"}))
    (state / "containers" / "damaged" / "lease.json").write_text("{")
    (state / "containers" / "half").mkdir()
    log.record(str(state), "gone", "gpushare: no room", CapacityError("no room"))
    log.record(str(state), "live", "gpushare: no room", CapacityError("no room"))

    states = {one["id"]: one["state"] for one in json.loads(cli("list", "--format", "json")[1])}
    assert states == {"dead": "dead", "live": "running", "damaged": "damaged"}
    assert json.loads(cli("devices", "--format", "json")[1])[1]["state"] == "unknown use"

    wanted = {("lease", "dead"), ("start", "half"), ("damaged", "damaged"), ("refusal", "gone")}
    for _ in range(2):  # a dry run changes nothing
        items = json.loads(cli("prune", "--dry-run", "--format", "json")[1])["items"]
        assert {(item["kind"], item["id"]) for item in items} == wanted
    code, text, error = cli("prune")
    assert code == 0 and "--assume-free" in error
    assert sorted(line.split()[2] for line in text.splitlines()[1:]) == ["damaged", "dead", "gone", "half"]
    assert sorted(os.listdir(state / "containers")) == ["damaged", "live"]
    assert log.known(str(state)) == ["live"]
    assert cli("prune", "--assume-free")[0] == 0
    assert os.listdir(state / "containers") == ["live"] and storage.trash(str(state)) == []
    assert cli("prune")[1] == "nothing to remove\n"


def test_memory_of_the_driver_is_shown(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    """Also why a container is over its limit without an allocation, in one line."""
    page = start("c1", pure.share(0, 0, GIB))
    charge(page, 0, 1, GIB + 64 * MIB, driver_mib=700)
    note = (
        "slot 0: over its limit by 64 MiB, new allocations fail until it is below; "
        "of 1.06 GiB in use, 700 MiB are the driver's contexts, code, streams and graphs"
    )
    code, text, _ = cli("inspect", "c1")
    assert code == 0 and f"note          {note}\n" in text
    lines = text.splitlines()
    (heading,) = (line for line in lines if line.startswith("SLOT  DEVICE  MEMORY USED"))
    assert "DRIVER PART" in heading and "700 MiB" in lines[lines.index(heading) + 1]
    assert note in cli("list")[1]
    value = json.loads(cli("list", "--format", "json")[1])
    assert value[0]["shares"][0]["memory_driver_bytes"] == 700 * MIB


def test_limit_that_cannot_hold_a_start_is_named(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    small, large = start("small", pure.share(0, 0, GIB)), start("large", pure.share(0, 0, 8 * GIB))
    charge(small, 0, 1, GIB - MIB, driver_mib=712, refused=3)
    charge(large, 0, 1, 8 * GIB - MIB, driver_mib=712, refused=3)
    text = cli("inspect", "small")[1]
    assert "memory was refused, and the driver itself takes 712 MiB of 1 GiB for contexts, code and streams" in text
    assert "PyTorch needs about 0.7 GiB before its first tensor" in text
    assert "was refused" not in cli("inspect", "large")[1]


def test_limit_of_running_container_is_set(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    page = start("c1", pure.share(0, 0, 8 * GIB), pure.share(1, 1, 2 * GIB)._replace(compute_percent=30))
    charge(page, 0, 1, 5 * GIB, GIB)
    words = ("limit", "set", "c1", "--memory", "4Gi", "--device", "0")
    code, out, err = cli(*words, "--priority", "high")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [
        "   0       0        5 GiB  8 GiB -> 4 GiB     100%  hard  normal -> high  allowed",
        "   1       1        1 GiB           2 GiB      30%  hard  normal          allowed",
        "slot 0: in use 5 GiB, over the limit by 1 GiB: new allocations fail until it is below",
    ]
    assert all("over its limit by 1 GiB" in text for text in (cli("inspect", "c1")[1], cli("list")[1]))
    value = json.loads(cli(*words, "--format", "json")[1])
    share = value["shares"][0]
    assert (value["changed"], value["dry_run"], share["over_bytes"]) == (False, False, GIB)
    assert share["before"] == share["after"] and share["after"]["memory_limit_bytes"] == 4 * GIB
    assert cli(*words)[1].splitlines()[-2] == "nothing changed"


def test_second_pause_reports_no_change(cli: Callable[..., Any], start: Callable[..., Path]) -> None:
    start("c1", pure.share(0, 0, GIB))
    assert cli("pause", "c1") == (0, "c1 is paused: its launches wait until `gpushare resume c1`\n", "")
    assert cli("pause", "c1") == (0, "c1 is paused already\n", "")
    assert json.loads(cli("list", "--format", "json")[1])[0]["state"] == "paused"
    assert "paused" in cli("limit", "show", "c1")[1]
    answer = json.loads(cli("resume", "c1", "--format", "json")[1])
    assert (answer["id"], answer["paused"], answer["changed"], answer["bytes"]) == ("c1", False, True, 0)
    assert cli("resume", "c1") == (0, "c1 is running already\n", "")
    assert json.loads(cli("list", "--format", "json")[1])[0]["state"] == "running"
