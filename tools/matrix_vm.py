"""Boot a release of Debian in a virtual machine, and run containers with gpushare's package there: make matrix-vm.

python -m tools.matrix_vm [--folder DIR] [--cgroup 1] SUITE

The machine has systemd, pure cgroup v2 and the engines of SUITE. Its root (DIR/SUITE-vm) is made with debootstrap once
and kept; each run copies it to a disk, with the .deb of make packages. tools/matrix_guest.py runs inside as a unit,
reports through a serial port, and switches the machine off. qemu uses KVM if there is any, otherwise it emulates. The
results are in DIR/SUITE-vm.json, the console in DIR/SUITE-vm.logs/console.

With --cgroup 1 the machine has systemd's hybrid layout, where cgroup v1 controls device access. Only the tests of
device rules run then, and the results are in DIR/SUITE-vm-v1.json. bookworm has the last systemd with that layout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from simulator.simhost import make_simhost
from tests.support.engines.image import make_root, make_tar
from tests.support.host import BUILD, TREE
from tests.support.realnodes import make_nodes
from tests.support.rootfs import run
from tools.matrix import FOLDER, RECORDS, SUITES, Root, count, locked, say

HERE = "srv/gpushare"  # in the root, as tools/matrix_guest.py expects
DISK_GIB = 8
BOOT_S = 3600
PACKAGES = (
    "linux-image-cloud-amd64 initramfs-tools systemd-sysv dbus dbus-user-session libpam-systemd udev kmod uidmap "
    "docker.io containerd podman runc crun slirp4netns passt fuse-overlayfs python3 apparmor"
)
# docker's client is a package of its own from Debian 13 on
INSTALL = f"""
apt-get update -qq
client=$(apt-cache show docker-cli >/dev/null 2>&1 && echo docker-cli || true)
apt-get install -y -qq --no-install-recommends {PACKAGES} $client
systemctl disable docker.service docker.socket containerd.service
rm -f /usr/sbin/policy-rc.d
"""
UNIT = """\
[Unit]
Description=Tests of gpushare
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 /srv/gpushare/matrix_guest.py /dev/ttyS1
ExecStopPost=/usr/bin/systemctl poweroff --no-block
[Install]
WantedBy=default.target
"""


def prepare(root: Root, version: int) -> None:
    """Install the engines once, and copy the files of this run. `version`: of cgroups."""
    root.make()
    done = root.path / "etc/gpushare-matrix-installed"
    if not done.exists():
        say(f"installing a kernel, systemd and engines; {root.logs}/install.log")
        root.copy_settings()
        if root.call("install", INSTALL, network=True):
            sys.exit(f"gpushare: apt-get failed: {root.logs}/install.log")
        done.touch()
    here = root.path / HERE
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    (deb,) = (BUILD / "packages").glob("gpushare_*_amd64.deb")
    shutil.copy(deb, here / "gpushare.deb")
    (here / "cgroup-version").write_text(str(version))
    shutil.copytree(BUILD / "simhost", here / "simhost", symlinks=True)
    real = make_simhost(here / "real", gpus=2, memory_bytes=16 << 30)
    (real / ".gpushare-sim").unlink()
    make_nodes(real / "dev")
    shutil.copy(TREE / "tools" / "matrix_guest.py", here)
    image = root.logs / "image"
    shutil.rmtree(image, ignore_errors=True)
    make_tar(make_root(image), here / "image.tar")
    unit = root.path / "etc/systemd/system/gpushare-matrix.service"
    unit.write_text(UNIT)
    wanted = root.path / "etc/systemd/system/default.target.wants"
    wanted.mkdir(exist_ok=True)
    if not (wanted / unit.name).is_symlink():
        (wanted / unit.name).symlink_to(f"/etc/systemd/system/{unit.name}")
    (root.path / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    (root.path / "etc/hostname").write_text("gpushare-matrix\n")


def boot(root: Root, version: int) -> list[dict[str, Any]]:
    """Boot the machine and return what its tests reported."""
    disk, results = root.logs / "disk.img", root.logs / "results"
    disk.unlink(missing_ok=True)
    run("truncate", "--size", f"{DISK_GIB}G", disk)
    run("mkfs.ext4", "-q", "-d", root.path, disk)
    results.unlink(missing_ok=True)
    kvm = os.access("/dev/kvm", os.R_OK | os.W_OK) and _kvm_works()
    say(f"booting {'with KVM' if kvm else 'without KVM, which takes many minutes'}; {root.logs}/console")
    (kernel,), (initrd,) = root.path.glob("boot/vmlinuz-*"), root.path.glob("boot/initrd.img-*")
    words = ["qemu-system-x86_64", "-machine", "q35", "-accel", "kvm" if kvm else "tcg,thread=multi", "-smp", "2"]
    words += ["-cpu", "host" if kvm else "max", "-m", "4096", "-display", "none", "-no-reboot", "-nic", "none"]
    words += ["-serial", f"file:{root.logs}/console", "-serial", f"file:{results}", "-device", "virtio-rng-pci"]
    words += [
        "-drive",
        f"file={disk},if=virtio,format=raw,cache=unsafe",
        "-kernel",
        str(kernel),
        "-initrd",
        str(initrd),
    ]
    hybrid = " systemd.unified_cgroup_hierarchy=0" if version == 1 else ""
    words += ["-append", f"root=/dev/vda rw console=ttyS0 quiet mitigations=off systemd.show_status=no{hybrid}"]
    machine = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdin=subprocess.DEVNULL)
    try:
        _follow(machine, results)
    finally:
        machine.kill()
        machine.wait()
        disk.unlink()
    return [json.loads(line) for line in _lines(results)]


def _kvm_works() -> bool:
    """A node may exist where the processor has no virtualisation."""
    flags = Path("/proc/cpuinfo").read_text()
    return " vmx " in flags or " svm " in flags


def _lines(results: Path) -> list[str]:
    text = results.read_text(errors="replace") if results.exists() else ""
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]


def _follow(machine: subprocess.Popen[bytes], results: Path) -> None:
    """Show the results as they come, until the machine is off."""
    shown, end = 0, time.monotonic() + BOOT_S
    while True:
        try:
            machine.wait(2)
        except subprocess.TimeoutExpired:
            pass
        for line in _lines(results)[shown:]:
            shown += 1
            row = json.loads(line)
            if "test" in row:
                where = " ".join(row.get(name, "") for name in ("engine", "way"))
                say(f"{row['result']:7} {row['test']} {where} ({row['seconds']} s) {row['detail'][-400:]}")
        if machine.returncode is not None:
            return
        if time.monotonic() > end:
            say(f"not done after {BOOT_S / 60:.0f} minutes")
            return


def report(root: Root, rows: list[dict[str, Any]], commit: str, version: int = 2) -> int:
    """Write the JSON; return the exit code."""
    tests = [row for row in rows if "test" in row]
    ended = [row for row in rows if "end" in row]
    engines: dict[tuple[str, str, str], list[str]] = {}
    for row in tests:
        if "engine" in row:
            engines.setdefault((row["engine"], row["cgroups"], row["way"]), []).append(row["result"])
    entry: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d"),
        **count([row["result"] for row in tests]),
        "failures": sorted({" ".join(row.get(name, "") for name in ("test", "engine", "way")).strip()
                            for row in tests if row["result"] == "failed"}),
        "engines": [{"engine": engine, "cgroups": f"{driver}, v{version}", "way": way, **count(results)}
                    for (engine, driver, way), results in sorted(engines.items())],
        "commit": commit,
    }  # fmt: skip
    if not ended:
        entry["broken"] = f"the machine stopped after {len(tests)} tests"
    versions = {**root.versions(), "kernel": ended[0]["kernel"] if ended else ""}
    value = {"suite": root.suite, "versions": versions, "parts": {"vm" if version == 2 else "vm, cgroup v1": entry}}
    root.result.write_text(json.dumps(value, indent=1) + "\n")
    print(f"\n{root.result}: {entry['passed']} passed, {entry['failed']} failed")
    return int(not ended or bool(entry["failed"]))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make matrix-vm")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where roots and results are kept")
    parser.add_argument("suite", nargs="?", metavar="SUITE", choices=SUITES, default="sid")
    parser.add_argument("--record", action="store_true", help="copy the results to tests/matrix")
    parser.add_argument("--cgroup", type=int, choices=(1, 2), default=2, help="version of cgroups; default: 2")
    options = parser.parse_args(argv)
    version = options.cgroup
    root = Root(options.folder.resolve(), options.suite, "-vm")
    if version == 1:
        root.result = root.result.with_name(f"{options.suite}-vm-v1.json")
    root.logs.mkdir(parents=True, exist_ok=True)
    try:
        with locked(root.lock, str(root.path)):
            commit = run("git", "rev-parse", "--short=8", "HEAD", cwd=TREE).strip()
            prepare(root, version)
            code = report(root, boot(root, version), commit, version)
            if options.record:
                RECORDS.mkdir(exist_ok=True)
                shutil.copy(root.result, RECORDS)
            return code
    except KeyboardInterrupt:
        say("interrupted; the root is kept")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
