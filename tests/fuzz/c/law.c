/* shim/accounting/activity_files.c and throttle*.c: a context launches while the target corrupts
 * every file that tenants of its device can write, including its own container's. The rate limiter
 * must always admit a launch or return a wait, and admit every launch in the end. */
#include "../../../shim/accounting/activity_files.c"

#include "../../limiter/try.h"
#include "fuzz.h"

#define STEPS 200
#define PEERS 3u
#define STREAMS 3u
#define FUNCTIONS 3u
#define EVENTS 1024u
#define UUID "GPU-f"
#define BASE "/usr/lib/gpushare/"
#define LONGEST (30000 * MS) /* wait of a launch whose container is in debt */

static const char *const PATHS[] = {BASE "limits",
                                    BASE "rw/usage",
                                    BASE "pages/" UUID,
                                    BASE "peers/" UUID "/index",
                                    BASE "peers/" UUID "/1",
                                    BASE "peers/" UUID "/64",
                                    BASE "peers/" UUID "/127"};
#define FILES (sizeof PATHS / sizeof *PATHS)
#define USAGE 1
#define OWN 2
#define INDEX 3

static struct {
    size_t size;
    uint64_t *bytes, *good;
} file[FILES];

static struct gs_compute compute;
static struct gs_predictor function[FUNCTIONS];
static struct gs_throttle_stream stream[STREAMS];
static bool in_flight[STREAMS]; /* a launch between its thread and the driver */
static uint64_t clock_ns, event_ns[EVENTS];
static uint32_t events;

static uint64_t now(void *arg) {
    (void)arg;
    return clock_ns;
}

static int mark(void *arg, uint32_t of) {
    (void)arg;
    (void)of;
    event_ns[events % EVENTS] = clock_ns + 20 * US;
    return (int)(events++ % EVENTS);
}

static bool done(void *arg, int event, uint64_t *stamp) {
    (void)arg;
    *stamp = event_ns[event];
    return event_ns[event] <= clock_ns;
}

static unsigned peers(void *arg, struct gs_peer *out, unsigned max) {
    return gs_activity_peers(arg, out, max);
}

static bool idle(void *arg, uint32_t of) {
    (void)arg;
    return of == 0;
}

static uint32_t others(void *arg) {
    return gs_activity_others_ppm(arg);
}

static unsigned turns(void *arg, struct gs_turn_of *out, unsigned max) {
    (void)arg;
    return gs_activity_turns(0, out, max);
}

static void trace(void *arg, const struct gs_trace *record) {
    (void)arg;
    require(record->end_ns >= record->start_ns && record->charged_ns >= 0);
}

static const struct gs_throttle_env env = {&compute, now,    mark,  done, peers,
                                           idle,     others, turns, trace};

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    for (unsigned i = 0; i < FILES; i++) {
        file[i].size = i == 0       ? sizeof(struct gs_limits)
                       : i == USAGE ? sizeof(struct gs_usage)
                       : i == INDEX ? sizeof(struct gs_peers)
                                    : sizeof(struct gs_pages);
        file[i].bytes = file_make(PATHS[i], file[i].size);
    }
    struct gs_limits *limits = (void *)file[0].bytes;
    *limits = (struct gs_limits){.magic = GS_LIMITS_MAGIC,
                                 .version = GS_ABI_VERSION,
                                 .size = sizeof *limits,
                                 .n_devices = 1};
    limits->device[0] = (struct gs_device_limit){.uuid_text = UUID, .granularity_bytes = GS_BLOCK};
    *(struct gs_usage *)file[USAGE].bytes = (struct gs_usage){.magic = GS_USAGE_MAGIC,
                                                              .version = GS_ABI_VERSION,
                                                              .size = sizeof(struct gs_usage),
                                                              .n_slots = GS_MAX_SLOTS,
                                                              .slots_high = 2};
    for (unsigned i = 0; i < 2; i++) /* its own and a peer */
        ((struct gs_usage *)file[USAGE].bytes)->slot[i] =
            (struct gs_slot){.owner = 9, .live = 9, .generation = 1};
    *(struct gs_peers *)file[INDEX].bytes = (struct gs_peers){.magic = GS_PEERS_MAGIC,
                                                              .version = GS_ABI_VERSION,
                                                              .size = sizeof(struct gs_peers),
                                                              .used = {3, 1 | UINT64_C(1) << 63}};
    for (unsigned i = OWN; i < FILES; i++)
        if (i != INDEX) {
            struct gs_pages *pages = (void *)file[i].bytes;
            *pages = (struct gs_pages){.magic = GS_PAGES_MAGIC,
                                       .version = GS_ABI_VERSION,
                                       .size = sizeof *pages,
                                       .n_pages = GS_MAX_PAGES};
            pages->owner[0] = GS_PAGE_OWNER(i == OWN ? 1 : 0, 1);
            pages->high = 1;
        }
    for (unsigned i = 0; i < FILES; i++) {
        file[i].good = malloc(file[i].size);
        memcpy(file[i].good, file[i].bytes, file[i].size);
    }
    require(gs_region() && gs_activity_open(gs_region()->limits, 0));
    return 0;
}

