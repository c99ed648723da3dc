/* Local memory. A context has room for every thread that its device can hold at once, with 1 KiB
 * each at first. A launch of a function whose threads need more makes the driver enlarge it, and it
 * stays enlarged: 1.8 GiB for 8 KiB on an H100. So room is reserved before the first launch. */
#include "code.h"

#define INITIAL_BYTES UINT64_C(1024) /* of a thread: the initial CU_LIMIT_STACK_SIZE */

static _Atomic uint64_t generation; /* of function handles: grows when one may stand for another */

static uint64_t key_of(const void *function, const struct gs_here *here, uint64_t which) {
    uint64_t key = (uint64_t)(uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15) ^
                   gs_context_key(here->context) * UINT64_C(0xbf58476d1ce4e5b9);
    key = (key ^ key >> 31) * UINT64_C(0x94d049bb133111eb) ^ which;
    key &= UINT64_MAX >> 1;
    return key ? key : 1;
}

void gs_local_forget(void) {
    atomic_fetch_add(&generation, 1);
}

/* Threads that are resident on a device at once. */
static uint64_t threads_of(CUdevice device) {
    __typeof__(&cuDeviceGetAttribute) get = GS_REAL(cuDeviceGetAttribute);
    int processors = 0, threads = 0;
    if (!get ||
        get(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        get(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
        return 0;
    return processors > 0 && threads > 0 ? (uint64_t)processors * (uint64_t)threads : 0;
}

/* Local memory of one thread, 0 if the driver does not report it. */
static uint64_t bytes_of(const void *function, CUdevice device) {
    __typeof__(&cuFuncGetAttribute) of_function = GS_REAL(cuFuncGetAttribute);
    __typeof__(&cuKernelGetAttribute) of_kernel = GS_REAL(cuKernelGetAttribute);
    CUfunction_attribute local = CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
    void *handle = (void *)(uintptr_t)function;
    int bytes = 0;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (gs_is_kernel(function))
        result = of_kernel ? of_kernel(&bytes, local, handle, device) : result;
    else if (of_function)
        result = of_function(&bytes, local, handle);
    return result == CUDA_SUCCESS && bytes > 0 ? (uint64_t)bytes : 0;
}

/* The size of a context's local memory beyond the initial one; its entry's `bytes` are charged. */
static struct gs_entry size_of(const struct gs_here *here) {
    struct gs_entry size;
    if (!gs_map_get(&gs_loaded, key_of(NULL, here, 1), &size))
        size = (struct gs_entry){
            .context = gs_context_key(here->context), .dev = here->dev, .kind = GS_KIND_WHOLE};
    return size;
}

CUresult gs_use_launch(struct gs_use *use, const void *function) {
    struct gs_entry known;
    struct gs_here here;
    *use = (struct gs_use){.may_load = false};
    if (!function || !gs_slot() || !gs_here(&here))
        return CUDA_SUCCESS;
    uint64_t key = key_of(function, &here, 2 + 2 * atomic_load(&generation));
    if (gs_map_get(&gs_loaded, key, &known))
        return CUDA_SUCCESS;
    CUresult result = gs_use_kernel(use, function);
    if (result != CUDA_SUCCESS)
        return result;
    use->here = here;
    use->function = key;
    uint64_t bytes = bytes_of(function, use->here.device), had = size_of(&use->here).extra;
    if (bytes > INITIAL_BYTES)
        use->local_size =
            gs_round_up((bytes - INITIAL_BYTES) * threads_of(use->here.device), GS_BLOCK);
    use->local = use->local_size > had ? use->local_size - had : 0;
    if (!use->may_load)
        return gs_use_reserve(use);
    struct gs_growth code = use->growth;
    result = gs_growth_begin(&use->growth, use->here.device, use->local);
    use->growth.bound += code.bound;
    use->growth.bytes += code.bytes;
    if (result != CUDA_SUCCESS) {
        gs_growth_end(&use->growth, false);
        use->may_load = false;
    }
    return result;
}

void gs_local_launched(const struct gs_use *use, uint64_t kept) {
    struct gs_entry entry = {
        .context = gs_context_key(use->here.context), .dev = use->here.dev, .kind = GS_KIND_WHOLE};
    if (use->local_size) {
        _Atomic uint32_t *lock = &gs_self()->lock_context;
        uint64_t key = key_of(NULL, &use->here, 1);
        gs_lock(lock);
        struct gs_entry size = size_of(&use->here);
        gs_map_take(&gs_loaded, key, &size);
        if (use->local_size > size.extra) {
            size.extra = use->local_size;
            size.bytes += kept;
            kept = 0;
        }
        gs_map_put(&gs_loaded, key, &size);
        gs_unlock(lock);
        gs_release(use->here.dev, kept); /* another thread has enlarged it as far */
    }
    if (use->function)
        gs_map_put(&gs_loaded, use->function, &entry);
}
