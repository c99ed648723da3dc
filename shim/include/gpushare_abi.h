/* The shared-memory ABI between the host (hook/gpushare/state/shm_abi.py) and the shim. The build
 * asserts each offset and size that Python has (gen_symbols.py).
 *
 * All files are little-endian and have an exact size that the reader checks:
 *
 *   /usr/lib/gpushare/limits     written by the host only, mapped read-only by the shim.
 *                                Values may change in place while a container runs
 *                                (8-byte aligned stores); the layout never changes. There
 *                                are two copies of the values that can change, and the
 *                                generation selects the copy in force. So one store changes
 *                                all devices at once, and the writer can be killed at any
 *                                point: the host writes the copy that is not in force and
 *                                increments the generation.
 *   /usr/lib/gpushare/rw/usage   created by the host, written by the container's processes.
 *                                The host reads it with pread and does not trust its content.
 *   /usr/lib/gpushare/pages/<uuid>  created by the host, written by the container's processes:
 *                                the activity that they report to other containers on the device.
 *   /usr/lib/gpushare/peers/<uuid>/<number>  the activity files of all containers on the device,
 *                                this one's among them; mounted read-only and read with pread,
 *                                since the owner can truncate its file. How far the content is
 *                                trusted: docs/internals/limiter.md
 *   /usr/lib/gpushare/peers/<uuid>/index  the numbers in use, and the grant of each; written by the
 *                                host only.
 *
 * A slot belongs to one process. `owner` is a robust futex word: the kernel itself sets
 * GS_OWNER_DIED and clears the thread id when the owner's parked thread ends, for whatever reason.
 * A slot counts only while (owner & GS_TID_MASK) != 0 and live == (owner & GS_TID_MASK). So the
 * slot of a dead process counts as zero at once, without any clean-up. */
#ifndef GPUSHARE_ABI_H
#define GPUSHARE_ABI_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define GS_ABI_VERSION 1u
#define GS_LIMITS_MAGIC 0x5354494d494c5347ull /* "GSLIMITS" */
#define GS_USAGE_MAGIC 0x4547415355534753ull  /* "SGSUSAGE" */

#define GS_PAGES_MAGIC 0x5345474150535347ull /* "GSSPAGES" */
#define GS_PEERS_MAGIC 0x5352454550535347ull /* "GSSPEERS" */

#define GS_MAX_DEVICES 16u
#define GS_MAX_SLOTS 1024u

#define GS_UNLIMITED UINT64_MAX
#define GS_NO_PERCENT 100u /* compute_percent: no limit */

#define GS_TID_MASK 0x3fffffffu   /* FUTEX_TID_MASK */
#define GS_OWNER_DIED 0x40000000u /* FUTEX_OWNER_DIED */

enum gs_device_flag {
    GS_DEVICE_COMPUTE_SOFT = 1u << 0, /* borrow compute time that other containers leave idle */
    GS_DEVICE_OVERSUBSCRIBE =
        1u << 1,                /* memory_virtual_bytes applies, beyond the limit on the host */
    GS_DEVICE_PAUSED = 1u << 2, /* launches wait */
    /* memory_limit_bytes is the request, memory_virtual_bytes the limit. With OVERSUBSCRIBE, what
     * is between both is managed memory that prefers the device. */
    GS_DEVICE_LENT = 1u << 3,
    GS_DEVICE_LENDING = 1u << 4,   /* LENT: the limit is in force on the device, not the request */
    GS_DEVICE_SUSPENDED = 1u << 5, /* every call waits; its memory may be on the host */
    GS_DEVICE_MOVING = 1u << 6,    /* SUSPENDED: its memory is on its way to the host */
    GS_DEVICE_MEMORY_DMEM = 1u << 8, /* for the host: the kernel also enforces the memory limit */
};

