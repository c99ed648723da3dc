/* Simulates the device's time. The state is advanced lazily: each process that reads it first
 * computes what happened until now (CLOCK_MONOTONIC). Contexts with work run in time slices, as
 * on hardware: a running kernel is preempted at the end of a slice. A switch takes time, which
 * counts for the context that is switched to. No process spins to simulate the GPU. */
#include "device.h"

#include <string.h>

/* The scheduler's copy of a queue's work. */
struct load {
    uint64_t left_ns;
    bool spinning;
};

enum stretch_kind { STRETCH_IDLE, STRETCH_SWITCH, STRETCH_WORK, STRETCH_SPIN };

/* A period of device time in which one queue runs or the device is idle. */
struct stretch {
    enum stretch_kind kind;
    uint32_t queue; /* index of the queue */
    uint64_t ns;
};

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t next_random(struct sim_schedule *schedule) { /* splitmix64 */
    uint64_t z = (schedule->random += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t random_between(struct sim_schedule *schedule, uint64_t low, uint64_t high) {
    return high > low ? low + next_random(schedule) % (high - low) : low;
}

static bool has_work(const struct load *load) {
    return load->left_ns || load->spinning;
}

/* Gives the device to the next queue with work in round-robin order. */
static bool start_next_slice(const struct sim_config *c, struct sim_schedule *schedule,
                             const struct load *load, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (schedule->last + i) % n;
        if (!has_work(&load[at]))
            continue;
        uint64_t noise_ns = c->slice_ns / 1000 * c->slice_noise_ppm / 1000;
        if (schedule->last && schedule->last != at + 1)
            schedule->switch_left_ns =
                random_between(schedule, c->switch_low_ns, c->switch_high_ns);
        schedule->slice_left_ns =
            random_between(schedule, c->slice_ns - noise_ns, c->slice_ns + noise_ns + 1);
        schedule->last = at + 1;
        schedule->held = 1;
        return true;
    }
    return false;
}

/* Returns the next period, at most `limit_ns` long. Changes the schedule, not the load. */
static struct stretch next_stretch(const struct sim_config *c, struct sim_schedule *schedule,
                                   const struct load *load, uint32_t n, uint64_t limit_ns) {
    if (schedule->held && (!has_work(&load[schedule->last - 1]) ||
                           (!schedule->slice_left_ns && !schedule->switch_left_ns)))
        schedule->held = 0;
    if (!schedule->held && !start_next_slice(c, schedule, load, n))
        return (struct stretch){STRETCH_IDLE, 0, limit_ns};
    struct stretch s = {.queue = schedule->last - 1};
    if (schedule->switch_left_ns) {
        s.kind = STRETCH_SWITCH;
        s.ns = least(schedule->switch_left_ns, limit_ns);
        schedule->switch_left_ns -= s.ns;
        return s;
    }
    uint64_t left_ns = load[s.queue].left_ns;
    s.kind = left_ns ? STRETCH_WORK : STRETCH_SPIN;
    s.ns = least(limit_ns, schedule->slice_left_ns);
    if (left_ns)
        s.ns = least(s.ns, left_ns);
    schedule->slice_left_ns -= s.ns;
    return s;
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

static void note_history(struct sim_bin *bins, uint64_t at_ns, struct stretch s) {
    while (s.ns) {
        uint64_t number = at_ns / SIM_BIN_NS;
        uint64_t ns = least(s.ns, (number + 1) * SIM_BIN_NS - at_ns);
        struct sim_bin *bin = &bins[number % SIM_BINS];
        if (bin->number != (uint32_t)number)
            *bin = (struct sim_bin){.number = (uint32_t)number};
        bin->busy_ns += (uint32_t)ns;
        if (s.kind == STRETCH_SWITCH)
            bin->switch_ns += (uint32_t)ns;
        at_ns += ns;
        s.ns -= ns;
    }
}

static void account(struct sim_state *s, struct stretch stretch) {
    struct sim_queue *q = &s->queue[stretch.queue];
    struct sim_client *client = &s->client[q->client - 1];
    struct sim_group *group = &s->group[client->group];
    uint64_t ns = stretch.ns;
    s->busy_ns += ns;
    client->busy_ns += ns;
    group->busy_ns += ns;
    note_history(s->history[client->group], s->device_ns, stretch);
    if (stretch.kind == STRETCH_SWITCH) {
        client->switch_ns += ns;
        group->switch_ns += ns;
        return;
    }
    note_slice(q, s->device_ns, ns);
    q->attained_ns += ns;
    if (stretch.kind == STRETCH_SPIN) {
        q->submitted_ns += ns;
        return;
    }
    client->work_ns += ns;
    group->work_ns += ns;
}

static uint32_t read_load(const struct sim_state *s, struct load *load) {
    for (uint32_t i = 0; i < s->queues_high; i++) {
        const struct sim_queue *q = &s->queue[i];
        load[i] = (struct load){0};
        if (q->client)
            load[i] = (struct load){q->submitted_ns - q->attained_ns, q->spinning != 0};
    }
    return s->queues_high;
}

/* Shortest interval between two checks for dead clients, whose work must not run on for ever. */
#define REAP_INTERVAL_NS 1000000u

void sim_advance(struct sim_device *device, uint64_t now_ns) {
    struct sim_state *s = device->state;
    struct load load[SIM_MAX_QUEUES];
    if (s->schedule.last && now_ns > s->last_reap_ns + REAP_INTERVAL_NS)
        sim_reap(device);
    uint32_t n = s->device_ns < now_ns ? read_load(s, load) : 0;
    while (s->device_ns < now_ns) {
        struct stretch stretch =
            next_stretch(&s->config, &s->schedule, load, n, now_ns - s->device_ns);
        if (stretch.kind != STRETCH_IDLE)
            account(s, stretch);
        if (stretch.kind == STRETCH_WORK)
            load[stretch.queue].left_ns -= stretch.ns;
        s->device_ns += stretch.ns;
    }
}

/* How far sim_foresee computes ahead, in periods and in time. */
#define FORESEEN_STRETCHES 256
#define FORESEEN_NS 100000000u

uint64_t sim_foresee(const struct sim_device *device, uint32_t queue, uint64_t end_ns) {
    const struct sim_state *s = device->state;
    struct sim_schedule schedule = s->schedule;
    struct load load[SIM_MAX_QUEUES];
    uint32_t n = read_load(s, load);
    uint64_t attained_ns = s->queue[queue].attained_ns, at_ns = s->device_ns;
    uint64_t last_ns = at_ns + FORESEEN_NS;
    for (int i = 0; i < FORESEEN_STRETCHES && attained_ns < end_ns && at_ns < last_ns; i++) {
        struct stretch stretch = next_stretch(&s->config, &schedule, load, n, last_ns - at_ns);
        if (stretch.kind == STRETCH_WORK) {
            if (stretch.queue == queue && stretch.ns >= end_ns - attained_ns)
                return at_ns + (end_ns - attained_ns);
            load[stretch.queue].left_ns -= stretch.ns;
        }
        if (stretch.queue == queue &&
            (stretch.kind == STRETCH_WORK || stretch.kind == STRETCH_SPIN))
            attained_ns += stretch.ns;
        at_ns += stretch.ns;
    }
    return at_ns;
}
