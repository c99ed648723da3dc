"""The simulated libraries have the real ones' ELF shape: exports, binding, results of cuGetProcAddress."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.simhost import BUILT, CHECKPOINTS, VERSION
from tools.nvidia_userland import Userland

EXPORTS = Path(__file__).parents[2] / "simulator" / "exports"
LISTS = {"libcuda": EXPORTS / "libcuda-535.txt", "libnvidia-ml": EXPORTS / "libnvidia-ml-535.txt"}
CUDA = BUILT / f"libcuda.so.{VERSION}"
NEWER = BUILT / f"libcuda.so.{CHECKPOINTS}"
NVML = BUILT / f"libnvidia-ml.so.{VERSION}"

CHECKPOINT_CALLS = ("Checkpoint", "GetRestoreThreadId", "GetState", "Lock", "Restore", "Unlock")

# Prints each line "name flag version symbol" of stdin for which the library's answer differs.
ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for line in sys.stdin:
    name, per_thread, version, symbol = line.split()
    found, status = ctypes.c_uint64(), ctypes.c_int()
    code = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), int(version), ctypes.c_uint64(2 * int(per_thread)), ctypes.byref(status))
    wanted = ctypes.cast(library[symbol], ctypes.c_void_p).value
    if (code, status.value, found.value) != (0, 0, wanted):
        print(line.strip(), code, status.value)
"""


def exported(library: Path) -> dict[str, int]:
    """Map each name to its size in bytes for objects, 0 for functions."""
    text = subprocess.run(
        ["readelf", "--dyn-syms", "-W", str(library)], check=True, capture_output=True, text=True
    ).stdout
    symbols = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[3] in ("FUNC", "OBJECT") and fields[6] != "UND" and "@" not in fields[7]:
            symbols[fields[7]] = int(fields[2], 0) if fields[3] == "OBJECT" else 0
    return symbols


def listed(path: Path) -> dict[str, int]:
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) if len(row) > 1 else 0 for row in rows}


def dynamic(library: Path) -> str:
    return subprocess.run(["readelf", "-dW", str(library)], check=True, capture_output=True, text=True).stdout


def self_references(library: Path, prefix: str) -> set[tuple[str, str]]:
    """Return (relocation type, name) of the library's references to its own exports."""
    text = subprocess.run(["readelf", "-rW", str(library)], check=True, capture_output=True, text=True).stdout
    return set(re.findall(rf"(R_X86_64_\w+)\s+\w+ ({prefix}\w+)", text))


@pytest.mark.parametrize("stem", LISTS)
def test_exports_equal_the_list(stem: str) -> None:
    assert exported(BUILT / f"{stem}.so.{VERSION}") == listed(LISTS[stem])


def test_newer_driver_has_the_checkpoint_api_in_addition() -> None:
    added = listed(EXPORTS / "libcuda-570.txt")
    assert exported(NEWER) == listed(LISTS["libcuda"]) | added
    assert sorted(added) == [f"cuCheckpointProcess{name}" for name in CHECKPOINT_CALLS]


@pytest.mark.parametrize("stem", LISTS)
def test_export_list_is_the_real_drivers(stem: str, userland: Userland) -> None:
    assert exported(Path(userland.libdir) / f"{stem}.so.{VERSION}") == listed(LISTS[stem])


@pytest.mark.parametrize("stem", LISTS)
def test_soname_is_the_real_one(stem: str) -> None:
    assert f"[{stem}.so.1]" in dynamic(BUILT / f"{stem}.so.{VERSION}")


def test_libcuda_is_bound_to_itself() -> None:
    assert "SYMBOLIC" in dynamic(CUDA) and not self_references(CUDA, "cu")


def test_nvml_calls_itself_like_the_real_library(userland: Userland) -> None:
    real = self_references(Path(userland.libdir) / NVML.name, "nvml")
    assert len(real) == 40 and self_references(NVML, "nvml") == real


@pytest.mark.parametrize("which", ["simulated", "newer", "real"])
def test_proc_addresses_equal_the_table(which: str, userland: Userland) -> None:
    library = {"simulated": CUDA, "newer": NEWER, "real": Path(userland.libdir) / CUDA.name}[which]
    table = (EXPORTS / "procaddress-535.txt").read_text()
    table += (EXPORTS / "procaddress-570.txt").read_text() if which == "newer" else ""
    assert len(table.splitlines()) > 900
    command = [sys.executable, "-c", ASK, str(library)]
    done = subprocess.run(command, input=table, check=True, capture_output=True, text=True)
    assert done.stdout == ""


def test_unmodelled_functions_are_not_supported() -> None:
    code = f"import ctypes; n = ctypes.CDLL({str(NVML)!r}); c = ctypes.CDLL({str(CUDA)!r})\n"
    code += "assert n.nvmlVgpuTypeGetClass() == 3 and c.cuMulticastCreate() == 801 and c.cuEGLApiInit() == 801"
    subprocess.run([sys.executable, "-c", code], check=True)