/* One granted device. `uuid` is the raw 16 bytes of GPU-<uuid> or MIG-<uuid>. 192 bytes. */
struct gs_device_limit {
    uint8_t uuid[16];
    char uuid_text[64];            /* NUL-terminated, with its GPU-/MIG- prefix */
    uint64_t memory_limit_bytes;   /* GS_UNLIMITED = no limit */
    uint64_t memory_total_bytes;   /* of the whole device; 0 = unknown */
    uint64_t context_bytes;        /* charged for each process's context */
    uint64_t granularity_bytes;    /* the driver's physical block, 2 MiB */
    uint64_t memory_virtual_bytes; /* OVERSUBSCRIBE, LENT: limit and host part together; else 0 */
    uint32_t compute_percent;      /* 1..100; GS_NO_PERCENT = no limit */
    uint32_t priority;             /* 0 = normal, 1 = high */
    uint32_t weight;               /* soft sharing, 0 = by compute_percent */
    uint32_t flags;                /* enum gs_device_flag */
    uint32_t page;                 /* this container's number in peers/<uuid>/ */
    uint32_t slice_ns;             /* the device's time slice; 0 = default (throttle.c) */
    uint32_t switch_ns;            /* mean cost of a context switch; 0 = default */
    uint32_t turn_mib; /* device memory kept free for migration slices (gs_turn); 0: none */
    /* The second copy of the values that can change: in force while the generation is even. */
    uint64_t next_memory_limit_bytes;
    uint32_t next_compute_percent;
    uint32_t next_priority;
    uint32_t next_weight;
    uint32_t next_flags;
    uint64_t draining_bytes; /* for the host: bytes in use when the limit was lowered below them */
    uint64_t next_memory_virtual_bytes;
};

/* The round in which containers with compute limits take turns (struct gs_compute_turn), in
 * milliseconds; 0: they do not. */
#define GS_ROUND_MS(flags) ((flags) >> 16)

/* The whole limits file: header, then GS_MAX_DEVICES entries (n_devices in use, slot order). */
struct gs_limits {
    uint64_t magic;
    uint32_t version;
    uint32_t size; /* sizeof(struct gs_limits) */
    uint32_t n_devices;
    uint32_t flags;      /* GS_ROUND_MS */
    uint64_t nonce;      /* equals gs_usage.nonce: a usage file of another container is refused */
    uint64_t generation; /* odd: the first copy is in force, even: next_*; a futex for waiting */
    uint64_t mps_token;  /* the MPS daemon of this grant; for the host (mps.py) */
    uint32_t mps_uid;    /* the uid in the container that the daemon serves; -1: every uid */
    uint32_t mps_device; /* 1 + the slot of the device whose compute limit MPS enforces; 0: none */
    uint32_t turn_us;    /* length of a migration slice */
    /* Memory that the device counts and the driver lists for no process */
    uint16_t init_kib;     /* of each process that has called cuInit */
    uint16_t unlisted_kib; /* of each context */
    struct gs_device_limit device[GS_MAX_DEVICES];
};

/* Compute of all processes of the container on one device: the bucket of docs/internals/limiter.md.
 * Nanoseconds; times are CLOCK_MONOTONIC. 128 bytes. */
struct gs_bucket {
    _Atomic uint64_t tat_ns;      /* theoretical arrival time: a launch may go iff tat <= now */
    _Atomic uint64_t done_ns;     /* when work of this container was last seen to complete */
    _Atomic uint64_t admitted_ns; /* when a launch was last admitted to avoid a deadlock */
    /* Information only, for `list`, `inspect` and NVML: */
    _Atomic uint64_t waited_ns;  /* throttled time, summed over processes */
    _Atomic uint64_t busy_ns;    /* device time charged so far, borrowed time included */
    _Atomic uint64_t recent[10]; /* charged in each of the last windows: GS_RECENT_* */
    _Atomic uint64_t launch_ns;  /* recent device time per launch: the payment for a new function */
};
/* recent[w % 10] belongs to window w = time / GS_RECENT_NS: (w << 40) | nanoseconds charged. */
#define GS_RECENT 10u
#define GS_RECENT_NS 125000000u
#define GS_RECENT_MASK ((UINT64_C(1) << 40) - 1)

/* With OVERSUBSCRIBE (at most GS_MAX_DEVICES / 2 devices) the host part of a share is counted as
 * one more device, numbered from the other end. */
#define GS_HOST_PART(dev) (GS_MAX_DEVICES - 1 - (dev))

/* One process. First cache line: identity, rarely written; then the charges. 192 bytes. */
struct gs_slot {
    uint32_t owner;      /* robust futex word: tid of the parked thread | GS_OWNER_DIED */
    uint32_t live;       /* that tid again, stored after bytes[] was zeroed */
    uint32_t generation; /* grows by one with each new owner */
    uint32_t pid;        /* getpid() as the process sees itself; information only */
    uint64_t started_ns; /* CLOCK_MONOTONIC; and the byte of this file that its mapping locks */
    uint64_t bounds; /* of bytes[], all devices: bounds of running calls, mostly released soon */
    uint64_t wants;  /* device slot << 56 | bytes that it waits for, see lending.c */
    uint16_t driver_mib[12];        /* of bytes[]: what the driver takes beyond allocations */
    uint64_t bytes[GS_MAX_DEVICES]; /* charged by this process, per device slot */
};

