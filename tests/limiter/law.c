/* Rate limiters: none, gpushare's (shim/limiter/throttle.c, unchanged), the common one of other
 * projects, and an oracle. */
#include <string.h>

#include "try.h"
#include "vt.h"

#define MARK_NS 1500 /* host time of a cuEventRecord */

static uint64_t env_now(void *arg) {
    return ((struct host *)arg)->clock_ns;
}

static int env_mark(void *arg, uint32_t stream) {
    struct host *host = arg;
    struct gpu *gpu = host->gpu;
    struct context *c = gpu->context[host->context];
    int event = (int)(c->next_event++ % EVENTS);
    c->stamp[event] = 0;
    gpu_push(gpu, host->context,
             stream == GS_LOOKS ? (host->world->one_queue ? host->stream : STREAMS) : stream,
             (double)gpu->bubble_ns, event);
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

static unsigned env_peers(void *arg, struct gs_peer *out, unsigned max) {
    struct host *host = arg;
    struct world *world = host->world;
    unsigned n = 0;
    for (int i = 0; i < world->hosts; i++) {
        const struct tenant *t = &world->tenant[world->host[i]->tenant];
        struct gs_peer peer = {.container = (uint32_t)world->host[i]->tenant, .granted = t->limit};
        if (i == host->context || world->host[i]->gpu != host->gpu)
            continue;
        for (unsigned k = 0; (peer.activity = told(world, i, k)) && n < max; k++)
            out[n++] = peer;
    }
    return n;
}

static bool env_idle(void *arg, uint32_t stream) {
    const struct host *host = arg;
    return gpu_empty(host->gpu, host->context, stream);
}

static uint32_t env_others(void *arg) {
    const struct host *host = arg;
    uint64_t ppm = 0;
    for (int i = 0; i < host->world->tenants; i++)
        ppm += i == host->tenant ? 0 : gs_throttle_may_have(&host->world->tenant[i].limit);
    return ppm < 1000000 ? (uint32_t)ppm : 1000000;
}

const char *const claim_name[CLAIMS] = {"none", "holds", "long", "first", "garbage", "own",
                                        "late", "soon",  "cuts", "nicks", "blinks",  "flickers"};

/* holds: one turn after the other, each no longer than granted; long: a turn without end; first: it
 * waits since ever and takes no turn; garbage: random words. own: a process of the container writes
 * a new turn for it at each launch. late: short turns with work that outlasts each, and nonsense in
 * between. soon: it waits and always looks again soon. cuts: it always has a burst. nicks: one that
 * is over at once. blinks, flickers: it waits since ever and takes no turn, but seems to have one
 * at least at each third look, or for moments. */
static struct gs_compute_turn claimed(struct host *host, int tenant,
                                      const struct gs_compute_turn *real) {
    uint64_t now = host->clock_ns, turn = 4 * MS;
    struct gs_compute_turn claim = *real;
    switch (host->world->tenant[tenant].claim) {
    case CLAIM_HOLDS:
        claim.from_ns = now / turn * turn;
        claim.until_ns = claim.work_until_ns = claim.from_ns + turn;
        break;
    case CLAIM_LONG:
        claim.from_ns = 1;
        claim.until_ns = UINT64_MAX / 2;
        claim.work_until_ns = UINT64_MAX; /* which overflows if something is added */
        break;
    case CLAIM_FIRST:
        claim.until_ns = claim.arrival_ns = 0;
        claim.wants_until_ns = now + 2 * MS;
        break;
    case CLAIM_LATE:
        claim.from_ns = now / (2 * MS) * (2 * MS);
        claim.until_ns = now / (100 * US) % 20 ? claim.from_ns + 2 * MS : claim.from_ns - MS;
        claim.work_until_ns = claim.from_ns + 27 * MS;
        break;
    case CLAIM_SOON:
        claim.until_ns = claim.arrival_ns = 0;
        claim.wants_until_ns = now + 1400 * US;
        break;
    case CLAIM_NICKS:
        claim.cuts_in_until_ns = now + US;
        break;
    case CLAIM_BLINKS:
    case CLAIM_FLICKERS:
        turn = host->world->tenant[tenant].claim == CLAIM_BLINKS ? 1050 * US : 600 * US;
        claim.from_ns = now - US;
        claim.until_ns = claim.work_until_ns = now % turn < turn / 3 ? now + 20 * US : 0;
        claim.arrival_ns = 0;
        claim.wants_until_ns = now + (turn == 600 * US ? 1200 * US : 1100 * US);
        break;
    case CLAIM_CUTS:
        claim.cuts_in_until_ns = now + 5 * MS;
        break;
    case CLAIM_GARBAGE:
        claim.cuts_in_until_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        claim.from_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        claim.until_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        claim.work_until_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        claim.wants_until_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        claim.arrival_ns = (uint64_t)((double)now * 2 * uniform(&host->rng));
        break;
    default:
        break;
    }
    return claim;
}

static unsigned env_turns(void *arg, struct gs_turn_of *out, unsigned max) {
    struct host *host = arg;
    struct world *world = host->world;
    unsigned n = 0;
    for (int i = 0; i < world->tenants && n < max; i++)
        if (i != host->tenant)
            out[n++] =
                (struct gs_turn_of){claimed(host, i, &world->turn[host->gpu - world->gpu][i]),
                                    (uint32_t)i, world->tenant[i].limit};
    return n;
}

void set_env(struct world *world) {
    world->env = (struct gs_throttle_env){NULL,     env_now,    env_mark,  env_done, env_peers,
                                          env_idle, env_others, env_turns, NULL};
}

/* The oracle: the same credit as gpushare's limiter, but from the device's own ledger, and a
 * launch is paid in full in advance. */
static uint64_t ask_oracle(struct host *host) {
    const struct world *world = host->world;
    const struct gpu *gpu = host->gpu;
    struct oracle *o = &host->world->oracle[gpu - world->gpu][host->tenant];
    double share = world->tenant[host->tenant].limit.ppm / 1e6, left = 0;
    double most = world->burst_ms * 1e6 * share;
    for (int i = 0; i < world->hosts; i++)
        if (world->host[i]->tenant == host->tenant && world->host[i]->gpu == gpu)
            left += gpu->context[i]->left_ns / gpu->context[i]->width;
    if (o->at_ns) {
        o->credit_ns += (double)(gpu->now_ns - o->at_ns) * share;
        o->credit_ns -= (double)(gpu->held_ns[host->tenant] - o->held_ns);
    }
    o->at_ns = gpu->now_ns;
    o->held_ns = gpu->held_ns[host->tenant];
    o->credit_ns = o->credit_ns < most + left ? o->credit_ns : most + left;
    double owed = left - o->credit_ns;
    return owed < 0 ? 0 : host->clock_ns + 1000 + (uint64_t)(owed / share);
}

uint64_t may_launch(struct host *host) {
    struct gs_throttle_stream *stream = &host->streams[host->stream];
    struct gs_predictor *function = &host->predictor[host->function];
    enum law law = host->world->tenant[host->tenant].law;
    if (law == LAW_NONE)
        return 0;
    if (law == LAW_ORACLE)
        return ask_oracle(host);
    /* Around a capture everything cached is forgotten. */
    bool forgotten = host->throttle.capturing || host->throttle.open.blind;
    if (!forgotten && gs_throttle_try(&host->throttle, stream, function))
        return 0;
    host->slow++;
    if (host->world->tenant[host->tenant].claim == CLAIM_OWN) {
        struct gs_compute_turn *own = host->throttle.turn;
        own->from_ns = host->clock_ns;
        own->until_ns = host->clock_ns + 1000 * MS;
    }
    return gs_throttle_slow(&host->throttle, stream, function);
}
