/* The state of one simulated device: the content of its device node, a regular sparse file that
 * every client maps. simhost.py writes the configuration, ledger.py reads the rest. Both repeat
 * the offsets that are asserted below.
 *
 * One robust process-shared lock protects everything after `lock`. `sequence` is odd while a
 * process writes, so that ledger.py can take a consistent copy without the lock. */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_MAGIC 0x5645444d49535347ull /* "GSSIMDEV" */
#define SIM_VERSION 5u
#define SIM_MAX_CLIENTS 512u
#define SIM_MAX_GROUPS 256u
#define SIM_MAX_SHARED 1024u
#define SIM_MAX_QUEUES 512u
#define SIM_QUEUE_SLICES 512u
#define SIM_BIN_NS 10000000u
#define SIM_BINS 1024u
#define SIM_STATE_BYTES (16u << 20)
/* Memory shared by cuIpcGetMemHandle is stored in the device file from this offset on (sparse). */
#define SIM_ARENA_OFFSET (64ull << 20)
/* A live process holds a POSIX record lock on byte SIM_LIFE_OFFSET + i for its client i. */
#define SIM_LIFE_OFFSET (1ull << 40)
#define SIM_INIT_OFFSET (SIM_LIFE_OFFSET - 1)
/* Above each pid that Linux gives. Plus the client's index it stands for a host pid that no process
 * of the host has seen yet. */
#define SIM_UNSEEN_PID (1u << 22)

/* `index` of a device file. A GPU divided by MIG has the highest bit set; a MIG device has its
 * own numbers above its GPU's. The file of a MIG device is the capability node of its compute
 * instance: a process that cannot open the node does not see the device. */
#define SIM_DIVIDED (1u << 31)
#define SIM_GPU(index) ((index)&0xffu)
#define SIM_MIG(index) ((index) >> 8 & 0xffu) /* plus 1; 0 for a whole GPU */
#define SIM_GI(index) ((index) >> 16 & 0xffu)
#define SIM_CI(index) ((index) >> 24 & 0x7fu)

/* Costs beyond a program's own allocations: `Costs` in models.py has the same fields. */
struct sim_costs {
    uint64_t init_bytes;       /* taken by cuInit of each device; NVML lists it for no process */
    uint64_t unlisted_bytes;   /* part of each context that NVML lists for no process */
    uint64_t duplicates;       /* NVML in a container lists each process twice */
    uint64_t host_pids;        /* NVML lists host pids, in a container too */
    uint64_t stream_bytes;     /* of each stream that a program creates, until it is destroyed */
    uint64_t graph_bytes;      /* of each kernel node of an executable graph; see graphexec.c */
    uint64_t graph_late;       /* taken when the graph is first uploaded or launched */
    uint64_t library_bytes;    /* of each library in a context, from its first kernel on */
    uint64_t module_bytes;     /* the same for a module that was loaded without a library */
    uint64_t event_pool_bytes; /* of each 512 events in a context, until the context ends */
    uint64_t one_descriptor;   /* descriptors of pools and of host memory are nvidiactl's, too */
    uint64_t query_ns;         /* processor time of a list of processes */
    uint64_t imports_listed;   /* NVML lists memory of another process that one has open, too */
    uint64_t host_rate;        /* bytes per second of a checkpoint or restore */
    uint64_t saved_whole;  /* checkpointed memory that was never written takes host memory, too */
    uint64_t restore_once; /* after a restore that found no room, none succeeds */
    uint64_t sync_crashes; /* waiting for a stream or context of a checkpointed process crashes */
};

