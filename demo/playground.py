"""An environment to try gpushare without a GPU: `make playground` opens a shell in it.

    python -m demo.playground [--no-docker] [COMMAND...]      default: an interactive bash

It has a simulated GPU of 16 GiB, `gpushare` in PATH, /etc/gpushare/config.yaml for both, and a docker daemon. The image
`demo` has two CUDA programs: `probe` allocates memory until an allocation fails; `busy`, the image's command, keeps the
GPU busy. If podman is installed, it works too, with its own images.

The playground is in a mount namespace: /etc and /var/lib are copies (overlays) without gpushare's and docker's files,
and /run is empty. The only network is loopback. When COMMAND ends, its files, containers and programs are removed. The
exit code is that of COMMAND.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from simulator.simhost import make_simhost
from tests.support import busy, host, processes
from tests.support.engines.dockerd import CLIENT, Dockerd
from tests.support.engines.image import PROBE, make_root, make_tar
from tests.support.engines.podman import SETTINGS
from tests.support.rootfs import mount_tmpfs, run, unmount_below

_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP = 0x40000000, 0x8914, 1  # <sched.h>, <linux/sockios.h>, <linux/if.h>
IMAGE = "demo"
PROGRAM = ("busy", "--seconds", "600")  # what the image runs without a command
IMPORT_OPTIONS = ("--change", f"CMD {json.dumps(PROGRAM)}")  # of docker import
CONFIG = Path("/etc/gpushare/config.yaml")
WELCOME = "A simulated GPU, gpushare and docker (image: demo). docs/tour.md has a tour; `exit` leaves nothing behind."
# The playground has no systemd. This script supports `systemctl reload docker`, the only call in the docs
SYSTEMCTL = """\
#!/bin/sh
[ "$*" = "reload docker" ] || {
    echo "systemctl: no systemd in here, only docker can be reloaded; a new playground starts from scratch" >&2
    exit 1
}
kill -HUP PID
for try in $(seq 100); do
    docker info --format '{{.Runtimes}}' | grep -q gpushare-runtime && exit
done
echo "systemctl: the daemon has no runtime called gpushare: gpushare runtime configure docker" >&2
exit 1
"""

PODMAN = {
    "storage.conf": """\
[storage]
driver = "overlay"
graphroot = "{place}/storage"
runroot = "/run/containers/storage"
""",
    "containers.conf": SETTINGS + 'runtime = "runc"\n',
}


def interrupted(number: int, _: Any) -> None:
    """Handle SIGTERM and SIGHUP so that every cleanup runs, as after the end of the command."""
    raise KeyboardInterrupt


def own_network() -> None:
    """Enter a network namespace with loopback only. Enable IP forwarding, because Docker warns if it is disabled."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        raise RuntimeError("unshare CLONE_NEWNET: not permitted")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def own_view(directory: Path) -> None:
    """Mount /etc, /var/lib and /run as on a host without gpushare and docker."""
    mount_tmpfs(directory, "size=256m,mode=711")
    for place in ("/etc", "/var/lib"):
        upper, work = directory / f"upper{place}", directory / f"work{place}"
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        upper.chmod(0o755)
        options = f"lowerdir={place},upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "-o", options, "gpushare-test", place)
        for ours in ("gpushare", "docker"):
            shutil.rmtree(Path(place, ours), ignore_errors=True)
    mount_tmpfs(Path("/run"), "mode=755")
    Path("/etc/cdi").mkdir(exist_ok=True)
    mount_tmpfs(Path("/etc/cdi"), "mode=755")  # an overlay loses a directory that is removed below it meanwhile


def image(root: Path) -> Path:
    """Make the root file system of the image `demo`."""
    make_root(root)
    shutil.copy2(busy.build(), root / "usr/bin")
    return root


def start_docker(directory: Path, image_root: Path, cleanup: contextlib.ExitStack) -> dict[str, str]:
    """Start a daemon that reads /etc/docker/daemon.json, like those of distributions. Returns variables for its
    client."""
    daemon = Dockerd(directory)
    daemon.config_file = Path("/etc/docker/daemon.json")
    daemon.config_file.parent.mkdir()
    daemon.config_file.write_text("{}\n")
    cleanup.callback(daemon.close)
    daemon.start()
    daemon.must("import", *IMPORT_OPTIONS, str(make_tar(image_root, directory / "image.tar")), IMAGE)
    (directory / "client").mkdir(exist_ok=True)
    (directory / "client" / "config.json").write_text("{}\n")  # podman reads it too, and fails if it does not exist
    return {"DOCKER_HOST": f"unix://{directory / 'socket'}", "DOCKER_CONFIG": str(directory / "client")}


def prepare_podman(directory: Path) -> None:
    """Give podman its own storage and settings, and its own /dev/shm, where podman's locks are."""
    mount_tmpfs(Path("/dev/shm"), "mode=1777")
    for name, text in PODMAN.items():
        path = Path("/etc/containers", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{place}", str(directory)))


def prepare(directory: Path, docker: bool, cleanup: contextlib.ExitStack) -> dict[str, str]:
    """Set the playground up and return the command's environment. `directory` must have a short path, because it
    contains sockets."""
    own_view(directory)
    node = host.Node(directory / "node", make_simhost(directory / "host", gpus=1, memory_bytes=16 << 30))
    node.move(str(CONFIG), "/run/gpushare")
    lines = yaml.safe_dump(yaml.safe_load(CONFIG.read_text()), sort_keys=False)  # as YAML blocks, which users can edit
    CONFIG.write_text(lines)
    image_root = image(directory / "image")
    tools = directory / "bin"
    tools.mkdir()
    for program in (busy.build(), image_root / PROBE[1:]):
        shutil.copy2(program, tools)
    environment = {**os.environ, "PATH": f"{tools}:{host.BIN}:{os.environ['PATH']}", "PS1": "playground# "}
    prepare_podman(directory / "podman")
    if docker:
        environment.update(start_docker(directory / "docker", image_root, cleanup))
        pid = (directory / "docker" / "pid").read_text()
        (tools / "systemctl").write_text(SYSTEMCTL.replace("PID", pid))
        (tools / "systemctl").chmod(0o755)
        (tools / "docker").symlink_to(CLIENT)
    return environment


def end_all() -> None:
    """Kill the processes that the command left running. This process is a subreaper, so they are its children."""
    while left := processes.children():
        for pid in left:
            processes.kill_and_reap(pid)
    subprocess.run([host.BIN / "gpushare", "prune"], stdout=subprocess.DEVNULL)  # removes cgroups of `gpushare run`


def main(words: list[str]) -> int:
    docker = "--no-docker" not in words[:1]
    command = words[0 if docker else 1 :]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    host.enter_private_mounts()
    own_network()
    processes.become_subreaper()
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    try:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(end_all)
            environment = prepare(directory, docker, cleanup)
            if not command:
                print(WELCOME)
            return subprocess.run(command or ["bash", "--norc"], env=environment).returncode
    except KeyboardInterrupt:
        return 130
    except (AssertionError, RuntimeError, OSError) as error:
        print(f"playground: {error}", file=sys.stderr)
        return 1
    finally:
        unmount_below(Path("/run"))
        unmount_below(directory)
        directory.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
