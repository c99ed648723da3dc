/* Code that is loaded: what module.c, library.c and local.c share. */
#ifndef GPUSHARE_CODE_H
#define GPUSHARE_CODE_H

#include "image.h"
#include "memory/memory.h"

/* ---- code.c: what a context's code takes ----------------------------------------------------- */

/* Parts of an image other than kernels, which go by the hash of their names. */
#define GS_PART_SHARED UINT64_C(0)
#define GS_PART_ALL UINT64_MAX

bool gs_lazy_loading(void);
/* 10 * major + minor of a device's compute capability; 0 if the driver does not report it. */
unsigned gs_arch(CUdevice device);
/* Charge `bytes` of code to a context. `exact` false: a bound, charged even over the limit.
 * Returns CUDA_ERROR_OUT_OF_MEMORY when the limit has no room. */
CUresult gs_code_take(const struct gs_here *here, uint64_t bytes, bool exact);
void gs_code_give(uint64_t context, int dev, uint64_t bytes);
/* Is a part of `owner` (a module or library) charged in a context? Zero bytes count as charged. */
bool gs_code_is_charged(uint64_t owner, const struct gs_here *here, uint64_t part);
/* Record a part whose bytes were charged; release them if another thread was first. */
CUresult gs_code_record(uint64_t owner, const struct gs_here *here, uint64_t part, uint64_t bytes);
/* The bytes of a part of an image, read while lock_context keeps the image. */
struct gs_part {
    uint64_t part, bytes;
    uint64_t shared; /* bytes that are loaded with any part; 0 if `bytes` includes them */
    bool known;
};
struct gs_part gs_part_of(const struct gs_image *image, uint64_t part);
/* Charge a part and what is loaded with it, once for each context. */
CUresult gs_part_use(uint64_t owner, const struct gs_here *here, const struct gs_part *part);
/* The device of a context that this process made; false when it is not known. */
bool gs_here_of_context(CUcontext context, struct gs_here *here);
/* `owner` was unloaded: release the bytes of its parts in every context. */
void gs_code_forget(uint64_t owner);

/* ---- module.c and library.c -------------------------------------------------------------------
 */

extern struct gs_map gs_library_modules; /* CUmodule -> extra = the library that it belongs to */
/* Charge a part of a library in the current context. */
CUresult gs_library_use(CUlibrary library, uint64_t part);

/* ---- library.c and local.c: before a function is used -----------------------------------------
 */

/* Charge the code of a kernel of a library in the current context; other functions pass. */
CUresult gs_kernel_use(const void *function);
/* The same and the local memory of its threads, for a call that launches it. */
CUresult gs_function_launch(const void *function);
/* A library's kernel, for cuKernelGetAttribute. */
bool gs_is_kernel(const void *function);
/* Handles of functions may stand for others from now on. */
void gs_local_forget(void);

#endif
