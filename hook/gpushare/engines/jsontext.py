"""Change one member of a JSON object in its text and keep the rest of the text unchanged. Pure.

check(text, path)                 -> dict     raises ConfigError naming file, line and column
put(text, ("a", "b"), value)      -> str      makes "a" if it is missing
drop(text, ("a", "b"))            -> str      also drops "a" if it is empty then
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown

_DECODER = json.JSONDecoder()
BYTE_ORDER_MARK = "\ufeff"  # editors of Windows write it, and docker accepts it; Python's parser does not
_SPACE = " \t\r\n"
_INDENT = "    "  # for a text without indentation


class Member(NamedTuple):
    """Position of a member: its key begins at `start`; its value begins at `value` and ends before `end`."""

    key: str
    start: int
    value: int
    end: int


def is_empty(text: Optional[str]) -> bool:
    """Whether there is no JSON value, only white space."""
    return not (text or "").removeprefix(BYTE_ORDER_MARK).strip()


def check(text: str, path: str) -> dict[str, Any]:
    """The object in `text`. Raises ConfigError."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) != len(found):
            keys = [key for key, _ in found]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{path}: {shown(twice)} occurs twice", "keep one")
        return value

    try:
        value = json.loads(text.removeprefix(BYTE_ORDER_MARK), object_pairs_hook=pairs)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply", "fix the file") from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {error.msg}", "fix the file; nothing was changed") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {str(error).partition(';')[0]}", "fix the file") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must contain a JSON object, not {type(value).__name__}", "fix the file")
    return value


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _members(text: str, at: int) -> list[Member]:
    """The members of the object whose brace is at `at`, in a valid text."""
    found = []
    here = _skip(text, at + 1)
    while text[here] != "}":
        key, end = _DECODER.raw_decode(text, here)
        value = _skip(text, _skip(text, end) + 1)  # behind the colon
        stop = _DECODER.raw_decode(text, value)[1]
        found.append(Member(key, here, value, stop))
        here = _skip(text, stop)
        if text[here] == ",":
            here = _skip(text, here + 1)
    return found


def _find(members: Sequence[Member], key: str) -> Optional[int]:
    return next((n for n, member in enumerate(members) if member.key == key), None)


def _margin(text: str, at: int) -> str:
    """The white space at the beginning of the line of `at`."""
    line = text.rfind("\n", 0, at) + 1
    return text[line : _skip(text, line)] if _skip(text, line) <= at else ""


def _unit(text: str) -> str:
    """The indentation of one level in this text."""
    at = text.index("{")
    members = _members(text, at)
    if not members or "\n" not in text[at : members[0].start]:
        return _INDENT
    return _margin(text, members[0].start) or _INDENT


def _written(value: Any, margin: str, unit: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", "\n" + margin)


def put(text: str, keys: Sequence[str], value: Any) -> str:
    """Set a member. `text` must have passed `check`; each parent must be an object, null or absent."""
    return _put(text, text.index("{"), keys, value, _unit(text))


def _put(text: str, at: int, keys: Sequence[str], value: Any, unit: str) -> str:
    members = _members(text, at)
    n = _find(members, keys[0])
    margin = _margin(text, members[0].start if members else at)
    if n is not None and len(keys) > 1 and text[members[n].value] == "{":
        return _put(text, members[n].value, keys[1:], value, unit)
    for key in reversed(keys[1:]):
        value = {key: value}
    if n is not None:
        return text[: members[n].value] + _written(value, margin, unit) + text[members[n].end :]
    if not members:
        stop = _skip(text, at + 1)
        inner = margin + unit
        body = f"\n{inner}{json.dumps(keys[0])}: {_written(value, inner, unit)}\n{margin}"
        return text[: at + 1] + body + text[stop:]
    gap = text[at + 1 : members[0].start]
    lines = "\n" in gap
    member = _written(value, margin, unit) if lines else json.dumps(value, ensure_ascii=False)
    last = members[-1].end
    return f"{text[:last]},{gap if lines else ' '}{json.dumps(keys[0])}: {member}{text[last:]}"


def drop(text: str, keys: Sequence[str]) -> str:
    """Remove a member, and its parents that are empty then. Without that member, return the text unchanged."""
    return _drop(text, text.index("{"), keys)


def _drop(text: str, at: int, keys: Sequence[str]) -> str:
    members = _members(text, at)
    n = _find(members, keys[0])
    if n is None:
        return text
    here = members[n]
    if len(keys) > 1:
        if text[here.value] != "{":
            return text
        shorter = _drop(text, here.value, keys[1:])
        if shorter == text or _members(shorter, here.value):
            return shorter
    if n > 0:
        return text[: members[n - 1].end] + text[here.end :]
    if len(members) > 1:
        return text[: here.start] + text[members[1].start :]
    return text[: at + 1] + text[_skip(text, here.end) :]
