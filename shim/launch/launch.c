/* Launches: the first launch of a library's kernel in a context loads it, and where compute is
 * limited a launch waits until the rate limiter admits it. A launch like an earlier one costs a
 * comparison with what its thread remembers (launch.h), and jumps to the driver without a stack
 * frame of its own. */
#include <string.h>

#include "code/code.h"
#include "launch.h"

#define GS_SLOW static GS_APART CUresult

static CUresult not_supported(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

void gs_launches_ready(void) {
    static const unsigned quick[] = {GS_SYMBOL_cuLaunchKernel,   GS_SYMBOL_cuLaunchKernel_ptsz,
                                     GS_SYMBOL_cuLaunchKernelEx, GS_SYMBOL_cuLaunchKernelEx_ptsz,
                                     GS_SYMBOL_cuGraphLaunch,    GS_SYMBOL_cuGraphLaunch_ptsz};
    for (size_t i = 0; i < sizeof(quick) / sizeof(quick[0]); i++)
        gs_real_or(quick[i], (void *)not_supported);
}

/* Call `real` after admission. */
#define GS_ADMITTED(function, grid, stream, overlaps, ...) \
    struct gs_admission admission; \
    struct gs_use use; \
    CUresult result = gs_use_launch(&use, function); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = gs_compute_admit(&admission, function, grid, stream, overlaps, true); \
    if (result == CUDA_SUCCESS) \
        result = real(__VA_ARGS__); \
    gs_compute_launched(&admission, result); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    gs_overhead_if_late(); \
    return result

#define GRID ((struct gs_grid){gx, gy, gz})

/* ---- cuLaunchKernel -----------------------------------------------------------------------------
 */

#define GS_KERNEL_ARGUMENTS \
    CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, \
        unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params

/* Arguments after `by` are on the stack already and stay there for the driver: as separate
 * parameters, gcc would load and store each of them again. On x86-64 a structure that is passed by
 * value has the same layout as they do. */
#ifdef __x86_64__
struct gs_on_stack {
    unsigned int bz, unused, shared, unused2;
    CUstream stream;
    void **params, **extra;
};
#define GS_REST struct gs_on_stack rest
#define GS_REST_GIVEN rest
#define GS_FROM_REST(name) rest.name
#else
#define GS_REST unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra
#define GS_REST_GIVEN bz, shared, stream, params, extra
#define GS_FROM_REST(name) name
#endif

typedef CUresult kernel_fn(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                           unsigned int bx, unsigned int by, GS_REST);

/* Exported as `name`; `key` converts the stream as launch.h needs it. */
#define GS_KERNEL_WRAPPER(name, key) \
    GS_SLOW name##_slow(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, \
                        unsigned int bx, unsigned int by, GS_REST) { \
        GS_NEED(real, name); \
        GS_ADMITTED(f, GRID, key(GS_FROM_REST(stream)), false, f, gx, gy, gz, bx, by, \
                    GS_FROM_REST(bz), GS_FROM_REST(shared), GS_FROM_REST(stream), \
                    GS_FROM_REST(params), GS_FROM_REST(extra)); \
    } \
    GS_EXPORT kernel_fn name##_wrapper __asm__(#name); \
    CUresult name##_wrapper(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, \
                            unsigned int bx, unsigned int by, GS_REST) { \
        if (!gs_compute_passes(f, gx, gy, gz, key(GS_FROM_REST(stream)))) \
            return name##_slow(f, gx, gy, gz, bx, by, GS_REST_GIVEN); \
        return ((kernel_fn *)(void *)GS_REAL_NOW(name))(f, gx, gy, gz, bx, by, GS_REST_GIVEN); \
    }

#define GS_AS_IT_IS(stream) (stream)
GS_KERNEL_WRAPPER(cuLaunchKernel, GS_AS_IT_IS)
GS_KERNEL_WRAPPER(cuLaunchKernel_ptsz, gs_per_thread)

/* ---- cuLaunchKernelEx ----------------------------------------------------------------------- */

