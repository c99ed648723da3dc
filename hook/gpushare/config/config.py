"""Parse and check the configuration file; make its schema and sample from the table of keys in keys.py.

    load_config(path)     -> Config     raises ConfigError naming file, line, key and value; no default file = defaults
    parse_config(text, path) -> Config  the same from text
    schema()              -> dict       JSON Schema (config/config.schema.json)
    sample()              -> str        config/config.yaml, commented
    rendered(values, head) -> str       such a file with other values (profiles.py)
    WrongConfig.problems  -> tuple      every problem of a file
    without_effect(text)  -> [str]      notes on values that a valid file has and that mean nothing here

Not on the start path: yaml and jsonschema are imported when node.json is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import constants
from ..core.errors import ConfigError, RequestError, what_to_do
from ..core.model import Config, Policy
from ..core.quoting import shown
from . import quotas, sharing
from .keys import KEYS, NVIDIA_ONLY, PATTERNS, TYPES, VERSION

MAX_CONFIG_BYTES = 1 << 20


def schema() -> dict[str, Any]:
    """The JSON Schema of the file. It refuses unknown keys at every level."""
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
        return json.dumps(value, default=str)  # JSON is valid YAML; `default` is for YAML's dates, sets and bytes
    except ValueError:
        return "..."  # a list that contains itself


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def sample() -> str:
    """A file with every key at its default and its description."""
    head = (
        "# gpushare: configuration of one host, /etc/gpushare/config.yaml",
        "# Every key except version is optional. A change applies to containers that start after it.",
        "# `gpushare config check` checks the file and reports every error.",
    )
    return rendered({}, head)


# Keys whose default depends on the installation. A file with this default would keep the directory of this version
# even after an upgrade.
_OF_THE_INSTALLATION = ("shim_dir",)


def rendered(values: Mapping[str, Any], head: Sequence[str]) -> str:
    """A file with every key, its description, and its value in `values` (dotted key -> value), else its default."""
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
            lines.append(f"{indent}# {leaf}: /DIR    only if it is not the directory of the installed programs")
        else:
            lines.append(f"{indent}{leaf}: {_yaml_value(values.get(key.path, key.default))}")
    return "\n".join(lines) + "\n"


def load_config(path: str) -> Config:
    """Read and check the file at `path`. Return the defaults if the default file does not exist; any other path must
    exist, because a misspelled path would silently remove every policy. Raises ConfigError; `WrongConfig.problems`
    lists all errors."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        if path == constants.CONFIG_PATH:
            return Config()
        raise ConfigError(f"{path}: no such file", "create it, or leave out --config") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", what_to_do(error)) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return parse_config(data.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None


class Problem(NamedTuple):
    """One error in a file. `line` counts from 1; 0: no line. `key`: dotted, "" for the whole file."""

    line: int
    key: str
    problem: str
    hint: str

    def error(self, path: str) -> ConfigError:
        where = f"{path}:{self.line}" if self.line else path
        return ConfigError(f"{where}: {self.key or 'the file'}: {self.problem}", self.hint)


class WrongConfig(ConfigError):
    """All problems of a file, sorted by line. The message names the first and counts the rest."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        first, rest = self.problems[0].error(path), len(problems) - 1
        more = f"{rest} more error{'s' if rest > 1 else ''}: `gpushare config check {path}` lists all" if rest else ""
        super().__init__(first.message, "; ".join(filter(None, (first.hint, more))))


def parse_config(text: str, path: str) -> Config:
    """Check `text` and return it as a Config. `path` is for messages. Raises WrongConfig, or ConfigError if the text is
    not YAML at all."""
    import yaml

    problems: list[Problem] = []
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[str, int] = {}
        _find_lines(tree, "", lines, problems, set())
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number or date that Python rejects
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        nested = (
            "nested too deeply"
            if isinstance(error, RecursionError)
            else str(error).partition(";")[0].partition("\n")[0]
        )
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or nested
        raise ConfigError(f"{where}: not valid YAML: {problem}", "write it as key: value, indented by spaces") from None
    problems += _schema_problems(value, lines)
    config = _config(value, lines, problems)
    if problems:
        raise WrongConfig(path, problems)
    return config


def _find_lines(node: Any, at: str, lines: dict[str, int], problems: list[Problem], seen: set[int]) -> None:
    """Fill `lines`: dotted key, with [index] in lists -> line. Report a key that occurs twice: YAML would silently take
    the last. `seen`: nodes by id, because an alias can point to its own parent."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if node.id == "sequence":
        for index, item in enumerate(node.value):
            lines[f"{at}[{index}]"] = item.start_mark.line + 1
            _find_lines(item, f"{at}[{index}]", lines, problems, seen)
    elif node.id == "mapping":
        for key_node, value_node in node.value:
            name = _below(at, str(key_node.value))
            line = key_node.start_mark.line + 1
            if name in lines:
                problems.append(Problem(line, name, f"given twice (first in line {lines[name]})", "keep one"))
            lines.setdefault(name, line)
            _find_lines(value_node, name, lines, problems, seen)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _dotted(parts: Iterable[Any]) -> str:
    at = ""
    for part in parts:
        at = f"{at}[{part}]" if isinstance(part, int) else _below(at, str(part))
    return at


def _near(name: str, known: Iterable[str]) -> str:
    """The most similar item of `known`; "" if none is similar."""
    import difflib

    lowered = {item.lower().replace("-", "_"): item for item in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, 1, 0.7)
    return lowered[found[0]] if found else ""


