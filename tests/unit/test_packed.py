"""The modules of a start in one file: the same modules, and never older ones than the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpushare import oci, packed, ticket

TREE = Path(oci.__file__).resolve().parents[2]
LOAD = "import sys; sys.path.insert(0, {hook!r}); from gpushare import packed; loaded = packed.load({pack!r})\n"
OURS = "[m for n, m in sys.modules.items() if n.startswith('gpushare.') and n != 'gpushare.packed']"


class Copy:
    """The package in a place of its own, with one pack of it."""

    def __init__(self, directory: Path, program: str = "gpushare-runtime", *alone: str) -> None:
        self.hook, self.pack = directory / "hook", directory / "hook" / f"{program}.pack"
        shutil.copytree(
            TREE / "hook" / "gpushare", self.hook / "gpushare", ignore=shutil.ignore_patterns("__pycache__")
        )
        (directory / "packaging").mkdir()
        shutil.copy(TREE / "packaging" / "pack", directory / "packaging")
        command = [sys.executable, "-ISs", directory / "packaging" / "pack", program, self.pack, *alone]
        subprocess.run(command, check=True)

    def run(self, text: str) -> list[str]:
        """The words that Python printed after it has loaded the pack."""
        text = LOAD.format(hook=str(self.hook), pack=str(self.pack)) + text
        done = subprocess.run([sys.executable, "-ISBc", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


@pytest.mark.parametrize("program", packed.PROGRAMS)
@pytest.mark.parametrize("alone", [(), ("alone",)], ids=["sources", "alone"])
def test_start_finds_all_its_modules_in_the_pack(tmp_path: Path, program: str, alone: tuple[str, ...]) -> None:
    copy = Copy(tmp_path, program, *alone)
    if alone:  # as in the bundle: nothing else is looked at
        for path in (copy.hook / "gpushare").rglob("*.py"):
            if path.name not in ("__init__.py", "packed.py"):
                path.unlink()
    first, then = packed.PROGRAMS[program]
    half = f"import {', '.join('gpushare.' + name for name in first.split())}; print(len({OURS}))\n"
    rest = f"from gpushare import {', '.join(then.split())}; print(len({OURS}))\n"
    check = f"assert loaded; print(all(m.__spec__.loader is packed._Loaded for m in {OURS}))"
    before, after, all_packed = copy.run(half + rest + check)
    assert all_packed == "True"
    assert 10 < int(before) < int(after) - 10  # and the second half waits until it is asked for


def test_packed_module_is_as_any_other(tmp_path: Path) -> None:
    text = """
import gpushare.dialects.own as own, gpushare.dialects as dialects, gpushare.specedit as specedit
import gpushare.constraints  # not in the pack
print(own.__name__, own.__package__, own.__spec__.parent, dialects.own is own, specedit.Editor.__module__)
print(own.__file__, gpushare.specedit is specedit, specedit.write.__doc__)
"""
    copy = Copy(tmp_path)
    name, package, parent, same, module, file, attribute, doc = copy.run(text)
    assert (name, package, parent) == ("gpushare.dialects.own", "gpushare.dialects", "gpushare.dialects")
    assert (same, module, attribute, doc) == ("True", "gpushare.specedit", "True", "None")
    assert file == str(copy.hook / "gpushare/dialects/own.py")


def edit(copy: Copy) -> None:
    path = copy.hook / "gpushare" / "ticket.py"
    path.write_text(path.read_text() + "EDITED = True\n")


def edit_in_place(copy: Copy) -> None:
    """Of the same size."""
    path = copy.hook / "gpushare" / "ticket.py"
    path.write_text(path.read_text().replace("gpushare-adopt-", "gpushare-edite-"))


def remove_source(copy: Copy) -> None:
    (copy.hook / "gpushare" / "mig.py").rename(copy.hook / "gpushare" / "mig2.py")


def other_python(copy: Copy) -> None:
    data = copy.pack.read_bytes()
    copy.pack.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def no_pack(copy: Copy) -> None:
    copy.pack.unlink()


def directory(copy: Copy) -> None:
    copy.pack.unlink()
    copy.pack.mkdir()


@pytest.mark.parametrize("change", [edit, edit_in_place, remove_source, other_python, no_pack, directory])
def test_stale_pack_is_not_used(tmp_path: Path, change: object) -> None:
    copy = Copy(tmp_path)
    assert callable(change)
    change(copy)
    assert copy.run(f"print(loaded, len({OURS}), packed.load.__module__)") == ["False", "0", "gpushare.packed"]
    if change in (edit, edit_in_place):
        assert copy.run("from gpushare import ticket; print(ticket.VERSION, hasattr(ticket, 'EDITED'))") == (
            [ticket.VERSION, "True"] if change is edit else [ticket.VERSION.replace("-adopt-", "-edite-"), "False"]
        )


def test_pack_cut_anywhere_is_not_used(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    data = copy.pack.read_bytes()
    sizes = [*range(40), *range(40, len(data), len(data) // 60), len(data) - 1]
    text = f"""
import os
whole = open({str(copy.pack)!r}, "rb").read()
for size in {sizes}:
    open({str(copy.pack)!r} + "-cut", "wb").write(whole[:size])
    print(packed.load({str(copy.pack)!r} + "-cut"))
"""
    assert set(copy.run(text)) == {"False"}


STAND_IN = """
import os, sys
assert "collections.abc" not in sys.modules and "_collections_abc" not in sys.modules
import pathlib
os.environ["ONE"] = "1"
print(os.environ.get("ONE"), os.environ.get("NONE", "no"), "ONE" in os.environ, "NONE" in os.environ)
os.environ.update(TWO="2")
print(os.environ.pop("TWO"), os.environ.setdefault("ONE", "x"), (os.environ | {"TWO": "2"})["TWO"], len(os.environ))
print(sorted(os.environ.items()), [*os.environ.keys()], [*os.environb.values()], dict(os.environ) == os.environ.copy())
print(isinstance(pathlib.Path("/"), os.PathLike), isinstance("/", os.PathLike))
import collections.abc, json, subprocess, typing
class Mine(collections.abc.Mapping):
    __getitem__ = __iter__ = __len__ = None
print(isinstance(Mine(), collections.abc.Mapping), isinstance([], collections.abc.Sequence))
print(subprocess.run(["printenv", "ONE"], env=os.environ, capture_output=True).stdout)
os.environ.clear()
print(len(os.environ))
"""


def test_os_is_as_any_other() -> None:
    """The part of it that is left out at first is there when somebody wants it."""

    def said(first: str) -> str:
        text = f"import sys; sys.path.insert(0, {str(TREE / 'hook')!r}); {first}\n{STAND_IN}"
        done = subprocess.run([sys.executable, "-ISc", text], capture_output=True, text=True, env={"PATH": "/bin"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    ordinary = (
        "import os; [sys.modules.pop(name) for name in ('collections.abc', '_collections_abc') if name in sys.modules]"
    )
    assert said("from gpushare import packed") == said(ordinary)


def test_program_starts_without_a_pack(tmp_path: Path) -> None:
    """The pack lies beside the program; a copy of the program alone has none."""
    program = shutil.copy(TREE / "build" / "libexec" / "gpushare-hook", tmp_path)
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("usage: gpushare-hook") and not os.listdir(tmp_path)[1:]
