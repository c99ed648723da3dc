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
    *use = (struct gs_use){0};
    if (!params || params->type != CU_GRAPH_NODE_TYPE_KERNEL)
        return CUDA_SUCCESS;
    return gs_kernel_use_begin(use, params->kernel.func ? (void *)params->kernel.func
                                                        : (void *)params->kernel.kern);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph,
                                          const CUgraphNode *after, size_t n,
                                          CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode);
    struct gs_use use;
    CUresult result = begin_kernel_use(&use, params);
    return result == CUDA_SUCCESS ? gs_library_use_end(&use, real(node, graph, after, n, params))
                                  : result;
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v2);
    struct gs_use use;
    CUresult result = begin_kernel_use(&use, params);
    return result == CUDA_SUCCESS
               ? gs_library_use_end(&use, real(node, graph, after, edges, n, params))
               : result;
}

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams);
    gs_compute_changed(exec);
    return real(exec, node, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphExecKernelNodeSetParams_v2);
    gs_compute_changed(exec);
    return real(exec, node, params);
}
