"""tools/newcomer.py without a Debian: its commands are those of README.md, and it reports every unexpected line."""

from __future__ import annotations

import pytest

from tools import newcomer
from tools.newcomer import INSTALL, REMOVE, USE, Step, Trouble, Watch


def test_commands_are_in_the_page_in_this_order() -> None:
    lines = [newcomer.find(one.begins).line for one in (*INSTALL, *USE, *REMOVE)]
    in_blocks = [line for line in lines if line]
    assert in_blocks == sorted(in_blocks) and len(in_blocks) >= len(lines) - 1, "one is in a sentence"


def test_output_is_checked_unless_the_page_shows_it() -> None:
    for one in (*INSTALL, *USE, *REMOVE):
        assert not (newcomer.find(one.begins).shown and one.lines), one.begins


def test_missing_command_is_an_error() -> None:
    with pytest.raises(Trouble, match="no command that begins with 'docker fly'"):
        newcomer.find("docker fly")


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        ("serve\n", []),
        ("serve\nWARNING: no swap\n", ["an unexpected line: WARNING: no swap"]),
        ("", ["no line that matches serve"]),
        ("server\n", ["an unexpected line: server", "no line that matches serve"]),
    ],
)
def test_unexpected_and_missing_lines_are_reported(output: str, wrong: list[str]) -> None:
    assert newcomer.unexpected(output, ("serve",)) == wrong


def test_silent_command_must_print_nothing() -> None:
    assert newcomer.unexpected("", ()) == [] and newcomer.unexpected("done\n", ()) == ["an unexpected line: done"]


def test_shortest_beginning_tells_an_id_from_the_other_ids() -> None:
    ids = ["5d42", "5d94", "0948"]
    assert [newcomer.shortest(one, ids) for one in ids] == ["5d4", "5d9", "0"]


def test_times_are_summed_for_each_place() -> None:
    watch = Watch()
    watch.steps = [Step("a", "dpkg -i x", 1.5), Step("a", "gpushare inspect x", 2.0), Step("a", "docker rm x", 4.0)]
    watch.steps.append(Step("b", "make demo", 300.5))
    assert watch.totals() == {"a": 7.5, "b": 300.5} and watch.seconds("a", "gpushare inspect") == 3.5
    assert newcomer.table(watch.steps).splitlines()[3:] == [
        "     4.0     7.5  a          docker rm x",
        "   300.5   300.5  b          make demo",
    ]
