/* Count open captures, and limit the time for which they keep launches from being measured. */
#include "capture_timeout.h"
#include "compute_parts.h"

_Atomic uint32_t gs_captures;

static struct gs_capture_timeout timeout;

void gs_capture_opened(void) {
    uint64_t now = gs_compute_now();
    if (!atomic_fetch_add(&gs_captures, 1))
        gs_capture_timeout_begin(&timeout, now);
}

void gs_capture_closed(void) {
    gs_capture_timeout_end(&timeout, gs_compute_now());
    atomic_fetch_sub(&gs_captures, 1);
}

bool gs_captures_stop_markers(void) {
    return atomic_load(&gs_captures) && gs_capture_timed_out(&timeout, gs_compute_now());
}

/* A launch into a capturing stream does not run now; the launch of its graph will count. Only the
 * driver knows every capture: a call that the shim does not know may have begun it. For the legacy
 * stream it returns an error while a stream captures that would have to wait for it. */
bool gs_compute_is_capturing(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!GS_REAL(cuStreamIsCapturing))
        return false;
    CUresult result = GS_REAL(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
           (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}
