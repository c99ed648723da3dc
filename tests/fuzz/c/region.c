/* shim/core/region.c, quota.c and exports.c: both files with any content, corrupted while they are
 * in use. Until the target corrupts the usage file, all figures must be right. */
#include "../../../shim/core/region.c"

#include "fuzz.h"

#define STEPS 64

static struct gs_limits *limits, good_limits;
static struct gs_usage *usage, good_usage;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    limits = file_make(LIMITS_PATH, sizeof *limits);
    usage = file_make(USAGE_PATH, sizeof *usage);
    good_limits = (struct gs_limits){.magic = GS_LIMITS_MAGIC,
                                     .version = GS_ABI_VERSION,
                                     .size = sizeof *limits,
                                     .n_devices = 2,
                                     .nonce = 7};
    for (unsigned d = 0; d < 2; d++)
        good_limits.device[d] = (struct gs_device_limit){.uuid = {(uint8_t)(d + 1)},
                                                         .memory_limit_bytes = 1000 * (d + 1),
                                                         .granularity_bytes = GS_BLOCK};
    good_usage = (struct gs_usage){.magic = GS_USAGE_MAGIC,
                                   .version = GS_ABI_VERSION,
                                   .size = sizeof *usage,
                                   .n_slots = GS_MAX_SLOTS,
                                   .n_devices = 2,
                                   .nonce = 7,
                                   .slots_high = 4};
    good_usage.slot[3] = (struct gs_slot){.owner = 9, .live = 9, .generation = 1, .pid = 9};
    return 0;
}

static void write_word(void *to, size_t size, struct input *in) {
    size_t at = take(in, 2) % (size / 8);
    uint64_t value = take(in, 8);
    memcpy((char *)to + 8 * at, &value, 8);
}

static void count(uint32_t pid, uint64_t bytes, void *arg) {
    (void)pid;
    *(unsigned *)arg += bytes != 0;
}

struct truth {
    bool known; /* the usage file is intact */
    uint64_t held[2];
};

static void allocate(struct truth *truth, int dev, uint64_t bytes, bool patient) {
    bool fits = truth->known && bytes <= gs_limit(dev) - truth->held[dev];
    bool got = patient ? gs_reserve_patiently(dev, bytes) : gs_reserve(dev, bytes);
    require(!truth->known || got == fits);
    if (got && truth->known)
        truth->held[dev] += bytes;
}

/* Make one call. `row` is the shared-memory row that the shim returned last. */
static void step(struct truth *truth, struct input *in, int *row) {
    unsigned what = (unsigned)take(in, 1), listed = 0;
    int dev = (int)(what >> 5) % 2, any = (int)take(in, 1) % 18 - 1;
    switch (what & 31) {
    case 0:
        write_word(usage, sizeof *usage, in);
        truth->known = false;
        break;
    case 1:
    case 2:
        allocate(truth, dev, take(in, 2), (what & 31) == 2);
        break;
    case 3: {
        uint64_t bytes = take(in, 2);
        if (truth->known)
            bytes %= truth->held[dev] + 1, truth->held[dev] -= bytes;
        gs_release(dev, bytes);
        break;
    }
    case 4: {
        uint64_t bytes = take(in, 8);
        if (gs_bound(dev, bytes))
            gs_bound_end(dev, bytes);
        break;
    }
    case 5:
        *row = gs_export_add(take(in, 1) + 1, what >> 5 & 1, dev, take(in, 3));
        require(*row >= -1 && *row < (int)GS_MAX_SHARES);
        break;
    case 6:
        if (*row >= 0)
            gs_export_freed(*row, take(in, 3)), truth->known = false;
        break;
    case 7:
        gs_export_closed(*row);
        *row = -1;
        break;
    case 8:
        gs_count_refusal(dev);
        gs_warn((uint32_t)take(in, 1));
        break;
    default:
        require(gs_processes(any, count, &listed) == listed || !truth->known);
        require(any < 2 && any >= 0 ? true : !gs_limit(any) || limits->n_devices != 2);
        require(!gs_over(dev) || !truth->known);
        gs_used(any);
    }
    if (truth->known)
        require(gs_used(dev) == truth->held[dev]);
}

/* Return to the state of a new process. */
static void unmap_view(void) {
    const struct gs_view *view = atomic_exchange(&the_view, NULL);
    if (!view)
        return;
    munmap((void *)view->limits, sizeof *view->limits);
    munmap(view->usage, sizeof *view->usage);
    free((void *)view);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    struct truth truth = {.known = true};
    int row = -1;
    file_resize(LIMITS_PATH, sizeof *limits);
    file_resize(USAGE_PATH, sizeof *usage);
    *limits = good_limits;
    *usage = good_usage;
    unsigned before = (unsigned)take(&in, 1);
    for (unsigned i = before & 3; i; i--)
        write_word(limits, sizeof *limits, &in);
    for (unsigned i = before >> 2 & 3; i; i--)
        write_word(usage, sizeof *usage, &in);
    if (before >> 4)
        file_resize(before & 128 ? LIMITS_PATH : USAGE_PATH, take(&in, 3));
    const struct gs_view *view = gs_region();
    require(gs_region_refusal());
    if (view) {
        require(view->limits->n_devices <= GS_MAX_DEVICES && view->usage->nonce == limits->nonce);
        truth.known = !before;
        atomic_store(&gs_self()->slot, &view->usage->slot[3]);
        for (unsigned i = 0; i < STEPS && in.at < in.end; i++)
            step(&truth, &in, &row);
        atomic_store(&gs_self()->slot, NULL);
        unmap_view();
    }
    return 0;
}
