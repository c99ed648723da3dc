/* Runs shim/limiter/throttle.c in virtual time and prints the device's own ledger as JSON.
 *
 *     vt seed=1 ms=2500 limit=30,kernel=5us,program=stream limit=70,processes=4
 *
 * Options of a tenant: limit (percent; 100 = unlimited) ppm kernel program processes unequal law
 * (ours|none|oracle) mode (hard|soft) priority spoof (spoof.c) join leave kill (ms)
 * change (percent) at capture stop stop_for (ms) claim no_turns waits_for cpu_us latency_us
 * first_us stall_ms (vt.h). Options of the world: seed ms slice_us switch_us (when the previous
 * context has no more work) preempt_us (when it has; 0: the same) bubble_ns jitter_us skew_us (of
 * clocks) told_switch_us told_slice_us stall lost (of a thread's launches) devices (process i of a
 * container is on device i % devices; the ledger is of the first, but `done` of all) corpus (a
 * file: the activity of spoof=corpus) burst_ms (the oracle's) one_queue (1: probe events are behind
 * the program's work, as when all streams share a queue of the device) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vt.h"

static int find(const char *const *names, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (!strcmp(names[i], name))
            return i;
    fprintf(stderr, "vt: unknown word '%s'\n", name);
    exit(2);
}

/* Where an option of a tenant goes: times in ms to nanoseconds, shares in percent to millionths. */
struct option {
    const char *name;
    double scale;
    uint64_t *ns;
    uint32_t *count;
    double *number;
    int *small;
};

static void set_option(const struct option *o, double number) {
    if (o->ns)
        *o->ns = (uint64_t)(number * o->scale);
    else if (o->count)
        *o->count = (uint32_t)(number * o->scale);
    else if (o->small)
        *o->small = (int)number;
    else
        *o->number = number;
}

static bool named_word(struct tenant *t, const char *key, const char *value) {
    static const char *const laws[] = {"none", "ours", "oracle"};
    static const char *const modes[] = {"hard", "soft", "unlimited"};
    if (!strcmp(key, "kernel"))
        t->kernel = (enum kernel)find(kernel_name, KERNELS, value);
    else if (!strcmp(key, "program"))
        t->program = (enum program)find(program_name, PROGRAMS, value);
    else if (!strcmp(key, "law"))
        t->law = (enum law)find(laws, 3, value);
    else if (!strcmp(key, "mode"))
        t->limit.mode = (enum gs_throttle_mode)find(modes, 3, value);
    else if (!strcmp(key, "claim"))
        t->claim = (enum claim)find(claim_name, CLAIMS, value);
    else if (!strcmp(key, "spoof"))
        t->spoof = (enum spoof)find(spoof_name, SPOOFS, value);
    else
        return false;
    return true;
}

static void tenant_word(struct tenant *t, const char *key, const char *value) {
    double number = strtod(value, NULL);
    const struct option options[] = {
        {.name = "limit", .scale = 10000, .count = &t->limit.ppm},
        {.name = "ppm", .scale = 1, .count = &t->limit.ppm},
        {.name = "priority", .scale = 1, .count = &t->limit.priority},
        {.name = "change", .scale = 10000, .count = &t->limit_then_ppm},
        {.name = "processes", .small = &t->processes},
        {.name = "unequal", .small = &t->unequal},
        {.name = "join", .scale = 1e6, .ns = &t->join_ns},
        {.name = "leave", .scale = 1e6, .ns = &t->leave_ns},
        {.name = "kill", .scale = 1e6, .ns = &t->kill_ns},
        {.name = "at", .scale = 1e6, .ns = &t->limit_at_ns},
        {.name = "capture", .scale = 1e6, .ns = &t->capture_ns},
        {.name = "no_turns", .small = &t->no_turns},
        {.name = "waits_for", .small = &t->waits_for},
        {.name = "stop", .scale = 1e6, .ns = &t->stop_ns},
        {.name = "stop_for", .scale = 1e6, .ns = &t->stop_for_ns},
        {.name = "cpu_us", .number = &t->cpu_us},
        {.name = "latency_us", .number = &t->latency_us},
        {.name = "first_us", .number = &t->first_us},
        {.name = "stall_ms", .number = &t->stall_ms},
    };
    size_t k = 0, n = sizeof(options) / sizeof(*options);
    if (named_word(t, key, value))
        return;
    while (k < n && strcmp(options[k].name, key) != 0)
        k++;
    if (k == n)
        find(NULL, 0, key);
    set_option(&options[k], number);
    if (!strcmp(key, "limit") && number >= 100)
        t->limit.mode = GS_THROTTLE_UNLIMITED;
}

