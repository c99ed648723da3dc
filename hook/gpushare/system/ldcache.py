"""Parse, extend and render the dynamic loader's cache, /etc/ld.so.cache, in the order that the loader needs.

The format is glibc's "glibc-ld.so.cache1.1", alone (since 2.32) or behind the older "ld.so-1.7.0" table. All numbers
are 32 bits wide, little-endian; string offsets count from the new header. An optional extension directory holds the
generator's name and the names of glibc-hwcaps subdirectories. The file is untrusted: every offset is checked, sizes
are bounded, and every error raises `MalformedCache`.

The loader finds a name by binary search (descending `compare_names`), then checks all neighbours of the same name.
Among entries for its own machine it prefers glibc-hwcaps entries, then the first regular entry.
"""

import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..core.model import LdEntry

MAX_BYTES = 4 << 20  # a cache of 500 libraries has 40 KiB
MAX_LIBS = 1 << 16
_MAX_NAME = 4096  # PATH_MAX; comparing two names takes a step for each byte

_OLD_MAGIC = b"ld.so-1.7.0"
_NEW_MAGIC = b"glibc-ld.so.cache1.1"
_OLD_HEADER = struct.Struct("<11sxI")  # magic, nlibs; then 12 bytes per entry
# An entry's flags, as ldconfig writes them: libc6, and the machine
FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03, "i386": 0x0003}
_HEADER = struct.Struct("<20sIIB3xI12x")  # magic, nlibs, len_strings, flags, extension_offset
_ENTRY = struct.Struct("<iIIIQ")  # flags, key, value, osversion or isa level, hwcap
_OFFSETS = struct.pack("<iIIIQ", 0, 1, 1, 0, 0)  # 1 in each field of an entry that is an offset
_SECTION = struct.Struct("<IIII")  # tag, flags, offset, size
_EXTENSION_MAGIC = 0xEAA42174
_MAX_SECTIONS = 64
_TAG_HWCAPS = 1  # its data are string offsets; the data of other tags (0 is the generator's name) are plain bytes
_BIG_ENDIAN = 3  # the header's flags: 0 unset, 2 little
HWCAP_EXTENSION = 1 << 62  # in an entry's hwcap: a glibc-hwcaps subdirectory, its index in the low half


class MalformedCache(ValueError):
    """The file is no cache in a known format; the text is the reason."""


class Entry(NamedTuple):
    """One library of the cache; `key` and `value` are offsets of its name and its path in `Cache.strings`."""

    flags: int
    key: int
    value: int
    isa_level: int
    hwcap: int


class Entries:
    """All entries of a cache, kept as the bytes of the file: a start needs few of the hundreds."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @staticmethod
    def of(entries: Iterable[Entry]) -> "Entries":
        return Entries(b"".join(_ENTRY.pack(*entry) for entry in entries))

    def __len__(self) -> int:
        return len(self.raw) // _ENTRY.size

    def __getitem__(self, index: int) -> Entry:
        return Entry(*_ENTRY.unpack_from(self.raw, index * _ENTRY.size))

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry._make, _ENTRY.iter_unpack(self.raw))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and self.raw == other.raw

    def keys(self) -> memoryview:
        return memoryview(self.raw).cast("I")[1 :: _ENTRY.size // 4]

    def values(self) -> memoryview:
        return memoryview(self.raw).cast("I")[2 :: _ENTRY.size // 4]

    def moved(self, by: int) -> "Entries":
        """All entries with `by` added to their offsets. The table is added as one number, so no offset may carry."""
        offsets = int.from_bytes(_OFFSETS * len(self), "little")
        return Entries((int.from_bytes(self.raw, "little") + by * offsets).to_bytes(len(self.raw), "little"))


class Cache(NamedTuple):
    """A parsed cache. `sections` are the extension's: (tag, flags, data). All offsets count from `strings[0]`."""

    entries: Entries
    strings: bytes
    sections: tuple[tuple[int, int, bytes], ...]

    def named(self, keys: Container[int]) -> Iterator[Entry]:
        """Entries whose name is at one of these offsets."""
        return (self.entries[at] for at, key in enumerate(self.entries.keys()) if key in keys)

    def text(self, offset: int) -> bytes:
        """The NUL-terminated string at an offset that `parse` has checked."""
        return self.strings[offset : self.strings.index(b"\0", offset)]

    def libraries(self) -> Iterator[tuple[bytes, bytes, Entry]]:
        """(name, path, entry) in the order of the file."""
        for entry in self.entries:
            yield self.text(entry.key), self.text(entry.value), entry


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise MalformedCache(what)


