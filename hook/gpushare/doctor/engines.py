"""Checks of gpushare's programs, the low-level runtime, engines, and NVIDIA's own hooks."""

from __future__ import annotations

import os
import re
import subprocess

from ..config import oci_runtime
from ..engines import base, configure, containerd, daemon
from ..engines.configure import ENGINES, State
from ..engines.host import broken_snapshot, check_program, foreign_owners
from ..system import systemdscope
from .base import FAIL, OK, WARN, Machine, Result, failed

# The setting for an engine's cgroup driver in its files: daemon.json, config.toml v2 and v3, crio.conf(5),
# containers.conf(5). Without it docker and podman use systemd if it runs, CRI-O always does, and containerd never.
_CGROUPFS = re.compile(r'native\.cgroupdriver=cgroupfs|^[ \t]*cgroup_manager\s*=\s*"cgroupfs"', re.MULTILINE)
_SYSTEMD = re.compile(
    r'native\.cgroupdriver=systemd|^[ \t]*(SystemdCgroup\s*=\s*true|cgroup_manager\s*=\s*"systemd")', re.MULTILINE
)
_FILES = {  # a name with "/" at its end: all files below it
    "docker": ("/etc/docker/daemon.json",),
    "containerd": ("/etc/containerd/config.toml", "/etc/containerd/conf.d/*.toml"),
    "crio": ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d/"),
    "podman": (
        "/usr/share/containers/containers.conf",
        "/etc/containers/containers.conf",
        "/etc/containers/containers.conf.d/*.conf",
    ),
}
_FORGETS = re.compile(r"runc version 1\.1\.[3-6]\b")
_CGROUPS = "/sys/fs/cgroup"
_CLAIMS = "/var/run/cdi/gpushare.io-claim_*.json"  # of the DRA driver
_NOTATION = re.compile(r"[^:]*\.slice:[^:]*:[^:]+")
_HOOK_DIRS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d", "/etc/crio/hooks.d")
_NVIDIA_HOOK = re.compile(r"nvidia-(container-runtime-hook|container-toolkit|ctk|cdi-hook)")
_NVIDIA_DEFAULT = re.compile(
    r'"default-runtime"\s*:\s*"nvidia|^[ \t]*default_runtime(_name)?\s*=\s*"nvidia', re.MULTILINE
)


def programs(machine: Machine) -> Result:
    """Programs that root runs for each container must belong to root, and the snapshot must run."""
    settings = machine.settings
    paths = [check_program(path) for path in (settings.program, settings.cri_program, settings.hook)]
    owners = foreign_owners(paths)
    if owners:
        return Result(WARN, "; ".join(owners), "install gpushare from its archive, as root")
    snapshot = broken_snapshot(paths[0])
    if snapshot:
        what = f"Python does not start from {snapshot}: containers with a share do not start"
        return Result(FAIL, what, "remove it; containers then start some 30 ms later")
    names = f"{base.RUNTIME_PROGRAM}, {base.CRI_PROGRAM} and {base.HOOK_PROGRAM}"
    return Result(OK, f"{names} in {os.path.dirname(paths[0])}")


def runtime(machine: Machine) -> Result:
    """Whether the low-level runtime, which gpushare-runtime executes, is installed and runs."""
    if machine.config is None:
        return Result("skip", "needs a configuration")
    path = oci_runtime.find(machine.config)
    try:
        return Result(OK, f"{path}, {oci_runtime.version(path) or 'of unknown version'}")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return Result(FAIL, f"{path} --version: {error}", "install runc, or set runtime.path in the configuration file")


def _states(machine: Machine) -> list[State]:
    return [configure.state(ENGINES[name], machine.settings, machine.files) for name in ENGINES]


def _has_hook(one: State) -> bool:
    """Whether the hook, not gpushare-runtime, gives containers of this engine their share."""
    return one.engine != "docker" and any(path.endswith(".json") for path in one.files)


