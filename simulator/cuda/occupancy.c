/* How many blocks of a kernel can run at the same time. */
#include "module.h"

uint64_t blocks_per_processor(int block) {
    return block > (int)MAX_BLOCK ? 0 : 2048 / block > 32 ? 32 : 2048u / (unsigned)block;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction hfunc, int block,
                                                            size_t shared) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    (void)shared;
    CHECK_VALUE(n && block > 0);
    *n = (int)blocks_per_processor(block);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f,
                                                                     int block, size_t shared,
                                                                     unsigned int flags) {
    CHECK_VALUE(!(flags & ~1u));
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction hfunc,
                                                 CUoccupancyB2DSize size_of, size_t shared,
                                                 int limit) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    (void)size_of;
    (void)shared;
    CHECK_VALUE(grid && block);
    *block = limit > 0 && limit < (int)MAX_BLOCK ? limit : (int)MAX_BLOCK;
    *grid = 2 * (int)sim.device[ctx->device].sim.state->config.sm_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction f,
                                                          CUoccupancyB2DSize size_of, size_t shared,
                                                          int limit, unsigned int flags) {
    CHECK_VALUE(!(flags & ~1u));
    return cuOccupancyMaxPotentialBlockSize(grid, block, f, size_of, shared, limit);
}

EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction hfunc, int blocks,
                                                        int block) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    CHECK_VALUE(bytes && blocks > 0 && block > 0);
    *bytes = 102400u / (unsigned)blocks;
    return CUDA_SUCCESS;
}