/* Return whether the launch may start before earlier work in its stream has ended. */
static bool overlaps(const CUlaunchConfig *c) {
    for (unsigned i = 0; c->attrs && i < c->numAttrs; i++)
        if ((c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
             c->attrs[i].value.programmaticStreamSerializationAllowed) ||
            c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
            return true;
    return false;
}

#define GS_EX_ARGUMENTS const CUlaunchConfig *config, CUfunction f, void **params, void **extra

/* Compare two dimensions at once: there are too few registers for one each. */
static inline __attribute__((always_inline)) bool passes_ex(const CUlaunchConfig *config,
                                                            CUfunction f, CUstream stream) {
    _Static_assert(offsetof(CUlaunchConfig, gridDimX) == 0 &&
                       offsetof(CUlaunchConfig, gridDimY) == 4,
                   "as in struct gs_grid");
    struct gs_remembered *r = gs_remembered_at(gs_memory_of_thread, f, config->gridDimX);
    uint64_t wanted, known;
    memcpy(&wanted, config, sizeof(wanted));
    memcpy(&known, &r->grid, sizeof(known));
    return __builtin_expect(wanted == known && r->grid.z == config->gridDimZ, 1) &&
           gs_remembered_passes(r, f, stream, false);
}

/* Keep gcc from moving arguments out of their registers and back for the driver. */
#define GS_STAYS(a, b, c, d) __asm__("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d))

#define GS_EX_GRID ((struct gs_grid){config->gridDimX, config->gridDimY, config->gridDimZ})

GS_SLOW ex_slow(GS_EX_ARGUMENTS) {
    GS_NEED(real, cuLaunchKernelEx);
    if (!config)
        return real(config, f, params, extra);
    GS_ADMITTED(f, GS_EX_GRID, config->hStream, overlaps(config), config, f, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernelEx(GS_EX_ARGUMENTS) {
    GS_STAYS(config, f, params, extra);
    if (!config || !passes_ex(config, f, config->hStream))
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
    GS_STAYS(config, f, params, extra);
    if (!config || !passes_ex(config, f, gs_per_thread(config->hStream)))
        return ex_ptsz_slow(config, f, params, extra);
    return GS_REAL_NOW(cuLaunchKernelEx_ptsz)(config, f, params, extra);
}

/* ---- cooperative launches ------------------------------------------------------------------- */

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel(GS_KERNEL_ARGUMENTS) {
    GS_NEED(real, cuLaunchCooperativeKernel);
    GS_ADMITTED(f, GRID, stream, false, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel_ptsz(GS_KERNEL_ARGUMENTS) {
    GS_NEED(real, cuLaunchCooperativeKernel_ptsz);
    GS_ADMITTED(f, GRID, gs_per_thread(stream), false, f, gx, gy, gz, bx, by, bz, shared, stream,
                params);
}

/* One launch on several devices at once: admit each part, then launch all. */
GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list,
                                                                unsigned int n,
                                                                unsigned int flags) {
    GS_NEED(real, cuLaunchCooperativeKernelMultiDevice);
    struct gs_admission admission[GS_MAX_ORDINALS];
    struct gs_use use[GS_MAX_ORDINALS];
    CUresult result = list && n > GS_MAX_ORDINALS ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    unsigned admitted = 0;
    for (; list && admitted < n && result == CUDA_SUCCESS; admitted++) {
        const CUDA_LAUNCH_PARAMS *p = &list[admitted];
        if ((result = gs_use_launch(&use[admitted], p->function)) != CUDA_SUCCESS)
            break;
        result = gs_compute_admit(&admission[admitted], p->function,
                                  (struct gs_grid){p->gridDimX, p->gridDimY, p->gridDimZ},
                                  p->hStream, false, false);
    }
    if (result == CUDA_SUCCESS)
        result = real(list, n, flags);
    for (unsigned i = 0; i < admitted; i++) {
        gs_compute_launched(&admission[i], result);
        gs_use_end(&use[i], result == CUDA_SUCCESS);
    }
    return result;
}

/* ---- launch functions of CUDA 1 ------------------------------------------------------------- */

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

/* ---- other calls that use a library's kernel ------------------------------------------------ */

#define GS_USED(call) \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = (call); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    return result

#define GS_WITH(function, ...) \
    struct gs_use use; \
    CUresult result = gs_use_kernel(&use, function); \
    GS_USED(real(__VA_ARGS__))

#define GS_WITH_LAUNCHED(function, ...) \
    struct gs_use use; \
    CUresult result = gs_use_launch(&use, function); \
    GS_USED(real(__VA_ARGS__))

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
    GS_WITH_LAUNCHED(params ? params->func : NULL, node, graph, after, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph,
                                                   const CUgraphNode *after, size_t n,
                                                   const CUDA_KERNEL_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphAddKernelNode_v2);
    GS_WITH_LAUNCHED(!params        ? NULL
                     : params->func ? (void *)params->func
                                    : (void *)params->kern,
                     node, graph, after, n, params);
}