def _word(one: State) -> str:
    return f"{one.engine} ({'hook' if _has_hook(one) else 'runtime'})"


def engines(machine: Machine) -> Result:
    states = _states(machine)
    wrong = [one for one in states if one.problem]
    if wrong:
        hints = {
            f"gpushare runtime configure {one.engine} writes the entry again"
            if one.configured
            else f"correct the file of {one.engine} first: `gpushare runtime configure` refuses it, too"
            for one in wrong
        }
        return Result(FAIL, "; ".join(f"{one.engine}: {one.problem}" for one in wrong), "; ".join(sorted(hints)))
    configured = [_word(one) for one in states if one.configured]
    others = [one.engine for one in states if one.found and not one.configured]
    if configured:
        rest = f"; not {', '.join(others)}" if others else ""
        return Result(OK, ", ".join(configured) + rest)
    if others:
        return Result(WARN, f"{', '.join(others)}: not configured", f"gpushare runtime configure {others[0]}")
    return Result(OK, "none is installed; `gpushare run` needs none")


def cgroup_driver(machine: Machine, engine: str) -> str:
    """The engine's cgroup driver as containerd has it; of others, according to files and flags: systemd or cgroupfs."""
    if engine == "containerd":
        return "systemd" if containerd.systemd_cgroups(machine.settings, machine.files)[0] else "cgroupfs"
    flags = daemon.flags("dockerd", ("docker",), machine.files) if engine == "docker" else []
    texts = [*(flag.value for flag in flags if flag.name == "exec-opt")]
    texts += [machine.files.look(path) for name in _FILES[engine] for path in _matching(machine, name)]
    settings = [
        name for text in texts for name, rule in (("systemd", _SYSTEMD), ("cgroupfs", _CGROUPFS)) if rule.search(text)
    ]
    if settings:
        return settings[-1]
    booted = os.path.isdir("/run/systemd/system")
    return "systemd" if engine == "crio" or (booted and engine != "containerd") else "cgroupfs"


def cgroup_drivers(machine: Machine) -> Result:
    """Whether the hook can give systemd the device rules of a container. `systemctl daemon-reload` removes rules that
    systemd does not have: those of a hook, and with runc 1.1.3 to 1.1.6 those of config.json, too."""
    found = [one for one in _states(machine) if one.found]
    if not found:
        return Result(OK, "no engine is installed")
    drivers = {one.engine: cgroup_driver(machine, one.engine) for one in found}
    detail = ", ".join(f"{engine} {driver}" for engine, driver in drivers.items())
    managed = [engine for engine, driver in drivers.items() if driver == "systemd"]
    if not managed or os.path.exists(systemdscope.SOCKET):
        return Result(OK, detail)
    hooks = [one.engine for one in found if _has_hook(one)] or [
        path for path in base.CDI_FILES if _exists(machine, path)
    ]
    forgets = _forgets_devices(machine)
    if not hooks and not forgets:
        return Result(OK, detail)
    who = ", ".join(hooks) if hooks else forgets
    return Result(
        WARN,
        f"{detail}: without {systemdscope.SOCKET} containers of {who} lose their GPU at `systemctl daemon-reload`",
        f"start the engine where systemd's /run is visible, or use cgroupfs in {', '.join(managed)}",
    )


def handlers(machine: Machine) -> Result:
    """Whether the pod's limits hold for containers of gpushare's handler in containerd. Earlier versions of `gpushare
    runtime configure` could leave SystemdCgroup out of it: runc then takes the systemd name of the cgroup for a path,
    and makes a directory of this name outside the pod's slice."""
    again = "run `gpushare runtime configure containerd` again and restart containerd"
    lost = _literal_cgroups(machine.files.at(_CGROUPS))
    if lost:
        what = f"{len(lost)} container{'s are' if len(lost) > 1 else ' is'} outside the pod's cgroup"
        ids = ", ".join(name.rpartition(":")[2][:12] for name in lost[:5])
        return Result(FAIL, f"{what}, so the pod's limits do not hold: {ids}", f"{again}, then delete these pods")
    default, ours = containerd.systemd_cgroups(machine.settings, machine.files)
    if ours is not None and ours != default:
        values = [str(value).lower() for value in (ours, default)]
        what = f"containerd: SystemdCgroup is {values[0]} for the handler gpushare and {values[1]} for the default one"
        return Result(FAIL, f"{what}, so its containers are outside their pod's cgroup", again)
    return Result(OK, "no container is outside its pod's cgroup")