static void parse_tenant(struct world *world, char *text) {
    struct tenant *t = &world->tenant[world->tenants++];
    *t = (struct tenant){.law = LAW_OURS,
                         .processes = 1,
                         .waits_for = -1,
                         .stop_ns = UINT64_MAX,
                         .limit = {.ppm = 1000000},
                         .leave_ns = UINT64_MAX,
                         .kill_ns = UINT64_MAX,
                         .limit_at_ns = UINT64_MAX,
                         .capture_ns = UINT64_MAX};
    for (char *word = strtok(text, ","); word; word = strtok(NULL, ",")) {
        char *equals = strchr(word, '=');
        if (!equals)
            find(NULL, 0, word);
        *equals = 0;
        tenant_word(t, word, equals + 1);
    }
}

static void *kept[512];
static size_t n_kept;

static void *zeroed(size_t size) {
    void *memory = calloc(1, size);
    if (!memory || n_kept == sizeof(kept) / sizeof(*kept))
        abort();
    return kept[n_kept++] = memory;
}

static void read_corpus(struct world *world, const char *path) {
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = zeroed(65536);
    world->corpus_size = file ? fread(bytes, 1, 65536, file) : 0;
    world->corpus = bytes;
    if (!world->corpus_size)
        exit(fprintf(stderr, "vt: nothing in '%s'\n", path) ? 2 : 2);
    fclose(file);
}

static void add_host(struct world *world, int tenant, int process, uint64_t seed) {
    struct host *host = zeroed(sizeof(*host));
    struct context *c = zeroed(sizeof(*c));
    struct tenant *t = &world->tenant[tenant];
    int k = world->hosts++;
    host->world = world;
    host->tenant = c->tenant = tenant;
    c->group = t->waits_for >= 0 ? t->waits_for : tenant;
    world->pairs_of[c->group] += process == 0;
    host->context = k;
    host->rng.state = seed * 1000003 + (uint64_t)k * 7919;
    host->pauses = t->unequal && process > 0;
    host->clock_ns = 1 * MS + t->join_ns + (uint64_t)(uniform(&host->rng) * 1e6);
    c->width = t->program == P_STREAMS ? 4 : 1;
    c->waits_stream = -1;
    c->skew_ns = (int64_t)((uniform(&host->rng) * 2 - 1) * world->skew_us * 1000);
    int device = process % (int)world->devices;
    host->gpu = &world->gpu[device];
    for (int i = 0; i < DEVICES; i++) {
        world->gpu[i].context[k] = c; /* has work on one device only */
        world->gpu[i].n = world->hosts;
    }
    world->host[k] = host;
    world->page[k] = zeroed(sizeof(struct gs_page));
    struct gs_throttle_env *env = zeroed(sizeof(*env));
    *env = world->env;
    env->arg = host;
    gs_throttle_init(&host->throttle, env, &world->bucket[device][tenant], world->page[k],
                     (uint32_t)tenant);
    host->throttle.limit = t->limit;
    host->throttle.turn = &world->turn[device][tenant];
    host->throttle.round_ns = t->no_turns ? 0 : (uint64_t)(world->round_us * 1000);
    for (uint32_t i = 0; i < STREAMS; i++)
        host->streams[i].id = i;
    for (int i = 0; i < STEP; i++)
        gs_predictor_init(&host->predictor[i]);
}

/* The bucket's figure for the last second: the whole windows before the current one. */
static uint64_t recent_ns(const struct world *world, int tenant) {
    uint64_t window = world->end_ns / GS_RECENT_NS, sum = 0;
    for (uint32_t i = 0; i < GS_RECENT; i++) {
        uint64_t cell = atomic_load(&((struct world *)world)->bucket[0][tenant].recent[i]);
        if (cell >> 40 < window && cell >> 40 >= window - 8)
            sum += cell & GS_RECENT_MASK;
    }
    return sum;
}

static void print(const struct world *world) {
    const struct gpu *gpu = &world->gpu[0];
    printf("{\"switches\": %llu, \"tenants\": [", (unsigned long long)gpu->switches);
    for (int i = 0; i < world->tenants; i++) {
        uint64_t marks = 0, slow = 0, launches = 0, forbidden = 0, done = 0;
        uint64_t fewest = UINT64_MAX; /* launches of one process */
        for (int k = 0; k < world->hosts; k++)
            if (world->host[k]->tenant == i) {
                marks += world->host[k]->marks;
                forbidden += world->host[k]->forbidden;
                slow += world->host[k]->slow;
                launches += world->host[k]->launches;
                fewest = fewest < world->host[k]->launches ? fewest : world->host[k]->launches;
            }
        for (int k = 0; k < (int)world->devices; k++)
            done += world->gpu[k].done[i];
        printf("%s\n{\"held_ns\": %llu, \"work_ns\": %llu, \"switch_ns\": %llu, \"done\": %llu, "
               "\"launches\": %llu, \"fewest\": %llu, \"marks\": %llu, \"slow\": %llu, "
               "\"forbidden\": %llu, "
               "\"waited_ns\": %llu, \"charged_ns\": %llu, \"recent_ns\": %llu, \"bins\": [",
               i ? "," : "", (unsigned long long)gpu->held_ns[i],
               (unsigned long long)gpu->work_ns[i], (unsigned long long)gpu->switch_ns[i],
               (unsigned long long)done, (unsigned long long)launches, (unsigned long long)fewest,
               (unsigned long long)marks, (unsigned long long)slow, (unsigned long long)forbidden,
               (unsigned long long)atomic_load(&world->bucket[0][i].waited_ns),
               (unsigned long long)atomic_load(&world->bucket[0][i].busy_ns),
               (unsigned long long)recent_ns(world, i));
        for (uint64_t k = 0; k < gpu->bins; k++)
            printf("%s%llu", k ? "," : "", (unsigned long long)gpu->bin[i][k]);
        printf("], \"request_us\": [");
        const char *comma = "";
        for (int k = 0; k < world->hosts; k++)
            for (uint32_t r = 0; world->host[k]->tenant == i && r < world->host[k]->requests; r++) {
                printf("%s%u", comma, world->host[k]->request_us[r]);
                comma = ",";
            }
        printf("]}");
    }
    printf("]}\n");
}

