/* Local memory. A context has room for every thread that its device can hold at once, with 1 KiB
 * each at first, which is in the context's own cost. A launch of a function whose threads need more
 * makes the driver enlarge it, and it stays enlarged. */
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

/* Charge what a context needs beyond what it was charged: the largest function counts. */
static CUresult enlarge(const struct gs_here *here, uint64_t need) {
    uint64_t key = key_of(NULL, here, 1);
    _Atomic uint32_t *lock = &gs_self()->lock_context;
    struct gs_charge charge;
    struct gs_entry pool;
    if (!gs_map_get(&gs_loaded, key, &pool))
        pool = (struct gs_entry){
            .context = gs_context_key(here->context), .dev = here->dev, .kind = GS_KIND_WHOLE};
    if (need <= pool.bytes)
        return CUDA_SUCCESS;
    CUresult result = gs_charge_begin_on(&charge, here->device, need - pool.bytes);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t before = pool.bytes;
    gs_lock(lock);
    gs_map_take(&gs_loaded, key, &pool);
    bool first = pool.bytes == before; /* else another thread has enlarged it meanwhile */
    pool.bytes = first ? before + charge.bytes : pool.bytes;
    bool kept = gs_map_put(&gs_loaded, key, &pool) && first;
    gs_unlock(lock);
    if (!kept)
        gs_charge_abort(&charge);
    return first ? CUDA_SUCCESS : enlarge(here, need);
}

static CUresult use_local(const void *function) {
    struct gs_entry entry = {.kind = GS_KIND_CODE};
    struct gs_here here;
    if (!function || !gs_slot() || !gs_here(&here))
        return CUDA_SUCCESS;
    uint64_t key = key_of(function, &here, 2 + 2 * atomic_load(&generation));
    if (gs_map_get(&gs_loaded, key, &entry))
        return CUDA_SUCCESS;
    uint64_t bytes = bytes_of(function, here.device);
    if (bytes > INITIAL_BYTES) {
        CUresult result = enlarge(
            &here, gs_round_up((bytes - INITIAL_BYTES) * threads_of(here.device), GS_BLOCK));
        if (result != CUDA_SUCCESS)
            return result;
    }
    entry.context = gs_context_key(here.context);
    entry.dev = here.dev;
    gs_map_put(&gs_loaded, key, &entry);
    return CUDA_SUCCESS;
}

CUresult gs_function_launch(const void *function) {
    CUresult result = gs_kernel_use(function);
    return result == CUDA_SUCCESS ? use_local(function) : result;
}
