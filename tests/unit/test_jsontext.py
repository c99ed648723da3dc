"""Change one member of a JSON text and keep every other byte."""

from __future__ import annotations

import pytest
from gpushare.core.errors import ConfigError
from gpushare.engines import jsontext


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", '{\n    "r": {\n        "g": 1\n    }\n}'),
        ('{ "a": [1, 2] }', '{ "a": [1, 2], "r": {"g": 1} }'),
        ('{\n\t"a": [1,\n2]\n}\n', '{\n\t"a": [1,\n2],\n\t"r": {\n\t\t"g": 1\n\t}\n}\n'),
        ('{\n  "r": {"x": 0},\n  "a": 1\n}', '{\n  "r": {"x": 0, "g": 1},\n  "a": 1\n}'),
        ('{\n  "r": {\n    "x": 0\n  }\n}', '{\n  "r": {\n    "x": 0,\n    "g": 1\n  }\n}'),
        ('{"r": null, "a": "\\u00e9}"}', '{"r": {\n    "g": 1\n}, "a": "\\u00e9}"}'),
        ('{\n  "r": {"g": 0, "x": 2}\n}', '{\n  "r": {"g": 1, "x": 2}\n}'),
        ('{\r\n  "a": 1\r\n}\r\n', '{\r\n  "a": 1,\r\n  "r": {\n    "g": 1\n  }\r\n}\r\n'),
    ],
)
def test_put_keeps_formatting(text: str, expected: str) -> None:
    assert jsontext.put(text, ("r", "g"), 1) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('{"r": {"g": 1, "x": 2}, "a": 1}', '{"r": {"x": 2}, "a": 1}'),
        ('{"r": {"x": 2, "g": 1}}', '{"r": {"x": 2}}'),
        ('{\n  "r": {"g": 1},\n  "a": 1\n}', '{\n  "a": 1\n}'),
        ('{"r": 5}', '{"r": 5}'),
        ('{"r": {}}', '{"r": {}}'),
    ],
)
def test_drop_removes_member_and_empty_parents(text: str, expected: str) -> None:
    assert jsontext.drop(text, ("r", "g")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "a": 1,\n}', "f.json:2:9: not valid JSON: Illegal trailing comma|f.json:3:1: not valid JSON"),
        ("", "f.json:1:1: not valid JSON"),
        ("[]", "f.json: must contain a JSON object, not list"),
        ('{"a": 1, "a": 2}', 'f.json: "a" occurs twice; keep one'),
        ('{"b": {"a": 1, "a": 2}}', '"a" occurs twice'),
        ('{"a": 1} x', "f.json:1:10: not valid JSON"),
        ('{"a": ' + "[" * 100000, "f.json: nested too deeply"),
        ('{"a": ' + "9" * 5000, "f.json: not valid JSON: Exceeds the limit|f.json:1:"),  # depends on the Python version
    ],
)
def test_invalid_json_is_refused_with_position(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jsontext.check(text, "f.json")
    assert any(part in str(caught.value) for part in message.split("|")), str(caught.value)
