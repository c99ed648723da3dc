/* Calls that may load code. The driver counts the memory that a call takes (core/overhead.c).
 * Reserved before the call is what could be far more than the driver's blocks: the variables of an
 * image, its code as far as one call loads it, and local memory. */
#include "code.h"

#define CODE_OF_A_CALL GS_BLOCK /* few kernels are larger */

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

/* ---- owners: gs_loaded has an entry for each module or library and context ------------------- */

static uint64_t key_of(uint64_t owner, const struct gs_here *here) {
    uint64_t key =
        owner * UINT64_C(0x9e3779b97f4a7c15) ^ gs_context_key(here->context) ^ UINT64_C(0x636f6465);
    key = (key ^ key >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    key = (key ^ key >> 32) & (UINT64_MAX >> 1);
    return key ? key : 1;
}

bool gs_use_is_known(uint64_t owner, const struct gs_here *here) {
    struct gs_entry entry;
    return gs_map_get(&gs_loaded, key_of(owner, here), &entry);
}

static bool is_of(uint64_t key, const struct gs_entry *entry, void *owner) {
    (void)key;
    return entry->kind == GS_KIND_CODE && entry->extra == *(const uint64_t *)owner;
}

static void release(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)arg;
    gs_uncharge(key, entry);
    gs_overhead_shrank(entry->dev);
}

void gs_use_forget(uint64_t owner) {
    gs_map_take_all(&gs_loaded, is_of, release, &owner);
    gs_local_forget();
}

/* ---- a use ----------------------------------------------------------------------------------- */

static uint64_t plus(uint64_t a, uint64_t b) {
    return a + b < a ? UINT64_MAX : a + b;
}

CUresult gs_use_reserve(struct gs_use *use) {
    use->may_load = true;
    CUresult result = gs_growth_begin(&use->growth, use->here.device, plus(use->code, use->local));
    if (result != CUDA_SUCCESS)
        use->may_load = false;
    return result;
}

CUresult gs_use_owner(struct gs_use *use, uint64_t owner, const struct gs_image *image,
                      bool whole) {
    if (!gs_use_is_known(owner, &use->here)) {
        uint64_t code = whole || image->code < CODE_OF_A_CALL ? image->code : CODE_OF_A_CALL;
        use->owner = owner;
        use->code = plus(image->data, code);
    }
    return gs_use_reserve(use);
}

void gs_use_ended(struct gs_use *use, bool done) {
    uint64_t kept = gs_growth_end(&use->growth, done);
    if (!done)
        return;
    uint64_t local = kept < use->local ? kept : use->local;
    struct gs_entry entry = {.bytes = kept - local,
                             .context = gs_context_key(use->here.context),
                             .dev = use->here.dev,
                             .kind = GS_KIND_CODE,
                             .extra = use->owner};
    struct gs_entry known;
    if (use->owner && (gs_map_get(&gs_loaded, key_of(use->owner, &use->here), &known) ||
                       !gs_map_put(&gs_loaded, key_of(use->owner, &use->here), &entry)))
        gs_release(use->here.dev, entry.bytes); /* another thread was first */
    gs_local_launched(use, local);
}
