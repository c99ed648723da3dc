"""The checks of `gpushare doctor`, one row each, in the order in which a container's start needs their subjects.

    examine(machine, say) -> [(Check, Result), ...]      a problem of this host is a Result, never an exception

Checks only read. The exception leaves nothing behind: shim.py makes a share in a child with its own state directory.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Callable, Optional

from ..config import node
from ..config.config import load_config
from ..core.errors import DeviceError, GpushareError
from ..engines.base import Settings
from ..engines.host import Host
from ..gpu import contexts
from ..gpu.inventory import read_inventory
from ..state import log
from ..system import rootless
from . import driver, engines, kernel, mps, shim, state
from .base import FAIL, OK, SKIP, WARN, Check, Machine, Result, failed

__all__ = ["CHECKS", "FAIL", "OK", "SKIP", "WARN", "Check", "Machine", "Result", "examine", "probe"]

CHECKS = (
    Check("rights", "the command runs as root, so that every check can run", driver.rights),
    Check("configuration", "the configuration file is valid", engines.configuration),
    Check("programs", "gpushare's programs exist, and only root can change them", engines.programs),
    Check("library", "the library for containers exists, is complete, and is for this CPU architecture", shim.files),
    Check("kernel", "the kernel has the system calls that a start needs", kernel.features),
    Check("file leases", "no container can lease or change the files that are mounted into it", kernel.file_leases),
    Check("cgroups", "a cgroup hierarchy controls device access; shows its version and systemd", kernel.cgroups),
    Check("runtime", "runc or crun is installed and runs", engines.runtime),
    Check("driver", "an NVIDIA driver is loaded", driver.driver),
    Check(
        "driver files",
        "the libraries of the loaded driver version exist; lists files with their names that are not used, and why",
        driver.files,
    ),
    Check("devices", "there are GPUs, and NVML reports them", driver.devices),
    Check(
        "contexts", "shows the size of a CUDA context on each device, and whether it is measured", driver.context_sizes
    ),
    Check(
        "device nodes",
        "/dev has the nodes of all GPUs and of UVM, and /dev/char links to them",
        driver.nodes,
    ),
    Check(
        "library loads", "with this driver a process with a limit sees that limit, through CUDA and NVML", shim.loads
    ),
    Check("engines", "installed engines are configured to use gpushare", engines.engines),
    Check(
        "cgroup drivers",
        "where systemd manages cgroups, the hook can give it the device rules of containers",
        engines.cgroup_drivers,
    ),
    Check(
        "handlers",
        "containerd gives gpushare's handler the cgroup driver of the default one, and no container is outside the "
        "cgroup of its pod",
        engines.handlers,
    ),
    Check("CDI", "containerd has CDI enabled where pods request devices of gpushare's CDI files", engines.cdi_files),
    Check("NVIDIA hooks", "no NVIDIA hook or default runtime gives containers whole GPUs", engines.nvidia_hooks),
    Check("state", "the state directory is gpushare's and has room", state.directory),
    Check(
        "records", "the usage journal and the log of decisions, where these are files, can be written", state.records
    ),
    Check("leases", "every lease can be read and belongs to a running container", state.stale_leases),
    Check("lending", "`gpushare agent` runs if policy.lending or policy.suspend needs it", state.lending),
    Check(
        "processes",
        "no process of a container uses a GPU without gpushare's library, so without a limit",
        state.unlimited_processes,
    ),
    Check("containers", "running containers were started with the driver that is loaded now", state.versions),
    Check(
        "MPS", "daemons run as root with unchanged limits, and no container was started with one that died", mps.daemons
    ),
    Check("refusals", "no container was refused in the last day", state.refusals),
)


def probe(config_path: str, state_dir: str, settings: Settings) -> Machine:
    """Read what all checks need: the configuration and the driver's inventory."""
    machine = Machine(config_path, state_dir, settings, Host())
    try:
        config = load_config(config_path)._replace(state_dir=state_dir)
        machine = machine._replace(config=config)
        last = node.last(state_dir)
        found = read_inventory(config.driver_root, libraries=config.driver_libraries, dev=config.driver_dev)
        return machine._replace(inventory=contexts.with_measured(found, last.inventory.contexts if last else ()))
    except DeviceError as error:
        return machine._replace(driver_error=error)
    except GpushareError as error:
        return machine._replace(config_error=error)


def examine(machine: Machine, say: Optional[Callable[[str], None]] = None) -> Iterator[tuple[Check, Result]]:
    """Run all checks; call `say` with the name of each check before it runs."""
    for check in CHECKS:
        if say is not None:
            say(check.name)
        yield check, answer(check, machine)


def answer(check: Check, machine: Machine) -> Result:
    """Run one check. An exception is a FAIL: an expected error is a finding, and a bug in one check must not stop the
    other checks."""
    try:
        return check.ask(machine)
    except GpushareError as error:
        return failed(error)
    except OSError as error:
        what = f"{error.filename or check.name}: {error.strerror or error}"
        if error.errno not in (errno.EPERM, errno.EACCES):
            return Result(FAIL, what)
        return Result(SKIP, f"needs root: {what}") if rootless.is_rootless() else Result(FAIL, what, "run as root")
    except Exception as error:
        return Result(FAIL, log.line_of(error)[0])
