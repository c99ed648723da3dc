"""Python's parsers of untrusted input: each returns a value or raises gpushare's own error in one line.

Each function takes the bytes of a fuzzer. Any exception except SystemExit is a finding.
"""

from __future__ import annotations

import os
import shlex
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpushare.config import config
from gpushare.core import quantity, quoting
from gpushare.core.errors import GpushareError
from gpushare.core.model import Amount, Bundle, LdEntry, Node
from gpushare.request import oci, request
from gpushare.state import activity_files, leasefile, migration, shm_abi, usage_reader
from gpushare.system import elf, ldcache

from tests.support.host import BUILD
from tests.unit import pure

GIB = 1 << 30
_HOST = pure.node()
NODE = _HOST._replace(
    inventory=_HOST.inventory._replace(
        cuda_version="12.2",
        mig=(pure.device(1, uuid="MIG-cccccccc-2222-2222-2222-222222222222", parent=pure.UUIDS[1], mig_index=0),),
    )
)
POLICIES = (NODE, pure.node(accept_env="privileged", require_limits=True, annotations="scoped", accept_cdi="never"))
STATE = oci.State("c", 0, "", "/b", {})


@contextmanager
def only_one_line_errors() -> Iterator[None]:
    """Accept a refusal whose message is one line."""
    try:
        yield
    except GpushareError as error:
        assert str(error) and str(error).isprintable(), repr(str(error))
        assert 0 < error.exit_code < 126


def file_of(data: bytes) -> int:
    """A descriptor of a file with these bytes."""
    fd = os.memfd_create("fuzz")
    os.write(fd, data)
    return fd


