#!/usr/bin/env python3
"""Turn shim/symbols.tsv into what the shim is built from. Standard library only.

gen_symbols.py c LIBRARY DIR   writes DIR/symbols.h, DIR/symbols.c, DIR/layout.c, DIR/exports.map and DIR/linkable.s
gen_symbols.py linkable FILE   hides the names of linkable.s in a linked library from programs that run

LIBRARY is `cuda` or `nvml`. The table has one row for each function that a driver exports or a header declares:
library, name, class (intercepted | passed), reason ("family: why"). layout.c only asserts that the structs and
constants of include/gpushare_abi.h are those of gpushare/state/shm_abi.py.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("symbols.tsv")
COLUMNS = ("library", "name", "class", "reason")
CLASSES = ("intercepted", "passed")
REAL_PATHS = {
    "cuda": "/usr/lib/gpushare/driver/libcuda-real.so.1",
    "nvml": "/usr/lib/gpushare/driver/libnvidia-ml-real.so.1",
}
# A function that the table lacks, as a newer driver may have, is withheld if its name contains one of these: it
# allocates or launches. All others are passed with a warning.
WITHHELD = (
    *("Alloc", "Array3DCreate", "ArrayCreate", "CtxCreate", "CtxRetain", "GraphUpload", "Instantiate", "Launch"),
    *("LibraryLoad", "MemCreate", "ModuleLoad", "PoolCreate", "ProcAddress", "cuInit"),
)
NOT_WITHHELD = ("Allocation", "LaunchHostFunc")  # parts that only look like it
SONAMES = {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}
GENERATED = "/* Generated from shim/symbols.tsv by shim/gen_symbols.py. */\n"


class Row(NamedTuple):
    """One function: `reason` reads "family: why"."""

    library: str
    name: str
    klass: str
    reason: str

    @property
    def intercepted(self) -> bool:
        return self.klass == "intercepted"

    @property
    def family(self) -> str:
        return self.reason.partition(": ")[0]

    @property
    def why(self) -> str:
        return self.reason.partition(": ")[2]


class TableError(Exception):
    """The table is wrong; one line with its line number."""


def read(path: Path = TABLE) -> tuple[Row, ...]:
    """The table, checked: every column filled, known classes, no name twice, sorted by library and name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or tuple(lines[0].split("\t")) != COLUMNS:
        raise TableError(f"{path.name}: the first line must be {' '.join(COLUMNS)}, separated by tabs")
    rows = [_row(path, number, line) for number, line in enumerate(lines[1:], 2)]
    for before, after in zip(rows, rows[1:]):
        if before[:2] >= after[:2]:
            raise TableError(
                f"{path.name}: {after.name} is not after {before.name}; keep the rows sorted, no name twice"
            )
    return tuple(rows)


def _row(path: Path, number: int, line: str) -> Row:
    cells = line.split("\t")
    if len(cells) != len(COLUMNS) or not all(cells):
        raise TableError(f"{path.name}:{number}: {line!r} has not {len(COLUMNS)} filled columns")
    row = Row(*cells)
    if row.library not in REAL_PATHS or row.klass not in CLASSES or not row.family or not row.why:
        raise TableError(f"{path.name}:{number}: {line!r}: library, class or 'family: why' is not known")
    return row


def base_name(name: str) -> str:
    """Return the name for cuGetProcAddress, which has no version and no per-thread-stream suffix."""
    return re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", name)


def header(rows: tuple[Row, ...], library: str) -> str:
    """An index for each known function, so that any of them can be looked up in the driver."""
    lines = [GENERATED, "#ifndef GPUSHARE_SYMBOLS_H", "#define GPUSHARE_SYMBOLS_H", ""]
    lines += [f'#define GS_REAL_PATH "{REAL_PATHS[library]}"', "", "enum gs_symbol {"]
    lines += [f"    GS_SYMBOL_{row.name}," for row in rows]
    lines += ["    GS_SYMBOL_COUNT", "};", ""]
    lines += [f"#define GS_WRAPPER_COUNT {sum(row.intercepted for row in rows)}u"]
    lines += [f"#define GS_BASE_COUNT {len(bases(rows))}u", "", "#endif", ""]
    return "\n".join(lines)


