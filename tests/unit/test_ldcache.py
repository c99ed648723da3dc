"""ldcache.py without a loader: round trips, the order, and hostile files. (With a loader:
tests/integration/test_ldcache.py.)"""

from __future__ import annotations

import functools
import random
import struct

import pytest
from gpushare.core.model import LdEntry
from gpushare.system import ldcache
from hypothesis import given, settings
from hypothesis import strategies as st

X86_64 = 0x0303
NAMES = ("libz.so.1", "libcuda.so.1", "libcuda.so", "libc.so.6", "libm.so.6", "libcrypto.so.1.1", "libcrypto.so.3")


def build(*libraries: tuple[str, str, int, int], hwcaps: tuple[str, ...] = (), generator: bytes = b"test 1") -> bytes:
    """A cache as ldconfig would write it: (name, path, flags, hwcap) in any order."""
    strings = b""
    entries = []
    for name, path, flags, hwcap in libraries:
        entries.append(ldcache.Entry(flags, len(strings), len(strings) + len(name) + 1, 0, hwcap))
        strings += name.encode() + b"\0" + path.encode() + b"\0"
    offsets = []
    for name in hwcaps:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    cache = ldcache.Cache(ldcache.Entries.of(entries), strings, ())

    def order(left: ldcache.Entry, right: ldcache.Entry) -> int:
        names = ldcache.compare_names(cache.text(right.key), cache.text(left.key))
        return names or right.flags - left.flags or (right.hwcap > left.hwcap) - (right.hwcap < left.hwcap)

    sections = [(0, 0, generator)] + ([(1, 0, struct.pack(f"<{len(offsets)}I", *offsets))] if offsets else [])
    return ldcache.render(
        cache._replace(
            entries=ldcache.Entries.of(sorted(entries, key=functools.cmp_to_key(order))), sections=tuple(sections)
        )
    )


SAMPLE = build(
    *((name, f"/lib/{name}", X86_64, 0) for name in NAMES),
    ("libcuda.so.1", "/lib32/libcuda.so.1", 3, 0),
    ("libm.so.6", "/lib/glibc-hwcaps/x86-64-v3/libm.so.6", X86_64, ldcache.HWCAP_EXTENSION | 0),
    hwcaps=("x86-64-v3",),
)


def behind_old_header(data: bytes, n_old: int = 3) -> bytes:
    """The same cache after the table of glibc before 2.2, as `ldconfig -c compat` writes it. Section offsets count from
    the start of the file and change; string offsets count from the new header and stay."""
    old = (struct.pack("<11sxI", b"ld.so-1.7.0", n_old) + bytes(12 * n_old)).ljust((16 + 12 * n_old + 7) & ~7, b"\0")
    moved = bytearray(data)
    (extension,) = struct.unpack_from("<I", moved, 32)
    if extension:
        struct.pack_into("<I", moved, 32, extension + len(old))
        for index in range(struct.unpack_from("<I", moved, extension + 4)[0]):
            at = extension + 8 + 16 * index + 8
            struct.pack_into("<I", moved, at, struct.unpack_from("<I", moved, at)[0] + len(old))
    return old + bytes(moved)


def listed(cache: ldcache.Cache) -> list[tuple[str, str, int, int]]:
    return [(n.decode(), p.decode(), e.flags, e.hwcap) for n, p, e in cache.libraries()]


def lookup(cache: ldcache.Cache, name: str, flags: int = X86_64) -> list[str]:
    """The paths that glibc's search_cache finds for a name, in its order: a binary search, then all neighbours."""
    entries = cache.entries
    left, right = 0, len(entries) - 1
    while left <= right:
        middle = (left + right) // 2
        order = ldcache.compare_names(name.encode(), cache.text(entries[middle].key))
        if order == 0:
            while middle > 0 and ldcache.compare_names(name.encode(), cache.text(entries[middle - 1].key)) == 0:
                middle -= 1
            found = []
            while middle < len(entries) and cache.text(entries[middle].key).decode() == name:
                if entries[middle].flags == flags:
                    found.append(cache.text(entries[middle].value).decode())
                middle += 1
            return found
        if order < 0:
            left = middle + 1
        else:
            right = middle - 1
    return []


def test_parsed_cache_renders_to_same_bytes() -> None:
    assert ldcache.render(ldcache.parse(SAMPLE)) == SAMPLE


def test_cache_of_this_host_round_trips() -> None:
    with open("/etc/ld.so.cache", "rb") as file:
        data = file.read()
    cache = ldcache.parse(data)
    assert listed(ldcache.parse(ldcache.render(cache))) == listed(cache)
    assert any(name == "libc.so.6" for name, _, _, _ in listed(cache))


def test_order_matches_ldconfig_of_this_host() -> None:
    with open("/etc/ld.so.cache", "rb") as file:
        names = [name for name, _, _ in ldcache.parse(file.read()).libraries()]
    assert len(names) > 50
    assert all(ldcache.compare_names(a, b) >= 0 for a, b in zip(names, names[1:]))
    assert any(ldcache.compare_names(a, b) < 0 for a, b in zip(sorted(names), sorted(names, reverse=True)))


