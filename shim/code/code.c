/* Charges for the code of a context. The driver puts code and global data of all modules of a
 * context into shared blocks, so their bytes are added up, and the sum is rounded to blocks once.
 *
 * In gs_loaded, for each context: one entry with the sum (`extra` = bytes, `bytes` = what is
 * charged) and one for each part that is loaded (`bytes`, `extra` = its module or library). */
#include "code.h"

bool gs_lazy_loading(void) {
    __typeof__(&cuModuleGetLoadingMode) get = GS_REAL(cuModuleGetLoadingMode);
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return get && get(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

unsigned gs_arch(CUdevice device) {
    __typeof__(&cuDeviceGetAttribute) get = GS_REAL(cuDeviceGetAttribute);
    int major = 0, minor = 0;
    if (!get || get(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) != CUDA_SUCCESS ||
        get(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) != CUDA_SUCCESS)
        return 0;
    return (unsigned)(10 * major + minor);
}

/* ---- the sum of a context ------------------------------------------------------------------- */

static uint64_t mixed(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t key = a * UINT64_C(0x9e3779b97f4a7c15) ^ b;
    key = (key ^ key >> 29) * UINT64_C(0xbf58476d1ce4e5b9) ^ c;
    key = (key ^ key >> 32) & (UINT64_MAX >> 1);
    return key ? key : 1;
}

static uint64_t sum_key(uint64_t context) {
    return mixed(context, UINT64_C(0x636f6465), 0);
}

/* The caller holds lock_context, and puts the entry back with settle(). */
static struct gs_entry take_sum(uint64_t context, int dev) {
    struct gs_entry sum;
    if (!gs_map_take(&gs_loaded, sum_key(context), &sum))
        sum = (struct gs_entry){.context = context, .dev = dev, .kind = GS_KIND_WHOLE};
    return sum;
}

/* Charge or release, so that what is charged is the sum in whole blocks, and put the sum back. */
static bool settle(struct gs_entry *sum) {
    uint64_t want = gs_round_up(sum->extra, GS_BLOCK);
    if (want > sum->bytes)
        gs_charge_anyway(sum->dev, want - sum->bytes);
    else
        gs_release(sum->dev, sum->bytes - want);
    sum->bytes = want;
    return gs_map_put(&gs_loaded, sum_key(sum->context), sum);
}

CUresult gs_code_take(const struct gs_here *here, uint64_t bytes, bool exact) {
    uint64_t context = gs_context_key(here->context);
    _Atomic uint32_t *lock = &gs_self()->lock_context;
    struct gs_charge charge = {.passed = true};
    CUresult result = CUDA_SUCCESS;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (bytes >= GS_NO_BYTES) {
        gs_count_refusal(here->dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    gs_lock(lock);
    struct gs_entry sum = {0};
    gs_map_get(&gs_loaded, sum_key(context), &sum);
    uint64_t want = gs_round_up(sum.extra + bytes, GS_BLOCK);
    uint64_t more = want > sum.bytes ? want - sum.bytes : 0;
    gs_unlock(lock);
    if (more && exact)
        result = gs_charge_begin_on(&charge, here->device, more);
    if (result != CUDA_SUCCESS)
        return result;
    gs_lock(lock);
    sum = take_sum(context, here->dev);
    sum.extra += bytes;
    if (!charge.passed)
        sum.bytes += charge.bytes;
    bool kept = settle(&sum);
    gs_unlock(lock);
    return kept ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void gs_code_give(uint64_t context, int dev, uint64_t bytes) {
    if (bytes == 0)
        return;
    gs_lock(&gs_self()->lock_context);
    struct gs_entry sum = take_sum(context, dev);
    sum.extra -= bytes < sum.extra ? bytes : sum.extra;
    settle(&sum);
    gs_unlock(&gs_self()->lock_context);
}

/* ---- its parts ------------------------------------------------------------------------------ */

static uint64_t part_key(uint64_t owner, const struct gs_here *here, uint64_t part) {
    return mixed(owner, gs_context_key(here->context), part);
}

bool gs_code_is_charged(uint64_t owner, const struct gs_here *here, uint64_t part) {
    struct gs_entry entry;
    return gs_map_get(&gs_loaded, part_key(owner, here, part), &entry) ||
           gs_map_get(&gs_loaded, part_key(owner, here, GS_PART_ALL), &entry);
}

CUresult gs_code_record(uint64_t owner, const struct gs_here *here, uint64_t part, uint64_t bytes) {
    uint64_t key = part_key(owner, here, part);
    struct gs_entry known, entry = {.bytes = bytes,
                                    .context = gs_context_key(here->context),
                                    .dev = here->dev,
                                    .kind = GS_KIND_CODE,
                                    .extra = owner};
    gs_lock(&gs_self()->lock_context);
    bool raced = gs_map_get(&gs_loaded, key, &known);
    bool kept = !raced && gs_map_put(&gs_loaded, key, &entry);
    gs_unlock(&gs_self()->lock_context);
    if (!kept)
        gs_code_give(entry.context, here->dev, bytes);
    return raced || kept ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

struct gs_part gs_part_of(const struct gs_image *image, uint64_t part) {
    if (part == GS_PART_ALL)
        return (struct gs_part){part, image->all, 0, image->known};
    if (part == GS_PART_SHARED)
        return (struct gs_part){part, image->shared, 0, image->known};
    return (struct gs_part){part, gs_image_kernel(image, part), image->shared, image->known};
}

static bool is_other_part(uint64_t key, const struct gs_entry *entry, void *all) {
    const struct gs_entry *whole = all;
    (void)key;
    return entry->kind == GS_KIND_CODE && entry->extra == whole->extra &&
           entry->context == whole->context && entry->bytes != whole->bytes;
}

static void give_part(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)arg;
    gs_code_give(entry->context, entry->dev, entry->bytes);
}

static CUresult use(uint64_t owner, const struct gs_here *here, uint64_t part, uint64_t bytes,
                    bool exact) {
    if (bytes == 0 || gs_code_is_charged(owner, here, part))
        return CUDA_SUCCESS;
    CUresult result = gs_code_take(here, bytes, exact);
    if (result == CUDA_SUCCESS)
        result = gs_code_record(owner, here, part, bytes);
    if (result == CUDA_SUCCESS && part == GS_PART_ALL) {
        struct gs_entry whole = {
            .bytes = bytes, .context = gs_context_key(here->context), .extra = owner};
        gs_map_take_all(&gs_loaded, is_other_part, give_part, &whole);
    }
    return result;
}

CUresult gs_part_use(uint64_t owner, const struct gs_here *here, const struct gs_part *part) {
    CUresult result = use(owner, here, GS_PART_SHARED, part->shared, part->known);
    return result == CUDA_SUCCESS ? use(owner, here, part->part, part->bytes, part->known) : result;
}

bool gs_here_of_context(CUcontext context, struct gs_here *here) {
    struct gs_entry entry;
    if (!gs_map_get(&gs_contexts, gs_context_key(context), &entry))
        return false;
    *here = (struct gs_here){context, (CUdevice)(uint32_t)entry.extra, entry.dev};
    return true;
}

static bool is_part_of(uint64_t key, const struct gs_entry *entry, void *owner) {
    (void)key;
    return entry->kind == GS_KIND_CODE && entry->extra == *(const uint64_t *)owner;
}

void gs_code_forget(uint64_t owner) {
    gs_map_take_all(&gs_loaded, is_part_of, give_part, &owner);
    gs_local_forget();
}
