"""The shared-memory ABI of host and shim, as bytes: the Python side of shim/include/gpushare_abi.h.

One table per C struct: (field, struct code). Everything else (offsets, sizes, packers) follows from the tables. The
build of the shim asserts that the compiler's offsets, sizes and constants are these (shim/gen_symbols.py).

usage_reader.py and activity_files.py read what tenants write.
"""

import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Share
from ..core.quoting import shown

ABI_VERSION = 1
LIMITS_MAGIC = int.from_bytes(b"GSLIMITS", "little")
USAGE_MAGIC = int.from_bytes(b"SGSUSAGE", "little")
PAGES_MAGIC = int.from_bytes(b"GSSPAGES", "little")
PEERS_MAGIC = int.from_bytes(b"GSSPEERS", "little")
MAX_DEVICES = 16
MAX_SLOTS = 1024
MAX_PAGES = 32  # contexts of one container on one device
MAX_PEERS = 128  # containers on one device
UNLIMITED = (1 << 64) - 1
NO_PERCENT = 100
MAX_SHARES = 160  # rows of exported memory in a usage file

DEVICE_COMPUTE_SOFT = 1 << 0
DEVICE_OVERSUBSCRIBE = 1 << 1
DEVICE_PAUSED = 1 << 2
DEVICE_LENT = 1 << 3
DEVICE_LENDING = 1 << 4
DEVICE_SUSPENDED = 1 << 5
DEVICE_MOVING = 1 << 6
DEVICE_MEMORY_DMEM = 1 << 8
HOLDERS = {"dmem": DEVICE_MEMORY_DMEM}  # memory_backend of a share -> its flag

