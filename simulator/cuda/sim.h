/* Declarations shared by the parts of the simulated libcuda.
 *
 *   process.c    initialisation, fork, current context
 *   engine.c     streams' work on the device
 *   space.c      device addresses
 *   vmm.c        reserve, create, map
 *   memory.c     plain, pitched, managed memory
 *   pool.c       stream-ordered pools
 *   late.c       plain memory that is freed in the order of a stream
 *
 * Lock order: sim_enter's process lock, then a device's lock (device.h).
 */
#ifndef SIM_H
#define SIM_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "device.h"

#define EXPORT __attribute__((visibility("default")))
#define SIM_BLOCK (2ull << 20)
#define SIM_UNIT 512ull
#define SIM_LARGE (1ull << 20) /* allocations of this size or more occupy whole blocks */
#define SIM_MAX_DEVICES 16u
#define SIM_LEVELS 64u
/* parts of a device, among which a context's concurrent kernels are distributed */
#define SIM_PARTS 16u

enum object_kind {
    OBJ_CONTEXT = 0x43545831,
    OBJ_STREAM = 0x53545231,
    OBJ_EVENT = 0x45564e31,
    OBJ_MODULE = 0x4d4f4431,
    OBJ_FUNCTION = 0x46554e31,
    OBJ_LIBRARY = 0x4c494231,
    OBJ_KERNEL = 0x4b524e31,
    OBJ_ARRAY = 0x41525231,
    OBJ_MIPMAP = 0x4d495031,
    OBJ_POOL = 0x504f4f31,
    OBJ_PHYSICAL = 0x50485931,
    OBJ_GRAPH = 0x47524131,
    OBJ_NODE = 0x4e4f4431,
    OBJ_EXEC = 0x45584531,
    OBJ_EXTMEM = 0x45584d31,
    OBJ_LINK = 0x4c4e4b31,
    OBJ_TEXTURE = 0x54455831,
    OBJ_USER = 0x55534531,
    OBJ_DESTROYED = 0x44454144,
};

struct stream;
struct pool;
struct module;

/* MEM_CODE has only an address. Its bytes are part of the context's code_bytes. */
enum mem_kind {
    MEM_DEVICE,
    MEM_MANAGED,
    MEM_ARRAY,
    MEM_CODE,
    MEM_SMALL,
    MEM_POOL,
    MEM_FOREIGN,
    MEM_GRAPH
};

/* State of a block of managed memory: where it is, and the advice given for it. */
enum place {
    PLACE_RESIDENT = 1,    /* on the device and charged there; otherwise on the host */
    PLACE_PREFER_HOST = 2, /* stays on the host when the device reads it */
    PLACE_ACCESSED = 4,    /* mapped for the device: reading it from the host causes no fault */
};

/* A span of whole blocks at a device address. */
struct mem {
    enum mem_kind kind;
    int device;
    uint64_t va;
    uint64_t span;       /* bytes, whole blocks */
    uint64_t size;       /* requested bytes */
    struct context *ctx; /* NULL: not owned by a context */
    void *owner;         /* small block, pool chunk, graph node */
    uint64_t shared_id;
    uint64_t touched; /* content was written up to here and must be discarded on free */
    uint64_t id;      /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
    bool sync_memops;
    unsigned refs;  /* of an imported span */
    uint8_t *place; /* of managed memory, for each block: enum place */
    struct mem *next, *prev;
};

struct context {
    uint32_t magic;
    int device;
    unsigned flags;
    bool primary, green;
    int refs;
    uint64_t id;
    uint64_t code_bytes;  /* of all modules, in shared blocks */
    uint64_t local_bytes; /* of each thread, above the default */
    uint64_t overhead;    /* bytes charged beyond allocations and modules */
    uint64_t graph_bytes; /* of all executable graphs, in shared blocks */
    unsigned n_events, event_pools;
    size_t limit[CU_LIMIT_MAX];
    unsigned cache_config, shared_config;
    struct mem *mems;
    struct small_block *smalls;
    struct module *modules;
    struct event *events;
    struct stream *streams; /* all streams of this context, including the legacy one */
    struct stream *legacy;
    uint32_t queue;              /* engine queue index + 1 */
    uint64_t submitted_ns;       /* end of its work, on the clock of device time that it attained */
    uint64_t free_ns[SIM_PARTS]; /* when each part of the device is free again */
    unsigned pending;            /* operations not known to be done */
    unsigned effects;            /* of those, operations that write memory when they end */
    struct context *next;
};

struct device {
    struct sim_device sim;
    struct context *primary;
    unsigned primary_flags;
    struct pool *default_pool, *current_pool;
    uint64_t base; /* address range of this device */
    uint64_t n_blocks;
    uint64_t *used_map;
    struct mem **head;
    uint64_t hint;
    uint64_t graph_reserved, graph_reserved_high, graph_used, graph_used_high;
};

/* Whether calls may enter the driver: a lock of the checkpoint API shuts the gate. */
enum gate { GATE_OPEN, GATE_SHUT, GATE_FAILED };

struct process {
    pthread_mutex_t lock;
    enum gate gate;
    pthread_cond_t gate_opened;
    unsigned inside; /* calls that entered */
    int n_devices;
    struct device device[SIM_MAX_DEVICES];
    struct context *contexts;
    uint64_t next_id;
    int captures; /* streams that are capturing */
};

