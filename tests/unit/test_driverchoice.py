"""Files under the driver's names that are not the driver's: each is skipped for the driver's own file, or reported."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.allocation.backends.mps import control
from gpushare.config import node
from gpushare.core.errors import DeviceError
from gpushare.core.model import Config, Inventory, Node
from gpushare.gpu import driverchoice, driverfiles, driverroot, drivertable, inventory
from gpushare.system import elf

from tests.support.driverhost import elf32, elf_header
from tools.nvidia_userland import Userland

V, OTHER = "535.261.03", "550.54.15"
BOTH = ("compute", "utility")
FOREIGN = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]
OWN = "usr/local/nvidia"  # where the driver is
STEMS = ("libcuda", "libnvidia-ml", "libnvidia-nvvm")


def put(root: Path, name: str, content: bytes = b"") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content or elf_header())
    path.chmod(0o755)
    return path


def socket_at(path: Path) -> None:
    directory = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # the whole path can exceed a socket address
    os.close(directory)


# what is at the path -> how to make it
NO_FILES: dict[str, Callable[[Path], object]] = {
    "an empty file": lambda path: path.touch(),
    "a directory": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a socket": socket_at,
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a link to a missing file": lambda path: path.symlink_to("/nowhere"),
}
PROGRAMS: dict[str, Callable[[Path], object]] = {
    **NO_FILES,
    "a script": lambda path: path.write_text(f'#!/bin/sh\nexec /{OWN}/bin/nvidia-smi "$@"\n'),
    "no ELF file": lambda path: path.write_text("nvidia-smi: moved"),
    "a 32-bit program": lambda path: path.write_bytes(elf32()),
    f"a program for {FOREIGN}": lambda path: path.write_bytes(elf_header(2, machine=FOREIGN)),
    "an ELF file that is no program": lambda path: path.write_bytes(elf_header(1)),
}
LIBRARIES: dict[str, Callable[[Path], object]] = {
    **NO_FILES,
    "no ELF file (a linker script or damaged)": lambda path: path.write_text("/* GNU ld script */ INPUT(x)\n"),
    "a 32-bit library": lambda path: path.write_bytes(elf32()),
    f"a library for {FOREIGN}": lambda path: path.write_bytes(elf_header(machine=FOREIGN)),
    "an ELF file that is no library": lambda path: path.write_bytes(elf_header(2)),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A driver root: libraries in usr/lib64."""
    (tmp_path / "dev").mkdir()
    os.mknod(tmp_path / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
    for stem in STEMS:
        put(tmp_path, f"usr/lib64/{stem}.so.{V}")
    return tmp_path


@pytest.mark.parametrize("why", PROGRAMS)
def test_other_file_is_skipped_for_the_driver_s_program(root: Path, why: str) -> None:
    (root / "usr/bin").mkdir()
    PROGRAMS[why](root / "usr/bin/nvidia-smi")
    found = driverfiles.find(str(root), V, ("utility",))
    assert found.programs == ()
    own = put(root, f"{OWN}/bin/nvidia-smi", elf_header(2))
    found = driverfiles.find(str(root), V, ("utility",))
    assert found.programs == (("nvidia-smi", str(own)),)
    assert found.skipped == ((f"{root}/usr/bin/nvidia-smi", why),)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("why", LIBRARIES)
def test_other_file_is_skipped_for_the_driver_s_library(root: Path, why: str, stem: str) -> None:
    bad = root / f"usr/lib64/{stem}.so.{V}"
    bad.unlink()
    LIBRARIES[why](bad)
    if stem in drivertable.ALWAYS:
        with pytest.raises(DeviceError) as caught:
            driverfiles.find(str(root), V, BOTH)
        assert f"no usable {stem}.so.{V} below {root}: {bad} is {why}; install" in str(caught.value)
        assert "\n" not in str(caught.value)
    own = put(root, f"{OWN}/lib64/{stem}.so.{V}")
    found = driverfiles.find(str(root), V, BOTH)
    assert str(own) in [one.source for one in (found.cuda, found.nvml, *found.libraries)]
    assert len(found.libraries) == 1
    assert found.skipped == ((str(bad), why),)
    for query, name in ((driverfiles.cuda_library, "libcuda"), (driverfiles.nvml_library, "libnvidia-ml")):
        assert query(str(root), V) == str(own if name == stem else root / f"usr/lib64/{name}.so.{V}")


def test_link_to_another_version_is_skipped(root: Path) -> None:
    link = root / f"usr/lib64/libcuda.so.{V}"
    link.unlink()
    put(root, f"usr/lib64/libcuda.so.{OTHER}")
    link.symlink_to(f"libcuda.so.{OTHER}")
    with pytest.raises(
        DeviceError, match=rf"{link} is a link to libcuda.so.{OTHER}; install the libraries of driver {V}"
    ):
        driverfiles.find(str(root), V, BOTH)
    assert driverfiles.cuda_library(str(root), V) == ""
    own = put(root, f"{OWN}/lib64/libcuda.so.{V}")
    assert driverfiles.find(str(root), V, BOTH).cuda.source == str(own)
    link.unlink()
    link.symlink_to("/store/libcuda.so")  # a name without a version can be of any
    store = put(root, "store/libcuda.so")
    assert driverfiles.find(str(root), V, BOTH).cuda.source == str(store)


def test_libraries_of_a_toolkit_are_not_the_driver_s(root: Path) -> None:
    """A toolkit's compat directory and its stubs are in no search path of the driver."""
    (root / f"usr/lib64/libcuda.so.{V}").unlink()
    for name in (f"compat/libcuda.so.{V}", f"compat/libcuda.so.{OTHER}", "lib64/stubs/libcuda.so"):
        put(root, f"usr/local/cuda-12/{name}")
    with pytest.raises(DeviceError, match=rf"no libcuda.so.{V} below"):
        driverfiles.find(str(root), V, BOTH)


def test_64_bit_file_is_skipped_for_the_32_bit_library(root: Path) -> None:
    put(root, f"usr/lib/i386-linux-gnu/libcuda.so.{V}")
    own = put(root, f"{OWN}/lib/libcuda.so.{V}", elf32())
    found = driverfiles.find(str(root), V, (*BOTH, "compat32"))
    assert [one.source for one in found.libraries32] == [str(own)]
    assert (f"{root}/usr/lib/i386-linux-gnu/libcuda.so.{V}", "a 64-bit library") in found.skipped


def test_empty_firmware_is_skipped(root: Path) -> None:
    put(root, f"lib/firmware/nvidia/{V}/gsp_ga10x.bin").write_bytes(b"")
    (root / f"lib/firmware/nvidia/{V}/gsp_tu10x.bin").symlink_to("/nowhere")
    assert driverfiles.find(str(root), V, BOTH).firmware == ()
    own = put(root, f"usr/lib/firmware/nvidia/{V}/gsp_ga10x.bin", b"firmware")
    assert driverfiles.find(str(root), V, BOTH).firmware == (str(own),)


@pytest.mark.parametrize(
    ("libdir", "programs"),
    [
        ("usr/lib/x86_64-linux-gnu", "usr/bin"),
        ("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/nvidia/current"),
        ("usr/lib64", "usr/bin"),
        ("lib64", "usr/bin"),
        ("usr/lib", "usr/bin"),
        ("usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
        ("run/opengl-driver/lib", "run/opengl-driver/bin"),
    ],
)
def test_program_beside_libcuda_is_preferred(tmp_path: Path, libdir: str, programs: str) -> None:
    for stem in STEMS:
        put(tmp_path, f"{libdir}/{stem}.so.{V}")
    for directory in drivertable.PROGRAM_DIRS:
        put(tmp_path, f"{directory}/nvidia-smi")
    found = driverfiles.find(str(tmp_path), V, ("utility",))
    assert found.programs == (("nvidia-smi", f"{tmp_path}/{programs}/nvidia-smi"),)
    assert found.skipped == ()


def test_thorough_search_reports_files_after_the_used_one(root: Path) -> None:
    put(root, "usr/bin/nvidia-smi")
    put(root, f"{OWN}/bin/nvidia-smi", b"#!/bin/sh\n")
    put(root, f"{OWN}/lib64/libcuda.so.{V}", b"text")
    assert driverfiles.find(str(root), V, BOTH).skipped == ()
    found = driverfiles.find(str(root), V, BOTH, thorough=True)
    assert found.programs == (("nvidia-smi", f"{root}/usr/bin/nvidia-smi"),)
    assert [os.path.relpath(one.path, root) for one in found.skipped] == [
        f"{OWN}/lib64/libcuda.so.{V}",
        f"{OWN}/bin/nvidia-smi",
    ]


def test_lib_is_not_listed_again_where_it_is_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    real = driverroot.listing
    monkeypatch.setattr(driverfiles, "listing", lambda path: listed.append(os.path.relpath(path, root)) or real(path))
    driverfiles.find(str(root), V, BOTH)
    assert {"lib64", "lib/x86_64-linux-gnu"} <= set(listed)
    for name in ("lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    listed.clear()
    driverfiles.find(str(root), V, BOTH)
    assert "usr/lib64" in listed and not {"lib64", "lib/x86_64-linux-gnu"} & set(listed)


def test_exhausted_descriptors_are_no_reason_to_skip_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(24, "Too many open files", path)

    monkeypatch.setattr(driverchoice.os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        driverfiles.cuda_library(str(root), V)


# Programs of another version


def test_program_of_another_version_is_used_only_without_a_better_one(root: Path) -> None:
    """Found when the inventory is compiled; a start only compares paths."""
    old = put(root, "usr/bin/nvidia-smi", elf_header(2) + f"\0{OTHER}\0".encode())
    assert driverfiles.stale_programs(str(root), V) == ()
    own = put(root, f"{OWN}/bin/nvidia-smi", elf_header(2) + f"\0{V}\0".encode())
    put(root, "usr/bin/nvidia-cuda-mps-server")  # these two have no version in them
    put(root, f"{OWN}/bin/nvidia-cuda-mps-server")
    stale = driverfiles.stale_programs(str(root), V)
    assert stale == (str(old),)
    found = driverfiles.find(str(root), V, BOTH, stale=stale)
    assert dict(found.programs)["nvidia-smi"] == str(own)
    assert dict(found.programs)["nvidia-cuda-mps-server"] == f"{root}/usr/bin/nvidia-cuda-mps-server"
    assert found.skipped == ((str(old), f"a program of another driver than {V}"),)
    own.unlink()
    assert driverfiles.find(str(root), V, ("utility",), stale=stale).programs == (("nvidia-smi", str(old)),)


@pytest.mark.parametrize(("text", "expected"), [(V, True), (f"1{V}", False), (f"{V}.1", False), (f"{V}0", False)])
def test_version_is_recognised_as_a_whole(tmp_path: Path, text: str, expected: bool) -> None:
    path = put(tmp_path, "nvidia-smi", f"x {text} y".encode())
    assert driverchoice.has_version(str(path), V) is expected


@pytest.mark.every_driver
def test_real_program_has_the_version_in_it(userland: Userland) -> None:
    found = dict(driverfiles.find(str(userland.root), userland.version, BOTH).programs)
    for name in ("nvidia-smi", "nvidia-cuda-mps-control"):
        assert driverchoice.has_version(found[name], userland.version)
        assert not driverchoice.has_version(found[name], "470.1")


def test_inventory_has_programs_of_another_version(root: Path, tmp_path: Path) -> None:
    (root / "sys/module/nvidia").mkdir(parents=True)
    (root / "sys/module/nvidia/version").write_text(V)
    old = put(root, "usr/bin/nvidia-smi", elf_header(2) + OTHER.encode())
    put(root, f"{OWN}/bin/nvidia-smi", elf_header(2) + V.encode())
    found = inventory.read_inventory(str(root))
    assert found.stale_programs == (str(old),)
    host = Node(Config(), found)
    assert node.node_of(node.node_json(host, [], [])) == host


# Programs that gpushare executes


def test_mps_uses_the_driver_s_programs_before_scripts(root: Path) -> None:
    """On the host a script finds its program, so it is used if there is no other."""
    host = Inventory(str(root), V, ())
    assert control.program(host) is None
    put(root, "usr/bin/nvidia-cuda-mps-control", b"#!/bin/sh\n").chmod(0o644)
    assert control.program(host) is None
    (root / "usr/bin/nvidia-cuda-mps-control").chmod(0o755)
    assert control.program(host) == f"{root}/usr/bin/nvidia-cuda-mps-control"
    put(root, "usr/bin/nvidia-cuda-mps-server", b"#!/bin/sh\n")
    for name in ("control", "server"):
        put(root, f"{OWN}/bin/nvidia-cuda-mps-{name}")
    program = control.program(host)
    assert program == f"{root}/{OWN}/bin/nvidia-cuda-mps-control"
    path = control.environment(Node(Config(), host), program)["PATH"]
    assert path.split(":")[0] == f"{root}/{OWN}/bin"


def test_mps_gets_the_library_directory_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader does not search every directory in which a driver can be."""
    host = Node(Config(), Inventory("/", V, ()))
    for directory, given in (("/usr/lib64", None), (f"/{OWN}/lib64", f"/{OWN}/lib64")):
        monkeypatch.setattr(driverfiles, "cuda_library", lambda *_, at=directory: f"{at}/libcuda.so.{V}")
        assert control.environment(host, "/usr/bin/x").get("LD_LIBRARY_PATH") == given


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (elf_header(), (64, os.uname().machine)),
        (elf32(), (32, "i386")),
        (elf_header()[:19], None),
        (b"\x7fELF\x02\x02".ljust(20, b"\0"), None),  # big-endian
        (b"", None),
    ],
)
def test_elf_header_is_read(head: bytes, expected: object) -> None:
    found = elf.header_of(head)
    assert found == expected
    assert found is None or elf.number_of(found.machine) == head[18:20]