static uint64_t some_time(struct input *in) {
    uint64_t kind = take(in, 1);
    return kind < 8     ? (const uint64_t[]){0,         1,          2,          UINT64_MAX,
                                             INT64_MAX, 1ull << 63, 1ull << 62, GS_RUNS}[kind]
           : kind < 128 ? clock_ns + (kind & 15) * 100 * US - 800 * US
           : kind < 192 ? clock_ns + (uint64_t)((int64_t)(int16_t)take(in, 2) * 10000)
                        : take(in, 8);
}

/* Overwrite a word, mostly a busy one: the runs of the first activity file, or the bucket. */
static void corrupt(struct input *in) {
    unsigned which = (unsigned)take(in, 1);
    size_t of = USAGE + which % (FILES - USAGE), words = file[of].size / 8, at = take(in, 2);
    if (of == INDEX) /* only the host writes it */
        return;
    if (which & 64)
        at =
            offsetof(struct gs_pages, compute_turn) / 8 + at % (sizeof(struct gs_compute_turn) / 8);
    else if (which & 128)
        at = of == USAGE ? offsetof(struct gs_usage, bucket) / 8 + at % 16
                         : offsetof(struct gs_pages, page) / 8 + at % (sizeof(struct gs_page) / 8);
    uint64_t word = some_time(in);
    file_write(PATHS[of], 8 * (at % words), &word, sizeof word);
}

/* Publish plausible activity of a peer: consecutive runs up to now, and perhaps announced work. */
static void publish(struct input *in, unsigned peer) {
    uint64_t what = take(in, 1), at = clock_ns - take(in, 1) * 10 * US;
    struct gs_activity a = {.n = (uint32_t)(what & 7), .weight = 1, .priority = what >> 7};
    a.last = a.n ? a.n - 1 : 0;
    a.horizon_ns = at;
    for (uint32_t i = a.n; i--;) {
        uint64_t took = take(in, 1) * 20 * US;
        a.run[i] = (struct gs_run){at - took, at, took * (1 + (what >> 3 & 1)) / 2};
        at -= took + (what >> 4 & 1 ? take(in, 1) * 10 * US : 0);
    }
    if (what & 32)
        a.busy_from_ns = at, a.busy_until_ns = clock_ns + 50 * MS;
    a.expects_ns = what & 64 ? 10 * MS : 100 * US;
    a.switch_ns = 100 * US;
    file_write(PATHS[OWN + 2 + peer], offsetof(struct gs_pages, page[0].buffer[0]), &a, sizeof a);
}

