/* Functions that vmm.c and vmm_host.c share. */
#ifndef GPUSHARE_VMM_H
#define GPUSHARE_VMM_H

#include "memory.h"

/* Allocate the memory on the host if the device of `charge` has no room; `charge` is then that of
 * the host part. CUDA_ERROR_OUT_OF_MEMORY, which is counted, if there is no room there either;
 * nothing is charged then. */
CUresult gs_vmm_on_host(CUmemGenericAllocationHandle *handle, size_t size,
                        const CUmemAllocationProp *prop, struct gs_charge *charge);
/* Return whether the memory was allocated on the host instead of a device; `device`: the one that
 * was requested. */
bool gs_vmm_asked(CUmemGenericAllocationHandle handle, CUdevice *device);

#endif