def bases(rows: tuple[Row, ...]) -> dict[str, bool]:
    """Map each base name, sorted as strcmp sorts, to whether the function is intercepted."""
    return dict(sorted((base_name(row.name), row.intercepted) for row in rows))


def is_withheld(name: str) -> bool:
    """Return whether a function that the table lacks is withheld, as shim/driver/getproc.c decides."""
    found = (name[at:] for part in WITHHELD for at in range(len(name)) if name.startswith(part, at))
    return any(not rest.startswith(NOT_WITHHELD) for rest in found)


def source(rows: tuple[Row, ...]) -> str:
    """The tables. A wrapper that does not exist fails the link, by name."""
    ours = [row.name for row in rows if row.intercepted]
    lines = [GENERATED, '#include "core/real.h"', "", "const char *const gs_symbol_name[GS_SYMBOL_COUNT] = {"]
    lines += [f'    "{row.name}",' for row in rows]
    lines += ["};", ""]
    lines += [f'extern char wrapper_of_{name}[] __asm__("{name}");' for name in ours]
    lines += ["", "const struct gs_wrapper gs_wrapper[GS_WRAPPER_COUNT] = {"]
    lines += [f"    {{GS_SYMBOL_{name}, wrapper_of_{name}}}," for name in ours]
    lines += ["};", "", "const struct gs_base gs_base[GS_BASE_COUNT] = {"]
    lines += [f'    {{"{name}", {str(intercepted).lower()}}},' for name, intercepted in bases(rows).items()]
    lines += ["};", ""]
    for table, parts in (("gs_withheld", WITHHELD), ("gs_not_withheld", NOT_WITHHELD)):
        lines += [f"const char *const {table}[] = {{{', '.join(map(_quoted, parts))}, NULL}};"]
    lines += [""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names[:-1]) + f" or `{names[-1]}`"


def exports(rows: tuple[Row, ...]) -> str:
    """The linker's export list: the names of the table and nothing else, without a symbol version."""
    names = [f"        {row.name};" for row in rows]
    return "\n".join(["{", "    global:", *names, "    local: *;", "};", ""])


def linkable(rows: tuple[Row, ...]) -> str:
    """Assembler code that exports each passed function at address 0, so that programs can be linked with the shim.

    A linker does not take a name from a dependency of a library, so `gcc x.c -l:libcuda.so.1` needs them here.
    """
    names = [row.name for row in rows if not row.intercepted]
    stack = '.section .note.GNU-stack,"",%progbits\n'
    return "".join(f".globl {name}\n.set {name}, 0\n" for name in names) + stack


SHN_ABS, STT_FUNC_GLOBAL, SHT_DYNSYM = 0xFFF1, 0x12, 11