/* Memory that several processes may hold. A process has one row for each id that it exports, with
 * the bytes that are still allocated; one for what it has freed of that id while another process
 * has the id open (GS_SHARE_ORPHAN); and one for each id that it has open (GS_SHARE_IMPORT), with
 * how often. Many allocations can have one id: descriptors of most drivers cannot be told apart.
 * GS_SHARE_ANY stands for all ids for which there was no row.
 *
 * A row is claimed by its owner word, which only its process changes while it lives, and in use
 * while id is not 0. Any process can claim a row of a process that has ended, unless it is an
 * export that a living process has open. */
struct gs_share {
    uint64_t id;    /* of the memory, the same in all processes */
    uint64_t owner; /* slot index | GS_SHARE_* | the slot's generation << 32 */
    uint64_t what;  /* device slot << 56 | bytes; of an import: how often it is open */
};
#define GS_MAX_SHARES 160u
#define GS_SHARE_IMPORT (1u << 30)
#define GS_SHARE_ORPHAN (1u << 31) /* the exporter has freed it, another process has it open */
#define GS_SHARE_SLOT 0xffffu
#define GS_SHARE_ANY UINT64_MAX /* an id */
#define GS_SHARES_OWN 128u      /* rows from here on are for GS_SHARE_ANY */
#define GS_SHARES_LOST 2u       /* openings were not recorded: all exports count as open */

/* Memory of the container on one device over time, for accounting. 32 bytes. */
struct gs_account {
    _Atomic uint64_t until_ns; /* CLOCK_MONOTONIC; held_gib_ns is complete up to here; 0: unused */
    _Atomic uint64_t held_gib_ns; /* held memory, summed over time: 2^30 bytes for a nanosecond */
    _Atomic uint64_t peak_bytes;
    uint64_t reserved;
};

struct gs_usage {
    uint64_t magic;
    uint32_t version;
    uint32_t size; /* sizeof(struct gs_usage) */
    uint32_t n_slots;
    uint32_t n_devices;
    uint64_t nonce;
    uint32_t slots_high;              /* no slot at or above this index was ever used */
    uint32_t warnings;                /* enum gs_warning bits, for doctor */
    uint64_t refused[GS_MAX_DEVICES]; /* allocations refused, per device; information only */
    uint64_t shares_used;             /* 0: no row was ever claimed; or with GS_SHARES_LOST */
    struct gs_share share[GS_MAX_SHARES];
    _Atomic uint64_t called_ns; /* CLOCK_MONOTONIC, of the last second with a call of the driver */
    _Atomic uint32_t asks;      /* written by the program: to be suspended until its next call */
    uint8_t reserved[68];
    struct gs_bucket bucket[GS_MAX_DEVICES];
    struct gs_account account[GS_MAX_DEVICES];
    _Atomic uint8_t does[GS_MAX_SLOTS]; /* enum gs_does, of the process with that slot */
    uint8_t reserved2[512];
    struct gs_slot slot[GS_MAX_SLOTS];
};

/* A period in which a context was on the device: `run_ns` of it was its own time. */
struct gs_run {
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t run_ns;
};
#define GS_RUNS 47u

/* The activity that a context reports to other contexts. */
struct gs_activity {
    uint64_t busy_from_ns;  /* when work was queued that is not known to be complete; 0: idle */
    uint64_t busy_until_ns; /* ignored after this time */
    uint64_t horizon_ns;    /* everything up to this time is in `run` */
    uint32_t weight;
    uint32_t priority;
    uint32_t last; /* run[last] is the newest of n */
    uint32_t n;
    uint64_t expects_ns; /* expected device time from the horizon until the next timestamp */
    uint64_t switch_ns;  /* switch costs that it measured: hand-over; preemption in the high half */
    uint64_t owes_ns;    /* upper bound of the charge if its process dies before completion */
    struct gs_run run[GS_RUNS];
};

/* A writer can be killed at any point, so it writes the other buffer and then changes the index. */
struct gs_page {
    _Atomic uint32_t index;
    uint32_t reserved;
    struct gs_activity buffer[2];
    uint8_t reserved2[40];
};

