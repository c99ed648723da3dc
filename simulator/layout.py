"""The offsets of a device file, as asserted in device.h."""

from __future__ import annotations

import struct

MAGIC = 0x5645444D49535347
VERSION = 5
STATE_BYTES = 16 << 20
BLOCK_BYTES = 2 << 20  # granularity of physical memory
MAX_GROUPS = 256
MAX_CLIENTS = 512
LIFE_OFFSET = 1 << 40

# magic version size index minor | total context granularity late slice switch_low kernel | uuid model driver bus | ...
# | switch_high slice_noise launch record bubble seed | reserved cores threads compute_mode xid | host_pidns
# | models.Costs
CONFIG = struct.Struct("<QIIII7Q16s96s32s32s12I6QQ4IQ17Q")
XID_OFFSET = 372
FAULT_OFFSET = 520
FAULTS = ("none", "checkpoint", "restore")
COSTS_FIRST = 40  # index of the first cost in CONFIG
INDEX_OFFSET = 16
# bit of `index`; above the GPU's eight bits a MIG device has its number + 1, GPU instance and compute instance
DIVIDED = 1 << 31
# sequence used generation shared_next deaths last_reap clients_high queues_high device_ns busy_ns
COUNTERS = struct.Struct("<6Q2I2Q")
COUNTERS_OFFSET = 1152
GROUP = struct.Struct("<8Q")  # pidns current peak refused init_ticks busy work switch
GROUPS_OFFSET = 4096
# state pid pidns mntns generation started bytes return contexts group peak allocations busy work switch
# | programmatic parted managed evicted unlisted host_pid
CLIENT = struct.Struct("<II6QII5QII3QI4x")
CLIENTS_OFFSET = GROUPS_OFFSET + MAX_GROUPS * GROUP.size
HISTORY_OFFSET = 225280
BINS = 1024
BIN_NS = 10_000_000
BIN = struct.Struct("<3I")  # number busy switch

STATES = ("free", "live", "dead")