# C struct -> its fields in order. Little-endian without padding: every gap is a `reserved` field
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "gs_device_limit": (
        ("uuid", "16s"),
        ("uuid_text", "64s"),
        ("memory_limit_bytes", "Q"),
        ("memory_total_bytes", "Q"),
        ("context_bytes", "Q"),
        ("granularity_bytes", "Q"),
        ("memory_virtual_bytes", "Q"),
        ("compute_percent", "I"),
        ("priority", "I"),
        ("weight", "I"),
        ("flags", "I"),
        ("page", "I"),
        ("slice_ns", "I"),
        ("switch_ns", "I"),
        ("turn_mib", "I"),
        ("next_memory_limit_bytes", "Q"),
        ("next_compute_percent", "I"),
        ("next_priority", "I"),
        ("next_weight", "I"),
        ("next_flags", "I"),
        ("draining_bytes", "Q"),
        ("next_memory_virtual_bytes", "Q"),
    ),
    "gs_limits": (
        ("magic", "Q"),
        ("version", "I"),
        ("size", "I"),
        ("n_devices", "I"),
        ("flags", "I"),
        ("nonce", "Q"),
        ("generation", "Q"),
        ("mps_token", "Q"),
        ("mps_uid", "I"),
        ("mps_device", "I"),
        ("turn_us", "I"),
        ("init_kib", "2x"),  # pack_limits writes both
        ("unlisted_kib", "2x"),
        ("device", f"{MAX_DEVICES * 192}x"),
    ),
    "gs_slot": (
        ("owner", "I"),
        ("live", "I"),
        ("generation", "I"),
        ("pid", "I"),
        ("started_ns", "Q"),
        ("bounds", "8x"),  # the host does not use it
        ("wants", "8x"),  # usage_reader.py reads it
        ("driver_mib", "24x"),  # usage_reader.py reads it
        ("bytes", f"{MAX_DEVICES}Q"),
    ),
    "gs_bucket": (
        ("tat_ns", "Q"),
        ("done_ns", "Q"),
        ("admitted_ns", "Q"),
        ("waited_ns", "Q"),
        ("busy_ns", "Q"),
        ("recent", "10Q"),
        ("launch_ns", "Q"),
    ),
    "gs_share": (
        ("id", "Q"),
        ("owner", "Q"),
        ("what", "Q"),
    ),
    "gs_account": (
        ("until_ns", "Q"),
        ("held_gib_ns", "Q"),
        ("peak_bytes", "Q"),
        ("reserved", "8x"),
    ),
    "gs_usage": (
        ("magic", "Q"),
        ("version", "I"),
        ("size", "I"),
        ("n_slots", "I"),
        ("n_devices", "I"),
        ("nonce", "Q"),
        ("slots_high", "I"),
        ("warnings", "I"),
        ("refused", f"{MAX_DEVICES}Q"),
        ("shares_used", "8x"),
        ("share", f"{MAX_SHARES * 24}x"),
        ("called_ns", "8x"),  # usage_reader.py reads it
        ("asks", "4x"),  # usage_reader.py reads it
        ("reserved", "68x"),
        ("bucket", f"{MAX_DEVICES * 128}x"),
        ("account", f"{MAX_DEVICES * 32}x"),
        ("does", f"{MAX_SLOTS}x"),  # usage_reader.py reads it
        ("reserved2", "512x"),
        ("slot", f"{MAX_SLOTS * 192}x"),
    ),
    "gs_run": (
        ("start_ns", "Q"),
        ("end_ns", "Q"),
        ("run_ns", "Q"),
    ),
    "gs_activity": (
        ("busy_from_ns", "Q"),
        ("busy_until_ns", "Q"),
        ("horizon_ns", "Q"),
        ("weight", "I"),
        ("priority", "I"),
        ("last", "I"),
        ("n", "I"),
        ("expects_ns", "Q"),
        ("switch_ns", "Q"),
        ("owes_ns", "Q"),
        ("run", f"{47 * 24}x"),
    ),
    "gs_page": (
        ("index", "I"),
        ("reserved", "4x"),
        ("buffer", f"{2 * 1192}x"),
        ("reserved2", "40x"),
    ),
    "gs_turn": (
        ("held_from_ns", "Q"),
        ("held_until_ns", "Q"),
        ("used_ns", "Q"),
        ("wants_from_ns", "Q"),
        ("wants_until_ns", "Q"),
        ("brought_bytes", "Q"),
    ),
    "gs_compute_turn": (
        ("from_ns", "Q"),
        ("until_ns", "Q"),
        ("work_until_ns", "Q"),
        ("wants_until_ns", "Q"),
        ("arrival_ns", "Q"),
        ("cuts_in_until_ns", "Q"),
        ("got_ns", "Q"),
        ("free_until_ns", "Q"),
    ),
    "gs_pages": (
        ("magic", "Q"),
        ("version", "I"),
        ("size", "I"),
        ("n_pages", "I"),
        ("high", "I"),
        ("reserved", "40x"),
        ("owner", f"{MAX_PAGES}Q"),
        ("turn", "48x"),
        ("compute_turn", "64x"),
        ("reserved2", "3664x"),
        ("page", f"{MAX_PAGES * 2432}x"),
    ),
    "gs_peers": (
        ("magic", "Q"),
        ("version", "I"),
        ("size", "I"),
        ("generation", "Q"),
        ("used", f"{MAX_PEERS // 64}Q"),
        ("granted", f"{MAX_PEERS * 8}x"),
        ("reserved", "3032x"),
    ),
}


def packer(name: str) -> struct.Struct:
    """Return a packer of the whole C struct `name`; embedded arrays of structs are padding in it."""
    return struct.Struct("<" + "".join(code for _, code in LAYOUTS[name]))


def offset(name: str, field: str) -> int:
    """Return offsetof(struct `name`, `field`) in bytes."""
    codes: list[str] = []
    for known, code in LAYOUTS[name]:
        if known == field:
            return struct.calcsize("<" + "".join(codes))
        codes.append(code)
    raise KeyError(f"{name}.{field}")


DEVICE_SIZE = packer("gs_device_limit").size
SLOT_SIZE = packer("gs_slot").size
LIMITS_SIZE = packer("gs_limits").size
USAGE_SIZE = packer("gs_usage").size


class RegionError(GpushareError):
    """A shared file is damaged or of another version."""


class Limit(NamedTuple):
    """One device of a limits file. None: no limit."""

    uuid: str
    memory_limit_bytes: Optional[int]
    memory_total_bytes: int
    compute_percent: Optional[int]
    priority: int
    flags: int
    page: int = 0
    draining_bytes: int = 0  # as in model.Share
    virtual_bytes: int = 0  # the same

    @property
    def lending(self) -> str:
        """How its memory above memory_limit_bytes is lent, as in model.Share."""
        way = constants.MOVABLE if self.flags & DEVICE_OVERSUBSCRIBE else constants.EVICT
        return way if self.flags & DEVICE_LENT else ""