def _new_header_at(data: bytes) -> int:
    """Offset of the new format: 0, or behind the old table (aligned to 8, as ldconfig does)."""
    if data.startswith(_NEW_MAGIC):
        return 0
    _require(len(data) >= _OLD_HEADER.size and data.startswith(_OLD_MAGIC), "it is not an ld.so.cache")
    count = _OLD_HEADER.unpack_from(data)[1]
    _require(count <= MAX_LIBS, f"its old table has {count} entries")
    base = (_OLD_HEADER.size + 12 * count + 7) & ~7
    _require(data[base : base + len(_NEW_MAGIC)] == _NEW_MAGIC, "it has only the format of glibc before 2.2")
    return int(base)


_last: list[tuple[bytes, Cache]] = []  # a start parses the image's cache twice: to inspect it and to extend it


def parse(data: bytes) -> Cache:
    """The cache in `data`; raises MalformedCache."""
    if not _last or _last[0][0] != data:
        _last[:] = [(data, _parsed(data))]
    return _last[0][1]


def _parsed(data: bytes) -> Cache:
    _require(len(data) <= MAX_BYTES, f"it has {len(data)} bytes; at most {MAX_BYTES} are read")
    base = _new_header_at(data)
    _require(len(data) >= base + _HEADER.size, "its header is cut off")
    _, count, strings_size, flags, extension = _HEADER.unpack_from(data, base)
    _require(flags & 3 != _BIG_ENDIAN, "it is big-endian")
    _require(count <= MAX_LIBS, f"it has {count} entries; at most {MAX_LIBS} are read")
    start = base + _HEADER.size + count * _ENTRY.size
    end = start + strings_size
    _require(end <= len(data), "its strings are cut off")
    strings = data[start:end]
    last = strings.rfind(b"\0")  # every string that starts at or before this ends inside the table
    shift = start - base
    entries = Entries(data[base + _HEADER.size : start])
    for offsets in (entries.keys(), entries.values()) if count else ():
        _require(shift <= min(offsets) and max(offsets) <= shift + last, "an entry points outside the strings")
    return Cache(entries.moved(-shift), strings, _sections(data, extension, shift, last) if extension else ())


def _sections(data: bytes, at: int, shift: int, last: int) -> tuple[tuple[int, int, bytes], ...]:
    """The extension's sections. Its offsets count from the start of the file; those of hwcaps names are re-based."""
    _require(at % 4 == 0 and at + 8 <= len(data), "its extension directory is cut off")
    magic, count = struct.unpack_from("<II", data, at)
    _require(magic == _EXTENSION_MAGIC, "its extension directory has a wrong magic number")
    _require(
        count <= _MAX_SECTIONS and at + 8 + count * _SECTION.size <= len(data), "its extension directory is too long"
    )
    sections = []
    for index in range(count):
        tag, flags, offset, size = _SECTION.unpack_from(data, at + 8 + index * _SECTION.size)
        _require(offset + size <= len(data), f"its extension section {index} is cut off")
        content = data[offset : offset + size]
        if tag == _TAG_HWCAPS:
            _require(size % 4 == 0, "its glibc-hwcaps section is cut off")
            names = [v[0] - shift for v in struct.iter_unpack("<I", content)]
            _require(all(0 <= v <= last for v in names), "a glibc-hwcaps name is outside the strings")
            content = struct.pack(f"<{len(names)}I", *names)
        sections.append((tag, flags, content))
    return tuple(sections)


def render(cache: Cache) -> bytes:
    """The file content of `cache`, only in the new format, which every glibc since 2.2 reads."""
    shift = _HEADER.size + len(cache.entries) * _ENTRY.size
    parts = [b"", cache.entries.moved(shift).raw, cache.strings]
    extension = 0
    if cache.sections:
        end = shift + len(cache.strings)
        extension = (end + 3) & ~3
        parts.append(bytes(extension - end))
        parts.append(_rendered_sections(cache.sections, extension, shift))
    parts[0] = _HEADER.pack(_NEW_MAGIC, len(cache.entries), len(cache.strings), 2, extension)
    return b"".join(parts)


