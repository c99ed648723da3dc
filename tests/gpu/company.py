"""The files by which shares of one device hear of each other's compute, as the host makes them for containers.

DIRECTORY/index       which numbers are in use
DIRECTORY/<number>    one share's pages
"""

from __future__ import annotations

from pathlib import Path

from gpushare.region import ABI_VERSION, MAX_PAGES, MAX_PEERS, PAGES_MAGIC, PEERS_MAGIC, offset, packer

WORD_BITS = 64


def join(directory: Path, granted: int) -> int:
    """Makes the pages of one more share, with region.granted(share); its number. Everything is written before the first
    of them is started."""
    directory.mkdir(exist_ok=True)
    number = sum(path.name.isdigit() for path in directory.iterdir())
    size = packer("gs_pages").size
    head = packer("gs_pages").pack(PAGES_MAGIC, ABI_VERSION, size, MAX_PAGES, 0, *(0,) * MAX_PAGES)
    (directory / str(number)).write_bytes(head)
    used = (1 << number + 1) - 1
    words = [used >> WORD_BITS * i & (1 << WORD_BITS) - 1 for i in range(MAX_PEERS // WORD_BITS)]
    index = bytearray(packer("gs_peers").pack(PEERS_MAGIC, ABI_VERSION, packer("gs_peers").size, number + 1, *words))
    first, end = offset("gs_peers", "granted"), offset("gs_peers", "granted") + 8 * number
    if number:
        index[first:end] = (directory / "index").read_bytes()[first:end]
    index[end : end + 8] = granted.to_bytes(8, "little")
    (directory / "index").write_bytes(index)
    return number