extern struct process sim;
extern const int sim_cuda_version; /* of the driver: 13000 is CUDA 13.0 */

/* process.c */
bool sim_is_ready(void);  /* false in a forked child */
CUresult sim_enter(void); /* takes the lock, except on failure */
void sim_leave(int *entered);
#define ENTER() \
    int entered __attribute__((cleanup(sim_leave))) = 0; \
    do { \
        CUresult entry = sim_enter(); \
        if (entry != CUDA_SUCCESS) \
            return entry; \
        entered = 1; \
    } while (0)
#define ENTER_CONTEXT(ctx) \
    ENTER(); \
    struct context *ctx = current_context(); \
    if (!ctx) \
    return CUDA_ERROR_INVALID_CONTEXT
#define CHECK(condition, error) \
    do { \
        if (!(condition)) \
            return (error); \
    } while (0)
#define CHECK_VALUE(condition) CHECK(condition, CUDA_ERROR_INVALID_VALUE)
#define CHECK_HANDLE(condition) CHECK(condition, CUDA_ERROR_INVALID_HANDLE)
#define CHECK_DEVICE(device) \
    CHECK((device) >= 0 && (device) < sim.n_devices, CUDA_ERROR_INVALID_DEVICE)

struct context *current_context(void);
bool sim_is(const void *object, enum object_kind kind);
/* Use instead of free(): does not give the memory out again for long. A later use of the handle
 * returns an error or, if the program itself destroyed the object, crashes, as it may with the real
 * driver. */
void sim_bury(void *object, bool by_program);
struct context *context_of(CUcontext handle);
const struct sim_costs *costs_of(int device);
CUresult join_device(int device);
CUresult charge(int device, uint64_t bytes);
void uncharge(int device, uint64_t bytes);

/* checkpoint.c */
CUresult checkpoint_open(void);
/* Crashes if the process is checkpointed and the driver has that flaw. */
void checkpoint_before_wait(void);

/* mps.c: connects to MPS; the limits that a client received. */
CUresult mps_connect(void);
bool mps_is_client(void);
int mps_multiprocessors(int of_device);
bool mps_charge(uint64_t bytes);
void mps_uncharge(uint64_t bytes);
static inline uint64_t round_up(uint64_t n, uint64_t unit) {
    return (n + unit - 1) / unit * unit;
}

/* space.c */
CUresult space_open(int device);
struct mem *space_take(int device, uint64_t blocks); /* address range only, nothing is charged */
void space_give(struct mem *mem);
struct mem *space_find(uint64_t va);
bool space_has(uint64_t va);

/* memory.c */
struct mem *mem_take(struct context *ctx, int device, uint64_t bytes, enum mem_kind kind,
                     CUresult *error);
void mem_give(struct mem *mem);
void mem_give_all(struct context *ctx);
/* The device allocation that holds va: its start and size. False: none. */
bool mem_range(uint64_t va, uint64_t *start, uint64_t *size, struct mem **mem);
/* Add to, and take from, a sum of small amounts that share blocks of a context. */
CUresult share_blocks(struct context *ctx, uint64_t *sum, uint64_t bytes);
void unshare_blocks(struct context *ctx, uint64_t *sum, uint64_t bytes);
CUresult mem_alloc(struct context *ctx, uint64_t bytes, CUdeviceptr *va);
CUresult mem_free(uint64_t va);

/* managed.c */
/* Takes all blocks of this memory off the device. */
void managed_leave(struct mem *mem);
/* Returns the time that a kernel needs for fetching these bytes over the bus. */
uint64_t managed_read_ns(uint64_t va, uint64_t bytes);

/* small.c */
CUresult small_alloc(struct context *ctx, uint64_t bytes, CUdeviceptr *va);
bool small_free(struct mem *mem, uint64_t va);
bool small_range(const struct mem *mem, uint64_t va, uint64_t *start, uint64_t *size);
void small_drop_all(struct context *ctx);

/* capture.c: false when a capture prohibits this potentially unsafe call; the capture is then
 * invalid */
bool capture_allows_call(void);

/* limits.c */
void limits_open(struct context *ctx);
/* Enlarges the room for the local memory of all threads that can be resident; never reduces it. */
CUresult local_room(struct context *ctx, uint64_t bytes_of_thread);

/* share.c */
CUresult foreign_drop(uint64_t va); /* unmaps memory of another process */

/* host.c: page-locked host memory */
bool host_range(uint64_t va, uint64_t *start, uint64_t *size);

/* vmm.c */
bool vmm_is_shared(void); /* memory was exported or imported */
bool vmm_range(uint64_t va, uint64_t *start, uint64_t *size, int *device);

/* pool.c */
CUresult pool_alloc(struct pool *pool, uint64_t bytes, CUdeviceptr *va);
bool pool_free(struct mem *mem, uint64_t va);
bool pool_range(const struct mem *mem, uint64_t va, uint64_t *start, uint64_t *size);
void pools_trim_at_sync(int device);

/* graphmem.c */
CUresult graph_free_address(struct mem *mem, uint64_t va);

/* module.c */
void modules_drop_all(struct context *ctx);

/* engine.c, stream.c */
CUresult engine_open(struct context *ctx);
void engine_close(struct context *ctx);
void engine_progress(struct context *ctx);
CUresult engine_wait_context(struct context *ctx); /* releases the process lock while waiting */
void streams_drop_all(struct context *ctx);
void events_drop_all(struct context *ctx);
#endif
