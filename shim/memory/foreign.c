/* Memory that another process or another API allocated and this process only opens. It is charged
 * where it was allocated, as long as it exists (core/exports.c). Freeing or closing it here
 * releases nothing. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pool.h"

static struct gs_map exported; /* address of an allocation -> extra = row */
static struct gs_map opened;   /* address here -> extra = row | times it was opened << 32 */
static _Atomic uint64_t exports;

/* ---- by IPC handle: it names a whole allocation ------------------------------------------------
 */

GS_EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr) {
    GS_NEED(real, cuIpcGetMemHandle);
    gs_does(GS_DOES_EXCHANGE);
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
    gs_does(GS_DOES_EXCHANGE);
    return open_ipc_handle(real, pdptr, handle, flags);
}

GS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                                 unsigned int flags) {
    GS_NEED(real, cuIpcOpenMemHandle_v2);
    gs_does(GS_DOES_EXCHANGE);
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

/* ---- by descriptor: both processes have the same open file --------------------------------------
 */

/* All descriptors of NVIDIA's driver are of /dev/nvidiactl, so the file identifies nothing. An
 * exporter marks the open file, which goes to the importer with the descriptor, by a shared lock on
 * one byte: the byte's offset is the id. Locks of open files stand in /proc/self/fdinfo
 * (Linux 4.1). Without such a mark all memory of one file forms a class: freed memory of the class
 * counts until all of the class is closed. */

/* Linux 3.15, and not in the C library of 2013 that the shim is linked against. */
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif
#define MARK "OFDLCK"

static uint64_t id_of_file(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return GS_SHARE_ANY;
    uint64_t name[2] = {st.st_dev, st.st_ino};
    return gs_export_id(name, sizeof(name));
}

uint64_t gs_export_mark(int fd, uint64_t id) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)id, .l_len = 1};
    int saved = errno;
    bool marked = fcntl(fd, F_OFD_SETLK, &lock) == 0;
    errno = saved;
    return marked ? id : id_of_file(fd);
}

/* "lock:\t1: OFDLCK  ADVISORY  READ -1 00:06:142 <start> <end>", once for each lock. */
static uint64_t mark_of(const char *text) {
    const char *line = strstr(text, MARK);
    unsigned long long start, end;
    if (!line || sscanf(line + sizeof(MARK) - 1, " %*s %*s %*s %*s %llu %llu", &start, &end) != 2)
        return 0;
    return start == end ? start : 0;
}

uint64_t gs_export_id_of_file(int fd) {
    char path[40], text[4096];
    int saved = errno;
    uint64_t id = 0;
    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    int info = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = info < 0 ? -1 : read(info, text, sizeof(text) - 1);
    if (info >= 0)
        close(info);
    if (n > 0) {
        text[n] = 0;
        id = mark_of(text);
    }
    errno = saved;
    if (!id && (n <= 0 || n == sizeof(text) - 1))
        return GS_SHARE_ANY; /* a mark cannot be read: it may be any export */
    return id ? id : id_of_file(fd);
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