/* Written once by simhost.py before any client starts. */
struct sim_config {
    uint64_t magic;
    uint32_t version;
    uint32_t state_bytes;
    uint32_t index;
    uint32_t minor;
    uint64_t total_bytes; /* what clients can allocate, as cuDeviceTotalMem reports it */
    uint64_t context_bytes;
    uint64_t granularity_bytes;
    uint64_t late_return_ns; /* delay between noticing a client's death and freeing its memory */
    uint64_t slice_ns;
    uint64_t switch_low_ns;
    uint64_t kernel_ns; /* duration of a kernel whose name gives none */
    uint8_t uuid[16];
    char model[96];
    char driver_version[32];
    char bus_id[32]; /* "00000000:01:00.0" */
    uint32_t cuda_version;
    uint32_t cc_major;
    uint32_t cc_minor;
    uint32_t sm_count;
    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    uint32_t pci_device_id;
    uint32_t clock_khz;
    uint32_t memory_clock_khz;
    uint32_t bus_width_bits;
    uint32_t l2_bytes;
    uint64_t switch_high_ns;  /* a context switch takes between low and high */
    uint64_t slice_noise_ppm; /* a slice is longer or shorter by at most this much */
    uint64_t launch_ns;       /* minimum processor time of a launch */
    uint64_t record_ns;       /* minimum processor time of recording an event */
    uint64_t bubble_ns;       /* device time of recording an event */
    uint64_t seed;            /* for the random lengths of slices and switches */
    uint64_t reserved_bytes;  /* NVML counts them in addition to total_bytes */
    uint32_t cores_per_sm;
    uint32_t threads_per_sm;
    uint32_t compute_mode; /* nvmlComputeMode_t */
    uint32_t xid;          /* the last Xid error; its number above bit 16 */
    uint64_t host_pidns;   /* inode of the host's pid namespace, where simhost.py ran */
    struct sim_costs costs;
    uint32_t fault; /* enum sim_fault; set to 0 when it happens */
};

/* The operation that fails half-way, once. */
enum sim_fault { SIM_FAULT_NONE, SIM_FAULT_CHECKPOINT, SIM_FAULT_RESTORE };

enum sim_client_state { SIM_CLIENT_FREE, SIM_CLIENT_LIVE, SIM_CLIENT_DEAD };

struct sim_client {
    uint32_t state;
    uint32_t pid; /* in its own pid namespace */
    uint64_t pidns;
    uint64_t mntns;
    uint64_t generation;
    uint64_t started_ns;
    uint64_t bytes;     /* physical memory held, including contexts */
    uint64_t return_ns; /* when DEAD: the time at which its memory is freed */
    uint32_t contexts;
    uint32_t group;
    uint64_t peak_bytes;
    uint64_t allocations; /* physical allocations made so far */
    uint64_t busy_ns;     /* device time held: work, switches to this client, spinning kernels */
    uint64_t work_ns;
    uint64_t switch_ns;
    uint32_t programmatic; /* launches that may overlap with the preceding kernel */
    /* of those, launches prevented from overlapping by an event in between */
    uint32_t parted;
    uint64_t managed_bytes; /* part of `bytes`: managed memory, which other clients may evict */
    uint64_t evicted_bytes; /* evicted by other clients, not yet noticed by this one */
    /* part of `bytes`, apart from managed memory: what NVML lists for no process */
    uint64_t unlisted_bytes;
    uint32_t host_pid; /* 0 until a process of the host sees it */
    uint32_t pad;
};

/* All clients of one pid namespace, that is, of one container. */
struct sim_group {
    uint64_t pidns; /* 0: free */
    uint64_t current_bytes;
    uint64_t peak_bytes;
    uint64_t refused; /* allocations refused for lack of physical memory */
    /* start time of the namespace's init, because the kernel reuses inode numbers */
    uint64_t init_ticks;
    uint64_t busy_ns; /* sums over the clients, including dead ones */
    uint64_t work_ns;
    uint64_t switch_ns;
};

/* Device time that a group held in one bin of SIM_BIN_NS. */
struct sim_bin {
    uint32_t
        number; /* start of the bin / SIM_BIN_NS, low bits: detects a bin of an earlier round */
    uint32_t busy_ns;
    uint32_t switch_ns;
};

