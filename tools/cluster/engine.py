"""The container engines that the node can have: programs, files, unit, and how images get there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import ClassVar

from tools.cluster import PAUSE, PLACE, Trouble

# containerd's release -> its configuration file
_CRI_1 = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{place}/cni"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
"""
_CRI_2 = """version = 3
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{image}"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    bin_dir = ""
    conf_dir = "{place}/cni"
"""
CONTAINERD = {"1": _CRI_1, "2": _CRI_2}
CRIO = """[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "{place}/runc"
[crio.image]
pause_image = "{image}"
pause_command = "/usr/bin/sleep inf"
[crio.network]
network_dir = "{place}/cni"
plugin_dirs = ["/usr/lib/cni"]
"""
# A machine can lack CAP_SYS_RESOURCE, without which no process gets a lower oom_score_adj. containerd has
# restrict_oom_score_adj for that, and gives a privileged container the capabilities that itself has
_RUNC = r"""#!/bin/sh
least=$(cat /proc/self/oom_score_adj)
for word; do
    case "$before" in
        --bundle) file=$word/config.json ;;
        --process) file=$word ;;
        *) file= ;;
    esac
    [ ! "$file" ] || sed -i -e 's/\("oomScoreAdj": *\)-[0-9]*/\1'"$least/" \
        -e 's/"CAP_SYS_RESOURCE", *//g; s/, *"CAP_SYS_RESOURCE"//g' "$file"
    before=$word
done
exec runc "$@"
"""


class Engine:
    """An engine whose programs are in `folder`. `name`: of its unit, and in GPUSHARE_ENGINE."""

    name: ClassVar[str]
    title: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    socket: ClassVar[str]
    places: ClassVar[tuple[str, ...]]  # folders that outlive a reboot
    drop_in: ClassVar[str]  # gpushare's file
    requires_nri_since: ClassVar[tuple[int, int]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        missing = [name for name in self.programs if not (folder / name).is_file()]
        if missing:
            raise Trouble(f"{folder} has no {', '.join(missing)}: write a folder with the programs of {self.title}")

    @property
    def version(self) -> str:
        """Its version, such as "2.1.9+unknown"."""
        done = subprocess.run([self.folder / self.name, "--version"], capture_output=True, text=True)
        found = re.search(r"\bv?(\d+\.\d+\.\S+)", done.stdout)
        if not found:
            raise Trouble(f"{self.folder}/{self.name} --version printed {done.stdout!r}: {done.stderr.strip()}")
        return found[1]

    @property
    def can_require_nri(self) -> bool:
        return tuple(int(part) for part in self.version.split(".")[:2]) >= self.requires_nri_since

    def files(self) -> dict[str, str]:
        """The files of an administrator. Programs begin with #!."""
        raise NotImplementedError

    def import_words(self) -> list[str]:
        """The command that imports an archive of images from its input."""
        raise NotImplementedError

    def show_words(self) -> list[str]:
        """The command that shows the configuration."""
        raise NotImplementedError


class Containerd(Engine):
    name, title = "containerd", "containerd"
    programs = ("containerd", "containerd-shim-runc-v2", "ctr")
    socket = "/run/containerd/containerd.sock"
    places = ("var/lib/containerd",)
    drop_in = "/etc/containerd/conf.d/gpushare.toml"
    requires_nri_since = (2, 2)

    def files(self) -> dict[str, str]:
        return {"/etc/containerd/config.toml": CONTAINERD[self.version[0]].format(image=PAUSE, place=PLACE)}

    def import_words(self) -> list[str]:
        return ["/usr/local/bin/ctr", "--namespace", "k8s.io", "images", "import", "--local", "-"]

    def show_words(self) -> list[str]:
        return ["containerd", "config", "dump"]


class Crio(Engine):
    """conmon, runc and podman, which imports images, are this machine's own."""

    name, title = "crio", "CRI-O"
    programs = ("crio", "pinns")
    socket = "/run/crio/crio.sock"
    places = ("var/lib/containers", "var/lib/crio")
    drop_in = "/etc/crio/crio.conf.d/99-gpushare.conf"
    requires_nri_since = (1, 34)

    def files(self) -> dict[str, str]:
        return {
            "/etc/crio/crio.conf.d/10-crio.conf": CRIO.format(image=PAUSE, place=PLACE),
            f"{PLACE}/runc": _RUNC,
            # Names without a registry, as in many manifests
            "/etc/containers/registries.conf": 'unqualified-search-registries = ["docker.io"]\n',
        }

    def import_words(self) -> list[str]:
        storage = ["--root", "/var/lib/containers/storage", "--runroot", "/run/containers/storage"]
        return ["podman", *storage, "--storage-driver", "overlay", "load", "--quiet"]

    def show_words(self) -> list[str]:
        return ["crio", "config"]


ENGINES = (Containerd, Crio)
