"""Find every message that gpushare can show a user, in the sources, for docs/troubleshooting.md.

A message is the first argument of an exception of errors.py (or of click, or of a function in MAKERS that creates an
exception); the hint is its second argument. Values that are filled in become `…`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

from gpushare.allocation import backends
from gpushare.core import constants
from gpushare.gpu import selectors

from tests.support.host import TREE

SOURCES = TREE / "hook" / "gpushare"
# SyscallError formats "CALL PATH: REASON", so it is one row for all
ERRORS = (
    "ConfigError", "RequestError", "PolicyError", "CapacityError", "DeviceError", "KernelError", "GpushareError",
    "RegionError", "SyscallError", "UsageError", "BadParameter", "CannotExecute", "Interrupted", "WrongConfig",
    "HeldError", "Refusal", "Busy", "Taken",
)  # fmt: skip
# function -> (its files, () for all; the exception that it creates; index of the reason; index of the hint)
MAKERS = {
    "HeldError": ((), "CapacityError", 0, 1),
    "Refusal": ((), "ConfigError", 0, 1),
    "wrong": ((), "RequestError", 2, 3),  # quantity.py: NAME=VALUE: reason
    "Problem": (("config/config.py",), "ConfigError", 2, 3),
    "Wrong": (("config/sharing.py",), "ConfigError", 1, 2),
    "kind": (("allocation/placement.py", "request/dialects/conditions.py"), "CapacityError", 0, 1),  # or a subclass
    "MpsState": (("allocation/backends/mps/state.py",), "DeviceError", 0, 1),
}
# Exceptions that only combine messages from elsewhere: file -> text in the source
CARRIERS = {
    "cli/main.py": ("<error.format_message()>", "<text"),
    "config/config.py": ("{problem}", "{self.problem}", "<first.message>", "<one.problem>", "<error.message", "<path>"),
    "config/sharing.py": ("<error.message>",),
    "request/dialects/conditions.py": ("<error.message>",),
    "engines/tomltext.py": ("{error.message}",),
    "allocation/backends/mps/state.py": ("{found.problem}",),
    "core/quantity.py": ("{reason}", "{wrong_item}"),
    "state/rebuild.py": ("<str(error)>",),
}


Local = dict[str, list[tuple[int, str]]]  # name -> the texts that it is assigned in the file, each with its line


class Message(NamedTuple):
    kind: str
    file: str  # path below hook/gpushare
    line: int
    text: str
    hint: str


def _constant(node: ast.expr) -> Optional[str]:
    """Return the value of a constant such as `names.ENV_MEMORY`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "names":
        value = getattr(constants, node.attr, None)
        return value if isinstance(value, str) else None
    if isinstance(node, ast.Name):
        for module in (constants, backends, selectors):
            value = getattr(module, node.id, None)
            if node.id.isupper() and isinstance(value, str):
                return value
    return None