/* Physical memory that several clients may hold. It is charged to `owner` (a client index). */
struct sim_shared {
    uint64_t id; /* 0: free */
    uint64_t bytes;
    uint64_t offset; /* of the content, in the device file */
    uint64_t unused;
    uint32_t owner;
    uint32_t kind;
    uint64_t holders[SIM_MAX_CLIENTS / 64];
    uint8_t reserved[24];
};

/* A period of device time given to one queue, whose attained service was `attained_ns` at its
 * start. */
struct sim_slice {
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t attained_ns;
};

/* The work of one context, as the scheduler stores it. */
struct sim_queue {
    uint32_t client; /* index + 1; 0: free */
    uint32_t n_slices;
    uint32_t spinning; /* kernels that run until a value in memory changes */
    uint32_t pad;
    uint64_t submitted_ns; /* total runnable work submitted so far */
    uint64_t attained_ns;  /* total service received so far */
    struct sim_slice slice[SIM_QUEUE_SLICES];
};

/* The queue that has the device, and the rest of its slice. */
struct sim_schedule {
    uint32_t last; /* index + 1 of the queue that had the device last; 0: none yet */
    uint32_t held; /* its slice has not ended */
    uint64_t slice_left_ns;
    uint64_t switch_left_ns;
    uint64_t random;
};

struct sim_state {
    struct sim_config config;
    uint8_t pad0[1024 - sizeof(struct sim_config)];
    uint32_t lock_ready;
    uint32_t pad1;
    pthread_mutex_t lock;
    uint8_t pad2[128 - 8 - sizeof(pthread_mutex_t)];
    uint64_t sequence;
    uint64_t used_bytes;
    uint64_t generation;
    uint64_t shared_next_id;
    uint64_t deaths;
    uint64_t last_reap_ns;
    uint32_t clients_high;
    uint32_t queues_high;
    /* scheduler */
    uint64_t device_ns; /* the device is simulated up to this instant (CLOCK_MONOTONIC) */
    uint64_t busy_ns;   /* time with work, including switches */
    struct sim_schedule schedule;
    uint8_t pad4[4096 - 1024 - 128 - 104];
    struct sim_group group[SIM_MAX_GROUPS];
    struct sim_client client[SIM_MAX_CLIENTS];
    struct sim_shared shared[SIM_MAX_SHARED];
    struct sim_bin history[SIM_MAX_GROUPS][SIM_BINS]; /* the last ten seconds of each group */
    struct sim_queue queue[SIM_MAX_QUEUES];
};

_Static_assert(sizeof(struct sim_config) <= 1024, "config");
_Static_assert(offsetof(struct sim_config, uuid) == 80, "uuid");
_Static_assert(offsetof(struct sim_config, bus_id) == 224, "bus_id");
_Static_assert(offsetof(struct sim_config, cuda_version) == 256, "cuda_version");
_Static_assert(offsetof(struct sim_state, sequence) == 1152, "sequence");
_Static_assert(offsetof(struct sim_state, group) == 4096, "group");
_Static_assert(sizeof(struct sim_group) == 64, "sim_group");
_Static_assert(sizeof(struct sim_client) == 144, "sim_client");
_Static_assert(offsetof(struct sim_state, client) == 20480, "client");
_Static_assert(sizeof(struct sim_shared) == 128, "sim_shared");
_Static_assert(offsetof(struct sim_config, switch_high_ns) == 304, "switch_high_ns");
_Static_assert(offsetof(struct sim_config, reserved_bytes) == 352, "reserved_bytes");
_Static_assert(offsetof(struct sim_config, costs) == 384, "costs");
_Static_assert(offsetof(struct sim_config, fault) == 520, "fault");
_Static_assert(offsetof(struct sim_state, history) == 225280, "history");
_Static_assert(sizeof(struct sim_bin) == 12, "sim_bin");
_Static_assert(sizeof(struct sim_state) <= SIM_STATE_BYTES, "sim_state");

/* A device opened by one library in one process. Never closed: closing any descriptor of the
 * file would drop the process's record locks, and the process would be taken for dead. */
