/* Graph nodes. Building a graph allocates nothing. These wrappers exist so that every call that can
 * name an allocation is seen, the code of a kernel is charged at its first use, and the rate
 * limiter notices a changed kernel in an executable graph. */
#include "code/code.h"
#include "launch.h"

GS_EXPORT CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph,
                                                  const CUgraphNode *after, size_t n,
                                                  CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphAddMemAllocNode);
    return real(node, graph, after, n, params);
}

static CUresult begin_kernel_use(struct gs_use *use, const CUgraphNodeParams *params) {
    *use = (struct gs_use){.may_load = false};
    if (!params || params->type != CU_GRAPH_NODE_TYPE_KERNEL)
        return CUDA_SUCCESS;
    return gs_use_launch(use, params->kernel.func ? (void *)params->kernel.func
                                                  : (void *)params->kernel.kern);
}

#define GS_ADD_NODE(...) \
    struct gs_use use; \
    CUresult result = begin_kernel_use(&use, params); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = real(__VA_ARGS__); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    return result

GS_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph,
                                          const CUgraphNode *after, size_t n,
                                          CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode);
    GS_ADD_NODE(node, graph, after, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v2);
    GS_ADD_NODE(node, graph, after, edges, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v3);
    GS_ADD_NODE(node, graph, after, edges, n, params);
}

#define GS_SET_KERNEL(function) \
    struct gs_use use; \
    CUresult result = gs_use_launch(&use, function); \
    gs_compute_changed(exec); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = real(exec, node, params); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    return result

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams);
    GS_SET_KERNEL(params ? params->func : NULL);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams_v2);
    GS_SET_KERNEL(!params ? NULL : params->func ? (void *)params->func : (void *)params->kern);
}