def patched(good: bytes, data: bytes) -> bytes:
    """`good` with words overwritten: repeated (16-bit index of the word, 64-bit value). An odd first byte truncates the
    result."""
    whole, at = bytearray(good), 1
    while at + 10 <= len(data):
        word, value = struct.unpack_from("<HQ", data, at)
        struct.pack_into("<Q", whole, 8 * (word % (len(good) // 8)), value)
        at += 10
    return bytes(whole[: -data[0]] if data[:1] and data[0] % 2 else whole)


def resolve(bundle: Bundle) -> None:
    """Every check of a request before a device is chosen."""
    asks = request.mentions(bundle)
    for node in POLICIES:
        for with_injected in (False, True):
            with only_one_line_errors():
                found = request.resolve(bundle, node, with_injected)
                assert found is None or asks, found
                if found is not None:
                    request.refuse_conflicts(bundle, found, node.inventory)


def config_json(data: bytes) -> None:
    """config.json, from its bytes to the container's request."""
    fd = file_of(data)
    try:
        with only_one_line_errors():
            spec = oci.read_json(f"/proc/self/fd/{fd}", oci.MAX_CONFIG_BYTES, "config.json")
            resolve(oci.bundle_of(STATE, spec))
    finally:
        os.close(fd)


def state(data: bytes) -> None:
    """The state that a runtime sends to a hook."""
    with only_one_line_errors():
        found = oci.read_state(data)
        assert found.bundle.startswith("/") and "/" not in found.id and found.pid >= 0


def requests(data: bytes) -> None:
    """Variables, one a line; @ starts an annotation; "!" makes the container privileged."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    spec: dict[str, Any] = {"root": {"path": "r"}, "process": {"env": [], "capabilities": {}}, "annotations": {}}
    for line in lines:
        if line.startswith("@"):
            key, _, value = line[1:].partition("=")
            spec["annotations"][key] = value
        elif line == "!":
            spec["process"]["capabilities"]["bounding"] = ["CAP_SYS_ADMIN"]
        else:
            spec["process"]["env"].append(line)
    with only_one_line_errors():
        resolve(oci.bundle_of(STATE, spec))


def quantities(data: bytes) -> None:
    """Amounts, and their sizes on a device."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (quantity.percent, quantity.whole_percent, quantity.percents):
        with only_one_line_errors():
            parse("NAME", text)
    with only_one_line_errors():
        size = quantity.size_bytes("NAME", text)
        assert 0 < size <= quantity.MAX_BYTES
        shown = quantity.human(size)
        assert "." in shown or quantity.size_bytes("NAME", shown) == size, shown
    with only_one_line_errors():
        for _, amount in quantity.amounts("NAME", text):
            _check_amount(amount)


def _check_amount(amount: Amount) -> None:
    block = 2 << 20
    for total in (0, block - 1, 16 * GIB + 5):
        size = quantity.bytes_of(amount, total, block)
        if amount.limit_bytes is None:
            assert 0 <= size <= total and size % block == 0, (amount, total)


def _bytes_of(quoted: str) -> bytes:
    r"""The bytes that `quoted` encodes; \xNN is the only escape."""
    first, *parts = quoted[1:-1].split("\\")
    assert all(part[0] == "x" for part in parts), quoted
    return first.encode() + b"".join(bytes.fromhex(part[1:3]) + part[3:].encode() for part in parts)


def quoted_value(data: bytes) -> None:
    """A value from an image in a message: one short line, one word for a shell, and lossless."""
    if data[:1] == b"u":  # any code point, including a lone surrogate
        text = data[1 : 1 + (len(data) - 1) // 2 * 2].decode("utf-16-le", "surrogatepass")
    else:
        text = data.decode("utf-8", "surrogateescape")
        assert _bytes_of(quoting.quoted(text)) == data
    cut, fits = quoting.shown(text), len(text) <= (256 if text[:1] == "/" else 80)
    for line in (quoting.quoted(text), cut if fits else cut[: cut.rindex(" (")]):
        assert line.isprintable() and not set("$`'\"\n").intersection(line[1:-1]), line
        assert shlex.split(line) == [line[1:-1]] and shlex.split(f"it's {line}'") == [f"its {line}"]
    assert (cut == quoting.quoted(text)) == fits and len(cut) < 256 * 16 + 40
    assert quoting.printable(text).isprintable() and str(GpushareError(text)) == quoting.printable(text)


def _is_in_order(cache: ldcache.Cache) -> bool:
    """Whether the entries have the loader's order; the loader does not find misplaced entries."""
    entries = [(name, entry) for name, _, entry in cache.libraries()]
    return all(
        (ldcache.compare_names(a, b) or one.flags - other.flags or int(one.hwcap != 0) - int(other.hwcap != 0)) >= 0
        for (a, one), (b, other) in zip(entries, entries[1:])
    )


def loader_cache(data: bytes) -> None:
    """An image's ld.so.cache, rewritten with additions."""
    try:
        cache = ldcache.parse(data)
    except ldcache.MalformedCache as error:
        assert str(error).isprintable()
        return
    written = ldcache.render(cache)
    again = ldcache.parse(written)
    assert again._replace(sections=()) == cache._replace(sections=())
    assert sorted(again.sections) == sorted(cache.sections) and ldcache.render(again) == written
    added = LdEntry("libcuda.so.1", "/usr/lib/libcuda.so.1", 0x0303)
    try:
        more = ldcache.parse(ldcache.render(ldcache.extended(cache, [added])))
    except ldcache.MalformedCache:
        return
    assert (b"libcuda.so.1", b"/usr/lib/libcuda.so.1") in [(name, path) for name, path, _ in more.libraries()]
    assert ldcache.extended(more, [added]) == more or not _is_in_order(more)


def library(data: bytes) -> None:
    """A file of an image that may be a library."""
    fd = file_of(data)
    try:
        found = elf.read_library(fd)
        assert found is None or found.machine in ("", *elf.MACHINES.values())
    finally:
        os.close(fd)


LIMITS = shm_abi.pack_limits([pure.share(slot, slot, GIB) for slot in range(2)], 7)
USAGE = shm_abi.pack_usage(7, 2)


def limits(data: bytes) -> None:
    """A limits file, as a rebuild reads it."""
    with only_one_line_errors():
        assert len(shm_abi.read_limits(patched(LIMITS, data)).devices) <= shm_abi.MAX_DEVICES


def usage(data: bytes) -> None:
    """The usage file of a tenant."""
    with only_one_line_errors():
        found = usage_reader.read_usage(patched(USAGE, data), 2)
        assert len(found.slots) <= shm_abi.MAX_SLOTS and found.n_devices <= 2
        for device in range(found.n_devices):
            assert found.used_bytes(device) >= 0 and found.refused[device] >= 0
            for now_ns in (0, 1 << 40, (1 << 63) - 1):
                assert 0 <= usage_reader.recent_percent(found.buckets[device], now_ns) <= 100


# Below build/: a fuzzer exits without cleaning up.
_state_dir = str(BUILD / "fuzz" / "scratch" / "state")
os.makedirs(activity_files.directory(_state_dir, "GPU-f"), exist_ok=True)
_INDEX = shm_abi.packer("gs_peers").pack(shm_abi.PEERS_MAGIC, 1, shm_abi.packer("gs_peers").size, 1, 5, 1)


def index(data: bytes) -> None:
    """The index of a device's activity files."""
    with open(f"{activity_files.directory(_state_dir, 'GPU-f')}/{activity_files.INDEX}", "wb") as file:
        file.write(patched(_INDEX, data))
    with only_one_line_errors():
        assert activity_files.numbers(_state_dir, "GPU-f") <= set(range(shm_abi.MAX_PEERS))


def lease(data: bytes) -> None:
    """lease.json and, behind a NUL, `held`."""
    text, _, held = data.partition(b"\0")
    try:
        found = leasefile.from_json(migration.lease_json(text, lambda: held), "c")
        assert found.state == "held" and leasefile.from_json(leasefile.to_json(found), "c") == found
    except ValueError:
        return


def configuration(data: bytes) -> None:
    """config.yaml."""
    with only_one_line_errors():
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return
        node = Node(config.parse_config(text, "/c.yaml"), NODE.inventory)
        request.resolve(pure.bundle("GPUSHARE_MEMORY=1Gi"), node)