/* The options of the world that struct world does not hold. */
struct options {
    double seed, ms, slice_us, switch_us, preempt_us, bubble_ns;
    double told_switch_us, told_slice_us;
};

static void parse(struct world *world, struct options *o, int argc, char **argv) {
    struct {
        const char *name;
        double *value;
    } words[] = {{"seed", &o->seed},
                 {"ms", &o->ms},
                 {"slice_us", &o->slice_us},
                 {"switch_us", &o->switch_us},
                 {"preempt_us", &o->preempt_us},
                 {"bubble_ns", &o->bubble_ns},
                 {"told_switch_us", &o->told_switch_us},
                 {"told_slice_us", &o->told_slice_us},
                 {"jitter_us", &world->jitter_us},
                 {"devices", &world->devices},
                 {"skew_us", &world->skew_us},
                 {"stall", &world->stall},
                 {"lost", &world->lost},
                 {"one_queue", &world->one_queue},
                 {"burst_ms", &world->burst_ms},
                 {"round_us", &world->round_us}};
    for (int i = 1; i < argc; i++) {
        size_t k = 0, n = sizeof(words) / sizeof(*words);
        char *equals = strchr(argv[i], '=');
        if (!strncmp(argv[i], "corpus=", 7)) {
            read_corpus(world, argv[i] + 7);
            continue;
        }
        while (equals && k < n &&
               (strlen(words[k].name) != (size_t)(equals - argv[i]) ||
                strncmp(words[k].name, argv[i], (size_t)(equals - argv[i])) != 0))
            k++;
        if (equals && k < n)
            *words[k].value = strtod(equals + 1, NULL);
        else if (world->tenants < MAX_TENANTS)
            parse_tenant(world, argv[i]);
    }
}

static void init_gpu(struct world *world, struct gpu *gpu, const struct options *o) {
    gpu->signals = &world->signals;
    gpu->slice_ns = (uint64_t)(o->slice_us * 1000);
    gpu->handover_ns = o->switch_us * 1000;
    gpu->preempt_ns = (o->preempt_us > 0 ? o->preempt_us : o->switch_us) * 1000;
    gpu->bubble_ns = (uint64_t)o->bubble_ns;
    gpu->slice_noise = 0.2;
    gpu->rng.state = (uint64_t)o->seed;
    gpu->current = gpu->woken = -1;
    gpu->now_ns = 1 * MS;
    gpu->bins = world->end_ns / BIN;
    for (int i = 0; i < world->tenants; i++)
        gpu->bin[i] = zeroed((gpu->bins + 1) * sizeof(uint64_t));
}

int main(int argc, char **argv) {
    struct world *world = zeroed(sizeof(*world));
    struct options o = {.seed = 1,
                        .ms = 2500,
                        .slice_us = 2000,
                        .switch_us = 125,
                        .bubble_ns = 1000,
                        .told_switch_us = 125,
                        .told_slice_us = 2000};
    world->jitter_us = 60;
    world->skew_us = 10;
    world->stall = 0.002;
    world->devices = 1;
    world->burst_ms = 20;
    parse(world, &o, argc, argv);
    world->end_ns = (uint64_t)o.ms * MS;
    for (struct gpu *gpu = world->gpu; gpu < world->gpu + DEVICES; gpu++)
        init_gpu(world, gpu, &o);
    set_env(world);
    for (int i = 0; i < world->tenants; i++) {
        for (int k = 0; k < world->tenant[i].processes; k++)
            add_host(world, i, k, (uint64_t)o.seed);
    }
    for (int i = 0; i < world->hosts; i++) {
        world->host[i]->throttle.switch_ns = (uint32_t)(o.told_switch_us * 1000);
        world->host[i]->throttle.slice_ns = (uint32_t)(o.told_slice_us * 1000);
    }
    if (world->hosts)
        simulate(world);
    print(world);
    while (n_kept)
        free(kept[--n_kept]);
    return 0;
}
