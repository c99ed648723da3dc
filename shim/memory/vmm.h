/* What vmm.c and vmm_host.c have of each other. */
#ifndef GPUSHARE_VMM_H
#define GPUSHARE_VMM_H

#include "memory.h"

/* The same memory on the host, for what the device that `charge` names has no room for; `charge` is
 * then its. CUDA_ERROR_OUT_OF_MEMORY, counted: there is none, and nothing is charged. */
CUresult gs_vmm_on_host(CUmemGenericAllocationHandle *handle, size_t size,
                        const CUmemAllocationProp *prop, struct gs_charge *charge);
/* True for memory that lies on the host instead of a device; `device`: which one. */
bool gs_vmm_asked(CUmemGenericAllocationHandle handle, CUdevice *device);

#endif
