"""The simulated host root: its content, and formats equal to the real ones."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import hostfiles, layout
from simulator import simhost as builder
from simulator.ledger import Ledger
from simulator.simhost import LIBDIR, VERSION


def soname(library: Path) -> str:
    text = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    return text.split("Library soname: [")[1].split("]")[0]


def test_devices_are_sparse_and_open_to_all(make_host: Callable[..., Path]) -> None:
    root = make_host("host", gpus=3, memory_bytes=80 << 30, uuids=["GPU-00000000-1111-2222-3333-444444444444"])
    assert (root / ".gpushare-sim").is_file()
    for minor in range(3):
        status = (root / f"dev/nvidia{minor}").stat()
        assert status.st_mode & 0o777 == 0o666 and status.st_blocks * 512 < 1 << 20
        with Ledger(str(root / f"dev/nvidia{minor}")) as ledger:
            assert ledger.total_bytes == 80 << 30
    assert sorted(p.name for p in (root / "dev").iterdir() if not p.name[-1].isdigit()) == sorted(builder.CONTROL_NODES)
    information = (root / "proc/driver/nvidia/gpus/0000:01:00.0/information").read_text()
    assert "GPU UUID: \t GPU-00000000-1111-2222-3333-444444444444\n" in information
    assert "Device Minor: \t 0\n" in information and "Bus Location: \t 0000:01:00.0\n" in information
    other = (root / "proc/driver/nvidia/gpus/0000:02:00.0/information").read_text()
    assert builder.default_uuid(1) in other and "Device Minor: \t 1\n" in other


def test_driver_version_files(simhost: Path) -> None:
    assert (simhost / "sys/module/nvidia/version").read_text() == VERSION + "\n"
    assert f"Kernel Module  {VERSION}  " in (simhost / "proc/driver/nvidia/version").read_text()
    assert "\nModifyDeviceFiles: 1\n" in (simhost / "proc/driver/nvidia/params").read_text()


def test_libraries_have_sonames_and_links(simhost: Path) -> None:
    libdir = simhost / LIBDIR
    for stem in ("libcuda", "libnvidia-ml"):
        assert os.readlink(libdir / f"{stem}.so") == f"{stem}.so.1"
        assert os.readlink(libdir / f"{stem}.so.1") == f"{stem}.so.{VERSION}"
        assert soname(libdir / f"{stem}.so.{VERSION}") == f"{stem}.so.1"
    for stem, suffix in hostfiles.PLACEHOLDERS.items():
        library = libdir / f"{stem}.so.{VERSION}"
        assert soname(library) == f"{stem}.so.{suffix or VERSION}"
        ctypes.CDLL(str(library))


def test_uuids_are_deterministic() -> None:
    assert builder.default_uuid(0) == "GPU-35c53cc4-4ccd-4b67-a26e-a93d07cad784"
    assert len({builder.default_uuid(i) for i in range(8)}) == 8


def test_rebuilding_resets_the_devices(simhost: Path) -> None:
    device = simhost / "dev/nvidia0"
    with open(device, "r+b") as file:
        file.seek(layout.CLIENTS_OFFSET)
        file.write(b"\1\0\0\0")

    builder.make_simhost(simhost)
    with Ledger(str(device)) as ledger:
        assert ledger.clients() == ()


@pytest.mark.parametrize(("text", "size"), [("16GiB", 16 << 30), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29)])
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert builder.parse_size(text) == size


def test_command_builds_a_root(tmp_path: Path) -> None:
    command = [sys.executable, builder.__file__, str(tmp_path / "h"), "--gpus", "2", "--memory", "24GiB"]
    subprocess.run(command, check=True)
    with Ledger(str(tmp_path / "h/dev/nvidia1")) as ledger:
        assert ledger.total_bytes == 24 << 30
    wrong = subprocess.run([*command[:-1], "banana"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "'banana'" in wrong.stderr and "Traceback" not in wrong.stderr


def test_newer_driver_replaces_the_older_one(simhost: Path) -> None:
    command = [sys.executable, builder.__file__, str(simhost), "--driver", builder.CHECKPOINTS]
    subprocess.run(command, check=True)
    named = {path.name for path in (simhost / LIBDIR).glob("*.so.[0-9]*.*")}
    assert named and all(name.endswith(builder.CHECKPOINTS) for name in named)
    assert (simhost / "sys/module/nvidia/version").read_text() == builder.CHECKPOINTS + "\n"
    code = f"import ctypes; n = ctypes.c_int(); c = ctypes.CDLL({str(simhost / LIBDIR / 'libcuda.so.1')!r})"
    code += "; print(c.cuDriverGetVersion(ctypes.byref(n)), n.value)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "0 13000\n"


def test_unknown_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="driver '1.2' is not simulated; give one of 535.261.03, 580.159.04"):
        builder.make_simhost(tmp_path / "h", driver="1.2")
    assert not (tmp_path / "h").exists()


def test_control_stand_in_answers_commands(simhost: Path) -> None:
    control = str(simhost / "usr/bin/nvidia-cuda-mps-control")
    said = subprocess.run([control], input="get_default_active_thread_percentage\n", capture_output=True, text=True)
    assert said.stdout == "100.0\n"


def test_libraries_find_the_devices_of_their_own_root(make_host: Callable[..., Path]) -> None:
    roots = [make_host("one", gpus=1), make_host("two", gpus=2)]
    counts = []
    for root in roots:
        code = f"import ctypes; n = ctypes.c_int(); c = ctypes.CDLL({str(root / LIBDIR / 'libcuda.so.1')!r})"
        code += "; print(c.cuInit(0), c.cuDeviceGetCount(ctypes.byref(n)), n.value)"
        counts.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert counts == [["0", "0", "1"], ["0", "0", "2"]]


def test_root_without_devices_has_no_device(make_host: Callable[..., Path]) -> None:
    root = make_host("empty", gpus=0)
    code = f"import ctypes; print(ctypes.CDLL({str(root / LIBDIR / 'libcuda.so.1')!r}).cuInit(0))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "100\n"
