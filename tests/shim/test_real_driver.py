"""The shim over NVIDIA's own user-space driver: start, cuGetProcAddress, NVML's calls into itself, real clients.

Without a GPU the driver fails every start with its own error; the test expects that error and no other.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.state import shm_abi, usage_reader

from shim import gen_symbols
from tests.shim.inside import compile_c
from tests.shim.real_box import RealBox, limits
from tests.shim.test_loader import exports
from tests.simulator.test_exports import self_references
from tests.support.host import BUILD, TREE
from tools.nvidia_userland import Userland

pytestmark = pytest.mark.every_driver
ROWS = gen_symbols.read()
CUDA = [row for row in ROWS if row.library == "cuda"]
NO_DEVICE, NOT_PERMITTED, NOT_FOUND = 100, 800, 500  # CUDA_ERROR_*
NVML_NO_PERMISSION, NVML_DRIVER_NOT_LOADED = 4, 9
INITS = (
    ["cuda_init"],
    ["nvml_init", "nvmlInit", []],
    ["nvml_init", "nvmlInit_v2", []],
    ["nvml_init", "nvmlInitWithFlags", [0]],
)
# Every CUDA release: 1000 * major + 10 * minor
VERSIONS = [
    *(2000, 2010, 2020, 2030, 3000, 3010, 3020, 4000, 4010, 4020, 5000, 5050, 6000, 6050, 7000, 7050, 8000),
    *(9000, 9010, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070, 11080),
    *(12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13020, 13030, 13040, 13050),
    99000,
]


@pytest.fixture
def box(tmp_path: Path, userland: Userland) -> RealBox:
    return RealBox(tmp_path / "box", userland)


# ---- starting -------------------------------------------------------------------------------------------------------


def test_with_limits_the_drivers_own_error_is_returned(box: RealBox) -> None:
    assert box.probe("each", *INITS) == [NO_DEVICE, *[NVML_DRIVER_NOT_LOADED] * 3]


def patched(data: bytes, struct: str, field: str, value: int) -> bytes:
    """Return a copy with a 32-bit field of the first struct changed."""
    at = shm_abi.offset(struct, field)
    return data[:at] + value.to_bytes(4, "little") + data[at + 4 :]


def hidden_usage(box: RealBox) -> None:
    (box.rw / "usage").unlink()


def limits_as(change: Callable[[bytes], bytes]) -> Callable[[RealBox], None]:
    return lambda box: box.set_limits(change(limits()))


def a_directory(box: RealBox) -> None:
    box.set_limits(None)
    (box.private / "limits").mkdir()


def another_nonce(box: RealBox) -> None:
    (box.rw / "usage").write_bytes(shm_abi.pack_usage(1, 1))


REFUSALS: dict[str, tuple[Callable[[RealBox], None], str]] = {
    "missing": (lambda box: box.set_limits(None), "/limits is missing"),
    "empty": (limits_as(lambda data: b""), "/limits has the wrong size"),
    "longer": (limits_as(lambda data: data + b"\0"), "/limits has the wrong size"),
    "zeros": (limits_as(lambda data: bytes(len(data))), "/limits is not a limits file"),
    "newer": (
        limits_as(lambda data: patched(data, "gs_limits", "version", 2)),
        "/limits is of another version of gpushare",
    ),
    "too many devices": (
        limits_as(lambda data: patched(data, "gs_limits", "n_devices", 17)),
        "/limits lists too many devices",
    ),
    "directory": (a_directory, "/limits is not a regular file"),
    "usage missing": (hidden_usage, "/rw/usage is missing"),
    "usage of another container": (another_nonce, "/rw/usage belongs to another container"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_without_valid_limits_nothing_starts(case: str, box: RealBox) -> None:
    break_it, reason = REFUSALS[case]
    break_it(box)
    assert box.probe("each", *INITS) == [NOT_PERMITTED, *[NVML_NO_PERMISSION] * 3]
    quiet = box.run(sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
    loud = box.run(
        sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)", env={"GPUSHARE_LOG": "1"}
    )
    assert quiet.stderr == ""
    assert loud.stderr == f"gpushare: cuInit refused: /usr/lib/gpushare{reason}; start a new container\n"


@pytest.mark.parametrize(("library", "init"), [("libcuda.so.1", "cuInit"), ("libnvidia-ml.so.1", "nvmlInitWithFlags")])
def test_refused_start_leaves_nothing_behind(library: str, init: str, box: RealBox) -> None:
    """When the limits are refused, no descriptor, umask or environment of the program changes."""
    box.set_limits(None)
    before, after = box.probe("descriptors_and_environment", library, init)
    assert before == after


# ---- cuGetProcAddress -----------------------------------------------------------------------------------------------


def test_every_look_up_returns_the_wrapper_or_the_drivers_function(box: RealBox, userland: Userland) -> None:
    """Look up each function of the table for each CUDA release and stream flag, with both versions of the call. Some
    release returns each intercepted export for its full or its base name."""
    intercepted = {row.name for row in CUDA if row.intercepted}
    names = sorted({row.name for row in CUDA} | {gen_symbols.base_name(row.name) for row in CUDA})
    seen: set[str] = set()
    wrong = []
    successes = {"cuGetProcAddress": 0, "cuGetProcAddress_v2": 0}
    for api, name, version, flags, ours, theirs in box.probe("proc_addresses", names, VERSIONS):
        given = theirs[2].partition(":")[2]
        want = f"shim:{given}" if given in intercepted else theirs[2]
        if ours != [theirs[0], theirs[1], want]:
            wrong.append((api, name, version, flags, ours, theirs))
        if given and theirs[0] == 0:
            successes[api] += 1
            seen.add(given)
    assert wrong == []
    assert min(successes.values()) > 30_000
    exported = intercepted & exports(userland.library("libcuda"))
    # exported, but cuGetProcAddress returns them in no release: they are reached only by dlsym
    assert exported - seen <= {"cuGLCtxCreate", "cuVDPAUCtxCreate"}
    assert len(exported) > 80


def test_threads_that_look_up_first_all_get_wrappers(box: RealBox) -> None:
    bases = ["cuMemAlloc", "cuMemFree", "cuMemCreate", "cuCtxCreate", "cuModuleLoadData", "cuGetProcAddress"]
    want = ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuCtxCreate_v3", "cuModuleLoadData", "cuGetProcAddress_v2"]
    for found in box.probe("proc_addresses_at_once", bases, 8):
        assert [name.partition(":")[0] for name in found] == ["shim"] * len(bases)
        assert found[0] == f"shim:{want[0]}"


@pytest.mark.parametrize("binding", ["-Bsymbolic", "-Bdynamic"])
def test_unknown_function_of_an_intercepted_name_is_not_returned(binding: str, tmp_path: Path) -> None:
    """The driver's own references are bound to itself, as NVIDIA's are, or to the shim."""
    driver = compile_c(tmp_path, "real_driver.c", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,{binding}")
    box = RealBox(tmp_path / "box", {"libcuda": driver})
    names = ["cuMemAlloc", "cuMemAlloc_v2", "cuMemAlloc_v2_ptsz", "cuDriverGetVersion"]
    rows = {tuple(row[:3]): row[4] for row in box.probe("proc_addresses", names, [12000]) if row[3] == 0}
    assert rows["cuGetProcAddress_v2", "cuMemAlloc", 12000] == [0, 0, "shim:cuMemAlloc_v2"]
    assert box.usage().warnings == ()
    rows = {tuple(row[:3]): row[4] for row in box.probe("proc_addresses", names, [99000]) if row[3] == 0}
    assert rows["cuGetProcAddress_v2", "cuMemAlloc", 99000] == [0, 1, ""]
    assert rows["cuGetProcAddress", "cuMemAlloc", 99000][0] == NOT_FOUND
    assert rows["cuGetProcAddress", "cuMemAlloc", 99000][2] in ("", "untouched")
    # not intercepted: passed through, whatever it is
    assert rows["cuGetProcAddress_v2", "cuDriverGetVersion", 99000] == [0, 0, "unknown"]
    assert box.usage().warnings == (usage_reader.WARNINGS[0][1],)


NEWER = {"cuLaunchHostFunc": True, "cuNewerMemcpy": True, "cuNewerMemAlloc": False, "cuNewerLaunchKernel": False}


@pytest.mark.parametrize("name", NEWER)
def test_newer_function_is_passed_unless_it_allocates_or_launches(name: str, tmp_path: Path) -> None:
    driver = compile_c(tmp_path, "real_driver.c", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic")
    box = RealBox(tmp_path / "box", {"libcuda": driver})
    (answer,) = [row[4] for row in box.probe("proc_addresses", [name], [99000]) if row[0].endswith("2") and not row[3]]
    assert answer == ([0, 0, "unknown"] if NEWER[name] else [0, 1, ""])
    assert box.usage().warnings == (usage_reader.WARNINGS[3 if NEWER[name] else 0][1],)


def test_function_that_the_driver_lacks_is_not_found(box: RealBox, userland: Userland) -> None:
    """Programs look functions up to find out what the driver can do."""
    lacking = sorted({row.name for row in CUDA if row.intercepted} - exports(userland.library("libcuda")))
    assert len(lacking) > 3
    owners = box.probe("owners", "lazy", "libcuda.so.1", [*lacking, "cuInit"])
    assert owners == {**dict.fromkeys(lacking, ""), "cuInit": "shim:cuInit"}
    rows = box.probe("proc_addresses", lacking, [99000])
    assert {(row[4][2], row[5][2]) for row in rows if row[0].endswith("_v2")} == {("", "")}


# ---- NVML's calls into itself ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def self_call(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("self"), "nvml_selfcall.c")


def test_self_calls_are_the_drivers_own(self_call: Path, box: RealBox, userland: Userland) -> None:
    """NVML calls some of its own exports through its PLT, so they reach the shim.

    Without a limits file, so that a call mistaken for the program's would be refused.
    """
    box.set_limits(None)
    wrapped = {row.name for row in ROWS if row.library == "nvml" and row.intercepted}
    calls = sorted(name for _, name in self_references(userland.library("libnvidia-ml"), "nvml"))
    assert wrapped & set(calls)
    for name in calls:
        done = box.run(self_call, name)
        assert done.returncode == 0, done.stderr
        file, symbol, inside, outside, straight = done.stdout.split()
        assert (file, symbol) == ("shim" if name in wrapped else "real", name)
        if name.startswith("nvmlInit"):
            # the real nvmlInit_v2 jumps through the PLT to nvmlInitWithFlags: even a program that bypasses the shim
            # (`straight`) reaches the shim there
            assert (int(inside), int(outside)) == (NVML_DRIVER_NOT_LOADED, NVML_NO_PERMISSION)
        else:
            assert inside == outside == straight, name


# ---- real clients ---------------------------------------------------------------------------------------------------


def test_nvidia_smi_behaves_as_without_the_shim(box: RealBox, userland: Userland) -> None:
    smi = next(path for path in userland.root.rglob("nvidia-smi") if path.is_file() and os.access(path, os.X_OK))
    alone = subprocess.run([smi], env={"LD_LIBRARY_PATH": str(userland.libdir)}, capture_output=True, text=True)
    done = box.run(smi)
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert "couldn't communicate with the NVIDIA driver" in done.stdout
    box.set_limits(None)
    assert box.run(smi).stdout == "Failed to initialize NVML: Insufficient Permissions\n"


def older_runtime() -> Path:
    """NVIDIA's CUDA runtime 12.2, which all of the drivers support, from the package index, downloaded once."""
    directory = BUILD / "cudart-12.2"
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            wheels = BUILD / "wheels"
            what = ["--no-deps", "--quiet", "--dest", str(wheels), "nvidia-cuda-runtime-cu12==12.2.140"]
            subprocess.run([sys.executable, "-m", "pip", "download", *what], check=True)
            with zipfile.ZipFile(next(wheels.glob("nvidia_cuda_runtime_cu12-12.2.140-*.whl"))) as wheel:
                wheel.extractall(directory)
    return next(directory.rglob("libcudart.so.12"))


def newest_runtime() -> Path:
    """The runtime that comes with the headers in build/venv."""
    return next((BUILD / "include/cuda").resolve().parent.rglob("libcudart.so.*"))


@pytest.mark.parametrize("runtime", [older_runtime, newest_runtime])
def test_cuda_runtime_gets_wrappers(runtime: Callable[[], Path], box: RealBox, userland: Userland) -> None:
    """The runtime finds the driver by name and gets every function from cuGetProcAddress."""
    command = (sys.executable, "-I", TREE / "tests/shim/real_probe.py", "runtime", json.dumps([str(runtime())]))
    (tmp := box.dev.parent / "alone").mkdir()
    (tmp / "libcuda.so.1").symlink_to(userland.library("libcuda"))
    alone = subprocess.run(command, env={"LD_LIBRARY_PATH": str(tmp)}, capture_output=True, text=True, check=True)
    answers = box.probe("runtime", str(runtime()))
    assert answers == json.loads(alone.stdout)
    box.set_limits(None)
    refused = [NOT_PERMITTED if answer == NO_DEVICE else answer for answer in answers[1:]]
    assert box.probe("runtime", str(runtime()))[1:] == refused