struct sim_device {
    struct sim_state *state;
    int fd;
    uint32_t client; /* index + 1; 0: this library is not a client (NVML) */
    uint64_t generation;
};

enum sim_result { SIM_OK, SIM_NO_DEVICE, SIM_NO_MEMORY, SIM_GONE, SIM_NO_SLOT };

uint64_t sim_now_ns(void);
/* Opens the nodes nvidia0.. in the device directory, sorted by index. Returns how many. */
unsigned sim_open_devices(struct sim_device *devices, unsigned max);
/* Opens the MIG devices' nodes in the same way. */
unsigned sim_open_mig(struct sim_device *devices, unsigned max);
const char *sim_device_dir(void);
/* Writes "GPU-..." or "MIG-...". */
void sim_uuid_text(const struct sim_config *config, char text[41]);
void sim_lock(struct sim_device *device);
void sim_unlock(struct sim_device *device);
enum sim_result sim_join(struct sim_device *device);
/* Marks clients without a record lock as dead and frees memory whose delay has passed. Call
 * locked. */
void sim_reap(struct sim_device *device);
enum sim_result sim_charge(struct sim_device *device, uint64_t bytes);
/* Charges managed memory, evicting other clients' managed memory if the device is full. */
enum sim_result sim_charge_managed(struct sim_device *device, uint64_t bytes);
void sim_uncharge_managed(struct sim_device *device, uint64_t bytes);
/* True if `bytes` of it were evicted by another client; counts them as noticed. */
bool sim_was_evicted(struct sim_device *device, uint64_t bytes);
void sim_uncharge(struct sim_device *device, uint64_t bytes);
/* Counts memory that is charged, or no longer charged, as listed by NVML for no process. */
void sim_unlist(struct sim_device *device, int64_t bytes);
/* The bytes that NVML lists for a client. Call locked. */
/* Memory that the client has open and another one is charged for. Call locked. */
uint64_t sim_imported_bytes(const struct sim_device *device, unsigned client);
uint64_t sim_listed_bytes(const struct sim_client *client);
/* The accounts of a client, while its process is checkpointed. */
struct sim_held {
    uint64_t bytes, unlisted_bytes;
    uint32_t contexts;
};
/* Gives back all that the client holds; it is then not listed as a user of the device. */
void sim_set_aside(struct sim_device *device, struct sim_held *held);
/* Takes all of that again, or nothing. */
enum sim_result sim_take_back(struct sim_device *device, const struct sim_held *held);
uint64_t sim_held_bytes(struct sim_device *device);
void sim_count_context(struct sim_device *device, int delta);
uint64_t sim_used_bytes(struct sim_device *device);
/* True if the client's process exists. Call locked. */
bool sim_client_lives(struct sim_device *device, uint32_t index);
/* The client's pid in the caller's pid namespace; 0: dead, or not visible there. Call locked. */
uint32_t sim_client_pid(struct sim_device *device, uint32_t index);
/* The client's pid in the host's pid namespace, as far as it is known. Call locked. */
uint32_t sim_host_pid(const struct sim_device *device, uint32_t index);
/* True if the caller's pid namespace is the host's. */
bool sim_on_host(const struct sim_device *device);

uint64_t sim_share(struct sim_device *device, uint64_t bytes, uint64_t *offset);
struct sim_shared *sim_find_shared(struct sim_device *device, uint64_t id);
enum sim_result sim_hold_shared(struct sim_device *device, uint64_t id);
void sim_drop_shared(struct sim_device *device, uint64_t id);
void sim_bury_shared(struct sim_device *device, uint32_t dead_client);

/* Simulates the device up to `now_ns`. Call locked. */
void sim_advance(struct sim_device *device, uint64_t now_ns);
/* Predicts when a queue will have attained `end_ns` if no work is added; may return an earlier
 * time. Call locked, after sim_advance. */
uint64_t sim_foresee(const struct sim_device *device, uint32_t queue, uint64_t end_ns);
#endif
