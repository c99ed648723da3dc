"""However a program opens the libraries, intercepted functions come from the shim and all others from the driver."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shim import gen_symbols
from tests.shim.inside import compile_c
from tests.shim.real_box import SONAMES, RealBox
from tests.support.host import TREE
from tools.nvidia_userland import Userland

pytestmark = pytest.mark.every_driver
ROWS = gen_symbols.read()
LIBRARIES = {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}


@pytest.fixture
def box(tmp_path: Path, userland: Userland) -> RealBox:
    return RealBox(tmp_path / "box", userland)


def expected(library: str, in_driver: set[str]) -> dict[str, str]:
    """Map each function of the table to where a program must get it from ("" = nowhere)."""
    mine = [row for row in ROWS if row.library == library]
    return {
        row.name: f"{'shim' if row.intercepted else 'real'}:{row.name}" if row.name in in_driver else "" for row in mine
    }


def exports(library: Path) -> set[str]:
    text = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["lazy", "noload", "deepbind", "global", "closed"])
def test_dlopen_finds_shim_and_driver(mode: str, library: str, box: RealBox, userland: Userland) -> None:
    soname = LIBRARIES[library]
    want = expected(library, exports(userland.library(soname[: -len(".so.1")])))
    assert box.probe("owners", mode, soname, list(want)) == want


@pytest.mark.parametrize(
    ("soname", "ours", "theirs"),
    [
        ("libcuda.so.1", "cuMemAlloc_v2", "cuDriverGetVersion"),
        ("libnvidia-ml.so.1", "nvmlInit_v2", "nvmlShutdown"),
    ],
)
def test_dlmopen_looks_up_in_the_new_namespace(
    soname: str, ours: str, theirs: str, box: RealBox, tmp_path: Path
) -> None:
    """In a new link-map namespace the shim looks up the real functions in that namespace.

    The program is in C: the real libcuda crashes after dlmopen in an interpreter, with or without the shim.
    """
    done = box.run(compile_c(tmp_path, "real_dlmopen.c"), soname, ours, theirs)
    assert done.stdout.split() == [f"{soname}", "libcuda-real.so.1" if "cuda" in soname else "libnvidia-ml-real.so.1"]


def test_linked_program_loads_the_shim(box: RealBox, userland: Userland, tmp_path: Path) -> None:
    """A program linked against the driver's own library loads the shim at run time; it fails without limits."""
    program = compile_c(
        tmp_path, "real_linked.c", userland.library("libcuda"), "-Wl,--unresolved-symbols=ignore-in-shared-libs"
    )
    assert box.run(program).stdout == "shim real 100\n"
    box.set_limits(None)
    assert box.run(program).stdout == "shim real 800\n"


@pytest.mark.parametrize("option", ["-l:libcuda.so.1", "-lcuda"])
def test_program_is_linked_in_the_container(option: str, box: RealBox, tmp_path: Path) -> None:
    """The linker finds passed functions in the shim; the program then calls the driver's."""
    program = tmp_path / "linked"
    done = box.run("gcc", "-Wall", "-Werror", TREE / "tests/shim/real_linked.c", option, "-o", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert box.run(program).stdout == "shim real 100\n"


def test_library_path_is_not_searched(box: RealBox, tmp_path: Path) -> None:
    """LD_LIBRARY_PATH with other files of the private names has no effect: the shim opens them by absolute path."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("libcuda-real.so.1", "libnvidia-ml-real.so.1"):
        (hostile / name).write_bytes(b"not a library")
    env = {"LD_LIBRARY_PATH": str(hostile)}
    for soname, name in (("libcuda.so.1", "cuDriverGetVersion"), ("libnvidia-ml.so.1", "nvmlShutdown")):
        assert box.probe("owners", "lazy", soname, [name], env=env) == {name: f"real:{name}"}


def test_missing_real_library_stops_the_program(box: RealBox) -> None:
    box.binds.clear()
    for name in SONAMES:
        (box.private / "driver" / f"{name}-real.so.1").unlink()
    done = box.run("python3", "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')")
    assert done.returncode != 0
    assert "/usr/lib/gpushare/driver/libcuda-real.so.1: cannot open shared object file" in done.stderr


@pytest.mark.parametrize("library", ["libcuda.so", "libnvidia-ml.so"])
def test_shim_is_linked_as_intended(library: str, box: RealBox) -> None:
    """Checks what the other tests cannot see: no lazy binding after start, never unloaded, bound to its own names.

    Unloading would make the real library the next one under this soname. It needs only the real library and libc.
    """
    text = subprocess.run(["readelf", "-dW", box.libdir / library], capture_output=True, text=True, check=True).stdout
    flags = " ".join(line for line in text.splitlines() if "FLAGS" in line)
    assert all(flag in flags for flag in ("SYMBOLIC", "BIND_NOW", "NODELETE"))
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "NEEDED" in line]
    assert needed[0] == f"/usr/lib/gpushare/driver/{library.partition('.')[0]}-real.so.1"
    assert set(needed[1:]) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
