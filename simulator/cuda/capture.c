/* Stream capture: operations in a capturing stream become nodes of a graph. Certain calls, in
 * this or in other threads, invalidate the capture. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct capture {
    struct graph *graph;
    struct stream *origin;
    CUstreamCaptureMode mode;
    cuuint64_t id;
    pthread_t thread;
    bool invalid, ended;
    unsigned refs; /* held by the list while it lasts and by events recorded in it */
    struct capture *next;
};

static struct capture *captures;
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static void set_deps(struct stream *s, struct node **deps, size_t n) {
    free(s->deps);
    s->deps = deps;
    s->n_deps = n;
}

static struct node **copy_deps(struct node **deps, size_t n) {
    struct node **copy = calloc(n + 1, sizeof(struct node *));
    if (copy && n)
        memcpy(copy, deps, n * sizeof(struct node *));
    return copy;
}

static CUresult add_deps(struct stream *s, struct node **deps, size_t n) {
    struct node **all = calloc(s->n_deps + n + 1, sizeof(struct node *));
    size_t count = 0;
    CHECK(all, CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = 0; i < s->n_deps + n; i++) {
        struct node *d = i < s->n_deps ? s->deps[i] : deps[i - s->n_deps];
        bool known = false;
        for (size_t k = 0; k < count; k++)
            known |= all[k] == d;
        if (!known)
            all[count++] = d;
    }
    set_deps(s, all, count);
    return CUDA_SUCCESS;
}

