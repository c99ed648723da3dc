"""Read the driver root, which the host's administrator owns: listings, links, short files, device nodes.

    listing(path)                     -> frozenset[str]        empty when the directory is missing
    in_root(root, path)               -> str | None            `path` with its links followed as if `root` were "/"
    below(root, path)                 -> str                   the same for a directory; as it is, if it is missing
    short_read(path, max_bytes)       -> str | None
    node(root, name, simulated)       -> HostNode | None       the device node <root>/dev/<name>
    numbered(root, pattern)           -> tuple[str, ...]       names below <root>/dev; `#` stands for a number

Runs on the start path, so it imports only the standard library.
"""

import os
import stat
from typing import NamedTuple, Optional

_NOWHERE = "/dev/null"  # no directory, so nothing is below it


class HostNode(NamedTuple):
    """A device node of the host."""

    name: str  # below /dev: "nvidiactl", "nvidia-caps/nvidia-cap21"
    source: str
    major: int
    minor: int


def listing(path: str) -> frozenset[str]:
    """Return the names in a directory; empty if it cannot be read."""
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


def in_root(root: str, path: str, known: Optional[dict[str, bool]] = None) -> Optional[str]:
    """Return `path` (relative to `root`) with its links followed as if `root` were "/"; None if it does not exist.
    Needed because Debian's /usr/bin/nvidia-smi is a chain of absolute links, which would lead out of `root`. `known`:
    paths that are no links, and False for missing ones, which several calls collect and do not query again."""
    parts, here, hops = path.strip("/").split("/"), "", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            here = here.rpartition("/")[0]
            continue
        full = os.path.join(root, here.lstrip("/"), part)
        there = known.get(full) if known else None
        if there is None:
            try:
                there = not stat.S_ISLNK(os.lstat(full).st_mode) or None
            except OSError:
                there = False
            if known is not None and there is not None:
                known[full] = there
        if there is False:
            return None
        if there:
            here = f"{here}/{part}"
            continue
        hops += 1
        if hops > 40:
            return None
        text = os.readlink(full)
        here = "" if text.startswith("/") else here
        parts = text.split("/") + parts
    return os.path.join(root, here.lstrip("/"))


def below(root: str, path: str, known: Optional[dict[str, bool]] = None) -> str:
    """The directory `path` below `root`, with its links followed inside `root`. If the root is "/", the kernel does
    that. The kernel would follow a link whose target is missing in `root` to the host's directory: then the path is
    one that cannot exist. `known`: as for in_root."""
    plain = os.path.join(root, path).rstrip("/") or "/"
    if root == "/" or not path:
        return plain
    found = in_root(root, path, known)
    return found or (f"{_NOWHERE}{plain}" if os.path.lexists(f"{plain}/") else plain)


def short_read(path: str, max_bytes: int = 4096) -> Optional[str]:
    """Return the text of a small file; None if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(fd, max_bytes).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)


def node(root: str, name: str, simulated: bool) -> Optional[HostNode]:
    """Return the node `name`: a character device, or a regular file if the root is simulated."""
    path = os.path.join(root, "dev", name)
    try:
        if root != "/":
            path = os.path.join(below(root, os.path.join("dev", os.path.dirname(name))), os.path.basename(name))
        status = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISCHR(status.st_mode):
        return HostNode(name, path, os.major(status.st_rdev), os.minor(status.st_rdev))
    if simulated and stat.S_ISREG(status.st_mode):
        return HostNode(name, path, 0, 0)
    return None


def numbered(root: str, pattern: str) -> tuple[str, ...]:
    """Return the names that match `pattern`, sorted by number. A pattern without `#` is returned as it is, also if
    missing."""
    if "#" not in pattern:
        return (pattern,)
    directory, _, name = pattern.rpartition("/")
    before, _, after = name.partition("#")
    numbers = []
    for found in listing(below(root, os.path.join("dev", directory))):
        middle = found[len(before) : len(found) - len(after)]
        if found == f"{before}{middle}{after}" and middle.isascii() and middle.isdigit():
            numbers.append(int(middle))
    return tuple(f"{directory}/{before}{n}{after}".lstrip("/") for n in sorted(numbers))
