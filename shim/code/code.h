/* Code that is loaded: what module.c, library.c and local.c share. */
#ifndef GPUSHARE_CODE_H
#define GPUSHARE_CODE_H

#include "image.h"
#include "memory/memory.h"

/* ---- use.c: a call that may load code ----------------------------------------------------------
 */

/* A call that may make the driver load code or enlarge local memory. Room for what can be large is
 * reserved before: variables, and local memory. The driver's count charges what the call takes. */
struct gs_use {
    struct gs_here here;
    struct gs_growth growth;
    uint64_t owner;       /* module or library that this call is the first to use here; 0: none */
    uint64_t function;    /* key in gs_loaded of a function that this call is the first to launch */
    uint64_t code, local; /* bytes that are reserved for each */
    uint64_t local_size;  /* of the context, from this call on */
    bool may_load;
};
/* Begin a use of a module or library with an image of these sizes. `whole`: all of its code is
 * loaded. Any result but CUDA_SUCCESS: the limit has no room, so make no call. */
CUresult gs_use_owner(struct gs_use *use, uint64_t owner, const struct gs_image *image, bool whole);
/* `done`: the call succeeded. */
void gs_use_ended(struct gs_use *use, bool done);
static inline void gs_use_end(struct gs_use *use, bool done) {
    if (use->may_load)
        gs_use_ended(use, done);
}
/* Reserve what `use` needs. */
CUresult gs_use_reserve(struct gs_use *use);
/* Whether code of `owner` was loaded in this context before. */
bool gs_use_is_known(uint64_t owner, const struct gs_here *here);
/* `owner` was unloaded. */
void gs_use_forget(uint64_t owner);

bool gs_lazy_loading(void);
/* 10 * major + minor of a device's compute capability; 0 if the driver does not report it. */
unsigned gs_arch(CUdevice device);

/* ---- module.c and library.c -------------------------------------------------------------------
 */

extern struct gs_map gs_library_modules; /* CUmodule -> extra = the library that it belongs to */
/* Begin a use of a library in the current context. */
CUresult gs_use_library(struct gs_use *use, CUlibrary library, bool whole);
/* Begin a use of a kernel of a library; other functions pass. */
CUresult gs_use_kernel(struct gs_use *use, const void *function);
/* A library's kernel, for cuKernelGetAttribute. */
bool gs_is_kernel(const void *function);

/* ---- local.c ---------------------------------------------------------------------------------
 */

/* The same, with the local memory of its threads, for a call that launches it. */
CUresult gs_use_launch(struct gs_use *use, const void *function);
/* After the first launch: the next one needs no query of the function. */
void gs_local_launched(const struct gs_use *use, uint64_t kept);
/* Handles of functions may stand for others from now on. */
void gs_local_forget(void);

#endif
