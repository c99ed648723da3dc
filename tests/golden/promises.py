"""Interfaces that users and running containers rely on, one line each: promises() must contain every line of
promises.txt, which was made from 0.1.0. A version may add lines; no line is ever removed.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import gpushare

TREE = Path(gpushare.__file__).resolve().parents[2]
_MODULES = {
    one.name.rpartition(".")[2] if "cli" not in one.name else one.name: one.name
    for one in pkgutil.walk_packages(gpushare.__path__, "gpushare.")
}


def module(name: str) -> ModuleType:
    """Import the module under its short name, wherever it lives."""
    return importlib.import_module(_MODULES[name])


def _words() -> Iterator[str]:
    names, table = module("constants"), module("registry")
    for name, value in sorted(vars(names).items()):
        if name.startswith("ENV_"):
            yield f"variable {value}"
    for variable, annotation in names.ANNOTATIONS.items():
        yield f"annotation {annotation} is {variable}"
    for annotation in names.MEMORY_ENDS:
        yield f"annotation {annotation}"
    yield f"annotation {names.APPLIED_ANNOTATION}"
    for row in table.ROWS:
        scoped = [key._replace(name=f"{table.SCOPE}<container>.{key.name}") for key in row.scoped]
        for kind, words in (("variable", row.variables), ("annotation", row.annotations), ("annotation", scoped)):
            for word in words:
                yield f"{kind} {word.name}{'_<' + word.number + '>' if word.number else ''} of {row.name}: {word.about}"


def _schema(schema: dict[str, Any], path: str) -> Iterator[str]:
    if path:
        words = schema.get("enum", [schema["const"]] if "const" in schema else [schema.get("type", "any")])
        for word in words if isinstance(words[0], str) or len(words) > 1 else [json.dumps(words[0])]:
            yield f"configuration {path}: {word if isinstance(word, str) else json.dumps(word)}"
        if "default" in schema and not schema.get("properties"):
            yield f"configuration {path} is {json.dumps(schema['default'])} where it is not written"
    for key, below in schema.get("properties", {}).items():
        yield from _schema(below, f"{path}.{key}".lstrip("."))
    for one in schema.get("anyOf", ()):
        yield from _schema(one, path)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _schema(schema[key], f"{path}[]")


def _keys(value: Any, path: str) -> Iterator[str]:
    for key, below in value.items() if isinstance(value, dict) else ():
        yield from _keys(below, f"{path}.{key}".lstrip("."))
    if isinstance(value, list):
        for below in value:
            yield from _keys(below, f"{path}[]")
    elif not isinstance(value, dict):
        yield path


_IDS = re.compile(r"\b(?:GPU-[\w-]+|[0-9a-f]{12,64})\b")


def _json_keys() -> Iterator[str]:
    """JSON keys of the commands in tests/golden/cli; keys that name a container or a device stand for all of them."""
    for file in sorted((TREE / "tests/golden/cli").glob("*.txt")):
        for part in re.split(r"^# ", file.read_text(), flags=re.M)[1:]:
            line, _, text = part.partition("\n")
            words = [word for word in line.split() if not word.startswith("-")]
            try:
                answer = json.loads(text)
            except ValueError:
                continue
            command = " ".join(words[: 2 if words[1:2] and words[0] in ("mps", "runtime", "config", "cdi") else 1])
            for path in sorted(set(_keys(answer, ""))):
                yield f"json {command}: {_IDS.sub('<id>', path) or 'an empty list'}"


def _options(command: click.Command, name: str) -> Iterator[str]:
    yield f"command {name}"
    for one in command.params:
        if isinstance(one, click.Option):
            for word in (*one.opts, *one.secondary_opts):
                yield f"command {name} {word}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found
            yield from _options(found, f"{name} {below}")


def _programs() -> Iterator[str]:
    yield from _options(importlib.import_module("gpushare.cli.main").group, "gpushare")
    hook, line = module("hook"), module("commandline")
    for stage in hook._STAGES:
        assert hook.parse(["--config", "/c", "--state=/s", stage])[:3] == (stage, "/c", "/s")
        yield f"hook --config FILE --state DIR {stage}"
    yield from (f"runtime --{flag}" for flag in line.OWN)
    for name in ("GLOBAL_VALUE", "GLOBAL_BARE", "COMMAND_VALUE", "COMMAND_BARE", "DELETE_BARE"):
        yield from (f"runtime {name} {flag}" for flag in getattr(line, name))
    errors = module("errors")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.GpushareError):
            yield f"exit {value.exit_code} {name}"


def _metrics() -> Iterator[str]:
    for one in importlib.import_module("gpushare.cli.metrics").METRICS:
        yield f"metric {one.name}"
        yield from (f"metric {one.name} label {label}" for label in one.labels)


def _files() -> Iterator[str]:
    """Names in the state directory, and each field of a running container's files with its offset."""
    names = ("storage", "shm_abi", "leasefile", "spec_record", "migration")
    storage, region, lease, applied, migration = (module(name) for name in names)
    yield from (f"file {migration.HELD}", f"held {migration.HELD_VERSION}")
    constants = (
        "_FOLDERS",
        "_SHARE_FOLDERS",
        "_SHARE_FILES",
        "LEASE",
        "_CGROUP",
        "_PLAIN",
        "_MARKER",
        "CHANGING",
        "REBUILD",
    )
    for name in constants:
        value = getattr(storage, name)
        for one in (value,) if isinstance(value, str) else value:
            yield f"file {one if isinstance(one, str) else one[0]}"
    yield from (f"file {name}" for name in sorted(storage._OURS))
    for table in ("_LEASE", "_SHARE", "_DEVICE"):
        for name, types in getattr(lease, table).items():
            yield f"lease.json {table[1:].lower()}.{name}: {' '.join(one.__name__ for one in types)}"
    for name in sorted(vars(region)):
        value = getattr(region, name)
        if isinstance(value, int) and name.isupper():
            yield f"layout {name} {value:#x}"
    for struct, fields in region.LAYOUTS.items():
        yield from (
            f"layout {struct}.{name} {code} at {region.offset(struct, name)}"
            for name, code in fields
            if "x" not in code
        )
    yield f"applied version {applied.VERSION} {applied.NONCE_ENV}"
    yield from (f"applied {stage} {word}" for stage, word in applied.STAGES.items())
    yield from (f"applied {at} {name}" for at, name in enumerate(applied.Record._fields))


def promises() -> list[str]:
    schema = json.loads((TREE / "config/config.schema.json").read_text())
    parts = (_words(), _schema(schema, ""), _json_keys(), _programs(), _metrics(), _files())
    return sorted({line for part in parts for line in part})


if __name__ == "__main__":
    print("\n".join(promises()))
