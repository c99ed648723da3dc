"""gpushare doctor: driver, its files, devices and their nodes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpushare.core.errors import DeviceError
from gpushare.core.model import Context
from gpushare.doctor import FAIL, OK, SKIP, WARN, Machine, Result
from gpushare.gpu import charlinks, contexts

from tests.unit import pure
from tests.unit.doctorhost import ask, machine, put, put_elf, root

__all__ = ["machine", "root"]  # fixtures


def test_missing_driver_fails_and_skips_dependent_checks(machine: Machine) -> None:
    broken = machine._replace(inventory=None, driver_error=DeviceError("no driver", "load it"))
    assert ask("driver", broken) == Result(FAIL, "no driver", "load it")
    for name in ("driver files", "devices", "device nodes", "library loads", "containers"):
        assert ask(name, broken).result == SKIP, name


def test_driver_and_devices_are_named(machine: Machine) -> None:
    assert ask("driver", machine).detail.startswith(f"{pure.VERSION}, CUDA 12.2 in ")
    assert ask("devices", machine) == Result(OK, "0 Test GPU 16 GiB")


def test_device_of_unknown_size_is_reported(machine: Machine) -> None:
    assert machine.inventory
    unknown = machine.inventory._replace(devices=(pure.device(0, memory_bytes=0), pure.device(1)))
    result = ask("devices", machine._replace(inventory=unknown))
    assert result.result == WARN and "of device 0:" in result.detail
    assert ask("devices", machine._replace(inventory=unknown._replace(devices=()))).result == FAIL


def test_context_sizes_are_shown_with_their_source(machine: Machine) -> None:
    assert machine.inventory
    one = machine.inventory
    assert ask("contexts", machine) == Result(OK, "0 512 MiB estimated (`gpushare refresh` measures it)")
    for size, why, text in ((300 << 20, "", "300 MiB measured"), (0, "it is full", "512 MiB estimated (it is full)")):
        known = Context("Test GPU", pure.VERSION, "", False, size, why)
        found = contexts.with_measured(one, (known,))
        assert ask("contexts", machine._replace(inventory=found)) == Result(OK, f"0 {text}")


def test_missing_driver_files_are_reported(machine: Machine, root: Path) -> None:
    assert ask("driver files", machine).result == FAIL  # the root has none
    libdir = "usr/lib/x86_64-linux-gnu"
    for stem in ("libcuda", "libnvidia-ml"):
        put_elf(root, f"{libdir}/{stem}.so.{pure.VERSION}")
    result = ask("driver files", machine)
    assert result.result == WARN and "no nvidia-smi" in result.detail
    put_elf(root, "usr/bin/nvidia-smi").chmod(0o755)
    result = ask("driver files", machine)
    assert result.result == WARN and "libnvidia-ptxjitcompiler" in result.detail
    put_elf(root, f"{libdir}/libnvidia-ptxjitcompiler.so.{pure.VERSION}")
    assert ask("driver files", machine).result == OK
    assert ask("driver files", machine).more == ()
    newer = machine.inventory._replace(driver_version="550.1") if machine.inventory else None
    result = ask("driver files", machine._replace(inventory=newer))
    assert result.result == FAIL and pure.VERSION in result.detail and "550.1" in result.detail


def test_files_that_are_not_used_are_named(machine: Machine, root: Path) -> None:
    """Also files of other capabilities, and those after the used file."""
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        put_elf(root, f"usr/lib64/{name}.so.{pure.VERSION}")
    put(root, "usr/bin/nvidia-smi", "#!/bin/sh\n")
    put(root, f"usr/lib64/libnvidia-encode.so.{pure.VERSION}")
    encoder = f"not used: {root}/usr/lib64/libnvidia-encode.so.{pure.VERSION} is an empty file"
    script = f"not used: {root}/usr/bin/nvidia-smi is a script"
    result = ask("driver files", machine)
    assert (result.result, set(result.more)) == (WARN, {encoder, script}) and "no nvidia-smi" in result.detail
    put_elf(root, "usr/local/nvidia/bin/nvidia-smi")
    put(root, f"usr/local/nvidia/lib64/libcuda.so.{pure.VERSION}", "/* GNU ld script */")
    result = ask("driver files", machine)
    assert result.result == OK and len(result.more) == 3 and {encoder, script} < set(result.more)


def test_missing_links_for_systemd_are_reported(machine: Machine, root: Path) -> None:
    for name, number in {"nvidiactl": 255, "nvidia0": 0, "nvidia-uvm": 250, "nvidia-uvm-tools": 251}.items():
        (root / "dev").mkdir(exist_ok=True)
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(195, number))
    assert machine.inventory
    machine = machine._replace(inventory=machine.inventory._replace(simulated=False))
    assert ask("device nodes", machine).result == OK  # no udev
    (root / "dev/char").mkdir()
    result = ask("device nodes", machine)
    assert (result.result, result.hint) == (WARN, "gpushare refresh")
    assert "195:0, 195:255 not in /dev/char" in result.detail and "daemon-reload" in result.detail
    charlinks.make(str(root), str(root / "dev/char"))
    assert ask("device nodes", machine).result == OK


def test_missing_device_nodes_are_reported(machine: Machine, root: Path) -> None:
    names = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0")
    for name in names:
        put(root, f"dev/{name}")
    assert ask("device nodes", machine).result == OK
    for name in names:
        (root / "dev" / name).unlink()
        result = ask("device nodes", machine)
        assert result.result == FAIL and f"missing: /dev/{name}" in result.detail and "nvidia-modprobe" in result.hint
        put(root, f"dev/{name}")