def hide_linkable(path: Path) -> int:
    """Give the absolute symbols of an ELF64 library at address 0 a section, and return how many there were.

    The dynamic linker skips a symbol without an address that is in a section, and finds the driver's, which comes
    later. A linker sees a defined function. It cannot make such a symbol itself.
    """
    data = bytearray(path.read_bytes())
    sections_at, size, count = struct.unpack_from("<Q10xHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(count)]
    (dynsym,) = [(section[4], section[5]) for section in sections if section[1] == SHT_DYNSYM]
    hidden = 0
    for at in range(dynsym[0], dynsym[0] + dynsym[1], 24):
        name, info, other, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
        if section == SHN_ABS and value == 0:
            struct.pack_into("<IBBHQQ", data, at, name, STT_FUNC_GLOBAL, other, 1, 0, 0)
            hidden += 1
    path.write_bytes(data)
    return hidden


def docs(rows: tuple[Row, ...]) -> str:
    """docs/shim-symbols.md."""
    lines = [
        "# Intercepted functions",
        "",
        "This page lists the driver functions that the shim intercepts, and why it passes the others on.",
        "`make docs` generates it from `shim/symbols.tsv`; a test fails if the page is out of date.",
        "",
        "Programs call every other function of the driver directly, at no cost; for linkers the shim has its name.",
        "A function that the driver lacks does not exist for programs either.",
        "",
        *textwrap.wrap(
            "A newer driver may have functions that this table lacks. `dlsym` returns them as they are. "
            f"`cuGetProcAddress` withholds functions with {_listed(WITHHELD)} in their names (but not "
            f"{_listed(NOT_WITHHELD)}), because they allocate or launch, and passes all others. `gpushare list` "
            "reports both.",
            width=118,
        ),
    ]
    titles = {"cuda": "libcuda", "nvml": "libnvidia-ml"}
    for library, title in titles.items():
        mine = [row for row in rows if row.library == library]
        ours = [row for row in mine if row.intercepted]
        lines += ["", f"## {title}: {len(ours)} of {len(mine)} functions intercepted"]
        for family in dict.fromkeys(row.family for row in ours):
            lines += ["", f"### {family}"]
            for why in dict.fromkeys(row.why for row in ours if row.family == family):
                names = ", ".join(f"`{row.name}`" for row in ours if row.reason == f"{family}: {why}")
                lines += ["", f"{why[0].upper()}{why[1:]}: {names}."]
        lines += ["", f"### {title}: passed", "", "| family | functions | why |", "|---|---|---|"]
        for reason in sorted({row.reason for row in mine if not row.intercepted}):
            same = [row for row in mine if row.reason == reason]
            lines += [f"| {same[0].family} | {len(same)} | {same[0].why} |"]
    return "\n".join(lines) + "\n"


def layout() -> Iterator[str]:
    """The lines of layout.c. Each field is asserted, with its size, so a field that Python lacks fails the build."""
    sys.path.insert(0, str(TABLE.parents[1] / "hook"))
    from gpushare.state import shm_abi, usage_reader

    yield "/* Generated from gpushare/state/shm_abi.py by shim/gen_symbols.py. */"
    yield '#include "include/gpushare_abi.h"'
    values = {
        name: value
        for name, value in (*vars(shm_abi).items(), *vars(usage_reader).items())
        if isinstance(value, int) and name.isupper() and not (name.startswith("_") or name.endswith("_SIZE"))
    }
    warnings = ("WARN_UNKNOWN_PROC", "WARN_NO_SLOT", "WARN_UNGRANTED", "WARN_PASSED_PROC")
    values.update(zip(warnings, (bit for bit, _ in usage_reader.WARNINGS)))
    for name, value in values.items():
        yield f'_Static_assert(GS_{name} == {value}ull, "GS_{name}");'
    for kind, fields in shm_abi.LAYOUTS.items():
        yield f'_Static_assert(sizeof(struct {kind}) == {shm_abi.packer(kind).size}, "{kind}");'
        for field, code in fields:
            at, size = shm_abi.offset(kind, field), struct.calcsize(f"<{code}")
            what = f"offsetof(struct {kind}, {field}) == {at} && sizeof(((struct {kind} *)0)->{field}) == {size}"
            yield f'_Static_assert({what}, "{kind}.{field}");'


def write(path: Path, text: str) -> None:
    """Replace a file only when its text changes, so that make rebuilds only what depends on a change."""
    if path.exists() and path.read_text() == text:
        os.utime(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(arguments: list[str]) -> int:
    try:
        rows = read()
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    if len(arguments) == 2 and arguments[0] == "linkable":
        return 0 if hide_linkable(Path(arguments[1])) else 1
    if len(arguments) != 3 or arguments[0] != "c" or arguments[1] not in REAL_PATHS:
        print(__doc__, file=sys.stderr)
        return 64
    mine = tuple(row for row in rows if row.library == arguments[1])
    out = Path(arguments[2])
    write(out / "symbols.h", header(mine, arguments[1]))
    write(out / "symbols.c", source(mine))
    write(out / "layout.c", "".join(f"{line}\n" for line in layout()))
    write(out / "exports.map", exports(mine))
    write(out / "linkable.s", linkable(mine))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