def _rendered_sections(sections: Sequence[tuple[int, int, bytes]], at: int, shift: int) -> bytes:
    directory = [struct.pack("<II", _EXTENSION_MAGIC, len(sections))]
    contents: list[bytes] = []
    offset = at + 8 + len(sections) * _SECTION.size
    # The loader requires 4-byte alignment of the hwcaps array only, so arrays go first. Parsing and rendering a cache
    # again gives the same bytes, also where a tag occurs twice.
    for tag, flags, content in sorted(sections, key=lambda s: (s[0] != _TAG_HWCAPS, s[0], s[1])):
        if tag == _TAG_HWCAPS:
            content = b"".join(struct.pack("<I", v[0] + shift) for v in struct.iter_unpack("<I", content))
        directory.append(_SECTION.pack(tag, flags, offset, len(content)))
        contents.append(content)
        offset += len(content)
    directory[1:] = sorted(directory[1:], key=_SECTION.unpack)  # by tag, as ldconfig writes them
    return b"".join(directory + contents)


def _number(text: bytes, at: int) -> tuple[int, int]:
    """The decimal number at `at` and the index behind it; wraps as the loader's `int` does, which also bounds it."""
    value = 0
    while at < len(text) and 48 <= text[at] <= 57:
        value = (value * 10 + text[at] - 48) & 0xFFFFFFFF
        at += 1
    return value - (value >> 31 << 32), at


def _common(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two texts."""
    size = min(len(left), len(right))
    differs = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return size - (differs.bit_length() + 7) // 8


def _digits_before(text: bytes, at: int) -> int:
    """Start of the run of digits that ends at `at`; `at` when there is none."""
    while at and 48 <= text[at - 1] <= 57:
        at -= 1
    return at


def compare_names(left: bytes, right: bytes) -> int:
    """<0, 0, >0: the order of glibc's `_dl_cache_libcmp`. Runs of digits compare as numbers; a digit sorts above any
    other character."""
    i = j = _digits_before(left, _common(left, right))
    while i < len(left):
        a, b = left[i], right[j] if j < len(right) else 0
        if 48 <= a <= 57:
            if not 48 <= b <= 57:
                return 1
            first, i = _number(left, i)
            second, j = _number(right, j)
            if first != second:
                return first - second
        elif 48 <= b <= 57:
            return -1
        elif a != b:
            return a - b
        else:
            i, j = i + 1, j + 1
    return -right[j] if j < len(right) else 0


def _position(cache: Cache, entries: Entries, name: bytes, flags: int) -> int:
    """Index for a regular entry: behind entries with a higher name or higher flags, and behind its hwcaps variants."""
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        entry = entries[middle]
        present = cache.text(entry.key)
        if len(present) > _MAX_NAME:
            raise MalformedCache(f"it has a name of {len(present)} bytes; at most {_MAX_NAME} are read")
        order = compare_names(present, name) or entry.flags - flags or int(entry.hwcap != 0)
        if order > 0:
            low = middle + 1
        else:
            high = middle
    return low


def _is_regular(cache: Cache, entry: Entry, name: bytes, flags: int) -> bool:
    return entry.flags == flags and not entry.hwcap and cache.text(entry.key) == name


def extended(cache: Cache, additions: Iterable[LdEntry]) -> Cache:
    """`cache` with `additions`: each replaces the regular entries of the same name and flags. Variants in glibc-hwcaps
    directories stay: they are other files."""
    entries = cache.entries
    for flags, name, path in ((a.flags, a.soname.encode(), a.path.encode()) for a in additions):
        at = end = _position(cache, entries, name, flags)
        while end < len(entries) and _is_regular(cache, entries[end], name, flags):
            end += 1
        if end - at == 1 and cache.text(entries[at].value) == path:
            continue  # already there: a second start must not make the file grow
        key = len(cache.strings)
        added = _ENTRY.pack(flags, key, key + len(name) + 1, 0, 0)
        entries = Entries(entries.raw[: at * _ENTRY.size] + added + entries.raw[end * _ENTRY.size :])
        cache = cache._replace(strings=cache.strings + name + b"\0" + path + b"\0")
    _require(len(entries) <= MAX_LIBS, "it would have too many entries")
    return cache._replace(entries=entries)