/* Adds a node and makes it the stream's last one. */
CUresult capture_work(struct stream *s, const struct work *work, struct node **out) {
    struct capture *c = s->capture;
    CHECK(!c->invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    struct node *n = graph_add(c->graph, work, s->deps, s->n_deps);
    struct node **deps = calloc(1, sizeof(struct node *));
    CHECK(n && deps, CUDA_ERROR_OUT_OF_MEMORY);
    if (work->kind == WORK_ALLOC) {
        CUresult result = graph_mem_open(n);
        if (result != CUDA_SUCCESS)
            return result;
    }
    deps[0] = n;
    set_deps(s, deps, 1);
    if (out)
        *out = n;
    return CUDA_SUCCESS;
}

/* True if a potentially unsafe call is prohibited, by the rules of
 * cuThreadExchangeStreamCaptureMode. */
static bool prohibits(const struct capture *c) {
    bool own = pthread_equal(c->thread, pthread_self());
    switch (thread_mode) {
    case CU_STREAM_CAPTURE_MODE_RELAXED:
        return false;
    case CU_STREAM_CAPTURE_MODE_THREAD_LOCAL:
        return own && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    default:
        return own ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                   : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    }
}

static void drop(struct capture *c) {
    if (c && --c->refs == 0)
        free(c);
}

void capture_forget_event(struct event *e) {
    drop(e->capture);
    free(e->deps);
    e->capture = NULL;
    e->deps = NULL;
    e->n_deps = 0;
}

bool capture_allows_wait(struct stream *s) {
    bool allowed = true;
    if (!sim.captures)
        return true;
    if (s && s->capture) {
        s->capture->invalid = true;
        return false;
    }
    for (struct capture *c = captures; c; c = c->next) {
        if (!prohibits(c))
            continue;
        c->invalid = true;
        allowed = false;
    }
    return allowed;
}

bool capture_allows_call(void) {
    return capture_allows_wait(NULL);
}

/* False when work in the legacy stream would have to wait for a blocking stream that is
 * capturing. */
bool capture_allows_legacy(struct stream *s) {
    bool allowed = true;
    if (!sim.captures || !s->legacy)
        return true;
    for (struct stream *o = s->ctx->streams; o; o = o->next) {
        if (!o->capture || !stream_blocks_with_legacy(o))
            continue;
        o->capture->invalid = true;
        allowed = false;
    }
    return allowed;
}

CUresult capture_record_event(struct stream *s, struct event *e, unsigned flags) {
    CHECK(!s->capture->invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        struct work work = {.kind = WORK_RECORD, .event = e};
        return capture_work(s, &work, NULL);
    }
    capture_forget_event(e);
    e->deps = copy_deps(s->deps, s->n_deps);
    CHECK(e->deps, CUDA_ERROR_OUT_OF_MEMORY);
    e->n_deps = s->n_deps;
    e->capture = s->capture;
    e->capture->refs++;
    return CUDA_SUCCESS;
}

/* Adds a stream that waits for a captured event to that event's capture. */
CUresult capture_wait_event(struct stream *s, struct event *e) {
    if (!e->capture) {
        s->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    CHECK(!e->capture->ended, CUDA_ERROR_CAPTURED_EVENT);
    CHECK(!e->capture->invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (s->capture && s->capture != e->capture) {
        s->capture->invalid = e->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    CHECK(!s->legacy, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    s->capture = e->capture;
    return add_deps(s, e->deps, e->n_deps);
}

#define ENTER_STREAM(s, handle) \
    ENTER(); \
    struct stream *s = stream_of(current_context(), handle); \
    CHECK(s, (handle) > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE \
                                             : CUDA_ERROR_INVALID_CONTEXT)

EXPORT CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(!s->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(!s->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct capture *c = calloc(1, sizeof *c);
    CHECK(c, CUDA_ERROR_OUT_OF_MEMORY);
    *c = (struct capture){.graph = graph_open(),
                          .origin = s,
                          .mode = mode,
                          .refs = 1,
                          .id = sim.next_id++,
                          .thread = pthread_self(),
                          .next = captures};
    captures = c;
    s->capture = c;
    set_deps(s, NULL, 0);
    sim.captures++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture(CUstream hStream) {
    return cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static bool is_last(const struct graph *g, struct node *n) {
    for (struct node *x = g->first; x; x = x->next)
        for (size_t i = 0; i < x->n_deps; i++)
            if (x->deps[i] == n)
                return false;
    return true;
}

/* Removes every stream from the capture. True if all their work was joined into the origin
 * stream. */
static bool leave(struct capture *c) {
    bool joined = true;
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next) {
        for (struct stream *s = ctx->streams; s; s = s->next) {
            if (s->capture != c)
                continue;
            for (size_t i = 0; s != c->origin && i < s->n_deps; i++) {
                bool known = !is_last(c->graph, s->deps[i]);
                for (size_t k = 0; k < c->origin->n_deps; k++)
                    known |= c->origin->deps[k] == s->deps[i];
                joined &= known;
            }
            if (s != c->origin) {
                s->capture = NULL;
                set_deps(s, NULL, 0);
            }
        }
    }
    c->origin->capture = NULL;
    set_deps(c->origin, NULL, 0);
    return joined;
}

static void close_capture(struct capture *c) {
    for (struct capture **at = &captures; *at; at = &(*at)->next) {
        if (*at != c)
            continue;
        *at = c->next;
        break;
    }
    sim.captures--;
    c->ended = true;
    drop(c);
}

/* Destroying a stream ends its capture. */
void capture_abandon(struct stream *s) {
    struct capture *c = s->capture;
    if (!c)
        return;
    c->invalid = true;
    if (c->origin != s) {
        s->capture = NULL;
        set_deps(s, NULL, 0);
        return;
    }
    leave(c);
    graph_close(c->graph);
    close_capture(c);
}

EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
    ENTER_STREAM(s, hStream);
    struct capture *c = s->capture;
    CHECK_VALUE(phGraph);
    CHECK(c, CUDA_ERROR_ILLEGAL_STATE);
    CHECK(c->origin == s, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK(c->mode == CU_STREAM_CAPTURE_MODE_RELAXED || pthread_equal(c->thread, pthread_self()),
          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    struct graph *g = c->graph;
    bool invalid = c->invalid, joined = leave(c);
    close_capture(c);
    *phGraph = NULL;
    if (!invalid && joined)
        return *phGraph = (CUgraph)g, CUDA_SUCCESS;
    graph_close(g);
    return invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

static CUstreamCaptureStatus status_of(const struct stream *s) {
    if (!s->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                               : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

EXPORT CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *status) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(status);
    CHECK(capture_allows_legacy(s), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = status_of(s);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *status,
                                          cuuint64_t *id, CUgraph *graph, const CUgraphNode **deps,
                                          size_t *n_deps) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(status);
    CHECK(capture_allows_legacy(s), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = status_of(s);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id)
        *id = s->capture->id;
    if (graph)
        *graph = (CUgraph)s->capture->graph;
    if (deps)
        *deps = (const CUgraphNode *)s->deps;
    if (n_deps)
        *n_deps = s->n_deps;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *status,
                                       cuuint64_t *id) {
    return cuStreamGetCaptureInfo_v2(hStream, status, id, NULL, NULL, NULL);
}

EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *deps, size_t n,
                                                  unsigned int flags) {
    ENTER_STREAM(s, hStream);
    CHECK(s->capture, CUDA_ERROR_ILLEGAL_STATE);
    CHECK_VALUE((deps || !n) && flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        set_deps(s, NULL, 0);
    return add_deps(s, (struct node **)deps, n);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CHECK_VALUE(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