def cdi_files(machine: Machine) -> Result:
    """Whether containerd reads the CDI files of gpushare, where pods use them: kubelet's request is ignored otherwise,
    and the container starts without a GPU."""
    used = machine.files.glob(_CLAIMS)
    if configure.state(ENGINES["containerd"], machine.settings, machine.files).configured:
        used += [path for path in base.CDI_FILES if _exists(machine, path)]
    if not used or containerd.reads_cdi(machine.settings, machine.files) is not False:
        return Result(OK, "containerd ignores no CDI file of gpushare")
    return Result(
        FAIL,
        f"containerd has CDI disabled, so containers that request a device of {used[0]} start without a GPU",
        'write enable_cdi = true below [plugins."io.containerd.grpc.v1.cri"] in its configuration and restart it; '
        "containerd 1.6 has no CDI",
    )


def _literal_cgroups(top: str) -> list[str]:
    """Names of cgroups that are systemd's notation SLICE:PREFIX:NAME. A cgroup that root does not own is of a user or a
    user namespace, where any name can be made."""
    found: list[str] = []
    for above, names, _ in os.walk(top):
        names[:] = [name for name in names if _is_of_root(os.path.join(above, name))]
        found += filter(_NOTATION.fullmatch, names)
    return sorted(found)


def _is_of_root(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == 0
    except OSError:  # it was removed
        return False


def _exists(machine: Machine, path: str) -> bool:
    return bool(machine.files.read(path))


def _forgets_devices(machine: Machine) -> str:
    """The version of a runc that gives systemd no rules for devices without an entry in sysfs, such as NVIDIA's."""
    version = oci_runtime.version(oci_runtime.find(machine.config)) if machine.config is not None else ""
    return version if _FORGETS.match(version) else ""


def nvidia_hooks(machine: Machine) -> Result:
    """Whether NVIDIA's hook or runtime is configured. They give containers whole GPUs, beside or instead of
    gpushare."""
    files = machine.files
    paths = [path for folder in _HOOK_DIRS for path in files.glob(f"{folder}/*.json")]
    hooks = [path for path in paths if _NVIDIA_HOOK.search(machine.files.look(path))]
    names = [path for paths_ in _FILES.values() for name in paths_ for path in _matching(machine, name)]
    defaults = [path for path in names if _NVIDIA_DEFAULT.search(machine.files.look(path))]
    if hooks and any(_has_hook(one) for one in _states(machine)):
        return Result(
            FAIL,
            f"{', '.join(hooks)}: a container that both hooks serve is refused",
            "remove that file, or start containers with the runtime gpushare, which leaves it out",
        )
    found = [f"{path} (hook)" for path in hooks] + [f"{path} (default runtime)" for path in defaults]
    if found:
        return Result(
            WARN,
            f"{', '.join(found)}: containers without gpushare's runtime get whole GPUs",
            "start them with the runtime gpushare, or make it the default",
        )
    return Result(OK, "none")


def _matching(machine: Machine, name: str) -> list[str]:
    files = machine.files
    return files.files_below(name.rstrip("/")) if name.endswith("/") else files.glob(name)


def configuration(machine: Machine) -> Result:
    if machine.config_error is not None:
        return failed(machine.config_error)
    there = os.path.exists(machine.config_path)
    return Result(OK, f"{machine.config_path}: valid" if there else f"no {machine.config_path}, so the defaults apply")
