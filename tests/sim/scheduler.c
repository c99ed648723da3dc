/* Device time: a lazily advanced function of CLOCK_MONOTONIC. Whoever looks brings the device up to
 * now: contexts with work take turns in slices, a switch between them costs. Nobody burns CPU as
 * the GPU. */
#include "device.h"

#define QUEUE_OF(s, running) (&(s)->queue[(running)-1])

static bool has_work(const struct sim_queue *q) {
    return q->client && q->attained_ns < q->submitted_ns;
}

/* The next queue with work after the running one, which itself comes last. 0: none. */
static uint32_t next_queue(const struct sim_state *s) {
    for (uint32_t i = 0; i < s->queues_high; i++) {
        uint32_t at = (s->running + i) % s->queues_high;
        if (has_work(&s->queue[at]))
            return at + 1;
    }
    return 0;
}

static void note_slice(struct sim_queue *q, uint64_t start_ns, uint64_t run_ns) {
    struct sim_slice *last = &q->slice[(q->n_slices + SIM_QUEUE_SLICES - 1) % SIM_QUEUE_SLICES];
    if (q->n_slices && last->end_ns == start_ns) {
        last->end_ns += run_ns;
        return;
    }
    q->slice[q->n_slices++ % SIM_QUEUE_SLICES] = (struct sim_slice){
        .start_ns = start_ns, .end_ns = start_ns + run_ns, .attained_ns = q->attained_ns};
}

static void switch_to(struct sim_state *s, uint32_t queue) {
    if (s->running && queue != s->running)
        s->switch_left_ns = s->config.switch_ns;
    s->running = queue;
    s->slice_used_ns = 0;
}

/* One stretch of at most `left_ns`: a switch, or a part of a slice. Returns its length. */
static uint64_t step(struct sim_state *s, uint64_t left_ns) {
    if (s->switch_left_ns) {
        uint64_t run = s->switch_left_ns < left_ns ? s->switch_left_ns : left_ns;
        s->switch_left_ns -= run;
        return run;
    }
    struct sim_queue *q = QUEUE_OF(s, s->running);
    uint64_t run = q->submitted_ns - q->attained_ns;
    if (run > s->config.slice_ns - s->slice_used_ns)
        run = s->config.slice_ns - s->slice_used_ns;
    if (run > left_ns)
        run = left_ns;
    note_slice(q, s->device_ns, run);
    q->attained_ns += run;
    s->client[q->client - 1].busy_ns += run;
    s->slice_used_ns += run;
    return run;
}

/* Work of the dead must not go on for ever; looking for them at most this often is cheap enough. */
#define LOOK_FOR_DEAD_NS 1000000u

/* Call locked. */
void sim_advance(struct sim_device *device, uint64_t now_ns) {
    struct sim_state *s = device->state;
    if (s->running && now_ns > s->last_reap_ns + LOOK_FOR_DEAD_NS)
        sim_reap(device);
    while (s->device_ns < now_ns) {
        bool stay = s->running && has_work(QUEUE_OF(s, s->running)) &&
                    s->slice_used_ns < s->config.slice_ns;
        if (!stay) {
            uint32_t next = s->queues_high ? next_queue(s) : 0;
            if (!next) {
                s->device_ns = now_ns;
                return;
            }
            switch_to(s, next);
        }
        uint64_t run = step(s, now_ns - s->device_ns);
        s->device_ns += run;
        s->busy_ns += run;
    }
}
