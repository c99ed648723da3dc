/* Dispatches an API call's work to the stream, or to the graph that the stream is capturing, and
 * performs the work's effect on memory. */
#include "work.h"

#include <string.h>

#define BYTES_PER_US 12000u /* copies: 12 GB/s */

uint64_t copy_duration_ns(uint64_t bytes) {
    return 1000 + bytes * 1000 / BYTES_PER_US;
}

void run_copy(const struct copy *c) {
    for (size_t z = 0; z < c->depth; z++) {
        char *dst = (char *)c->dst + z * c->dst_slice;
        const char *src = (const char *)c->src + z * c->src_slice;
        if (c->dst_pitch == c->width && c->src_pitch == c->width) {
            memmove(dst, src, c->width * c->height);
            continue;
        }
        for (size_t y = 0; y < c->height; y++)
            memmove(dst + y * c->dst_pitch, src + y * c->src_pitch, c->width);
    }
}

void run_set(const struct set *s) {
    for (size_t y = 0; y < s->height; y++) {
        char *row = (char *)s->dst + y * s->pitch;
        if (s->element_bytes == 1) {
            memset(row, (int)s->value, s->width);
        } else {
            for (size_t x = 0; x < s->width; x++)
                memcpy(row + x * s->element_bytes, &s->value, s->element_bytes);
        }
    }
}

void run_value_write(const struct value *v) {
    if (v->wide)
        __atomic_store_n((uint64_t *)v->address, v->value, __ATOMIC_SEQ_CST);
    else
        __atomic_store_n((uint32_t *)v->address, (uint32_t)v->value, __ATOMIC_SEQ_CST);
}

bool value_holds(const struct value *v) {
    uint64_t now = v->wide ? __atomic_load_n((uint64_t *)v->address, __ATOMIC_SEQ_CST)
                           : __atomic_load_n((uint32_t *)v->address, __ATOMIC_SEQ_CST);
    switch (v->flags & 3u) {
    case CU_STREAM_WAIT_VALUE_GEQ:
        return v->wide ? (int64_t)(now - v->value) >= 0
                       : (int32_t)((uint32_t)now - (uint32_t)v->value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
        return now == v->value;
    case CU_STREAM_WAIT_VALUE_AND:
        return (now & v->value) != 0;
    default:
        return v->wide ? (now | v->value) != UINT64_MAX
                       : ((uint32_t)now | (uint32_t)v->value) != UINT32_MAX;
    }
}

CUresult dispatch_on(struct stream *s, const struct work *work) {
    CHECK(capture_allows_legacy(s), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    return s->capture ? capture_work(s, work, NULL) : engine_add(s, work, NULL);
}

CUresult dispatch(CUstream handle, const struct work *work, bool synchronous) {
    ENTER();
    struct context *ctx = current_context();
    struct stream *s = stream_of(ctx, handle);
    CHECK(s,
          handle > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    CHECK(!synchronous || capture_allows_wait(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult result = dispatch_on(s, work);
    if (result == CUDA_SUCCESS && synchronous)
        result = engine_wait_stream(s);
    return result;
}
