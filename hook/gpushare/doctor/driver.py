"""Checks of the driver, its devices, and the user's rights."""

from __future__ import annotations

import os

from ..core.model import Inventory
from ..core.quantity import human
from ..gpu import charlinks, contexts, driverfiles, driverroot
from ..gpu.drivertable import CAPABILITIES
from ..gpu.selectors import device_name, usable_devices
from .base import FAIL, OK, SKIP, WARN, Machine, Result, failed, no_driver

_USUAL = ("compute", "utility")  # capabilities of a container whose request names none
_EVERY = tuple(CAPABILITIES)
_LOAD_UVM = "load them with `nvidia-modprobe -u -c 0`, or install nvidia-persistenced"


def driver(machine: Machine) -> Result:
    if machine.driver_error is not None:
        return failed(machine.driver_error)
    if machine.inventory is None:
        return no_driver(machine)
    one = machine.inventory
    cuda = f", CUDA {one.cuda_version}" if one.cuda_version else ""
    return Result(OK, f"{one.driver_version}{cuda} in {one.root}{', simulated' if one.simulated else ''}")


def files(machine: Machine) -> Result:
    if machine.inventory is None:
        return no_driver(machine)
    one = machine.inventory
    found = driverfiles.for_capabilities(one, _USUAL)
    count = 2 + len(found.libraries)
    nvml_tool = [name for name, _ in found.programs if name == "nvidia-smi"]
    detail = f"{count} libraries in {os.path.dirname(found.cuda.source)}, {len(found.programs)} programs"
    skipped = _skipped(one)
    if not nvml_tool:
        what = "install the driver's utilities: images have no nvidia-smi of their own"
        return Result(WARN, f"{detail}; no nvidia-smi", what, skipped)
    jit = "libnvidia-ptxjitcompiler"
    if jit in CAPABILITIES["compute"].libraries and jit not in {library.stem for library in found.libraries}:
        what = "install the whole driver: programs with PTX code will not run"
        return Result(WARN, f"{detail}; no {jit}", what, skipped)
    return Result(OK, detail, more=skipped)


def _skipped(one: Inventory) -> tuple[str, ...]:
    """Files of all capabilities that have a driver file's name and are not used, one line each."""
    found = driverfiles.for_capabilities(one, _EVERY, thorough=True)
    return tuple(f"not used: {file.path} is {file.why}" for file in found.skipped)


def devices(machine: Machine) -> Result:
    if machine.inventory is None:
        return no_driver(machine)
    one = machine.inventory
    if not one.devices:
        return Result(FAIL, "the driver shows no GPU", "look for the reason in the kernel's log: dmesg | grep -i nvrm")
    unknown = [device_name(device) for device in (*one.devices, *one.mig) if not device.memory_bytes]
    shown = [f"{device_name(one)} {one.model} {human(one.memory_bytes)}" for one in one.devices if one.memory_bytes]
    mig = f", {len(one.mig)} MIG devices" if one.mig else ""
    if unknown:
        return Result(
            WARN,
            f"NVML reports no memory size of device {', '.join(unknown)}: requests for a percentage of it are refused",
            "run nvidia-smi: its output shows the reason",
        )
    return Result(OK, ", ".join(shown) + mig)


def context_sizes(machine: Machine) -> Result:
    """Show each device's context size, and why it was not measured. An estimate is no problem, only rather high."""
    if machine.inventory is None:
        return no_driver(machine)
    one, texts = machine.inventory, []
    for device in usable_devices(one):
        found = contexts.of(device, one)
        why = "`gpushare refresh` measures it" if found is None else found.why
        how = "measured" if contexts.is_measured(device, one) else f"estimated ({why})"
        texts.append(f"{device_name(device)} {human(device.context_bytes)} {how}")
    return Result(OK, ", ".join(texts) or "no device")


def nodes(machine: Machine) -> Result:
    if machine.inventory is None:
        return no_driver(machine)
    one = machine.inventory
    names = ["nvidiactl", *CAPABILITIES["compute"].nodes, *(f"nvidia{device.minor}" for device in one.devices)]
    found = {name: driverroot.node(one.dev_root, name, one.simulated) for name in dict.fromkeys(names)}
    missing = [f"/dev/{name}" for name, node in found.items() if node is None]
    if missing:
        return Result(FAIL, f"missing: {', '.join(missing)}", _LOAD_UVM)
    links = charlinks.missing(one.dev_root, machine.files.at(charlinks.DIRECTORY))
    if links:
        what = f"{', '.join(map(os.path.basename, links))} not in {charlinks.DIRECTORY}: systemd may take the devices "
        return Result(WARN, what + "from containers at `systemctl daemon-reload`", "gpushare refresh")
    return Result(OK, f"{len(found)} in {os.path.join(one.dev_root, 'dev')}")


def rights(machine: Machine) -> Result:
    """Whether doctor runs as root, because other users see less."""
    from ..system import rootless

    if rootless.is_rootless():
        return Result(WARN, rootless.COOPERATIVE, "run as root to see what root's containers have")
    if os.geteuid() != 0:
        return Result(SKIP, f"uid {os.geteuid()}: some checks need root", "run as root")
    return Result(OK, "root")
