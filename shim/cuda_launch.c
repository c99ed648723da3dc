/* Launches: a kernel of a library is loaded by its first launch in a context, and a launch waits
 * for its turn where compute is limited. A launch like those before it costs a comparison with what
 * its thread remembers (compute.h), and goes on to the driver with nothing on the stack. */
#include "code.h"
#include "compute.h"

#define GS_SLOW static __attribute__((noinline)) CUresult

/* `real` after it was admitted. */
#define GS_ADMITTED(function, grid, stream, overlaps, ...) \
    struct gs_admission admission; \
    struct gs_use use; \
    CUresult result = gs_kernel_use_begin(&use, function); \
    if (result != CUDA_SUCCESS) \
        return result; \
    gs_compute_admit(&admission, function, grid, stream, overlaps, !use.measure); \
    result = gs_library_use_end(&use, real(__VA_ARGS__)); \
    gs_compute_launched(&admission); \
    return result

#define GRID ((struct gs_grid){gx, gy, gz})

/* ---- cuLaunchKernel -----------------------------------------------------------------------------
 */

#define GS_KERNEL_ARGUMENTS \
    CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, \
        unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params

GS_SLOW kernel_slow(GS_KERNEL_ARGUMENTS, void **extra) {
    GS_NEED(real, cuLaunchKernel);
    GS_ADMITTED(f, GRID, stream, false, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernel(GS_KERNEL_ARGUMENTS, void **extra) {
    if (!gs_compute_passes(f, gx, gy, gz, stream))
        return kernel_slow(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
    return GS_REAL_NOW(cuLaunchKernel)(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

GS_SLOW kernel_ptsz_slow(GS_KERNEL_ARGUMENTS, void **extra) {
    GS_NEED(real, cuLaunchKernel_ptsz);
    GS_ADMITTED(f, GRID, gs_per_thread(stream), false, f, gx, gy, gz, bx, by, bz, shared, stream,
                params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernel_ptsz(GS_KERNEL_ARGUMENTS, void **extra) {
    if (!gs_compute_passes(f, gx, gy, gz, gs_per_thread(stream)))
        return kernel_ptsz_slow(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
    return GS_REAL_NOW(cuLaunchKernel_ptsz)(f, gx, gy, gz, bx, by, bz, shared, stream, params,
                                            extra);
}

/* ---- cuLaunchKernelEx
 * ----------------------------------------------------------------------------- */

/* It may start before what is in front of it in its stream has ended. */
static bool overlaps(const CUlaunchConfig *c) {
    for (unsigned i = 0; c->attrs && i < c->numAttrs; i++)
        if ((c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
             c->attrs[i].value.programmaticStreamSerializationAllowed) ||
            c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
            return true;
    return false;
}

#define GS_EX_ARGUMENTS const CUlaunchConfig *config, CUfunction f, void **params, void **extra
#define GS_PASSES_EX(stream) \
    (config && gs_compute_passes(f, config->gridDimX, config->gridDimY, config->gridDimZ, stream))
#define GS_EX_GRID ((struct gs_grid){config->gridDimX, config->gridDimY, config->gridDimZ})

GS_SLOW ex_slow(GS_EX_ARGUMENTS) {
    GS_NEED(real, cuLaunchKernelEx);
    if (!config)
        return real(config, f, params, extra);
    GS_ADMITTED(f, GS_EX_GRID, config->hStream, overlaps(config), config, f, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernelEx(GS_EX_ARGUMENTS) {
    if (!GS_PASSES_EX(config->hStream))
        return ex_slow(config, f, params, extra);
    return GS_REAL_NOW(cuLaunchKernelEx)(config, f, params, extra);
}

GS_SLOW ex_ptsz_slow(GS_EX_ARGUMENTS) {
    GS_NEED(real, cuLaunchKernelEx_ptsz);
    if (!config)
        return real(config, f, params, extra);
    GS_ADMITTED(f, GS_EX_GRID, gs_per_thread(config->hStream), overlaps(config), config, f, params,
                extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernelEx_ptsz(GS_EX_ARGUMENTS) {
    if (!GS_PASSES_EX(gs_per_thread(config->hStream)))
        return ex_ptsz_slow(config, f, params, extra);
    return GS_REAL_NOW(cuLaunchKernelEx_ptsz)(config, f, params, extra);
}

/* ---- cooperative launches
 * ------------------------------------------------------------------------- */

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel(GS_KERNEL_ARGUMENTS) {
    GS_NEED(real, cuLaunchCooperativeKernel);
    GS_ADMITTED(f, GRID, stream, false, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel_ptsz(GS_KERNEL_ARGUMENTS) {
    GS_NEED(real, cuLaunchCooperativeKernel_ptsz);
    GS_ADMITTED(f, GRID, gs_per_thread(stream), false, f, gx, gy, gz, bx, by, bz, shared, stream,
                params);
}

/* One launch on several devices, which run together: each part is admitted, then all go. */
GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list,
                                                                unsigned int n,
                                                                unsigned int flags) {
    GS_NEED(real, cuLaunchCooperativeKernelMultiDevice);
    struct gs_admission admission[GS_MAX_ORDINALS];
    unsigned admitted = list && n <= GS_MAX_ORDINALS ? n : 0;
    if (list && n > GS_MAX_ORDINALS)
        return CUDA_ERROR_INVALID_VALUE; /* more devices than there are */
    for (unsigned i = 0; i < admitted; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        gs_compute_admit(&admission[i], p->function,
                         (struct gs_grid){p->gridDimX, p->gridDimY, p->gridDimZ}, p->hStream, false,
                         false);
    }
    CUresult result = real(list, n, flags);
    for (unsigned i = 0; i < admitted; i++)
        gs_compute_launched(&admission[i]);
    return result;
}

/* ---- the launches of CUDA 1
 * ------------------------------------------------------------------------ */

#define GS_LAUNCH_OLD(x, y, stream, ...) \
    GS_ADMITTED(f, ((struct gs_grid){(unsigned)(x), (unsigned)(y), 1}), stream, false, __VA_ARGS__)

GS_EXPORT CUresult CUDAAPI cuLaunch(CUfunction f) {
    GS_NEED(real, cuLaunch);
    GS_LAUNCH_OLD(1, 1, NULL, f);
}

GS_EXPORT CUresult CUDAAPI cuLaunchGrid(CUfunction f, int width, int height) {
    GS_NEED(real, cuLaunchGrid);
    GS_LAUNCH_OLD(width, height, NULL, f, width, height);
}

GS_EXPORT CUresult CUDAAPI cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    GS_NEED(real, cuLaunchGridAsync);
    GS_LAUNCH_OLD(width, height, stream, f, width, height, stream);
}

/* ---- other users of a library's kernel
 * -------------------------------------------------------------- */

#define GS_WITH(function, ...) \
    struct gs_use use; \
    CUresult result = gs_kernel_use_begin(&use, function); \
    return result == CUDA_SUCCESS ? gs_library_use_end(&use, real(__VA_ARGS__)) : result

GS_EXPORT CUresult CUDAAPI cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    GS_NEED(real, cuKernelGetFunction);
    GS_WITH(kernel, out, kernel);
}

GS_EXPORT CUresult CUDAAPI cuKernelGetAttribute(int *value, CUfunction_attribute attribute,
                                                CUkernel kernel, CUdevice device) {
    GS_NEED(real, cuKernelGetAttribute);
    GS_WITH(kernel, value, attribute, kernel, device);
}

GS_EXPORT CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value,
                                                CUkernel kernel, CUdevice device) {
    GS_NEED(real, cuKernelSetAttribute);
    GS_WITH(kernel, attribute, value, kernel, device);
}

GS_EXPORT CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute,
                                              CUfunction f) {
    GS_NEED(real, cuFuncGetAttribute);
    GS_WITH(f, value, attribute, f);
}

GS_EXPORT CUresult CUDAAPI cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute,
                                              int value) {
    GS_NEED(real, cuFuncSetAttribute);
    GS_WITH(f, f, attribute, value);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph,
                                                const CUgraphNode *after, size_t n,
                                                const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    GS_NEED(real, cuGraphAddKernelNode);
    GS_WITH(params ? params->func : NULL, node, graph, after, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph,
                                                   const CUgraphNode *after, size_t n,
                                                   const CUDA_KERNEL_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphAddKernelNode_v2);
    GS_WITH(!params        ? NULL
            : params->func ? (void *)params->func
                           : (void *)params->kern,
            node, graph, after, n, params);
}
