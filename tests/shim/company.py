"""Create the activity files through which containers share their compute activity, per device of a simulated host.

    DIRECTORY/<uuid>/index       which numbers are in use
    DIRECTORY/<uuid>/<number>    one container's activity file

A box binds the directory at /usr/lib/gpushare/peers, read-only, and its own file at /usr/lib/gpushare/pages/<uuid>.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from gpushare.state.shm_abi import ABI_VERSION, MAX_PAGES, PAGES_MAGIC, PEERS_MAGIC, offset, packer

PAGES_SIZE = packer("gs_pages").size
PEERS_SIZE = packer("gs_peers").size


def pages() -> bytes:
    """Return the content of an unused activity file."""
    head = packer("gs_pages").pack(PAGES_MAGIC, ABI_VERSION, PAGES_SIZE, MAX_PAGES, 0, *(0,) * MAX_PAGES)
    return head.ljust(PAGES_SIZE, b"\0")


def join(directory: Path, uuid: str) -> int:
    """Create the next activity file of a device and return its number."""
    place = directory / uuid
    place.mkdir(parents=True, exist_ok=True)
    number = len(list(place.iterdir())) - 1 if (place / "index").exists() else 0
    page = place / str(number)
    page.write_bytes(pages())
    page.chmod(0o666)
    index = place / "index"
    if not index.exists():
        index.write_bytes(
            packer("gs_peers").pack(PEERS_MAGIC, ABI_VERSION, PEERS_SIZE, 1, 0, 0).ljust(PEERS_SIZE, b"\0")
        )
        index.chmod(0o444)
    at = offset("gs_peers", "used") + 8 * (number // 64)
    fd = os.open(index, os.O_RDWR)
    try:
        used = struct.unpack("<Q", os.pread(fd, 8, at))[0]
        os.pwrite(fd, struct.pack("<Q", used | 1 << number % 64), at)
    finally:
        os.close(fd)
    return number


def grant(directory: Path, uuid: str, number: int, word: int) -> None:
    """Publish to the other containers what a container was granted, in the format of region.granted."""
    with open(directory / uuid / "index", "r+b") as index:
        index.seek(offset("gs_peers", "granted") + 8 * number)
        index.write(word.to_bytes(8, "little"))
