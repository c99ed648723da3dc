"""Files of containerd that another program writes: k3s, RKE2, k0s, MicroK8s, kOps, Talos. Pure.

    of(main) -> Distribution | None      by a path of its configuration; main may be any file beside it
    refuse_generated(main)               raises ConfigError for other files that are made again at each start

Sources: k3s, pkg/agent/templates; k0s 1.27 and 1.35, pkg/component/worker/containerd; MicroK8s,
microk8s-resources/wrappers/run-containerd-with-args; kOps, nodeup/pkg/model/containerd.go; Talos, "Customize containerd
settings". docs/engines.md has one row for each.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from .base import Files


class Distribution(NamedTuple):
    """One distribution. Paths can contain {top}, its data directory."""

    name: str
    pattern: str  # of paths of its configuration
    usual: str = ""  # its configuration, where the data directory is the usual one
    main: str = ""  # the file that containerd reads, which the distribution writes
    drop_in: str = ""  # read by each version of the distribution; empty: a folder that `main` imports
    template: str = ""  # {v}: "-v3" for files of version 3. The distribution makes `main` of it
    is_go: bool = False  # the template is in Go's template language, not TOML
    programs: tuple[str, ...] = ()  # its containerd
    units: tuple[str, ...] = ()  # the first that is installed is the one to restart
    restart: str = "systemctl restart"
    instead: str = ""  # nothing on this host is kept: what to do

    def with_top(self, top: str) -> Distribution:
        paths = {name: getattr(self, name).replace("{top}", top) for name in ("main", "drop_in", "template")}
        return self._replace(**paths, programs=tuple(one.replace("{top}", top) for one in self.programs))

    def command(self, files: Files) -> str:
        """The command that makes its containerd read its files."""
        folders = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
        there = (unit for unit in self.units for folder in folders if files.has(f"{folder}/{unit}.service"))
        return f"{self.restart} {next(there, self.units[0])}"

    def template_of(self, version: int) -> str:
        """The template for a file of this version; empty: none."""
        return self.template.replace("{v}", "" if version < 3 else "-v3")


def _rancher(name: str, top: str, *units: str) -> Distribution:
    """k3s and RKE2: they make config.toml again at each start, from a template that can extend their own. Newer
    versions import config-v3.toml.d/*.toml there."""
    folder = "/agent/etc/containerd"
    return Distribution(
        name,
        f"(?P<top>{top}){folder}/.+",
        usual=f"/var/lib/rancher/{name.lower()}{folder}/config.toml",
        main=f"{{top}}{folder}/config.toml",
        template=f"{{top}}{folder}/config{{v}}.toml.tmpl",
        is_go=True,
        programs=("{top}/data/current/bin/containerd", "{top}/bin/containerd"),
        units=units,
    )


_TABLE = (
    _rancher("RKE2", "/.*rke2", "rke2-server", "rke2-agent"),
    _rancher("k3s", "/.+", "k3s", "k3s-agent"),
    Distribution(
        "k0s",
        "(?P<top>/etc/k0s|/run/k0s)/containerd.*",
        usual="/etc/k0s/containerd.toml",
        main="/etc/k0s/containerd.toml",
        drop_in="/etc/k0s/containerd.d/gpushare.toml",  # earlier versions merge it into /run/k0s/containerd-cri.toml
        programs=("/var/lib/k0s/bin/containerd",),
        units=("k0sworker", "k0scontroller"),
    ),
    Distribution(
        "MicroK8s",
        "(?P<top>/var/snap/microk8s/[^/]+)/args/containerd.*",  # `current` is a link to the revision
        usual="/var/snap/microk8s/current/args/containerd.toml",
        main="/var/snap/microk8s/current/args/containerd.toml",
        template="/var/snap/microk8s/current/args/containerd-template.toml",
        programs=("/snap/microk8s/current/bin/containerd",),
        units=("microk8s.daemon-containerd",),
        restart="snap restart",
    ),
    Distribution(
        "kOps",
        "(?P<top>/etc/containerd)/config-kops.toml",
        instead="add the handler to spec.containerd of the cluster: `kops edit cluster`",
    ),
    Distribution(
        "Talos",
        "(?P<top>/etc/cri)/(conf.d/.*|containerd.toml|cri.toml)",
        instead="add the handler to the machine configuration, as /etc/cri/conf.d/20-customization.part",
    ),
)


K0S_MANAGED = "# k0s_managed=true"  # the first line of a file that k0s writes


def of(main: str) -> Optional[Distribution]:
    """The distribution to which a path belongs."""
    for one in _TABLE:
        match = re.fullmatch(one.pattern, main)
        if match is not None:
            return one.with_top(match["top"])
    return None


def _usual() -> list[Distribution]:
    found = (of(row.usual) for row in _TABLE if row.usual)
    return [one for one in found if one is not None]


PROGRAMS = tuple(program for one in _usual() for program in one.programs)  # each distribution's containerd


def installed(files: Files) -> list[Distribution]:
    """The distributions whose containerd this host has."""
    return [one for one in _usual() if any(map(files.has, (one.main, *one.programs)))]


def refuse_generated(main: str) -> None:
    """Raise ConfigError for a file that a change would not outlive."""
    one = of(main)
    if one is not None and one.instead:
        raise ConfigError(f"{shown(main)} is written by {one.name}, which would undo a change", one.instead)
    if main.startswith("/usr/") and not main.startswith("/usr/local/"):
        raise ConfigError(
            f"{shown(main)} belongs to the system's image, as on Flatcar",
            "copy it to /etc/containerd/config.toml, and let a drop-in of the unit start containerd with that file",
        )
    if one is None and main.startswith(("/run/", "/var/run/")):
        raise ConfigError(
            f"{shown(main)} is made again at each start", "name the file that it is made of, with --config-file"
        )
