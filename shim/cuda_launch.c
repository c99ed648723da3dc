/* Whatever takes a kernel of a library where a function is expected: in a context in which that
 * library was not used so far it is loaded by it. Nothing else is done to a launch here. */
#include "code.h"

#define GS_WITH(function, ...) \
    struct gs_use use; \
    CUresult result = gs_kernel_use_begin(&use, function); \
    return result == CUDA_SUCCESS ? gs_library_use_end(&use, real(__VA_ARGS__)) : result

GS_EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy,
                                          unsigned int gz, unsigned int bx, unsigned int by,
                                          unsigned int bz, unsigned int shared, CUstream stream,
                                          void **params, void **extra) {
    GS_NEED(real, cuLaunchKernel);
    GS_WITH(f, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy,
                                                     unsigned int gz, unsigned int bx,
                                                     unsigned int by, unsigned int bz,
                                                     unsigned int shared, CUstream stream,
                                                     void **params) {
    GS_NEED(real, cuLaunchCooperativeKernel);
    GS_WITH(f, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f,
                                            void **params, void **extra) {
    GS_NEED(real, cuLaunchKernelEx);
    GS_WITH(f, config, f, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy,
                                               unsigned int gz, unsigned int bx, unsigned int by,
                                               unsigned int bz, unsigned int shared,
                                               CUstream stream, void **params, void **extra) {
    GS_NEED(real, cuLaunchKernel_ptsz);
    GS_WITH(f, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

GS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gx,
                                                          unsigned int gy, unsigned int gz,
                                                          unsigned int bx, unsigned int by,
                                                          unsigned int bz, unsigned int shared,
                                                          CUstream stream, void **params) {
    GS_NEED(real, cuLaunchCooperativeKernel_ptsz);
    GS_WITH(f, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}

GS_EXPORT CUresult CUDAAPI cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f,
                                                 void **params, void **extra) {
    GS_NEED(real, cuLaunchKernelEx_ptsz);
    GS_WITH(f, config, f, params, extra);
}

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
