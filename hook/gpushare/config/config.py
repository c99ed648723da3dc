"""The configuration file: schema, sample and checks, as they follow from the table of keys in configkeys.py.

    load_config(path)     -> Config     raises ConfigError naming file, line, key and value; no usual file = defaults
    parse_config(text, path) -> Config  the same from text
    SCHEMA, schema()      -> dict       JSON Schema (config/config.schema.json is this, written out)
    sample()              -> str        config/config.yaml, commented
    rendered(values, head) -> str       such a file with other values (profiles.py)
    effective(config)     -> dict       dotted key -> value, as the file would say it

Not on the start path: yaml and jsonschema are imported when a file is read, that is when node.json is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ..core import names
from ..core.errors import ConfigError, RequestError, what_to_do
from ..core.model import Config, Policy, SharingRule
from ..core.quantity import amount, whole_percent
from ..core.quoting import shown
from . import configsharing
from .configkeys import KEYS, PATTERNS, TYPES, VERSION

MAX_CONFIG_BYTES = 1 << 20


def schema() -> dict[str, Any]:
    """The JSON Schema of the file: unknown keys are refused at every level."""
    top: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpushare configuration",
        **_object("The configuration of gpushare on one host."),
        "required": ["version"],
    }
    for key in KEYS:
        here = top
        *parents, leaf = key.path.split(".")
        for depth, name in enumerate(parents):
            label = f"The keys below {'.'.join(parents[: depth + 1])}."
            here = here["properties"].setdefault(name, _object(label))
        here["properties"][leaf] = {"description": key.description, "default": key.default, **key.schema}
    return top


def _object(description: str) -> dict[str, Any]:
    fixed = {"default": {}, "additionalProperties": False, "properties": {}}
    return {"type": "object", "description": description, **fixed}


def _yaml_value(value: Any) -> str:
    import json

    try:
        return json.dumps(value, default=str)  # JSON scalars and lists are YAML, which also has dates, sets and bytes
    except ValueError:
        return "..."  # a list that is in itself


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def sample() -> str:
    """A file with every key at its default and what it means."""
    head = (
        "# gpushare: configuration of one host, /etc/gpushare/config.yaml",
        "# Every key but version may be left out. Containers started after a change use the changed file;",
        "# `gpushare config check` reads it and says what is wrong.",
    )
    return rendered({}, head)


# Written down, it would be that of this version's directory, also when a newer version has taken its place.
_OF_THE_INSTALLATION = ("shim_dir",)


def rendered(values: Mapping[str, Any], head: Sequence[str]) -> str:
    """A file with every key, what it means, and its value in `values` (dotted key -> value), else its default."""
    lines = list(head)
    open_parents: list[str] = []
    for key in KEYS:
        *parents, leaf = key.path.split(".")
        lines.append("")
        for depth, name in enumerate(parents):
            if open_parents[: depth + 1] != parents[: depth + 1]:
                lines.append("  " * depth + f"{name}:")
        open_parents = parents
        indent = "  " * len(parents)
        lines += _wrapped(key.description, indent)
        if key.path in _OF_THE_INSTALLATION and key.path not in values:
            lines.append(f"{indent}# {leaf}: /DIR    when it is not that of the installed programs")
        else:
            lines.append(f"{indent}{leaf}: {_yaml_value(values.get(key.path, key.default))}")
    return "\n".join(lines) + "\n"


def effective(config: Config) -> dict[str, Any]:
    """Every key with its value, in the file's own words."""
    policy = config.policy
    return {
        "version": VERSION,
        "driver.root": config.driver_root,
        "shim_dir": config.shim_dir,
        "runtime.path": config.runtime,
        "placement.strategy": config.placement,
        **configsharing.plain(config.sharing),
        "memory_overcommit": config.memory_overcommit,
        "oversubscription.host_memory": config.host_memory,
        "oversubscription.scaling": config.oversubscribe_scaling,
        "oversubscription.turn_ms": config.turn_ms,
        "oversubscription.turn_memory": config.turn_memory,
        "compute_overcommit": config.compute_overcommit,
        "compute.slice_us": config.slice_us,
        "compute.switch_us": config.switch_us,
        "policy.accept.env": policy.accept_env,
        "policy.accept.annotations": policy.accept_annotations,
        "policy.accept.volume_mounts": policy.accept_volume_mounts,
        "policy.accept.cdi": policy.accept_cdi,
        "policy.accept.switches": policy.accept_switches,
        "policy.accept.widening": policy.accept_widening,
        "policy.dialects.enabled": list(policy.enabled_dialects),
        "policy.dialects.disabled": list(policy.disabled_dialects),
        "policy.annotations": policy.annotations,
        "policy.nvidia_visible_devices": policy.nvidia_visible_devices,
        "policy.privileged_containers": list(policy.privileged_containers),
        "policy.require_limits": policy.require_limits,
        "policy.max_memory": policy.max_memory,
        "policy.max_compute": f"{policy.max_compute_percent}%",
        "policy.over_maximum": policy.over_maximum,
        "policy.allowed_devices": list(policy.allowed_devices),
        "policy.allowed_backends": list(policy.allowed_backends),
        "policy.unlimited": policy.unlimited,
        "reconcile.action": config.reconcile,
        "log.decisions": config.log,
    }