/* The state of one container's migration slice, by which oversubscribed containers share the device
 * memory that is kept free for their memory on the host. One container at a time has its memory
 * there, all of its processes together. Each container advertises its own state. The low ten bits
 * of held_until_ns and of brought_bytes are the number of the slice. */
struct gs_turn {
    _Atomic uint64_t held_from_ns;
    _Atomic uint64_t held_until_ns; /* below 1024: none. Ignored beyond one slice from now */
    _Atomic uint64_t used_ns;       /* when it last launched or waited for work in the slice */
    _Atomic uint64_t wants_from_ns;
    _Atomic uint64_t wants_until_ns; /* ignored after this time */
    _Atomic uint64_t brought_bytes;  /* moved to the device in that slice */
};

/* The turn of a container that saturates the device together with others (shim/limiter/turn.c).
 * Each container advertises its own, and reads those of the others. */
struct gs_compute_turn {
    _Atomic uint64_t from_ns;          /* of its last turn */
    _Atomic uint64_t until_ns;         /* 0: it has none, or gave it back */
    _Atomic uint64_t work_until_ns;    /* when the work that it launched is expected to be over */
    _Atomic uint64_t wants_until_ns;   /* it waits for a turn; ignored after this time */
    _Atomic uint64_t arrival_ns;       /* tat_ns of its bucket after a turn: the least is next */
    _Atomic uint64_t cuts_in_until_ns; /* it has a short burst in the turn of another container */
    /* For the processes of the container: */
    _Atomic uint64_t got_ns;        /* device time that was charged for the last turn */
    _Atomic uint64_t free_until_ns; /* they take no turns */
};

/* A container's activity file for one device, with a page for each context that works on it. Any
 * other process of the container can take a page of a process that has ended. */
#define GS_MAX_PAGES 32u
#define GS_PAGE_OWNER(slot, generation) (((uint64_t)(slot) + 1) | (uint64_t)(generation) << 32)
struct gs_pages {
    uint64_t magic;
    uint32_t version;
    uint32_t size; /* sizeof(struct gs_pages) */
    uint32_t n_pages;
    _Atomic uint32_t high; /* no page at or above this number was ever used */
    uint8_t reserved[40];
    _Atomic uint64_t owner[GS_MAX_PAGES]; /* GS_PAGE_OWNER, 0: free */
    struct gs_turn turn;
    struct gs_compute_turn compute_turn;
    uint8_t reserved2[3664];
    struct gs_page page[GS_MAX_PAGES];
};

/* peers/<uuid>/index. Bit i of used[i / 64] means that the number i is in use, and granted[i] is
 * what its container may use of the device. The grant is one word, so that it changes at once:
 * compute_percent | flags (the first eight of enum gs_device_flag) << 8 | priority << 16 | weight
 * << 32. 0: the host is older than this word. */
#define GS_MAX_PEERS 128u
#define GS_GRANTED_PERCENT(word) ((uint32_t)((word)&0xff))
#define GS_GRANTED_FLAGS(word) ((uint32_t)((word) >> 8 & 0xff))
#define GS_GRANTED_PRIORITY(word) ((uint32_t)((word) >> 16 & 0xffff))
#define GS_GRANTED_WEIGHT(word) ((uint32_t)((word) >> 32))
struct gs_peers {
    uint64_t magic;
    uint32_t version;
    uint32_t size;       /* sizeof(struct gs_peers) */
    uint64_t generation; /* grows by one with each change of `used` */
    _Atomic uint64_t used[GS_MAX_PEERS / 64];
    _Atomic uint64_t granted[GS_MAX_PEERS];
    uint8_t reserved[3032];
};

enum gs_warning {
    GS_WARN_UNKNOWN_PROC = 1u << 0, /* cuGetProcAddress withheld an unknown function */
    GS_WARN_NO_SLOT = 1u << 1,      /* more than GS_MAX_SLOTS processes */
    GS_WARN_UNGRANTED = 1u << 2,    /* the driver lists a device that was not granted */
    GS_WARN_PASSED_PROC = 1u << 3,  /* cuGetProcAddress passed an unknown function */
};

enum gs_does {
    GS_DOES_WAIT = 1u << 0,     /* it has seen GS_DEVICE_SUSPENDED: each further call waits */
    GS_DOES_MANAGE = 1u << 1,   /* it has allocated managed memory */
    GS_DOES_EXCHANGE = 1u << 2, /* it has shared memory or events with another process */
};
#endif
