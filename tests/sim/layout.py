"""Offsets of a device file, as asserted in device.h."""

from __future__ import annotations

import struct

MAGIC = 0x5645444D49535347
VERSION = 1
STATE_BYTES = 2 << 20
MAX_GROUPS = 256
MAX_CLIENTS = 512
LIFE_OFFSET = 1 << 40

# magic version size index minor | total context granularity late slice switch kernel | uuid model driver bus | ...
CONFIG = struct.Struct("<QIIII7Q16s96s32s32s12I")
# sequence used generation shared_next deaths last_reap clients_high queues_high device_ns busy_ns
COUNTERS = struct.Struct("<6Q2I2Q")
COUNTERS_OFFSET = 1152
GROUP = struct.Struct("<4Q32x")  # pidns current peak refused
GROUPS_OFFSET = 4096
# state pid pidns mntns generation started bytes return contexts group peak allocations busy
CLIENT = struct.Struct("<II6QII3Q40x")
CLIENTS_OFFSET = GROUPS_OFFSET + MAX_GROUPS * GROUP.size

STATES = ("free", "live", "dead")