def _key_hint(at: str, name: str, known: Sequence[str]) -> str:
    """The hint for the unknown key `name` below `at`, where the keys `known` exist."""
    if _below(at, name) in _ELSEWHERE:
        return _ELSEWHERE[_below(at, name)]
    if not at and "." in name and any(key.path == name for key in KEYS):
        above, _, last = name.rpartition(".")
        return f"write {last} in a line of its own, indented below {above.replace('.', ': ')}:"
    near = _near(name, known)
    if near:
        return f"did you mean {_below(at, near)}?"
    parts = [key.path.split(".") for key in KEYS]
    near = _near(name, (part for path in parts for part in path))
    for path in parts if near else ():
        if near in path:
            return f"did you mean {'.'.join(path[: path.index(near) + 1])}?"
    return f"known here: {', '.join(known)}"


def _expected(error: Any) -> str:
    """Text for the values that `error.validator` accepts."""
    wanted = error.validator_value
    quoted = isinstance(error.instance, str) and error.instance.lstrip("-").isdigit()
    return {
        "pattern": PATTERNS.get(wanted, "") if isinstance(wanted, str) else "",
        "anyOf": str(error.schema.get("description", "")),
        "minimum": f"at least {wanted}",
        "maximum": f"at most {wanted}",
        "minItems": "at least one",
        "enum": "one of " + ", ".join(str(one) for one in wanted if one and one is not True)
        if isinstance(wanted, list)
        else "",
        "type": TYPES.get(str(wanted), str(wanted)) + ", without quotes" * (quoted and wanted in ("integer", "number")),
    }.get(error.validator, f"{error.validator} {wanted}")


# Hints for keys of NVIDIA's device plugin that have another name here
_ELSEWHERE = {
    "sharing.mps": "write its replicas as sharing.split_count; policy.allowed_backends: [mps] has MPS enforce them",
}
_MIG_RESOURCE = "nvidia.com/mig-"


def _schema_problems(value: Any, lines: Mapping[str, int]) -> Iterator[Problem]:
    import jsonschema

    for error in jsonschema.Draft202012Validator(schema()).iter_errors(value):
        at = _dotted(error.path)
        if error.validator == "additionalProperties":
            known = list(error.schema["properties"])
            for name in map(str, error.instance):
                if name not in known:
                    key = _below(at, name)
                    yield Problem(lines.get(key, 0), key, "unknown key", _key_hint(at, name, known))
        elif error.validator == "required":
            missing = next(name for name in error.validator_value if name not in error.instance)
            if at:
                found = shown(_yaml_value(error.instance))
                yield Problem(lines.get(at, 0), at, f"no {missing} in {found}", "add it")
            else:
                yield Problem(0, "", f"no {missing}", f"begin the file with {missing}: {VERSION}")
        else:
            wrong = error.instance if isinstance(error.instance, str) else _yaml_value(error.instance)
            near = _near(wrong, map(str, error.validator_value)) if error.validator == "enum" else ""
            hint = f"did you mean {near}? Expected {_expected(error)}" if near else f"expected {_expected(error)}"
            if wrong.startswith(_MIG_RESOURCE):
                hint += "; for MIG devices write sharing.overrides"
            yield Problem(lines.get(at, 0), at, f"{shown(wrong)} is wrong", hint)


def without_effect(text: str) -> list[str]:
    """One note for each value of a valid file that only NVIDIA's device plugin uses."""
    import yaml

    given = _given(yaml.safe_load(text))
    found = [f"{key}: no effect, only NVIDIA's device plugin uses it" for key in NVIDIA_ONLY if given.get(key)]
    root = given.get("flags", {}).get("nvidiaDriverRoot", "/")
    if root != "/":
        found.append(f"flags.nvidiaDriverRoot: no effect; write {shown(str(root))} as driver.root, if it is needed")
    names = {at: one["rename"] for at, one in enumerate(given.get(sharing.TIME_SLICING, ())) if one.get("rename")}
    for at, name in names.items():
        first = next(iter(names.values()))
        if name != first:
            key = f"{sharing.TIME_SLICING}[{at}].rename"
            found.append(f"{key}: no effect; equal shares of all devices are offered as {shown(first)}")
    return found


def _given(value: Any) -> dict[str, Any]:
    """{dotted key: value} of the keys that the file sets."""
    given: dict[str, Any] = {}
    for key in KEYS:
        here = value
        for part in key.path.split("."):
            if not isinstance(here, dict) or part not in here:
                break
            here = here[part]
        else:
            given[key.path] = here
    return given


def _config(value: Any, lines: Mapping[str, int], problems: list[Problem]) -> Config:
    """The file as a Config, with the defaults for keys that it does not set. Skip values that `problems` already
    covers, and append further errors to it."""
    refused = tuple(problem.key for problem in problems)
    given = {
        path: item
        for path, item in _given(value).items()
        if not any(path == key or key.startswith(f"{path}[") for key in refused)
    }
    fields: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    for key in KEYS:
        if key.field and key.path in given:
            part, _, name = key.field.rpartition(".")
            try:
                (policy if part else fields)[name] = key.kind.read(key.path, given[key.path])
            except RequestError as error:
                line = lines.get(key.path, 0)
                problems.append(Problem(line, key.path, error.message.removeprefix(key.path).lstrip(":= "), error.hint))
    at = {key.path: given.get(key.path, key.default) for key in KEYS}
    rules, wrong = sharing.rules(at)
    policy["quotas"], more = quotas.rules(at[quotas.KEY])
    wrong += more
    problems += [Problem(lines.get(one.key, 0), one.key, one.problem, one.hint) for one in wrong]
    return Config()._replace(**fields, sharing=rules, policy=Policy()._replace(**policy))
