"""light.py is what it stands for: the same classes, the same JSON, the same errors."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from gpushare import light


class Ours(light.NamedTuple):
    """Text."""

    index: int  # type: ignore[assignment]
    name: str = "n"
    rest: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return self.index * 2


class Theirs(typing.NamedTuple):
    index: int  # type: ignore[assignment]
    name: str = "n"
    rest: tuple[int, ...] = ()


MADE: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "a", (2,)), {}),
    ((), {"index": 1}),
    ((1,), {"rest": (3,)}),
    ((), {"rest": (3,), "index": 7, "name": "z"}),
    ((), {}),
    ((1, 2, 3, 4), {}),
    ((1,), {"index": 2}),
    ((1,), {"other": 2}),
    ((1, 2, 3), {"other": 2}),
]


@pytest.mark.parametrize(("values", "named"), MADE)
def test_made_and_refused_as_a_named_tuple(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        expected = Theirs(*values, **named)
    except TypeError:
        with pytest.raises(TypeError, match="Ours"):
            Ours(*values, **named)
        return
    made = Ours(*values, **named)
    assert made == expected and hash(made) == hash(expected) and isinstance(made, tuple)
    assert repr(made) == repr(expected).replace("Theirs", "Ours")
    assert (made._asdict(), made.index, made.name, made.rest) == (expected._asdict(), *expected)
    assert made._replace(name="q") == expected._replace(name="q") and type(made._replace()) is Ours
    assert copy.deepcopy(made) == made and type(pickle.loads(pickle.dumps(made))) is Ours
    assert made.twice == made.index * 2


def test_class_is_like_a_named_tuple() -> None:
    assert (Ours._fields, Ours._field_defaults) == (Theirs._fields, Theirs._field_defaults)
    assert Ours.__doc__ == "Text." and Ours._make([1, "x", ()]) == (1, "x", ())
    with pytest.raises(ValueError, match="other"):
        Ours(1)._replace(other=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Ours(1).index = 2  # type: ignore[misc, assignment]
    with pytest.raises(AttributeError):
        Ours(1).other = 2  # type: ignore[attr-defined]


TEXTS: list[Any] = [
    '{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d\\ude00", NaN, -Infinity]}',
    " \t\n\r[]\n ",
    '"\\ud800"',
    "",
    " ",
    "[1, 2",
    '{"a" 1}',
    '{"a": 1} x',
    "[1,]",
    '"tab\there"',
    "\ufeff{}",
    "\xa0{}",
    "nul",
    "1" * 5000,
    b'{"a": "\xc3\xa9"}',
    b"\xef\xbb\xbf[1]",
    "[1]".encode("utf-16"),
    b"\xff",
    b"",
    '{"a": 1, "a": 2}',
]


def outcome(function: Any, value: Any) -> tuple[str, str]:
    try:
        return "value", repr(function(value))
    except (ValueError, TypeError, RecursionError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_reads_json_as_json_does(text: Any) -> None:
    assert outcome(light.loads, text) == outcome(json.loads, text)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(RecursionError):
        light.loads("[" * 1_000_000)


VALUES: list[Any] = [
    {"a": [1, 2.5, True, None, "é\u2028\ud800"], "b": {}, "c": ()},
    {1: 2, None: 3, False: 4},
    float("inf"),
    {"x": object()},
    {(1, 2): 3},
    Ours(1),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_writes_json_as_json_does(value: Any) -> None:
    assert outcome(light.dumps, value) == outcome(json.dumps, value)


def test_separators_and_a_circle() -> None:
    assert light.dumps({"a": [1, 2]}, ",", ":") == '{"a":[1,2]}'
    circle: list[Any] = []
    circle.append(circle)
    assert outcome(light.dumps, circle) == outcome(json.dumps, circle)


def test_bad_json_where_json_is_not_loaded_yet() -> None:
    """As in a start: the parser in C does not find the exception that it has to raise."""
    source = str(Path(light.__file__).parents[1])
    for bad in ("{", '{"a" 1}', '"a\nb"', "nul", "[1,]"):
        text = f"""
import sys
sys.path.insert(0, {source!r})
from gpushare import light
assert "json" not in sys.modules
try:
    light.loads({bad!r})
except ValueError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-ISc", text], capture_output=True, text=True)
        assert done.stdout.rstrip("\n") == outcome(json.loads, bad)[1], done.stderr


def test_a_python_without_the_c_parser_has_the_same_values() -> None:
    source = str(Path(light.__file__).parents[1])
    text = f"""
import sys
sys.path.insert(0, {source!r})
sys.modules["_json"] = None
from gpushare import light
assert light._json is None
assert light.loads(light.dumps({{"a": [1, "b"]}})) == {{"a": [1, "b"]}}
"""
    done = subprocess.run([sys.executable, "-ISc", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
