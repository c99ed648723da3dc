/* Streams and events: the driver takes device memory for their channels and timestamps, about 2 MiB
 * for a stream on an H100. They are never refused for it; the driver's count charges it. */
#include "launch.h"
#include "memory/memory.h"

#define STREAM_BYTES (UINT64_C(2) << 20) /* charged where the driver has no count */
#define EVENTS 64u                       /* events whose memory is worth a comparison */
#define EVENT_BYTES 4096u

static void created(CUstream stream, const struct gs_here *here) {
    struct gs_entry entry = {.context = gs_context_key(here->context),
                             .extra = gs_overhead_number(here->dev),
                             .dev = here->dev,
                             .kind = GS_KIND_WHOLE};
    entry.bytes = gs_overhead_grew(here->dev, STREAM_BYTES);
    if (!gs_map_put(&gs_streams, (uint64_t)(uintptr_t)stream, &entry))
        gs_release(here->dev, entry.bytes);
}

static CUresult note(CUresult result, const CUstream *stream) {
    struct gs_here here;
    if (result == CUDA_SUCCESS && stream && gs_slot() && gs_here(&here))
        created(*stream, &here);
    return result;
}

void gs_stream_gone(CUstream stream) {
    struct gs_entry entry;
    gs_captures_stream_gone(stream);
    if (!gs_slot() || !gs_map_take(&gs_streams, (uint64_t)(uintptr_t)stream, &entry))
        return;
    gs_release(entry.dev, entry.bytes);
    gs_overhead_undone(entry.dev, entry.extra, STREAM_BYTES);
}

GS_EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    GS_NEED(real, cuStreamCreate);
    return note(real(phStream, Flags), phStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags,
                                                      int priority) {
    GS_NEED(real, cuStreamCreateWithPriority);
    return note(real(phStream, flags, priority), phStream);
}

GS_EXPORT CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx,
                                                  unsigned int flags, int priority) {
    GS_NEED(real, cuGreenCtxStreamCreate);
    return note(real(phStream, greenCtx, flags, priority), phStream);
}

/* Programs make and destroy events all the time, out of memory that the driver keeps. */
GS_EXPORT CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    GS_NEED(real, cuEventCreate);
    static _Atomic uint32_t n;
    struct gs_here here;
    CUresult result = real(phEvent, Flags);
    if (result == CUDA_SUCCESS &&
        atomic_fetch_add_explicit(&n, 1, memory_order_relaxed) % EVENTS == 0 && gs_slot() &&
        gs_here(&here))
        gs_overhead_grew(here.dev, EVENTS * EVENT_BYTES);
    return result;
}
