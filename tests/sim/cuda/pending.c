/* Parts that are not there yet. */
#include "sim.h"
#define WEAK __attribute__((weak))
WEAK bool host_range(uint64_t va, uint64_t *start, uint64_t *size) {
    (void)va;
    (void)start;
    (void)size;
    return false;
}
WEAK bool vmm_range(uint64_t va, uint64_t *start, uint64_t *size, int *device) {
    (void)va;
    (void)start;
    (void)size;
    (void)device;
    return false;
}
WEAK bool pool_free(struct mem *mem, uint64_t va) {
    (void)mem;
    (void)va;
    return false;
}
WEAK bool pool_range(const struct mem *mem, uint64_t va, uint64_t *start, uint64_t *size) {
    (void)mem;
    (void)va;
    (void)start;
    (void)size;
    return false;
}
WEAK void modules_drop_all(struct context *ctx) {
    (void)ctx;
}
WEAK CUresult engine_open(struct context *ctx) {
    (void)ctx;
    return CUDA_SUCCESS;
}
WEAK void engine_close(struct context *ctx) {
    (void)ctx;
}
WEAK CUresult engine_wait_context(struct context *ctx) {
    (void)ctx;
    return CUDA_SUCCESS;
}
WEAK void streams_drop_all(struct context *ctx) {
    (void)ctx;
}
