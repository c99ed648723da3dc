/* The three laws: none, ours (shim/throttle.c, as it is), and the one that is common in the field.
 */
#include <string.h>

#include "vt.h"

#define MARK_NS 1500 /* host time of a cuEventRecord */
#define TICK (120 * MS)

static uint64_t env_now(void *arg) {
    return ((struct host *)arg)->clock_ns;
}

static int env_mark(void *arg, uint32_t stream) {
    struct host *host = arg;
    struct gpu *gpu = host->gpu;
    struct context *c = gpu->context[host->context];
    int event = (int)(c->next_event++ % EVENTS);
    c->stamp[event] = 0;
    gpu_push(gpu, host->context, stream, (double)gpu->bubble_ns, event);
    host->clock_ns += MARK_NS;
    host->marks++;
    host->forbidden += host->throttle.capturing;
    return event;
}

static bool env_done(void *arg, int event, uint64_t *stamp_ns) {
    struct host *host = arg;
    host->forbidden += host->throttle.capturing;
    *stamp_ns = host->gpu->context[host->context]->stamp[event];
    return *stamp_ns != 0;
}

static const struct gs_activity *told(struct world *world, int context) {
    struct gs_activity *lie = &world->lie[context];
    struct gs_page *page = world->page[context];
    uint64_t now = world->host[context]->gpu->now_ns;
    enum lie kind = world->tenant[world->host[context]->tenant].lie;
    if (kind == LIE_NONE)
        return &page->buffer[atomic_load(&page->index) & 1];
    memset(lie, kind == LIE_GARBAGE ? 0xa5 : 0, sizeof(*lie));
    if (kind == LIE_BUSY) {
        lie->busy_from_ns = 1;
        lie->busy_until_ns = UINT64_MAX;
        lie->horizon_ns = now;
        lie->switch_ns = 490 * US;
        lie->n = lie->last = 1;
        lie->run[1] = (struct gs_run){now > 100 * MS ? now - 100 * MS : 1, now, 100 * MS};
    }
    if (kind == LIE_RUNS) { /* short ones all the time, for a friend who is charged less */
        lie->horizon_ns = now;
        lie->busy_until_ns = now + MS;
        lie->n = GS_RUNS;
        lie->last = GS_RUNS - 1;
        for (uint64_t i = 0; i < GS_RUNS && now > 100 * MS; i++) {
            uint64_t start = (now / (100 * US) - GS_RUNS + i) * 100 * US;
            lie->run[i] = (struct gs_run){start, start + 60 * US, 60 * US};
        }
    }
    return lie;
}

static unsigned env_peers(void *arg, struct gs_peer *out, unsigned max) {
    struct host *host = arg;
    struct world *world = host->world;
    unsigned n = 0;
    for (int i = 0; i < world->hosts && n < max; i++)
        if (i != host->context && world->host[i]->gpu == host->gpu)
            out[n++] = (struct gs_peer){told(world, i), (uint32_t)world->host[i]->tenant};
    return n;
}

void set_env(struct world *world) {
    world->env = (struct gs_throttle_env){NULL, env_now, env_mark, env_done, env_peers};
}

void classic_tick(struct host *host) {
    struct classic *classic = &host->classic;
    const struct gpu *gpu = host->gpu;
    double share = host->world->tenant[host->tenant].limit.ppm / 1e6;
    while (host->clock_ns >= classic->tick_ns) {
        double used = (double)(gpu->held_ns[host->tenant] - classic->held_ns) / (double)TICK;
        double off = (share - used) / share;
        off = off > 1 ? 1 : off < -0.5 ? -0.5 : off;
        if (classic->refill <= 0)
            classic->refill = 10;
        classic->refill *= 1 + 0.5 * off;
        classic->refill = classic->refill < 1 ? 1 : classic->refill;
        classic->tokens = classic->tokens > 0 ? 0 : classic->tokens;
        classic->tokens += classic->refill;
        classic->held_ns = gpu->held_ns[host->tenant];
        classic->tick_ns += TICK;
    }
}

uint64_t may_launch(struct host *host) {
    struct gs_throttle_stream *stream = &host->streams[host->stream];
    struct gs_predictor *function = &host->predictor[host->function];
    enum law law = host->world->tenant[host->tenant].law;
    if (law == LAW_NONE)
        return 0;
    if (law == LAW_CLASSIC) {
        classic_tick(host);
        host->classic.tokens -= host->classic.tokens > 0;
        return host->classic.tokens > 0 ? 0 : host->classic.tick_ns;
    }
    /* Around a capture all that was remembered is forgotten. */
    bool forgotten = host->throttle.capturing || host->throttle.open.blind;
    if (!forgotten && gs_throttle_try(&host->throttle, stream, function))
        return 0;
    host->slow++;
    return gs_throttle_slow(&host->throttle, stream, function);
}