def _text(node: Optional[ast.AST], local: Local = {}) -> str:  # noqa: B006
    """Return the text as in the source.

    {expression} stands for a value in it, <expression> for an expression that is all of it, and {a|b} for a choice.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "setting":  # quoting.py
            return "{name}={value}"
        known = _constant(node.value)
        return known if known is not None else f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{ast.unparse(node)}}}"  # a choice between two values
    if isinstance(node, ast.Name) and node.id in local:
        return next((text for line, text in reversed(local[node.id]) if line <= node.lineno), f"<{node.id}>")
    if isinstance(node, ast.Name) and (known := _constant(node)):
        return known
    return f"<{ast.unparse(node)}>" if node is not None else ""


def shown(text: str) -> str:
    """Return the text for a reader: `…` for each value."""
    text = re.sub(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|<(?:[^<>]|->)*>", "…", text)
    text = re.sub(r"(?:… ?){2,}", "… ", text).replace("…=…", "NAME=VALUE").strip()
    return "PATH: REASON" if text == "…: …" else text


def _argument(call: ast.Call, place: int, names: tuple[str, ...]) -> Optional[ast.expr]:
    """Return the argument by position, by name, or in a dictionary of names (`**{"problem": ...}`)."""
    if len(call.args) > place:
        return call.args[place]
    for one in call.keywords:
        if one.arg in names:
            return one.value
        if isinstance(one.value, ast.Dict) and one.arg is None:
            for key, value in zip(one.value.keys, one.value.values):
                if isinstance(key, ast.Constant) and key.value in names:
                    return value
    return None


def _of_call(call: ast.Call, file: str, local: Local) -> Optional[Message]:
    function = str(getattr(call.func, "id", getattr(call.func, "attr", "")))
    before = ""
    if function in MAKERS and (file in MAKERS[function][0] or not MAKERS[function][0]):
        _, kind, reason, hint = MAKERS[function]
        before = {"wrong": "{name}={value}: ", "MpsState": "MPS: "}.get(function, "")
    elif function in ERRORS:
        kind, reason, hint = function, 0, 1
    else:
        return None
    text = _text(_argument(call, reason, ("message", "problem")), local)
    # placement.py: the other ending is for too few devices that fit
    text = text.replace("{found} {", "no device fits {", 1)
    said = _hint(_argument(call, hint, ("hint",)), local)
    return Message(kind, file, call.lineno, before + text, said) if text else None


def _hint(node: Optional[ast.expr], local: Local) -> str:
    """Return the hint; for a choice between two hints, both."""
    if isinstance(node, ast.IfExp):
        return "; or ".join(filter(None, (_hint(node.body, local), _hint(node.orelse, local))))
    return _text(node, local)


def _locals(tree: ast.AST) -> Local:
    found: Local = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _hint(node.value, found)
            if not text.startswith("<"):
                found.setdefault(node.targets[0].id, []).append((node.lineno, text))
    return found


def _of_python() -> Iterator[Message]:
    for path in sorted(SOURCES.rglob("*.py")):
        file = str(path.relative_to(SOURCES))
        tree = ast.parse(path.read_text())
        local = _locals(tree)
        for node in ast.walk(tree):
            found = _of_call(node, file, local) if isinstance(node, ast.Call) else None
            if found and found.kind != "SyscallError" and not _carries(found):
                yield found


def _carries(one: Message) -> bool:
    return any(part in one.text for part in CARRIERS.get(one.file, ()))


def _of_launcher() -> Iterator[Message]:
    """Yield the messages in lines of C that write to standard error: "gpushare: TEXT; HINT"."""
    for path in sorted((TREE / "hook" / "launcher").glob("*.c")):
        for match in re.finditer(r'(?:fprintf\(stderr, |fputs\()"gpushare: (.*?)\\n"', path.read_text()):
            text, _, hint = match[1].rpartition("; ")
            yield Message("KernelError", f"../launcher/{path.name}", 0, re.sub(r"'?%\w+'?", "{x}", text), hint)


_LOGGED = re.compile(
    r'gs_(?:log|tell)\("([^"]+)", (?:"([^"]+)"|symbol|path), "([^"]+)"\)|refuse\("([^"]+)", "([^"]+)"\)'
)
_FILES = re.compile(r'WITH_PATH\(path, "([^"]+)"\)|(?:LIMITS|USAGE)_PATH " ([^"]+)"')  # region.c: about its two files
_FILES_HINT = "start a new container: the share's files are damaged, covered by another mount, or of another version"


def of_shim() -> list[tuple[str, str]]:
    """Return (text, hint) of each message that the shim logs in a container with GPUSHARE_LOG=1."""
    found: dict[str, str] = {}
    for path in sorted((TREE / "shim").glob("*/*.c")):
        text = re.sub(r"\s+", " ", path.read_text())
        for begin, detail, hint, reason, its_hint in _LOGGED.findall(text):
            found[reason or f"{begin}: {detail or '…'}"] = its_hint or hint
        for match in _FILES.finditer(text):
            found[f"FILE {match[1] or match[2]}"] = _FILES_HINT
    return list(found.items())


@functools.cache
def messages() -> list[Message]:
    return [*_of_python(), *_of_launcher()]
