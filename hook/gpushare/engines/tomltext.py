"""Add gpushare's tables to a TOML text: one block between two comments at its end; the rest stays unchanged. Pure.

check(text, path)                   -> dict    raises ConfigError naming file and line
put_block(text, tables)             -> str     the block alone, for a text that need not be TOML
put(text, tables, path)             -> str     adds the block; removes an earlier block and these tables elsewhere
drop(text, tables, path)            -> str     the text without them, also when a program has rewritten the file
                                               and removed the comments
add_import(text, glob, path)        -> str
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError, TOMLKitError

from ..core.errors import ConfigError

Keys = tuple[str, ...]
BEGIN = "# gpushare runtime configure: begin (--undo takes this out)\n"
END = "# gpushare runtime configure: end\n"


def _document(text: str, path: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except ParseError as error:
        problem = str(error).partition(" at line ")[0].rstrip(".")
        where = f"{path}:{error.line}"
        raise ConfigError(f"{where}: not valid TOML: {problem}", "fix the file; nothing was changed") from None
    except (TOMLKitError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "fix the file; nothing was changed") from None


def check(text: str, path: str) -> dict[str, Any]:
    """The parsed content. Raises ConfigError."""
    value: dict[str, Any] = _document(text, path).unwrap()
    return value


def at(value: Any, keys: Sequence[str]) -> Any:
    """The value at `keys`; None if there is none (TOML has no null). Raises ConfigError if a parent is no table."""
    for n, key in enumerate(keys):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{_name(keys[:n])} must be a table, not {type(value).__name__}", "fix the file")
        value = value.get(key)
        if value is None:
            return None
    return value


def table_at(value: Any, keys: Sequence[str], path: str) -> dict[str, Any]:
    """The table at `keys`; empty when there is none. Raises ConfigError."""
    try:
        found = at(value, keys)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.hint) from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: {_name(keys)} must be a table, not {type(found).__name__}", "fix the file")
    return found or {}


def text_at(value: Any, keys: Sequence[str], path: str) -> str:
    """The text at `keys`; empty when there is none. Raises ConfigError."""
    found = table_at(value, keys[:-1], path).get(keys[-1], "")
    if not isinstance(found, str):
        raise ConfigError(f"{path}: {_name(keys)} must be text, not {type(found).__name__}", "fix the file")
    return found


def texts_at(value: Any, keys: Sequence[str], path: str) -> list[str]:
    """The list of texts at `keys`; empty when there is none. Raises ConfigError."""
    found = table_at(value, keys[:-1], path).get(keys[-1], [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"{path}: {_name(keys)} must be a list of strings", "fix the file")
    return found


def merged(to: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, as an engine merges a later file: tables are united, other values replaced."""
    result = dict(to)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _name(keys: Sequence[str]) -> str:
    return ".".join(tomlkit.key(key).as_string() for key in keys)


def _written(keys: Sequence[str], table: Mapping[str, Any]) -> str:
    lines = [f"[{_name(keys)}]\n"]
    for key, value in table.items():
        if not isinstance(value, Mapping):
            lines.append(f"  {tomlkit.key(key).as_string()} = {tomlkit.item(value).as_string()}\n")
    inner = [_written((*keys, key), value) for key, value in table.items() if isinstance(value, Mapping)]
    return "".join(lines + inner)


def without_block(text: str) -> str:
    """The text without gpushare's block. A line break that was added before the block stays: it is harmless."""
    end = text.find(END)
    start = text.rfind(BEGIN, 0, max(end, 0))  # the nearest: text after an earlier lone comment is not gpushare's
    return text if start < 0 or end < 0 else text[:start] + text[end + len(END) :]


def block(text: str) -> str:
    """gpushare's block; empty if there is none."""
    rest = without_block(text)
    return "" if rest == text else text[text.rfind(BEGIN) : text.find(END)]


def put_block(text: str, tables: Mapping[Keys, Mapping[str, Any]]) -> str:
    """Replace gpushare's block, or add it at the end, in a text that need not be TOML, such as a template."""
    rest = without_block(text)
    written = BEGIN + "".join(_written(keys, table) for keys, table in tables.items()) + END
    return rest + ("" if not rest or rest.endswith("\n") else "\n") + written


def put(text: str, tables: Mapping[Keys, Mapping[str, Any]], path: str, ours: Sequence[Keys] = ()) -> str:
    """Remove the tables `ours` (default: `tables`), then add `tables` in a block at the end. Raises ConfigError if
    tables cannot be added at the end of this file."""
    result = put_block(drop(text, ours or list(tables), path), tables)
    try:
        value = check(result, path)
    except ConfigError:
        value = {}
    for keys, table in tables.items():
        if not value or at(value, keys) != table:
            hint = f"write everything below {_name(keys[:1])} as [tables], not as inline tables"
            raise ConfigError(f"{path}: [{_name(keys)}] cannot be added at the end of the file", hint)
    return result


def drop(text: str, tables: Sequence[Keys], path: str) -> str:
    """The text without gpushare's block and without `tables`. Raises ConfigError."""
    text = without_block(text)
    for keys in tables:
        document = _document(text, path)
        if _delete(document, keys):
            text = tomlkit.dumps(document)
    return text


def _delete(value: Any, keys: Sequence[str]) -> bool:
    """Remove keys[-1], and its parent tables that are empty then. False: it does not exist."""
    if not isinstance(value, Mapping) or keys[0] not in value:
        return False
    if len(keys) > 1:
        inner = value[keys[0]]
        if not _delete(inner, keys[1:]):
            return False
        if inner:
            return True
    del value[keys[0]]  # type: ignore[attr-defined]
    return True


def imports(value: Mapping[str, Any], path: str) -> list[str]:
    """The list `imports`; empty when there is none. Raises ConfigError."""
    return texts_at(value, ("imports",), path)


def add_import(text: str, glob: str, path: str) -> str:
    """Add an entry to `imports`, which is made if it is missing."""
    document = _document(text, path)
    if "imports" in document:
        document["imports"].append(glob)
    else:
        document["imports"] = [glob]  # tomlkit puts it before the first table
    return tomlkit.dumps(document)


def drop_import(text: str, glob: str, path: str) -> str:
    """Remove an entry of `imports`. Raises ConfigError."""
    document = _document(text, path)
    found = imports(document.unwrap(), path)
    if glob not in found:
        return text
    if len(found) == 1:
        del document["imports"]
    else:
        del document["imports"][found.index(glob)]
    return tomlkit.dumps(document)
