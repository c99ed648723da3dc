/* Fills the activity pages that a container can write: with true or with false activity. */
#include <string.h>

#include "vt.h"

const char *const spoof_name[SPOOFS] = {"none",     "busy",  "idle",    "garbage",
                                        "runs",     "crowd", "future",  "past",
                                        "negative", "slow",  "careful", "corpus"};

/* Fills in short runs up to `to`, each in a period of `length` with `run` of its own. */
static void runs(struct gs_activity *a, uint64_t to, uint64_t length, uint64_t run) {
    a->n = GS_RUNS;
    a->last = GS_RUNS - 1;
    for (uint64_t i = 0; i < GS_RUNS && to > 100 * MS; i++) {
        uint64_t start = (to / length - GS_RUNS + i) * length;
        a->run[i] = (struct gs_run){start, start + run, run};
    }
}

/* A random word like those in the fuzzing corpus: extremes, times near now, any value. */
static uint64_t corpus_word(struct world *world, uint64_t now) {
    static const uint64_t extreme[] = {0,         1,          2,          UINT64_MAX,
                                       INT64_MAX, 1ull << 63, 1ull << 62, GS_RUNS};
    uint8_t byte[3];
    for (unsigned i = 0; i < 3; i++)
        byte[i] = world->corpus[world->corpus_at++ % world->corpus_size];
    if (byte[0] < 64)
        return extreme[byte[0] % 8];
    int64_t near = (int64_t)(int16_t)(byte[1] | byte[2] << 8) * (byte[0] < 128 ? 100 : 10000);
    return byte[0] < 224 ? now + (uint64_t)near : (uint64_t)near;
}

static void spoof_activity(struct world *world, struct gs_activity *a, enum spoof kind,
                           uint32_t ppm, uint64_t now) {
    memset(a, kind == SPOOF_GARBAGE ? 0xa5 : 0, sizeof(*a));
    switch (kind) {
    case SPOOF_BUSY:
        a->busy_from_ns = 1;
        a->busy_until_ns = UINT64_MAX;
        a->horizon_ns = now;
        a->switch_ns = 490 * US;
        a->n = a->last = 1;
        a->run[1] = (struct gs_run){now > 100 * MS ? now - 100 * MS : 1, now, 100 * MS};
        break;
    case SPOOF_RUNS: /* false runs, so that an accomplice is charged less */
        a->horizon_ns = now;
        a->busy_until_ns = now + MS;
        runs(a, now, 100 * US, 60 * US);
        break;
    case SPOOF_CROWD: /* claims to be active all the time, with the maximum weight */
        a->busy_from_ns = 1;
        a->busy_until_ns = UINT64_MAX;
        a->weight = 999999;
        a->priority = UINT32_MAX;
        a->expects_ns = 1000 * MS;
        break;
    case SPOOF_FUTURE:
        a->busy_from_ns = 1;
        a->horizon_ns = a->busy_until_ns = UINT64_MAX;
        runs(a, now + 3600 * 1000 * MS, 100 * US, UINT64_MAX);
        break;
    case SPOOF_PAST: /* stopped publishing its activity long ago */
        a->busy_from_ns = a->horizon_ns = 1;
        a->busy_until_ns = UINT64_MAX;
        runs(a, 200 * MS, 100 * US, 100 * US);
        break;
    case SPOOF_NEGATIVE:
        a->busy_from_ns = a->busy_until_ns = a->horizon_ns = (uint64_t)-1;
        a->expects_ns = a->switch_ns = a->owes_ns = (uint64_t)INT64_MIN;
        a->weight = a->priority = a->last = a->n = UINT32_MAX;
        for (unsigned i = 0; i < GS_RUNS; i++)
            a->run[i] = (struct gs_run){now - i * US, now - 2 * i * MS, (uint64_t)-1};
        break;
    /* claims that each kernel takes slices, and each switch the longest plausible time */
    case SPOOF_SLOW:
        a->busy_from_ns = a->horizon_ns = now - now % (7 * MS);
        a->busy_until_ns = now + 50 * MS;
        a->expects_ns = 20 * MS;
        a->switch_ns = 499 * US;
        runs(a, a->horizon_ns, 7 * MS, 7 * MS);
        break;
    case SPOOF_CAREFUL: /* claims as much more than its grant as claims.c tolerates */
        a->busy_from_ns = a->horizon_ns = now;
        a->busy_until_ns = now + MS;
        runs(a, now, MS, ppm < 700000 ? ppm * 4 / 3 - 10000 : 980000);
        break;
    case SPOOF_CORPUS:
        for (uint64_t *word = (uint64_t *)a; word < (uint64_t *)(a + 1); word++)
            *word = corpus_word(world, now);
        break;
    default:
        break;
    }
}

const struct gs_activity *told(struct world *world, int context, unsigned page) {
    enum spoof kind = world->tenant[world->host[context]->tenant].spoof;
    unsigned pages = kind == SPOOF_CROWD ? GS_MAX_PAGES : 1;
    struct gs_page *own = world->page[context];
    if (page >= pages)
        return NULL;
    if (kind == SPOOF_NONE)
        return &own->buffer[atomic_load(&own->index) & 1];
    spoof_activity(world, &world->spoof[context][page], kind,
                   world->tenant[world->host[context]->tenant].limit.ppm,
                   world->host[context]->gpu->now_ns);
    return &world->spoof[context][page];
}