class Limits(NamedTuple):
    """The copy in force of a limits file."""

    nonce: int
    generation: int
    devices: tuple[Limit, ...]
    mps_token: int = 0
    mps_device: int = 0  # the slot whose compute MPS enforces, plus one; 0: none
    round_ms: int = 0  # of the turns; 0: time slices


def uuid_bytes(uuid: str) -> bytes:
    """Return the raw 16 bytes of "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" (or MIG-). Raise RegionError."""
    try:
        raw = bytes.fromhex(uuid.partition("-")[2].replace("-", ""))
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise RegionError(f"device uuid {shown(uuid)} is not GPU- or MIG- and 32 hexadecimal digits")
    return raw


def host_part(slot: int) -> int:
    """Return the slot of a share's host part: GS_HOST_PART of the header."""
    return MAX_DEVICES - 1 - slot


def changing(share: Share) -> tuple[int, int, int, int, int]:
    """Return the fields of a share that can change while its container runs: memory_limit_bytes, compute_percent,
    priority, weight and flags of struct gs_device_limit. (memory_virtual_bytes can change too and is not included.)"""
    flags = (DEVICE_COMPUTE_SOFT if share.soft else 0) | (DEVICE_LENT if share.lending else 0)
    flags |= (DEVICE_SUSPENDED if share.phase else 0) | (DEVICE_MOVING if share.phase == constants.SUSPENDING else 0)
    flags |= DEVICE_OVERSUBSCRIBE if share.virtual_bytes and share.lending != constants.EVICT else 0
    return (
        UNLIMITED if share.memory_limit_bytes is None else share.memory_limit_bytes,
        NO_PERCENT if share.compute_percent is None else share.compute_percent,
        share.priority,
        0,
        flags | (DEVICE_PAUSED if share.paused else 0) | HOLDERS.get(share.memory_backend, 0),
    )


def granted(share: Share) -> int:
    """Return what other containers on the device see of a share: a word of struct gs_peers."""
    _, percent, priority, weight, flags = changing(share)
    return percent | (flags & 0xFF) << 8 | priority << 16 | weight << 32


def stores(shares: Sequence[Share], prefix: str, lending: Collection[int] = ()) -> list[tuple[int, int]]:
    """Yield (offset, 64-bit word) of all fields that can change, in the first copy (prefix "") or the second ("next_").
    No word also has a field that cannot change. `lending`: slots where the limit is in force and not the request."""
    found = []
    for index, share in enumerate(sorted(shares, key=lambda share: share.slot)):
        limit_bytes, percent, priority, weight, flags = changing(share)
        flags |= DEVICE_LENDING if share.slot in lending else 0
        base = offset("gs_limits", "device") + index * DEVICE_SIZE
        for field, word in (
            ("memory_limit_bytes", limit_bytes),
            ("compute_percent", percent | priority << 32),
            ("weight", weight | flags << 32),
            ("memory_virtual_bytes", share.virtual_bytes),
        ):
            found.append((base + offset("gs_device_limit", prefix + field), word))
    return found


def pack_device(share: Share, slice_us: int = 0, switch_us: int = 0, turn_mib: int = 0) -> bytes:
    """Return one gs_device_limit. 0 microseconds: the default."""
    device = share.device
    text = device.uuid.encode("ascii", "replace")
    limit_bytes, percent, priority, weight, flags = changing(share)
    if not 0 <= limit_bytes <= UNLIMITED or len(text) > 63:
        raise RegionError(f"share of device {shown(device.uuid)} cannot be written: memory limit {limit_bytes} bytes")
    return packer("gs_device_limit").pack(
        uuid_bytes(device.uuid),
        text,
        limit_bytes,
        device.memory_bytes,
        device.context_bytes,
        device.granularity_bytes,
        share.virtual_bytes,
        percent,
        priority,
        weight,
        flags,
        share.page,
        1000 * slice_us,
        1000 * switch_us,
        turn_mib,
        *(limit_bytes, percent, priority, weight, flags),
        share.draining_bytes,
        share.virtual_bytes,
    )


