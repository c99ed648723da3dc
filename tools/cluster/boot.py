"""Boot the node: the first process of its pid namespace makes the mounts of a host, and becomes systemd.

python -m tools.cluster.boot FOLDER LOGS

The root is an overlay over this machine's root: FOLDER/upper has what the node writes, so it outlives a reboot. /run,
/tmp and the simulated GPU are new at each boot, as on a machine. The cgroups are those of the process's own namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from pathlib import Path

from simulator.simhost import MARKER, make_simhost
from tests.support.rootfs import run
from tools.cluster import GPU_BYTES, GPUS, PLACE, SIMULATED
from tools.cluster.engine import ENGINES

PERSISTENT = (
    *(place for one in ENGINES for place in one.places),
    "var/lib/kubelet",
    "var/log/pods",
    "var/log/containers",
)  # not on the overlay
NODES = ("null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse")
# kubelet would write these values for the whole machine: it finds them and writes nothing
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
SYSTEMD = "/lib/systemd/systemd"


def controllers() -> list[str]:
    """The hierarchies of cgroup v1 of this machine, such as "cpu,cpuacct" and "name=systemd"; none with pure v2."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, name, _ = line.split(":", 2)
        found += [name] if name else []
    return found


def mounted_controllers() -> str:
    """/proc/cgroups without the controllers of cgroup v1 that no hierarchy has: CRI-O gives each container their
    limits, and runc fails."""
    text = Path("/proc/cgroups").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if line.split()[1] != "0" or not controllers())


def mount_cgroups(place: Path) -> None:
    v1 = controllers()
    if not v1:
        run("mount", "-t", "cgroup2", "cgroup2", place)
        return
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", place)
    for name in v1:
        folder = place / name.removeprefix("name=")
        folder.mkdir()
        run("mount", "-t", "cgroup", "-o", name, "cgroup", folder)


def make_dev(dev: Path, simulated: Path) -> None:
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", dev)
    for name in NODES:
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(f"/dev/{name}")
            os.mknod(dev / name, about.st_mode, about.st_rdev)
            (dev / name).chmod(0o666)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    run("mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", dev / "pts")
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", dev / "shm")
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (dev / name).symlink_to(target)
    for path in (simulated / "dev").iterdir():
        shutil.copy2(path, dev)  # the devices are sparse files


def make_root(folder: Path, logs: Path) -> Path:
    root, simulated = folder / "root", folder / "simulated"
    for name in ("root", "upper", "work"):
        (folder / name).mkdir(exist_ok=True)
    run("mount", "-t", "overlay", "-o", f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work", "overlay", root)
    shutil.rmtree(simulated, ignore_errors=True)
    make_simhost(simulated, gpus=GPUS, memory_bytes=GPU_BYTES)
    run("cp", "-a", simulated / "usr", simulated / MARKER, root)
    for name in PERSISTENT:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (root / name).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", folder / name, root / name)
    for source, place in ((logs, f"{PLACE}/logs"), (simulated, SIMULATED)):
        (root / place[1:]).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", source, root / place[1:])
    run("mount", "-t", "proc", "proc", root / "proc")
    run("mount", "--bind", simulated / "proc/driver", root / "proc/driver")
    for name, value in {**SYSCTLS, "kernel/random/boot_id": str(uuid.uuid4())}.items():
        own = folder / "sysctls" / name.replace("/", ".")
        own.parent.mkdir(exist_ok=True)
        own.write_text(f"{value}\n")
        run("mount", "--bind", own, root / "proc/sys" / name)
    mounted = folder / "cgroups"
    mounted.write_text(mounted_controllers())
    run("mount", "--bind", mounted, root / "proc/cgroups")
    run("mount", "-t", "sysfs", "sysfs", root / "sys")
    mount_cgroups(root / "sys/fs/cgroup")
    make_dev(root / "dev", simulated)
    for name, mode in (("run", "755"), ("tmp", "1777")):
        run("mount", "-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", root / name)
    (root / "run/lock").mkdir()
    return root


def main(folder: str, logs: str) -> None:
    root = make_root(Path(folder), Path(logs))
    os.chdir(root)
    os.makedirs(".before", exist_ok=True)
    run("pivot_root", ".", ".before")
    os.chdir("/")
    run("umount", "--lazy", "/.before")
    run("mount", "--make-rshared", "/")
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "container": "gpushare-cluster",
        "SYSTEMD_UNIT_PATH": f"{PLACE}/units:/run/systemd/transient",
        "SYSTEMD_GENERATOR_PATH": "/nonexistent",
    }
    words = ("--system", "--unit=node.target", "--log-target=console", "--log-level=notice", "--show-status=0")
    os.execve(SYSTEMD, [SYSTEMD, *words], environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