static void restart(struct input *in) {
    for (unsigned i = USAGE; i < FILES; i++) {
        file_resize(PATHS[i], file[i].size);
        memcpy(file[i].bytes, file[i].good, file[i].size);
    }
    clock_ns = 3600 * UINT64_C(1000000000);
    events = 0;
    atomic_store(&gs_self()->slot, &gs_region()->usage->slot[0]);
    compute = (struct gs_compute){.dev = 0};
    struct gs_activity left;
    gs_activity_claim(&compute, &left);
    require(compute.page != &compute.unshared);
    struct gs_usage *usage = gs_region()->usage;
    gs_throttle_init(&compute.throttle, &env, &usage->bucket[0], compute.page, 0);
    unsigned limit = (unsigned)take(in, 1);
    compute.throttle.limit = (struct gs_throttle_limit){
        .ppm = (limit % 100 + 1) * 10000, .priority = limit & 1, .mode = limit % 3};
    compute.throttle.rate_ppm = compute.throttle.limit.ppm;
    compute.throttle.turn = gs_activity_turn(0);
    compute.throttle.round_ns = limit & 64 ? 20 * MS : 0;
    uint64_t granted = limit % 100 + 1 + (limit & 1 << 8); /* to each peer; hard or soft */
    for (unsigned i = 0; i < GS_MAX_PEERS; i++)
        atomic_store(&((struct gs_peers *)file[INDEX].bytes)->granted[i], granted);
    compute.env = env;
    gs_throttle_inherit(&compute.throttle, &left, clock_ns);
    memset(stream, 0, sizeof stream);
    memset(in_flight, 0, sizeof in_flight);
    for (unsigned i = 0; i < STREAMS; i++)
        stream[i].id = i;
    for (unsigned i = 0; i < FUNCTIONS; i++)
        gs_predictor_init(&function[i]);
}

static void finish_launch(unsigned s) {
    in_flight[s] = false;
    gs_throttle_went(&stream[s]);
}

/* One attempt: 0, or the time of the next. */
static uint64_t launch(unsigned s, unsigned f) {
    uint64_t until;
    if (in_flight[s])
        finish_launch(s);
    until = gs_throttle_slow(&compute.throttle, &stream[s], &function[f]);
    require(until == 0 || (until > clock_ns && until <= clock_ns + DEBT));
    if (until == 0 && !(in_flight[s] = clock_ns & 64))
        gs_throttle_went(&stream[s]);
    if (until == 0 && stream[s].mark)
        gs_throttle_launched(&compute.throttle);
    return until;
}

static void step(struct input *in) {
    unsigned what = (unsigned)take(in, 1);
    switch (what & 7) {
    case 0:
    case 1:
        corrupt(in);
        break;
    case 2:
        publish(in, (what >> 3) % PEERS);
        break;
    case 3:
        clock_ns += take(in, 2) * (what & 128 ? 100 * US : US);
        break;
    case 4:
        if (what & 128)
            gs_throttle_sync_begin(&compute.throttle);
        gs_throttle_sync_end(&compute.throttle);
        break;
    case 5:
        if (what & 128)
            file_resize(PATHS[OWN + 2 + take(in, 1) % PEERS], take(in, 3));
        else
            compute.throttle.capturing = what & 64;
        break;
    default: {
        unsigned s = (what >> 3) % STREAMS, f = (what >> 5) % FUNCTIONS;
        if (!gs_throttle_try(&compute.throttle, &stream[s], &function[f]) && !launch(s, f) &&
            what == 255)
            gs_throttle_refused(&compute.throttle, &function[f]);
    }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    restart(&in);
    for (unsigned i = 0; i < STEPS && in.at < in.end; i++)
        step(&in);
    compute.throttle.capturing = false;
    uint64_t end = clock_ns + LONGEST, until;
    while ((until = launch(0, 0))) {
        clock_ns = max64(until, clock_ns + 50 * MS);
        require(clock_ns < end);
    }
    gs_throttle_sync_begin(&compute.throttle);
    gs_activity_give(&compute);
    return 0;
}
