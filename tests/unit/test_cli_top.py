"""gpushare top: its numbers, its layout at each size, and keys and signals on a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import output, sample, terminal, top, topscreen
from gpushare.cli.options import Paths
from gpushare.cli.topscreen import View
from gpushare.config import node
from gpushare.state import leases
from gpushare.state.names import Name

from tests.support.terminal import Terminal
from tests.unit import pure
from tests.unit.clihost import GIB, charge, compute

SOURCE = str(Path(leases.__file__).resolve().parents[2])
# The program over a state directory with a fixed host; the terminal is a real one
PROGRAM = f"""
import sys
sys.path[:0] = [{SOURCE!r}, {os.getcwd()!r}]
from gpushare.config import node
from tests.unit import pure
node.read_node = lambda config, directory: pure.node()
from gpushare.cli import main
sys.exit(main())
"""


def program(state: Path, *args: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "--state", str(state), *args]


@pytest.fixture
def three(start: Callable[..., Path], state: Path) -> Path:
    """A state directory: big uses most memory, hungry most compute, old is the oldest."""
    now = time.time()
    charge(start("big", pure.share(0, 0, 4 * GIB), created=now - 60), 0, 1, 3 * GIB)
    page = start("hungry", pure.share(0, 0, 2 * GIB)._replace(compute_percent=60, page=1), created=now - 100)
    charge(page, 0, 1, GIB)
    compute(page, 0, 45, waited_ns=50 * 10**9)
    charge(start("old", pure.share(0, 1, GIB), created=now - 7200), 0, 1, GIB // 2)
    return state


def names_in(text: str) -> list[str]:
    """The containers in the order of their rows."""
    return re.findall(r"^(big|hungry|old) ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("memory", ["big", "hungry", "old"]),
        ("compute", ["hungry", "old", "big"]),
        ("throttled", ["hungry", "old", "big"]),
        ("age", ["old", "hungry", "big"]),
        ("name", ["big", "hungry", "old"]),
    ],
)
def test_once_prints_plain_table_in_requested_order(
    cli: Callable[..., Any], three: Path, sort: str, order: list[str]
) -> None:
    code, text, error = cli("top", "--once", "--sort", sort)
    assert (code, error) == (0, "")
    assert names_in(text) == order
    assert "\x1b" not in text and "█" not in text


def test_json_line_matches_list_and_devices(cli: Callable[..., Any], three: Path) -> None:
    code, text, error = cli("top", "--once", "--format", "json")
    assert (code, error, text.count("\n")) == (0, "", 1)
    value = json.loads(text)
    assert {one["id"] for one in value["containers"]} == {"big", "hungry", "old"}
    listed = {one["id"]: one for one in json.loads(cli("list", "--format", "json")[1])}
    for one in value["containers"]:
        (share,) = one["shares"]
        assert 0 <= share.pop("compute_throttled_percent") <= 51
        assert share.keys() == listed[one["id"]]["shares"][0].keys()
    first, second = value["devices"]
    assert (first["memory_used_bytes"], second["memory_used_bytes"]) == (4 * GIB, GIB // 2)
    assert first["granted_bytes"] == 6 * GIB and abs(value["time"] - time.time()) < 60


def test_throttled_counts_since_previous_sample(
    start: Callable[..., Path], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = start("c1", pure.share(0, 0, GIB)._replace(compute_percent=30), created=time.time() - 1000)
    now = 10**15
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    sampler = sample.Sampler(Paths("/none.yaml", str(state)))
    waited = [0, 100, 350, 350, 90]  # seconds of waiting, in samples 100 s apart; the last one is forged
    seen = []
    for seconds in waited:
        compute(page, 0, 30, waited_ns=seconds * 10**9)
        seen.append(sampler.take().lines[0].throttled_percent)
        now += 100 * 10**9
    assert seen == [0.0, 100.0, 250.0, 0.0, 0.0]


def test_without_a_driver_containers_are_shown(
    cli: Callable[..., Any], three: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node, "read_node", lambda config, directory: None)
    (tmp_path / "none.yaml").write_text(f"version: 1\ndriver: {{root: {tmp_path}}}\n")
    value = json.loads(cli("--config", str(tmp_path / "none.yaml"), "top", "--once", "--format", "json")[1])
    assert value["devices"] == [] and "no NVIDIA driver" in value["note"] and len(value["containers"]) == 3


def test_unreadable_state_is_reported(cli: Callable[..., Any], state: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "containers").write_text("")
    code, text, error = cli("--state", str(tmp_path / "other"), "top", "--once")
    assert (code, text) == (71, "") and error.count("\n") == 1 and "Not a directory" in error
    assert cli("top", "--interval", "0")[0] == 2
    assert cli("top", "--sort", "colour")[0] == 2


@pytest.mark.parametrize(
    ("key", "view"),
    [
        ("c", View("compute")),
        ("r", View("memory", True, 5)),
        ("up", View("memory", False, 4)),
        ("page down", View("memory", False, 15)),
        ("right", View("percent")),
        ("left", View("name")),
        ("p", View("percent")),
        ("h", View("memory", False, 5, True)),
        ("?", View("memory", False, 5, True)),
        ("x", View("memory", False, 5)),
        ("", View("memory", False, 5)),
    ],
)
def test_key_changes_view(key: str, view: View) -> None:
    assert top.pressed(View("memory", False, 5), key) == view


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"M\x1b[A\x1bOBc", ["m", "up", "down", "c"]),
        (b"\x1b[5~\x1b[1;5C", ["page up", ""]),
        (b"\x1b", ["\x1b"]),
        ("é".encode(), ["", ""]),
    ],
)
def test_key_sequences_are_decoded(data: bytes, keys: list[str]) -> None:
    assert [terminal._name(key) for key in terminal._KEY.findall(data)] == keys


def many(state: Path, count: int) -> sample.Sample:
    """`count` containers on one device, without files."""
    from gpushare.cli import facts

    lines = []
    for number in range(count):
        share = pure.share(0, 0, GIB)
        use = facts.Use(share, number << 20, 0, facts.Compute(number, 0, 0))
        one = facts.Container(f"container-{number:03}", "running", "", pure.lease(share), (use,), ())
        lines.append(sample.Line(one, use, 0.0))
    return sample.Sample(0.0, tuple(lines), (), "")


def drawn(taken: sample.Sample, view: View, width: int, height: int) -> str:
    from rich.console import Console

    console = Console(width=width, height=height, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(topscreen.draw(taken, view, 2, width, height))
    return captured.get()


@pytest.mark.parametrize("height", [1, 5, 8, 24, 100])
@pytest.mark.parametrize("width", [10, 40, 80, 132, 250])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_every_size_shows_only_whole_lines(state: Path, width: int, height: int, count: int) -> None:
    taken = many(state, count)
    view = topscreen.scrolled(View("name", False, 1 << 30), taken, height)
    text = drawn(taken, view, width, height)
    lines = text.splitlines()
    assert len(lines) == max(height, 4 + min(count, 3) if count else 4) and max(map(len, lines)) <= width
    shown = re.findall(r"container-(\d+)", text)
    if count == 40 and width >= 80:
        room = max(3, height - 5)
        assert shown == [f"{number:03}" for number in range(max(0, 40 - room), 40)]  # scrolled to the end
        assert ("of 40" in lines[-1]) == (room < 40)


def titles(taken: sample.Sample, width: int) -> tuple[list[str], int]:
    """The titles of the shown columns, and the length of the bars."""
    cells = topscreen.without_empty(topscreen.SCREEN_CONTAINERS, taken.lines)
    shown, length = topscreen.fitting(cells, taken.lines, width)
    return [cells[n].column.title for n in shown], length


def test_width_selects_columns_and_bar_length(state: Path) -> None:
    taken = many(state, 3)
    wide, length = titles(taken, 200)
    cells = topscreen.without_empty(topscreen.SCREEN_CONTAINERS, taken.lines)
    assert wide == [cell.column.title for cell in cells if not cell.spare] and wide.count("used/limit") == 2
    assert length > topscreen.BAR_CELLS
    at_80, length = titles(taken, 80)  # one running device: no column shows that
    assert at_80 == ["container", "memory", "used/limit", "compute", "trend", "throttled", "age"] and length >= 5
    assert titles(taken, 20)[0] == ["container", "memory", "compute"]
    dead = taken.lines[0]._replace(container=taken.lines[0].container._replace(state="dead"))
    assert "state" in titles(taken._replace(lines=(dead, *taken.lines[1:])), 80)[0]


@pytest.mark.parametrize("height", [8, 24])
def test_note_is_shown_where_there_is_room(start: Callable[..., Path], state: Path, height: int) -> None:
    """Such as why a container is over its limit without an allocation."""
    charge(start("c1", pure.share(0, 0, GIB)), 0, 1, GIB + (64 << 20), driver_mib=700)
    taken = sample.Sampler(Paths("/none.yaml", str(state))).take()
    screen = drawn(taken, View(), 160, height)
    assert ("c1: slot 0: over its limit by 64 MiB" in screen) is (height == 24)
    assert len(screen.splitlines()) <= height


@pytest.mark.parametrize("lending", ["", "evict"])
def test_borrowed_memory_is_shown_where_memory_is_lent(start: Callable[..., Path], state: Path, lending: str) -> None:
    """On the screen and in a pipe: request, limit, use, and the part of it that is borrowed."""
    share = pure.share(0, 0, 4 * GIB)._replace(lending=lending, virtual_bytes=12 * GIB if lending else 0)
    charge(start("c1", share), 0, 1, 7 * GIB if lending else 3 * GIB)
    taken = sample.Sampler(Paths("/none.yaml", str(state))).take()
    screen = drawn(taken, View(), 160, 24)
    rows = topscreen.rows_of(topscreen.without_empty(topscreen.PLAIN, taken.lines), taken.lines)[0]
    assert ("BORROWED" in screen) is bool(lending)
    if lending:
        assert "7 GiB of 4 GiB..12 GiB" in screen and re.search(r" 3 GiB ", screen)
        assert rows[2:5] == ["7 GiB", "4 GiB..12 GiB", "3 GiB"]
    else:
        assert "3 GiB of 4 GiB" in screen and rows[2:4] == ["3 GiB", "4 GiB"]


def test_narrow_screen_keeps_percentage_and_cuts_long_names(state: Path) -> None:
    taken = many(state, 3)
    name = Name("namespace/a-pod-with-a-long-name/container")
    lines = [line._replace(container=line.container._replace(name=name)) for line in taken.lines]
    taken = taken._replace(lines=tuple(lines))
    wide, narrow = (drawn(taken, View(), width, 24) for width in (160, 82))
    assert "namespace/..me/container" in wide and "namespace/..me/container" in narrow
    assert ("MEM%" in wide, "MEM%" in narrow, "░" in wide, "░" in narrow) == (False, True, True, False), narrow


def test_trend_shows_last_samples(start: Callable[..., Path], state: Path) -> None:
    page = start("c1", pure.share(0, 0, GIB))
    sampler = sample.Sampler(Paths("/none.yaml", str(state)))
    for percent in (0, 50, 100):
        compute(page, 0, percent)
        taken = sampler.take()
    (line,) = taken.lines
    assert [round(one) for one in line.compute_history] == pytest.approx([0, 50, 100], abs=11)
    for columns in (100, 150):
        text = drawn(taken, View(), columns, 24)
        assert text.count("TREND") == 2 and len(re.findall(r" ▁[▄▅][▇█] ", text)) == 2, text  # device and container


@pytest.mark.parametrize(
    ("values", "cells", "text"),
    [((), 3, "   "), ((0, 100), 3, " ▁█"), ((0, 13, 100, 250), 3, "▂██"), ((-5,), 1, "▁"), ((50,), 0, "")],
)
def test_sparkline_has_the_newest_value_at_the_right(values: tuple[float, ...], cells: int, text: str) -> None:
    assert output.sparkline(values, cells) == text


@pytest.mark.parametrize("width", [80, 120, 200, 400])
def test_bars_fit_width(state: Path, width: int) -> None:
    taken = many(state, 40)
    _, length = titles(taken, width)
    text = drawn(taken, View(), width, 24)
    assert max(map(len, text.splitlines())) <= width and 5 <= length <= 30
    assert re.search(rf"[█░]{{{length}}} +\d+%", text)


def test_screen_follows_keys_and_size_and_is_restored(three: Path) -> None:
    with Terminal(program(three, "top", "--interval", "60"), 100, 24) as one:
        before = one.modes
        text = one.expect("q quit")  # the last line of the screen
        assert names_in(text) == ["big", "hungry", "old"] and "by memory" in text
        assert len(text.splitlines()) == 24 and "░" in text
        assert one.modes_now() != before  # keys arrive one at a time
        one.press("n", "r")
        one.expect(lambda text: "by name, reversed" in text and names_in(text) == ["old", "hungry", "big"])
        one.press("right")
        one.expect("by memory, reversed")
        one.resize(70, 12)
        assert len(one.expect(lambda text: len(text.splitlines()) == 12).splitlines()) == 12
        one.press("q")
        assert one.end() == 0
        assert one.modes_now() == before
        assert one.raw.endswith(b"\x1b[?1049l\x1b[?25h") or b"\x1b[?1049l" in one.raw[-40:]


def test_help_opens_and_closes_with_any_key(three: Path) -> None:
    with Terminal(program(three, "top", "--interval", "3600"), 100, 30) as one:
        one.expect("q quit")
        for key in ("h", "?"):
            one.press(key)
            one.expect(lambda text: "any key closes it" in text and "THROTTLED" in text and "hungry" not in text)
            one.press("q")  # closes the help, not the program
            one.expect("hungry")
        one.press("q")
        assert one.end() == 0


def test_space_refreshes_at_once(three: Path, start: Callable[..., Path]) -> None:
    with Terminal(program(three, "top", "--interval", "3600")) as one:
        one.expect("3 containers")
        start("late", pure.share(0, 0, GIB))
        one.press(" ")
        one.expect("4 containers")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_signal_restores_terminal(three: Path, number: signal.Signals, code: int) -> None:
    with Terminal(program(three, "top")) as one:
        one.expect("q quit")
        one.process.send_signal(number)
        assert one.end() == code
        assert one.modes_now() == one.modes and b"\x1b[?1049l" in one.raw and b"Traceback" not in one.raw


def test_ctrl_z_stops_and_fg_resumes(three: Path) -> None:
    """Ctrl-Z: while the program is stopped, the terminal belongs to the shell."""
    with Terminal(program(three, "top", "--interval", "60")) as one:
        one.expect("q quit")
        one.process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(one.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and one.modes_now() == one.modes
        one._read(5)
        one.screen.reset()
        one.process.send_signal(signal.SIGCONT)
        one.expect("q quit")
        one.press("q")
        assert one.end() == 0


def test_without_keyboard_runs_until_signal(three: Path) -> None:
    """`gpushare top </dev/null`: end of file is not a key."""
    words = ["sh", "-c", 'exec "$@" </dev/null', "sh", *program(three, "top", "--interval", "0.1")]
    with Terminal(words) as one:
        one.expect("q quit")
        for _ in range(3):
            one.screen.reset()
            one.expect("3 containers")
        one.process.send_signal(signal.SIGTERM)
        assert one.end() == 143


def test_colour_obeys_no_color(three: Path) -> None:
    for env, args, coloured in (({}, (), True), ({"NO_COLOR": "1"}, (), False), ({}, ("--no-color",), False)):
        with Terminal(program(three, "top", *args), env=env) as one:
            one.expect("q quit")
            assert (re.search(rb"\x1b\[[0-9;]*m", one.raw) is not None) == coloured, (env, args)


def test_dumb_terminal_gets_plain_tables(three: Path) -> None:
    with Terminal(program(three, "top", "--interval", "0.1"), 160, 50, env={"TERM": "dumb"}) as one:
        text = one.expect(lambda text: text.count("CONTAINER") >= 2)
        assert "\x1b" not in text and b"\x1b" not in one.raw
        one.press("\x03")
        assert one.end() == 130
        assert b"Traceback" not in one.raw


def test_pipe_output_ends_when_reader_closes(three: Path) -> None:
    command = program(three, "top", "--interval", "0.1", "--format", "json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        times = [json.loads(process.stdout.readline())["time"] for _ in range(3)]
        assert times == sorted(times) and 0.1 <= times[2] - times[0] < 20
        process.stdout.close()
        assert (process.wait(20), process.stderr.read()) == (0, "")
