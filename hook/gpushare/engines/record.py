"""Record the previous content of an engine's files, for an exact undo: /var/lib/gpushare/configured/<engine>.json.

load(host, engine) -> Record | None     raises ConfigError when it is damaged
change(host, engine, record) -> Change  the change that writes it (None: removes it)
low_level(host, engine, path)           the same for the path of its default handler's runtime, for oci_runtime.find
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Optional

from ..config import oci_runtime
from ..core.errors import ConfigError
from ..core.quoting import shown
from .base import Change
from .host import Host

FOLDER = oci_runtime.FOLDER
VERSION = 1


class Kept(NamedTuple):
    """One file: its content before gpushare's first change (None: no file) and after the last one."""

    path: str
    before: Optional[str]
    after: Optional[str]


class Record(NamedTuple):
    files: tuple[Kept, ...]
    folders: tuple[str, ...] = ()  # directories that gpushare made, the innermost last

    def kept(self, path: str) -> Optional[Kept]:
        return next((kept for kept in self.files if kept.path == path), None)


def path_of(engine: str) -> str:
    return f"{FOLDER}/{engine}.json"


def _text(record: Record) -> str:
    value = {
        "version": VERSION,
        "files": [kept._asdict() for kept in record.files],
        "folders": list(record.folders),
    }
    return json.dumps(value, indent=1) + "\n"


def _is(value: Any, *types: type) -> bool:
    return isinstance(value, types)


def load(host: Host, engine: str) -> Optional[Record]:
    path = path_of(engine)
    text = host.read(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']}")
        files = tuple(Kept(**item) for item in value["files"])
        folders = tuple(value["folders"])
        if not all(_is(kept.path, str) and _is(kept.before, str, type(None)) for kept in files):
            raise ValueError("wrong types")
        if not all(_is(kept.after, str, type(None)) for kept in files) or not all(_is(one, str) for one in folders):
            raise ValueError("wrong types")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "move it away; --undo then only removes gpushare's entries"
        raise ConfigError(f"{shown(path)} is damaged: {error}", hint) from None
    return Record(files, folders)


def change(host: Host, engine: str, record: Optional[Record]) -> Change:
    """The change that writes the record. Mode 0600: an engine's configuration can contain passwords."""
    path = path_of(engine)
    return Change(path, host.read(path), None if record is None else _text(record), 0o600)


def low_level(host: Host, engine: str, path: Optional[str]) -> list[Change]:
    """The changes that record what the default handler runs; a program other than runc and crun is not recorded. None:
    not known, so the record stays."""
    if path is None:
        return []
    file = f"{FOLDER}/{engine}{oci_runtime.OF_HANDLER}"
    name = path.rpartition("/")[2]
    before, after = host.read(file), f"{path}\n" if path.startswith("/") and name in oci_runtime.NAMES else None
    return [Change(file, before, after)] if before != after else []
