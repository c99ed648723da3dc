/* What cuda_module.c and cuda_library.c share: code that is loaded, and when. */
#ifndef GPUSHARE_CODE_H
#define GPUSHARE_CODE_H

#include "cuda_shim.h"
#include "image.h"

/* In an entry's extra, beside a number of bytes. */
#define GS_UNREAD (UINT64_C(1) << 63) /* the image could not be read: measured at its first use */
#define GS_DEAD (UINT64_C(1) << 62)   /* unloaded by us: it was too large */

bool gs_lazy_loading(void);
/* Device memory that is free, as the driver says. */
uint64_t gs_free_now(void);
/* Charge what was taken since `before` beyond `charged`: `more` bytes, perhaps 0. */
CUresult gs_charge_measured(uint64_t before, uint64_t charged, uint64_t *more);
/* A launch, or anything else that takes a kernel of a library for a function of this context: the
 * library is loaded there by it. Other functions pass. */
CUresult gs_kernel_used(const void *function);
/* The same for a library. */
CUresult gs_library_used(CUlibrary library);

#endif
