"""Links /dev/char/MAJOR:MINOR to NVIDIA's device nodes, for systemd.

    missing(root, directory)   -> {link: node}    nodes without a link that leads to them
    make(root, directory)      -> [link]          makes these links
    ours(directory)            -> [name]          links that gpushare has made

Runtimes hand a device to systemd as DeviceAllow=/dev/char/195:0. runc before 1.1.3 leaves out a path that is missing,
and systemd before 240 ignores it: the device is lost at `systemctl daemon-reload`. udev makes such links, but it does
not know devices of NVIDIA's modules. NVIDIA's toolkit makes them, too (`nvidia-ctk system create-dev-char-symlinks`),
with relative targets. Targets of gpushare's links are absolute, so that `gpushare uninstall` recognises them. Not on
the start path.
"""

from __future__ import annotations

import os
import stat
from typing import Optional

from .driverroot import below, listing, node

DIRECTORY = "/dev/char"  # udev makes it; without it no systemd needs links
_FOLDERS = ("", "nvidia-caps", "nvidia-caps-imex-channels")  # below dev


def _leads_to(link: str) -> Optional[tuple[int, int]]:
    try:
        status = os.stat(link)
    except OSError:
        return None
    return (os.major(status.st_rdev), os.minor(status.st_rdev)) if stat.S_ISCHR(status.st_mode) else None


def missing(root: str, directory: str) -> dict[str, str]:
    """The links that `make` would make, with their targets."""
    found = {}
    for folder in _FOLDERS if os.path.isdir(directory) else ():
        for name in sorted(listing(below(root, os.path.join("dev", folder)))):
            one = node(root, os.path.join(folder, name), False) if folder or name.startswith("nvidia") else None
            link = f"{directory}/{one.major}:{one.minor}" if one else ""
            if one and _leads_to(link) != (one.major, one.minor):
                found[link] = one.source
    return found


def make(root: str, directory: str) -> list[str]:
    """Make the missing links, and replace links that lead elsewhere. Raises OSError."""
    links = missing(root, directory)
    for link, target in links.items():
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(target, link)
    return list(links)


def ours(directory: str) -> list[str]:
    """The names of our links; the node of a link may be gone."""
    return [name for name in sorted(listing(directory)) if _is_ours(os.path.join(directory, name))]


def _is_ours(link: str) -> bool:
    return os.path.islink(link) and os.readlink(link).startswith("/") and "/dev/nvidia" in os.readlink(link)
