"""What `gpushare doctor` asks, in the order of the flow: one row for each check.

    examine(paths, settings, say) -> [(Check, Result), ...]      never raises for what is wrong with this host

Checks read, and leave nothing behind: shim.py tries a share in a child with a state directory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, Optional

from ..config.config import load_config
from ..core.errors import DeviceError, GpushareError
from ..engines.base import Settings
from ..engines.host import Host
from ..gpu.inventory import read_inventory
from ..state import log
from . import driver, engines, kernel, mps, shim, state
from .base import FAIL, OK, SKIP, WARN, Check, Machine, Result, failed

__all__ = ["CHECKS", "FAIL", "OK", "SKIP", "WARN", "Check", "Machine", "Result", "examine", "look"]

CHECKS = (
    Check("rights", "the command runs as root, and sees everything", driver.rights),
    Check("configuration", "the configuration file is valid", engines.configuration),
    Check("programs", "our programs are there, and nobody but root can change them", engines.programs),
    Check("library", "the library for containers is there, whole, and for this machine", shim.files),
    Check("kernel", "the kernel has the system calls that a start needs", kernel.features),
    Check("file leases", "no container can lease or change the files that it is shown", kernel.file_leases),
    Check("cgroups", "a cgroup hierarchy decides on devices; its version, and whether systemd runs", kernel.cgroups),
    Check("runtime", "runc or crun is there and runs", engines.runtime),
    Check("driver", "an NVIDIA driver is loaded", driver.driver),
    Check("driver files", "the libraries of the loaded version are there", driver.files),
    Check("devices", "there are GPUs, and NVML knows them", driver.devices),
    Check("device nodes", "/dev has the nodes of all GPUs and of UVM", driver.nodes),
    Check(
        "library loads", "over this driver a process with a limit sees that limit, through CUDA and NVML", shim.loads
    ),
    Check("engines", "engines that are installed know gpushare", engines.engines),
    Check("cgroup drivers", "no engine with the hook alone has its cgroups from systemd", engines.cgroup_drivers),
    Check("NVIDIA hooks", "no hook or default runtime of NVIDIA's gives out whole GPUs", engines.nvidia_hooks),
    Check("state", "the state directory is ours and has room", state.directory),
    Check("leases", "every lease can be read and belongs to a container that lives", state.stale_leases),
    Check("containers", "containers that run were started with the driver that is loaded", state.versions),
    Check(
        "MPS", "daemons run as root with the limits they were given, and no container had one that died", mps.daemons
    ),
    Check("refusals", "no container was refused in the last day", state.refusals),
)


def look(config_path: str, state_dir: str, settings: Settings) -> Machine:
    """What all checks share, read once: configuration, and the driver's own answers."""
    machine = Machine(config_path, state_dir, settings, Host())
    try:
        config = load_config(config_path)._replace(state_dir=state_dir)
        machine = machine._replace(config=config)
        return machine._replace(inventory=read_inventory(config.driver_root))
    except DeviceError as error:
        return machine._replace(driver_error=error)
    except GpushareError as error:
        return machine._replace(config_error=error)


def examine(machine: Machine, say: Optional[Callable[[str], None]] = None) -> Iterator[tuple[Check, Result]]:
    """All checks; `say` hears the name of each before it is asked."""
    for check in CHECKS:
        if say is not None:
            say(check.name)
        yield check, answer(check, machine)


def answer(check: Check, machine: Machine) -> Result:
    """A check that fails by an error has found something; one that has a bug is no reason to leave the others out."""
    try:
        return check.ask(machine)
    except GpushareError as error:
        return failed(error)
    except OSError as error:
        return Result(
            FAIL,
            f"{error.filename or check.name}: {error.strerror or error}",
            "run as root" if error.errno in (1, 13) else "",
        )
    except Exception as error:
        return Result(FAIL, log.line_of(error)[0])
