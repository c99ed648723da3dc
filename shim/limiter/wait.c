/* Streams that wait for something other than work of this context: a host function, a value in
 * memory, another context. One marker goes before the wait and one after it, so that no container
 * is charged for the time between them. */
#include "throttle_parts.h"

/* Return whether launches that came after `segment` may have run before it. */
static bool overtook(struct gs_throttle *t, const struct gs_segment *segment,
                     struct gs_segment *later) {
    if (!later->many && later->stream == segment->stream)
        return false;
    if (later->waited && !later->many)
        return gs_throttle_started(t, later) && later->start_ns < segment->start_ns;
    return later->opened_ns < segment->start_ns;
}

/* Intervals are charged in launch order, each from the end of the previous one. So work of other
 * streams during the wait is in no other interval, and the whole wait counts as busy from the first
 * of those launches on. Before that launch it was the limiter that delayed it. */
void gs_throttle_waited(struct gs_throttle *t, struct gs_segment *segment) {
    uint64_t first_ns = segment->many ? 0 : UINT64_MAX;
    if (!segment->waited)
        return;
    if (t->open.launches && overtook(t, segment, &t->open))
        first_ns = min64(first_ns, t->open.opened_ns);
    for (uint32_t i = t->finished + 1; i != t->marked; i++)
        if (overtook(t, segment, &t->segment[i % GS_SEGMENTS]))
            first_ns = min64(first_ns, t->segment[i % GS_SEGMENTS].opened_ns);
    if (first_ns == UINT64_MAX)
        return;
    segment->waited = false;
    segment->start_event = -1;
    segment->start_ns = first_ns;
}
