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

static CUresult begin_kernel_use(const CUgraphNodeParams *params) {
    if (!params || params->type != CU_GRAPH_NODE_TYPE_KERNEL)
        return CUDA_SUCCESS;
    return gs_function_launch(params->kernel.func ? (void *)params->kernel.func
                                                  : (void *)params->kernel.kern);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph,
                                          const CUgraphNode *after, size_t n,
                                          CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode);
    CUresult result = begin_kernel_use(params);
    return result == CUDA_SUCCESS ? real(node, graph, after, n, params) : result;
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v2);
    CUresult result = begin_kernel_use(params);
    return result == CUDA_SUCCESS ? real(node, graph, after, edges, n, params) : result;
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v3);
    CUresult result = begin_kernel_use(params);
    return result == CUDA_SUCCESS ? real(node, graph, after, edges, n, params) : result;
}

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams);
    CUresult result = gs_function_launch(params ? params->func : NULL);
    gs_compute_changed(exec);
    return result != CUDA_SUCCESS ? result : real(exec, node, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams_v2);
    CUresult result = gs_function_launch(!params        ? NULL
                                         : params->func ? (void *)params->func
                                                        : (void *)params->kern);
    gs_compute_changed(exec);
    return result != CUDA_SUCCESS ? result : real(exec, node, params);
}
