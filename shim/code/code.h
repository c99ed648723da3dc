/* What module.c and library.c share: code that is loaded, and when. */
#ifndef GPUSHARE_CODE_H
#define GPUSHARE_CODE_H

#include "image.h"
#include "memory/memory.h"

/* In an entry's extra, beside a number of bytes. */
#define GS_UNREAD (UINT64_C(1) << 63) /* the image could not be read: measured at its first use */
#define GS_DEAD (UINT64_C(1) << 62)   /* unloaded by us: it was too large */

bool gs_lazy_loading(void);
/* Device memory that is free, as the driver says. */
uint64_t gs_free_now(void);
/* Charge what was taken since `before` beyond `charged`: `more` bytes, perhaps 0. */
CUresult gs_charge_measured(uint64_t before, uint64_t charged, uint64_t *more);
/* Around a call that may load a library into the current context. */
struct gs_use {
    CUlibrary library;
    bool measure; /* its image could not be read */
    bool loads;   /* after this call it is loaded for sure */
    uint64_t before, key;
};
CUresult gs_library_use_begin(struct gs_use *use, CUlibrary library, bool loads);
/* For whatever takes a kernel of a library where a function is expected; other functions pass. */
CUresult gs_kernel_use_begin(struct gs_use *use, const void *function);
/* CUDA_ERROR_OUT_OF_MEMORY: it was too large, and is unloaded. */
CUresult gs_library_use_end(struct gs_use *use, CUresult result);

#endif