def test_cache_with_old_header_lists_same_libraries() -> None:
    cache = ldcache.parse(behind_old_header(SAMPLE))
    assert listed(cache) == listed(ldcache.parse(SAMPLE))
    assert cache.sections == ldcache.parse(SAMPLE).sections


def test_added_and_existing_libraries_are_found() -> None:
    before = ldcache.parse(SAMPLE)
    added = LdEntry("libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1", X86_64)
    after = ldcache.parse(ldcache.render(ldcache.extended(before, [added])))
    assert lookup(after, added.soname) == [added.path]
    assert [x for x in listed(after) if x[0] != added.soname] == listed(before)
    assert after.sections == before.sections
    assert len(listed(after)) == len(listed(before)) + 1


def test_addition_replaces_name_only_for_its_machine() -> None:
    additions = [LdEntry("libcuda.so.1", "/new/libcuda.so.1", X86_64), LdEntry("libm.so.6", "/new/libm.so.6", X86_64)]
    after = ldcache.extended(ldcache.parse(SAMPLE), additions)
    assert lookup(after, "libcuda.so.1") == ["/new/libcuda.so.1"]
    assert lookup(after, "libcuda.so.1", 3) == ["/lib32/libcuda.so.1"]
    assert lookup(after, "libm.so.6") == ["/lib/glibc-hwcaps/x86-64-v3/libm.so.6", "/new/libm.so.6"]


def test_extending_is_idempotent() -> None:
    additions = [LdEntry("libcuda.so.1", "/new/libcuda.so.1", X86_64), LdEntry("libzz.so", "/new/libzz.so", X86_64)]
    once = ldcache.extended(ldcache.parse(SAMPLE), additions)
    assert listed(ldcache.extended(once, additions)) == listed(once)


@pytest.mark.parametrize(
    ("low", "high"),
    [(b"libc.so.5", b"libc.so.6"), (b"libc.so.9", b"libc.so.10"), (b"liba.so", b"libb.so"), (b"libx.so", b"libx.so.1"),
     (b"lib.so", b"lib2.so"), (b"", b"a"), (b"a-", b"a1")],
)  # fmt: skip
def test_names_are_compared_like_loader(low: bytes, high: bytes) -> None:
    assert ldcache.compare_names(low, high) < 0 < ldcache.compare_names(high, low)
    assert ldcache.compare_names(low, low) == 0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("ab.1209-", min_size=1, max_size=8), min_size=1, max_size=30, unique=True), st.randoms())
def test_every_library_is_found_after_additions(names: list[str], rng: random.Random) -> None:
    # The loader's order treats "1" and "01" as equal, so two real names never differ only so.
    distinct: list[str] = []
    for name in names:
        if all(ldcache.compare_names(name.encode(), other.encode()) for other in distinct):
            distinct.append(name)
    cut = rng.randint(0, len(distinct))
    cache = ldcache.parse(build(*((n, "/old/" + n, X86_64, 0) for n in distinct[:cut])))
    cache = ldcache.extended(cache, [LdEntry(n, "/new/" + n, X86_64) for n in distinct[cut:]])
    cache = ldcache.parse(ldcache.render(cache))
    for index, name in enumerate(distinct):
        assert lookup(cache, name) == [("/old/" if index < cut else "/new/") + name]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_noise_is_reported(data: bytes) -> None:
    with pytest.raises(ldcache.MalformedCache):
        ldcache.parse(data)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (20, 0xFFFFFFFF, "entries"),  # nlibs
        (24, 0xFFFFFFFF, "strings"),  # len_strings
        (28, 3, "endian"),
        (32, 0xFFFFFFFC, "extension"),
        (32, 0x31, "extension"),
        (52, 0xFFFFFFF0, "outside"),  # first entry's key
        (56, 4, "outside"),  # its value, into the header
    ],
)
def test_invalid_field_is_named(at: int, value: int, message: str) -> None:
    data = bytearray(SAMPLE)
    struct.pack_into("<I", data, at, value)
    with pytest.raises(ldcache.MalformedCache, match=message):
        ldcache.parse(bytes(data))


def test_huge_file_is_refused_unread() -> None:
    with pytest.raises(ldcache.MalformedCache, match="at most"):
        ldcache.parse(bytes(ldcache.MAX_BYTES + 1))


def test_name_of_million_digits_is_compared_fast() -> None:
    digits = b"lib" + b"9" * 1_000_000
    assert ldcache.compare_names(digits, digits + b"x") < 0  # arbitrary-precision numbers would take minutes


def test_huge_name_is_refused_uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison would take a second."""
    strings = b"libcuda.so." + b"1" * (1 << 20) + b"\0"
    cache = ldcache.Cache(ldcache.Entries.of([ldcache.Entry(X86_64, 0, 0, 0, 0)]), strings, ())
    monkeypatch.setattr(ldcache, "compare_names", None)
    with pytest.raises(ldcache.MalformedCache, match="a name of 1048587 bytes"):
        ldcache.extended(cache, [LdEntry("libcuda.so.1", "/usr/lib/libcuda.so.1", X86_64)])