def pack_limits(
    shares: Sequence[Share],
    nonce: int,
    generation: int = 1,
    slice_us: int = 0,
    switch_us: int = 0,
    mps: tuple[int, int, int] = (0, 0, 0),
    turn_us: int = 0,
    turn_mib: Sequence[int] = (),
    round_ms: int = 0,
) -> bytes:
    """Return a complete limits file: LIMITS_SIZE bytes, devices in slot order. `mps`: the fields of MPS. `turn_mib`: of
    each device, in that order.

    Raise RegionError if the shares are not the slots 0..n-1, or more than MAX_DEVICES.
    """
    ordered = sorted(shares, key=lambda share: share.slot)
    if [share.slot for share in ordered] != list(range(len(ordered))) or len(ordered) > MAX_DEVICES:
        slots = [share.slot for share in ordered]
        raise RegionError(f"shares have slots {slots}, must be 0, 1, ... and at most {MAX_DEVICES}")
    device, token, uid = mps
    head = (
        LIMITS_MAGIC,
        ABI_VERSION,
        LIMITS_SIZE,
        len(ordered),
        round_ms << 16,
        nonce,
        generation,
        token,
        uid,
        device,
        turn_us,
    )
    whole = bytearray(packer("gs_limits").pack(*head))
    if any(not share.device.model.startswith(constants.SIMULATED_MODEL) for share in ordered):
        kib = (constants.INIT_BYTES >> 10, constants.CONTEXT_UNLISTED_BYTES >> 10)
        struct.pack_into("<HH", whole, offset("gs_limits", "init_kib"), *kib)
    start = offset("gs_limits", "device")
    for index, share in enumerate(ordered):
        mib = turn_mib[index] if turn_mib else 0
        whole[start : start + DEVICE_SIZE] = pack_device(share, slice_us, switch_us, mib)
        start += DEVICE_SIZE
    return bytes(whole)


def pack_usage(nonce: int, n_devices: int) -> bytes:
    """Return an empty usage file: USAGE_SIZE bytes."""
    refused = (0,) * MAX_DEVICES
    return packer("gs_usage").pack(USAGE_MAGIC, ABI_VERSION, USAGE_SIZE, MAX_SLOTS, n_devices, nonce, 0, 0, *refused)


def check(data: bytes, what: str, magic: int, size: int) -> None:
    """Check the header that both files have. Raise RegionError."""
    if len(data) != size:
        raise RegionError(f"{what} is damaged: {len(data)} bytes, must be {size}")
    found, version, stated = struct.unpack_from("<QII", data)
    if found == magic and version != ABI_VERSION:
        problem = f"{what} is of version {version}, and this gpushare uses version {ABI_VERSION}"
        raise RegionError(problem, "use the gpushare that wrote it")
    if (found, version, stated) != (magic, ABI_VERSION, size):
        raise RegionError(f"{what} is damaged: magic {found:#x}, version {version}, size {stated}")


def read_limits(data: bytes) -> Limits:
    """Parse a limits file. Raise RegionError if it is damaged."""
    check(data, "limits file", LIMITS_MAGIC, LIMITS_SIZE)
    _, _, _, n_devices, flags, nonce, generation, mps_token, _, mps_device, _ = packer("gs_limits").unpack(data)
    if n_devices > MAX_DEVICES:
        raise RegionError(f"limits file is damaged: {n_devices} devices, at most {MAX_DEVICES}")
    round_ms = flags >> 16
    devices = []
    for index in range(n_devices):
        fields = packer("gs_device_limit").unpack_from(data, offset("gs_limits", "device") + index * DEVICE_SIZE)
        _, text, limit_bytes, total_bytes, _, _, virtual, percent, priority, _, flags, page, _, _, _, *second = fields
        *second, draining, next_virtual = second
        if generation % 2 == 0:
            (limit_bytes, percent, priority, _, flags), virtual = second, next_virtual
        devices.append(
            Limit(
                text.partition(b"\0")[0].decode("ascii", "replace"),
                None if limit_bytes == UNLIMITED else limit_bytes,
                total_bytes,
                None if percent == NO_PERCENT else percent,
                priority,
                flags,
                page,
                draining,
                virtual if flags & (DEVICE_OVERSUBSCRIBE | DEVICE_LENT) else 0,
            )
        )
    return Limits(nonce, generation, tuple(devices), mps_token, mps_device, round_ms)
