"""The classification table matches a real driver, the public headers and the wrappers in the shim."""

from __future__ import annotations

import functools
import graphlib
import subprocess
from pathlib import Path

import pytest

from shim import gen_symbols
from tests.shim.test_loader import exports
from tests.support.host import BUILD, TREE
from tools import check_headers, shim_layers
from tools.nvidia_userland import Userland

pytestmark = pytest.mark.every_driver
ROWS = gen_symbols.read()
FILES = {"cuda": "libcuda", "nvml": "libnvidia-ml"}


@pytest.mark.parametrize("library", FILES)
def test_every_function_is_classified(library: str, userland: Userland) -> None:
    in_driver = exports(userland.library(FILES[library]))
    in_header = check_headers.declared(library, BUILD / "include" / library)
    assert len(in_driver) > 300 and len(in_header) > 300
    listed = {row.name for row in ROWS if row.library == library}
    assert sorted((in_driver | in_header) - listed) == [], "not classified; add these to shim/symbols.tsv"
    assert sorted(listed - in_driver - in_header) == [], "in no driver and no header; remove these from the table"


@pytest.mark.parametrize("library", FILES)
def test_shim_exports_wrappers_and_names_to_link_with(library: str) -> None:
    """Only wrappers have an address; the dynamic linker skips all others."""
    shim = BUILD / "shim" / f"{FILES[library]}.so"
    text = subprocess.run(["nm", "-D", "--defined-only", shim], capture_output=True, text=True, check=True).stdout
    found = {fields[2]: int(fields[0], 16) != 0 for fields in map(str.split, text.splitlines())}
    assert found == {row.name: row.intercepted for row in ROWS if row.library == library}
    assert {kind for _, kind, _ in map(str.split, text.splitlines())} <= {"T", "t", "i", "r", "R"}


@pytest.mark.parametrize("library", FILES)
def test_no_wrapper_is_left_out_of_the_table(library: str) -> None:
    """The linker would hide such a wrapper without a warning."""
    written = set()
    for compiled in (BUILD / "shim" / "obj" / library).rglob("*.o"):
        text = subprocess.run(["readelf", "-sW", compiled], capture_output=True, text=True, check=True).stdout
        fields = [line.split() for line in text.splitlines()]
        written |= {f[7] for f in fields if len(f) == 8 and f[3:6] == ["FUNC", "GLOBAL", "DEFAULT"] and f[6] != "UND"}
    assert written == {row.name for row in ROWS if row.library == library and row.intercepted}


@functools.cache
def calls() -> list[tuple[Path, str, Path]]:
    """Return all (caller, function, callee) with source files below shim/."""
    objects = BUILD / "shim" / "obj" / "cuda"
    defined, used = {}, []
    for compiled in objects.glob("*/*.o"):
        source = compiled.relative_to(objects).with_suffix(".c")
        if not (TREE / "shim" / source).exists():
            continue  # a file of an earlier build
        text = subprocess.run(["nm", compiled], capture_output=True, text=True, check=True).stdout
        for kind, name in (line.split()[-2:] for line in text.splitlines()):
            if kind == "U":
                used.append((source, name))
            elif kind.isupper():
                defined[name] = source
    return [(source, name, defined[name]) for source, name in used if defined.get(name, source) != source]


def test_no_folder_calls_a_higher_one() -> None:
    allowed = shim_layers.layers()
    found = calls()
    up = [
        f"{caller} calls {name} of {callee}"
        for caller, name, callee in found
        if callee.parent != caller.parent and callee.parent.name not in allowed[caller.parent.name]
    ]
    assert len(found) > 100 and up == []


def test_files_of_the_rate_limiter_call_each_other_in_one_direction() -> None:
    uses: dict[str, set[str]] = {}
    for caller, _, callee in calls():
        if caller.parent.name == callee.parent.name == "limiter":
            uses.setdefault(caller.stem, set()).add(callee.stem)
    assert len(uses) > 5
    list(graphlib.TopologicalSorter(uses).static_order())  # raises CycleError


def test_unknown_versions_are_withheld_by_topic() -> None:
    """shim/driver/getproc.c decides by name: the known allocators and launchers must have such names."""
    withheld = ("allocate", "contexts: a context takes", "code: global data", "compute: waits for the rate limiter")
    passed = (
        *("copies", "free", "streams", "placement", "synchronisation"),
        *("compute: the shim", "compute: the time", "compute: when", "compute: from"),
    )
    cuda = [row for row in ROWS if row.library == "cuda"]
    assert [row.name for row in cuda if row.reason.startswith(withheld) and not gen_symbols.is_withheld(row.name)] == []
    assert [row.name for row in cuda if row.reason.startswith(passed) and gen_symbols.is_withheld(row.name)] == []


def test_a_missing_wrapper_fails_the_link_by_name(tmp_path: Path) -> None:
    rows = tuple(row for row in ROWS if row.library == "cuda" and not row.intercepted)
    rows += (gen_symbols.Row("cuda", "cuZero", "intercepted", "test: has no wrapper"),)
    (tmp_path / "symbols.h").write_text(gen_symbols.header(rows, "cuda"))
    (tmp_path / "symbols.c").write_text(gen_symbols.source(rows))
    command = ["gcc", "-shared", "-fPIC", "-Wl,-z,defs", f"-I{tmp_path}", f"-I{TREE / 'shim'}"]
    files = ["-o", str(tmp_path / "out.so"), str(tmp_path / "symbols.c")]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode != 0
    assert "undefined reference to `cuZero'" in done.stderr


def test_versions_and_stream_variants_share_a_class() -> None:
    """A function is intercepted in all its versions and per-thread-stream variants, or in none."""
    classes: dict[str, set[str]] = {}
    for row in ROWS:
        classes.setdefault(gen_symbols.base_name(row.name), set()).add(row.klass)
    assert [name for name, found in classes.items() if len(found) > 1] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda\tcuInit\tintercepted", "has not 4 filled columns"),
        ("cuda\tcuInit\tmaybe\tstart: why", "is not known"),
        ("cuda\tcuInit\tpassed\tno family", "is not known"),
        ("cuda\tcuInit\tpassed\ta: b\ncuda\tcuInit\tpassed\ta: b", "keep the rows sorted"),
    ],
)
def test_invalid_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "symbols.tsv"
    table.write_text("library\tname\tclass\treason\n" + text + "\n")
    with pytest.raises(gen_symbols.TableError, match=message):
        gen_symbols.read(table)


def test_check_headers_lists_what_the_table_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for library, (name, _) in check_headers.HEADERS.items():
        prefix = "cu" if library == "cuda" else "nvml"
        (tmp_path / name).write_text(f"int {prefix}Init(unsigned); int {prefix}Fancy_v9(void);\n")
    found = dict.fromkeys(check_headers.HEADERS, ("14.0", tmp_path))
    monkeypatch.setattr(check_headers, "download", lambda directory: found)
    assert check_headers.main() == 1
    text = capsys.readouterr().out
    assert "cuFancy_v9: not classified; add it to shim/symbols.tsv\n" in text and "cuInit" not in text
    assert "nvidia-nvml-dev 14.0: 2 functions, 1 not in shim/symbols.tsv\n" in text
