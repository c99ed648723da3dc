"""Values from images in gpushare's output: short, and inert in a shell, a log and a terminal."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare.core import quantity, quoting
from gpushare.core.errors import GpushareError
from gpushare.request import oci
from gpushare.state import log

SOURCES = Path(oci.__file__).resolve().parents[1]
COMMANDS = (
    "$(touch made)",
    "`touch made`",
    '"; touch made; "',
    "'; touch made; '",
    "\\$(touch made)",
    '\\"; touch made; \\"',
    "\n touch made \n",
    "\r\ntouch made\r\n",
    "\u2028touch made\u2029",
    "${IFS}$(touch${IFS}made)",
    "$((a[$(touch made)]))",
    "!touch made",
    "'\"'\"$(touch made)",
    "\\",
    "\\'; touch made; '",
    "#' $(touch made)",
)
# text before and after the value: gpushare's own, and with unbalanced quotes
FRAMES = (
    "{}",
    "gpushare: X={}: not an amount; write 4Gi",
    "the container's {}",
    "{} of gpushare's",
    "it's {} in docker's {}",
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4Gi", '"4Gi"'),
        ("", '""'),
        ("größe 🎉", '"größe 🎉"'),
        ("$(id)", r'"\x24(id)"'),
        ("a`b\"c'd\\e", r'"a\x60b\x22c\x27d\x5ce"'),
        ("a\nb\tc\x00\x1b[31m\x7f", r'"a\x0ab\x09c\x00\x1b[31m\x7f"'),
        ("\u202egpj.exe", r'"\xe2\x80\xaegpj.exe"'),  # an override of the writing direction
        ("\x9b31m", r'"\xc2\x9b31m"'),
        ("\udcff\udc80", r'"\xff\x80"'),  # bytes that are not UTF-8
        ("\ud800", r'"\xed\xa0\x80"'),  # JSON can encode lone surrogates
    ],
)
def test_special_characters_become_bytes(text: str, expected: str) -> None:
    assert quoting.quoted(text) == quoting.shown(text) == expected


def test_long_values_are_cut_before_they_are_escaped() -> None:
    assert quoting.shown("x" * 80) == f'"{"x" * 80}"'
    assert quoting.shown("x" * 81) == f'"{"x" * 64}..." (81 characters)'
    assert quoting.shown("/" + "x" * 255) == f'"/{"x" * 255}"'
    assert quoting.shown("/" + "x" * 256) == f'"/{"x" * 203}..." (257 characters)'
    worst = "\U0010ffff" * 1_000_000  # four bytes each, none printable
    assert len(quoting.shown(worst)) < 64 * 16 + 40 and len(quoting.shown("/" + worst)) < 256 * 16 + 40


def test_numbers_stay_as_they_are() -> None:
    assert [quoting.shown(value) for value in (5, 2.5, True, None)] == ["5", "2.5", "True", '"None"']


@pytest.mark.parametrize("text", COMMANDS)
def test_shell_runs_nothing_in_message(text: str, tmp_path: Path) -> None:
    lines = [frame.format(quoting.shown(text), quoting.shown(text)) for frame in FRAMES]
    lines += [log.line_of(GpushareError(quantity.wrong("X", text, "bad", "do better").message))[0]]
    lines += [log.line_of(ValueError(text))[0], log.line_of(ValueError("it's " + text))[0]]
    for number, script in enumerate([*lines, "\n".join(lines), "\n".join(lines[::-1])]):
        for shell in ("bash", "sh"):
            subprocess.run([shell, "-c", script], cwd=tmp_path, capture_output=True, env={"PATH": os.environ["PATH"]})
            assert os.listdir(tmp_path) == [], (number, shell, script)


@pytest.mark.parametrize("text", COMMANDS)
def test_shell_parses_quoted_value_as_one_word(text: str) -> None:
    shown = quoting.shown(text)
    assert shlex.split(shown) == [shown[1:-1]]
    printed = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, text=True, check=True)
    assert printed.stdout == shown[1:-1]


def test_unexpected_error_text_is_quoted() -> None:
    line, code = log.line_of(OSError(2, "No such file", "/opt/$(touch made)"))
    assert r'FileNotFoundError: "[Errno 2] No such file: \x27/opt/\x24(touch made)\x27"' in line and code == 1


def messages() -> Iterator[tuple[str, ast.JoinedStr]]:
    """Every f-string of the package, with its location."""
    for path in sorted(SOURCES.rglob("*.py")):
        if path.name != "quoting.py":  # defines the function
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", node


def test_messages_use_quoting_functions() -> None:
    """`{value!r}` keeps `$(` unescaped; so do quotes around `{value}`."""
    ours = {
        'engines/docker.py: "{_DEFAULT}"',
        "request/dialects/conditions.py: '{word}",
        'state/log.py: "{stamp}"',
    }  # no text of an image
    found = set()
    for where, node in messages():
        for before, value in zip([None, *node.values], node.values):
            if not isinstance(value, ast.FormattedValue):
                continue
            assert value.conversion == -1, f"{where}: write {{shown(value)}}"
            text = before.value if isinstance(before, ast.Constant) else ""
            if isinstance(text, str) and text.endswith(('"', "'")):
                end = text[-1] if text[-1] == '"' else ""
                found.add(f"{where.rpartition(':')[0]}: {text[-1]}{{{ast.unparse(value.value)}}}{end}")
    assert found == ours
