/* Captures: while one is open nothing is recorded or asked, since even a query in another thread
 * can break it. One ends when its first stream does not capture any more, however that came.
 * One that stays open would leave the launches of other streams without a limit. So that is for a
 * while only; then markers are recorded again, by threads in relaxed mode, which breaks none
 * (cuThreadExchangeStreamCaptureMode), but into no legacy stream that a capture could see. */
#include "accounting/compute_parts.h"
#include "launch.h"

/* first stream -> nothing */
static struct gs_map origins;
static _Thread_local char this_thread;

static uint64_t key_of(CUstream stream) {
    return stream == CU_STREAM_PER_THREAD ? (uint64_t)(uintptr_t)&this_thread
                                          : (uint64_t)(uintptr_t)stream;
}

static CUresult begun(CUresult result, CUstream stream) {
    struct gs_here here = {0};
    if (result != CUDA_SUCCESS || !gs_slot())
        return result;
    gs_here_of_stream(stream, &here);
    struct gs_entry entry = {.context = (uint64_t)(uintptr_t)here.context};
    if (gs_map_put(&origins, key_of(stream), &entry))
        gs_capture_opened();
    gs_compute_forget();
    return result;
}

static void ended(CUstream stream) {
    struct gs_entry entry;
    if (!gs_slot() || !gs_map_take(&origins, key_of(stream), &entry))
        return;
    gs_capture_closed();
    gs_compute_forget();
}

/* Not every error ends a capture: the stream says. */
static CUresult end(CUresult result, CUstream stream) {
    if (result == CUDA_SUCCESS || !gs_compute_is_capturing(stream))
        ended(stream);
    return result;
}

void gs_captures_stream_gone(CUstream stream) {
    if (atomic_load(&gs_captures))
        ended(stream);
}

static bool is_in(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key;
    return entry->context == (uint64_t)(uintptr_t)arg;
}

static void dropped(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)entry, (void)arg;
    gs_capture_closed();
    gs_compute_forget();
}

void gs_captures_context_gone(CUcontext context) {
    if (atomic_load(&gs_captures))
        gs_map_take_all(&origins, is_in, dropped, context);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream hStream) {
    GS_NEED(real, cuStreamBeginCapture);
    return begun(real(hStream), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_ptsz(CUstream hStream) {
    GS_NEED(real, cuStreamBeginCapture_ptsz);
    return begun(real(hStream), gs_per_thread(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCapture_v2);
    return begun(real(hStream, mode), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream hStream,
                                                        CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCapture_v2_ptsz);
    return begun(real(hStream, mode), gs_per_thread(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph graph,
                                                       const CUgraphNode *after,
                                                       const CUgraphEdgeData *edges, size_t n,
                                                       CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCaptureToGraph);
    return begun(real(hStream, graph, after, edges, n, mode), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph graph,
                                                            const CUgraphNode *after,
                                                            const CUgraphEdgeData *edges, size_t n,
                                                            CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCaptureToGraph_ptsz);
    return begun(real(hStream, graph, after, edges, n, mode), gs_per_thread(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
    GS_NEED(real, cuStreamEndCapture);
    return end(real(hStream, phGraph), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph) {
    GS_NEED(real, cuStreamEndCapture_ptsz);
    return end(real(hStream, phGraph), gs_per_thread(hStream));
}
