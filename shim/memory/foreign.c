/* Memory that another process or another API allocated and this process only opens. It is charged
 * where it was allocated, as long as it exists (core/exports.c). Freeing or closing it here
 * releases nothing. */
#include <sys/stat.h>

#include "pool.h"

static struct gs_map exported; /* address of an allocation -> extra = row */
static struct gs_map opened;   /* address here -> extra = row | times it was opened << 32 */
static _Atomic uint64_t exports;

/* ---- by IPC handle: it names a whole allocation ------------------------------------------------
 */

GS_EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr) {
    GS_NEED(real, cuIpcGetMemHandle);
    __typeof__(&cuMemGetAddressRange_v2) range = GS_REAL(cuMemGetAddressRange_v2);
    struct gs_entry entry, known;
    CUdeviceptr base;
    size_t bytes;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (gs_virtual_holds(dptr)) {
        gs_log("cuIpcGetMemHandle refused", "oversubscription placed this memory on the host",
               "unset GPUSHARE_OVERSUBSCRIBE for this container");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = real(handle, dptr);
    if (result != CUDA_SUCCESS || !handle || !range || range(&base, &bytes, dptr) != CUDA_SUCCESS ||
        !gs_map_get(&gs_memory, base, &entry))
        return result;
    gs_lock(&gs_self()->lock_vmm);
    if (!gs_map_get(&exported, base, &known)) {
        uint64_t id = gs_export_id(handle, sizeof(*handle));
        int row = gs_export_add(id, false, entry.dev, gs_round_up(bytes, GS_BLOCK));
        known = (struct gs_entry){.extra = (uint64_t)(unsigned)row,
                                  .bytes = gs_round_up(bytes, GS_BLOCK)};
        if (gs_map_put(&exported, base, &known))
            atomic_fetch_add(&exports, 1);
        else
            result = CUDA_ERROR_OUT_OF_MEMORY; /* memory that cannot be tracked is not exported */
    }
    gs_unlock(&gs_self()->lock_vmm);
    return result;
}

bool gs_export_address_freed(uint64_t address) {
    struct gs_entry entry;
    if (atomic_load_explicit(&exports, memory_order_relaxed) == 0 ||
        !gs_map_take(&exported, address, &entry))
        return true;
    atomic_fetch_sub(&exports, 1);
    if ((int)entry.extra < 0)
        return false;
    gs_export_freed((int)entry.extra, entry.bytes);
    return true;
}

static CUresult open_ipc_handle(CUresult (*real)(CUdeviceptr *, CUipcMemHandle, unsigned int),
                                CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    struct gs_entry entry;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    int row = gs_export_add(gs_export_id(&handle, sizeof(handle)), true, 0, 0);
    CUresult result = real(out, handle, flags);
    if (result != CUDA_SUCCESS || !out) {
        gs_export_closed(row);
        return result;
    }
    gs_lock(&gs_self()->lock_vmm);
    bool again = gs_map_take(&opened, *out, &entry);
    if (again)
        entry.extra += UINT64_C(1) << 32;
    else
        entry = (struct gs_entry){.extra = (uint64_t)(unsigned)row | UINT64_C(1) << 32};
    /* If memory is short, the row stays until the process ends. */
    gs_map_put(&opened, *out, &entry);
    gs_unlock(&gs_self()->lock_vmm);
    if (again)
        gs_export_closed(row);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                              unsigned int flags) {
    GS_NEED(real, cuIpcOpenMemHandle);
    return open_ipc_handle(real, pdptr, handle, flags);
}

GS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                                 unsigned int flags) {
    GS_NEED(real, cuIpcOpenMemHandle_v2);
    return open_ipc_handle(real, pdptr, handle, flags);
}

GS_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr) {
    GS_NEED(real, cuIpcCloseMemHandle);
    struct gs_entry entry;
    CUresult result = real(dptr);
    if (result != CUDA_SUCCESS || !gs_slot())
        return result;
    gs_lock(&gs_self()->lock_vmm);
    bool last = gs_map_take(&opened, dptr, &entry);
    if (last && (entry.extra -= UINT64_C(1) << 32) >> 32) {
        gs_map_put(&opened, dptr, &entry);
        last = false;
    }
    gs_unlock(&gs_self()->lock_vmm);
    if (last)
        gs_export_closed((int)(uint32_t)entry.extra);
    return result;
}

/* ---- by descriptor: both processes have the same file ---------------------------------------- */

/* If all descriptors of a driver refer to one file, their memory forms one class: freed memory of
 * the class counts until all of the class is closed. */

uint64_t gs_export_id_of_file(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return GS_SHARE_ANY;
    uint64_t name[2] = {st.st_dev, st.st_ino};
    return gs_export_id(name, sizeof(name));
}

GS_EXPORT CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle,
                                                              CUmemAllocationHandleType type,
                                                              unsigned long long flags) {
    GS_NEED(real, cuMemPoolImportFromShareableHandle);
    CUresult result = gs_slot() ? real(pool, handle, type, flags) : CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS && pool)
        gs_pool_pass(*pool);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemPoolImportPointer(CUdeviceptr *ptr, CUmemoryPool pool,
                                                  CUmemPoolPtrExportData *data) {
    GS_NEED(real, cuMemPoolImportPointer);
    return gs_slot() ? real(ptr, pool, data) : CUDA_ERROR_NOT_INITIALIZED;
}

GS_EXPORT CUresult CUDAAPI cuImportExternalMemory(CUexternalMemory *mem,
                                                  const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    GS_NEED(real, cuImportExternalMemory);
    return gs_slot() ? real(mem, desc) : CUDA_ERROR_NOT_INITIALIZED;
}

GS_EXPORT CUresult CUDAAPI cuDestroyExternalMemory(CUexternalMemory mem) {
    GS_NEED(real, cuDestroyExternalMemory);
    return real(mem);
}
