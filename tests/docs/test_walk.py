"""The walk of docs/internals/start.md from config.json to a refused allocation names existing files and functions."""

from __future__ import annotations

import re

from tests.support.host import TREE

HOOK, SHIM = TREE / "hook" / "gpushare", TREE / "shim"


def walk() -> str:
    text = (TREE / "docs/internals/start.md").read_text()
    return text[text.index("runc create\n") : text.index("`tests/docs/test_walk.py`")]


def test_named_files_and_functions_exist() -> None:
    modules = {path.stem: path for path in HOOK.rglob("*.py")}
    functions = re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", walk())
    python = [(module, name) for module, name in functions if module in modules and name not in ("json", "py")]
    assert len(python) >= 9
    for module, name in python:
        assert re.search(rf"^def {name}\(", modules[module].read_text(), re.MULTILINE), f"{module}.{name}"
    for name in re.findall(r"\b([a-z]+/\w+\.c)\b", walk()):
        assert (SHIM / name).exists() or (TREE / "hook" / name).exists(), name


def test_shim_functions_exist_and_call_next_step() -> None:
    sources = {str(path.relative_to(SHIM)): path.read_text() for path in SHIM.glob("*/*.c")}
    names = re.findall(r"\bgs_\w+\b", walk())
    assert len(names) >= 5
    for name in names:
        assert any(re.search(rf"\b{name}\(", text) for text in sources.values()), name
    assert "gs_slot_claim(" in sources["driver/init.c"]
    assert "gs_charge_try(" in sources["memory/linear.c"]
    assert "gs_reserve" in sources["memory/charge.c"] or "gs_bound" in sources["memory/charge.c"]