def load_config(path: str) -> Config:
    """The configuration; the defaults when the usual file is not there. One that somebody named must be: a misspelt
    path would silently lift every policy."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        if path == names.CONFIG_PATH:
            return Config()
        raise ConfigError(f"{path}: no such file", "write it, or leave --config out") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", what_to_do(error)) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return parse_config(data.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None


def parse_config(text: str, path: str) -> Config:
    """The configuration in `text`; `path` is for messages."""
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = _lines(tree, path) if tree is not None else {}
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number or a date that Python has not
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        nested = (
            "nested too deeply"
            if isinstance(error, RecursionError)
            else str(error).partition(";")[0].partition("\n")[0]
        )
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or nested
        raise ConfigError(f"{where}: not valid YAML: {problem}", "write it as key: value, indented by spaces") from None
    _validate(value, lines, path)
    return _config(value, lines, path)


def _lines(tree: Any, path: str, prefix: str = "") -> dict[str, int]:
    """Dotted key -> line (from 1). Refuses a key that occurs twice: YAML would silently take the last."""
    lines: dict[str, int] = {}
    if not hasattr(tree, "value") or tree.id != "mapping":
        return lines
    for key_node, value_node in tree.value:
        name = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} is given twice (first in line {lines[name]})", "keep one")
        lines[name] = line
        lines.update(_lines(value_node, path, f"{name}."))
    return lines


def _error(path: str, lines: dict[str, int], key: str, problem: str, hint: str = "") -> ConfigError:
    line = lines.get(key)
    return ConfigError(f"{path}{f':{line}' if line else ''}: {key or 'the file'}: {problem}", hint)


def _validate(value: Any, lines: dict[str, int], path: str) -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(value), key=lambda error: [str(part) for part in error.path])
    if not errors:
        return
    error = errors[0]
    parts = [str(part) for part in error.path if not isinstance(part, int)]
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        unknown = next(str(name) for name in error.instance if name not in known)
        raise _error(path, lines, ".".join([*parts, unknown]), "unknown key", f"known here: {', '.join(known)}")
    if error.validator == "required" and parts:
        missing = next(name for name in error.validator_value if name not in error.instance)
        raise _error(path, lines, ".".join(parts), f"no {missing} in {shown(_yaml_value(error.instance))}", "add it")
    if error.validator == "required":
        raise _error(path, lines, "", f"no version in {shown(path)}", f"begin the file with version: {VERSION}")
    wanted = error.validator_value
    expected = {
        "pattern": PATTERNS.get(wanted, "") if isinstance(wanted, str) else "",
        "const": str(wanted),
        "minimum": f"at least {wanted}",
        "maximum": f"at most {wanted}",
        "minItems": "at least one",
        "enum": "one of " + ", ".join(map(str, wanted)) if isinstance(wanted, list) else "",
        "type": TYPES.get(str(wanted), str(wanted)),
    }.get(error.validator, f"{error.validator} {wanted}")
    wrong = error.instance if isinstance(error.instance, str) else _yaml_value(error.instance)
    problem = f"{shown(wrong)} is wrong"
    raise _error(path, lines, ".".join(parts), problem, f"expected {expected}")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat.update(_flat(item, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _quantity(path: str, lines: dict[str, int], key: str, value: str, parse: Any) -> Any:
    try:
        return parse(key, value)
    except RequestError as error:
        line = lines.get(key)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {error.message}", error.hint) from None


def _config(value: dict[str, Any], lines: dict[str, int], path: str) -> Config:
    """The validated file as a Config: missing keys take the table's defaults."""
    given = _flat(value)
    at = {key.path: given.get(key.path, key.default) for key in KEYS}
    for key in ("memory_overcommit", "oversubscription.scaling", "compute_overcommit"):
        if at[key] != at[key]:  # NaN, which is neither below nor above any bound
            raise _error(path, lines, key, '"NaN" is wrong', "expected a number")
    maximum: Optional[str] = at["policy.max_memory"].strip()
    if maximum:
        _quantity(path, lines, "policy.max_memory", maximum, amount)
    host_memory: str = at["oversubscription.host_memory"].strip()
    turn_memory: str = at["oversubscription.turn_memory"].strip()
    _quantity(path, lines, "oversubscription.turn_memory", turn_memory, amount)
    if host_memory:
        _quantity(path, lines, "oversubscription.host_memory", host_memory, amount)
    return Config(
        driver_root=os.path.normpath(at["driver.root"]),
        shim_dir=os.path.normpath(at["shim_dir"]),
        memory_overcommit=float(at["memory_overcommit"]),
        placement=at["placement.strategy"],
        policy=Policy(
            accept_env=at["policy.accept.env"],
            accept_annotations=at["policy.accept.annotations"],
            require_limits=at["policy.require_limits"],
            max_memory=maximum or "",
            max_compute_percent=_quantity(path, lines, "policy.max_compute", at["policy.max_compute"], whole_percent),
            allowed_devices=tuple(at["policy.allowed_devices"]),
            allowed_backends=tuple(at["policy.allowed_backends"]),
            unlimited=at["policy.unlimited"],
            accept_volume_mounts=at["policy.accept.volume_mounts"],
            accept_cdi=at["policy.accept.cdi"],
            annotations=at["policy.annotations"],
            nvidia_visible_devices=at["policy.nvidia_visible_devices"],
            privileged_containers=tuple(at["policy.privileged_containers"]),
            over_maximum=at["policy.over_maximum"],
            accept_switches=at["policy.accept.switches"],
            accept_widening=at["policy.accept.widening"],
            enabled_dialects=tuple(at["policy.dialects.enabled"]),
            disabled_dialects=tuple(at["policy.dialects.disabled"]),
        ),
        log=at["log.decisions"],
        runtime=at["runtime.path"],
        compute_overcommit=float(at["compute_overcommit"]),
        slice_us=int(at["compute.slice_us"]),
        switch_us=int(at["compute.switch_us"]),
        sharing=_sharing(at, lines, path),
        host_memory=host_memory,
        oversubscribe_scaling=float(at["oversubscription.scaling"]),
        turn_ms=int(at["oversubscription.turn_ms"]),
        turn_memory=turn_memory,
        reconcile=at["reconcile.action"],
    )


def _sharing(at: dict[str, Any], lines: dict[str, int], path: str) -> tuple[SharingRule, ...]:
    try:
        return configsharing.rules(at)
    except configsharing.Wrong as error:
        raise _error(path, lines, error.key, error.problem, error.hint) from None
