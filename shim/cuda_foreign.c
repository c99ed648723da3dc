/* Memory that another process, or another API, allocated and this one only opens: charged where it
 * was allocated. It gets no entry here, so that freeing or closing it gives nothing back. */
#include "pool.h"

GS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                              unsigned int flags) {
    GS_NEED(real, cuIpcOpenMemHandle);
    return gs_slot() ? real(pdptr, handle, flags) : CUDA_ERROR_NOT_INITIALIZED;
}

GS_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                                 unsigned int flags) {
    GS_NEED(real, cuIpcOpenMemHandle_v2);
    return gs_slot() ? real(pdptr, handle, flags) : CUDA_ERROR_NOT_INITIALIZED;
}

GS_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr) {
    GS_NEED(real, cuIpcCloseMemHandle);
    return real(dptr);
}

GS_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                          void *osHandle,
                                                          CUmemAllocationHandleType type) {
    GS_NEED(real, cuMemImportFromShareableHandle);
    return gs_slot() ? real(handle, osHandle, type) : CUDA_ERROR_NOT_INITIALIZED;
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
