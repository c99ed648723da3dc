/* Captures. While one is open, the shim records and queries no event, since even a query in another
 * thread can invalidate it. A capture ends when its first stream stops capturing, for whatever
 * reason. An open capture would leave launches of other streams without a limit. So the shim waits
 * only for a limited time. Then it records markers again, in threads in relaxed mode, which does
 * not invalidate captures (cuThreadExchangeStreamCaptureMode), but not in a legacy stream that a
 * capture could see. */
#include "accounting/compute_parts.h"
#include "launch.h"

/* first stream of a capture -> entry with its context */
static struct gs_map origins;
static _Thread_local char this_thread;

static uint64_t key_of(CUstream stream) {
    return stream == CU_STREAM_PER_THREAD ? (uint64_t)(uintptr_t)&this_thread
                                          : (uint64_t)(uintptr_t)stream;
}

static CUresult note_begin(CUresult result, CUstream stream) {
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

static void note_end(CUstream stream) {
    struct gs_entry entry;
    if (!gs_slot() || !gs_map_take(&origins, key_of(stream), &entry))
        return;
    gs_capture_closed();
    gs_compute_forget();
}

/* Some errors do not end a capture: ask whether the stream still captures. */
static CUresult end_capture(CUresult result, CUstream stream) {
    if (result == CUDA_SUCCESS || !gs_compute_is_capturing(stream))
        note_end(stream);
    return result;
}

void gs_captures_stream_gone(CUstream stream) {
    if (atomic_load(&gs_captures))
        note_end(stream);
}

static bool is_in_context(uint64_t key, const struct gs_entry *entry, void *arg) {
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
        gs_map_take_all(&origins, is_in_context, dropped, context);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream hStream) {
    GS_NEED(real, cuStreamBeginCapture);
    return note_begin(real(hStream), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_ptsz(CUstream hStream) {
    GS_NEED(real, cuStreamBeginCapture_ptsz);
    return note_begin(real(hStream), gs_per_thread(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCapture_v2);
    return note_begin(real(hStream, mode), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream hStream,
                                                        CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCapture_v2_ptsz);
    return note_begin(real(hStream, mode), gs_per_thread(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph graph,
                                                       const CUgraphNode *after,
                                                       const CUgraphEdgeData *edges, size_t n,
                                                       CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCaptureToGraph);
    return note_begin(real(hStream, graph, after, edges, n, mode), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph graph,
                                                            const CUgraphNode *after,
                                                            const CUgraphEdgeData *edges, size_t n,
                                                            CUstreamCaptureMode mode) {
    GS_NEED(real, cuStreamBeginCaptureToGraph_ptsz);
    return note_begin(real(hStream, graph, after, edges, n, mode), gs_per_thread(hStream));
}

/* Types that the first headers of CUDA 13 lack. */
struct CUstreamCigCaptureParams_st;
#if CUDA_VERSION < 13030
typedef void *CUgraphRecaptureCallback;
#endif

#define GS_RECAPTURE(name, stream_of) \
    GS_EXPORT CUresult CUDAAPI name(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, \
                                    CUgraphRecaptureCallback callback, void *data) { \
        GS_NEED(real, name); \
        return note_begin(real(stream, mode, graph, callback, data), stream_of); \
    }
GS_RECAPTURE(cuStreamBeginRecaptureToGraph, stream)
GS_RECAPTURE(cuStreamBeginRecaptureToGraph_ptsz, gs_per_thread(stream))

/* Into a command list of a graphics library, which runs the work: it is not limited then. */
#define GS_CIG(begin, end, stream_of) \
    GS_EXPORT CUresult CUDAAPI begin(CUstream stream, \
                                     struct CUstreamCigCaptureParams_st *params) { \
        GS_NEED(real, begin); \
        return note_begin(real(stream, params), stream_of); \
    } \
    GS_EXPORT CUresult CUDAAPI end(CUstream stream) { \
        GS_NEED(real, end); \
        return end_capture(real(stream), stream_of); \
    }
GS_CIG(cuStreamBeginCaptureToCig, cuStreamEndCaptureToCig, stream)
GS_CIG(cuStreamBeginCaptureToCig_ptsz, cuStreamEndCaptureToCig_ptsz, gs_per_thread(stream))

GS_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
    GS_NEED(real, cuStreamEndCapture);
    return end_capture(real(hStream, phGraph), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph) {
    GS_NEED(real, cuStreamEndCapture_ptsz);
    return end_capture(real(hStream, phGraph), gs_per_thread(hStream));
}
