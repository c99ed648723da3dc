/* The activity files of contexts. This container's own file is mapped and written. The index and
 * the files of other containers are read with pread each time: another container may be able to
 * truncate them, and a process that had them mapped would get SIGBUS. Only the form of what is read
 * is checked: throttle.c bounds how far it is relied on. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "compute_parts.h"

#define PATH_MOST 160
#define PAGES_PATH "/usr/lib/gpushare/pages/%s"
#define INDEX_PATH "/usr/lib/gpushare/peers/%s/index"
#define PEER_PATH "/usr/lib/gpushare/peers/%s/%u"
#define TRIES 4

static struct {
    struct gs_pages *own;
    const struct gs_device_limit *limit;
    _Atomic uint64_t used[GS_MAX_PEERS / 64], granted[GS_MAX_PEERS]; /* as last read */
} device[GS_MAX_DEVICES];

/* The beginning of struct gs_pages. */
struct head {
    uint64_t magic;
    uint32_t version, size, n_pages, high;
    uint8_t reserved[40];
    uint64_t owner[GS_MAX_PAGES];
};
_Static_assert(sizeof(struct head) == offsetof(struct gs_pages, turn), "struct gs_pages");

static bool header_is_valid(const struct head *p) {
    return p->magic == GS_PAGES_MAGIC && p->version == GS_ABI_VERSION &&
           p->size == sizeof(struct gs_pages) && p->n_pages == GS_MAX_PAGES;
}

static bool read_at(int fd, void *to, size_t bytes, size_t offset) {
    return pread(fd, to, bytes, (off_t)offset) == (ssize_t)bytes;
}

/* The beginning of struct gs_peers: which numbers are in use, and the grant of each. */
struct index {
    uint64_t magic;
    uint32_t version, size;
    uint64_t generation, used[GS_MAX_PEERS / 64], granted[GS_MAX_PEERS];
};
_Static_assert(sizeof(struct index) == offsetof(struct gs_peers, reserved), "struct gs_peers");

static bool read_index(const char *uuid, struct index *index) {
    char path[PATH_MOST];
    snprintf(path, sizeof(path), INDEX_PATH, uuid);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    bool right = fd >= 0 && read_at(fd, index, sizeof(*index), 0) &&
                 index->magic == GS_PEERS_MAGIC && index->version == GS_ABI_VERSION &&
                 index->size == sizeof(struct gs_peers);
    if (fd >= 0)
        close(fd);
    return right;
}

/* Return false if the index cannot be read now: the process may have changed its root directory
 * since, or be out of descriptors. Then it is the last one that was read, so that peers do not
 * vanish from the accounting. */
static bool current_index(unsigned dev, struct index *index) {
    _Atomic uint64_t *used = device[dev].used, *granted = device[dev].granted;
    bool fresh = read_index(device[dev].limit->uuid_text, index);
    for (unsigned w = 0; w < GS_MAX_PEERS / 64; w++)
        if (fresh)
            atomic_store_explicit(&used[w], index->used[w], memory_order_relaxed);
        else
            index->used[w] = atomic_load_explicit(&used[w], memory_order_relaxed);
    for (unsigned i = 0; i < GS_MAX_PEERS; i++)
        if (fresh)
            atomic_store_explicit(&granted[i], index->granted[i], memory_order_relaxed);
        else
            index->granted[i] = atomic_load_explicit(&granted[i], memory_order_relaxed);
    return fresh;
}

static bool is_used(const struct index *index, uint32_t number) {
    return index->used[number / 64] >> number % 64 & 1;
}

static struct gs_throttle_limit granted_to(const struct index *index, uint32_t number) {
    uint64_t word = index->granted[number];
    return gs_compute_limit(GS_GRANTED_PERCENT(word), GS_GRANTED_FLAGS(word),
                            GS_GRANTED_PRIORITY(word));
}

bool gs_activity_open(const struct gs_limits *limits, unsigned dev) {
    char path[PATH_MOST], uuid[sizeof(limits->device[dev].uuid_text)];
    const char *why;
    memcpy(uuid, limits->device[dev].uuid_text, sizeof(uuid));
    uuid[sizeof(uuid) - 1] = '\0';
    if (!uuid[0] || strchr(uuid, '/') || limits->device[dev].page >= GS_MAX_PEERS)
        return false;
    snprintf(path, sizeof(path), PAGES_PATH, uuid);
    struct gs_pages *own =
        gs_map_exact(path, O_RDWR, PROT_READ | PROT_WRITE, sizeof(struct gs_pages), &why);
    if (!own)
        return false;
    struct index index;
    if (!read_index(uuid, &index) || !header_is_valid((const struct head *)own)) {
        munmap(own, sizeof(*own));
        return false;
    }
    device[dev].limit = &limits->device[dev];
    /* Read it now, for a program that changes its root before its first launch. */
    current_index(dev, &index);
    device[dev].own = own;
    return true;
}

bool gs_activity_are_open(int dev) {
    return dev >= 0 && device[dev].own;
}

/* ---- this container's own file -------------------------------------------------------------- */

static bool is_held(uint64_t owner) {
    uint64_t slot = (owner & UINT32_MAX) - 1;
    if (!owner || slot >= GS_MAX_SLOTS)
        return false;
    const struct gs_slot *s = &gs_region()->usage->slot[slot];
    return __atomic_load_n(&s->generation, __ATOMIC_SEQ_CST) == (uint32_t)(owner >> 32) &&
           gs_alive(s);
}

/* Return whether `owner` names a process of this container that has ended, and not an invalid value
 * that some process wrote there. */
static bool was_held(uint64_t owner) {
    uint64_t slot = (owner & UINT32_MAX) - 1;
    if (!owner || slot >= GS_MAX_SLOTS || is_held(owner))
        return false;
    uint32_t now = __atomic_load_n(&gs_region()->usage->slot[slot].generation, __ATOMIC_SEQ_CST);
    return owner >> 32 && owner >> 32 <= now;
}

static uint64_t own_owner_word(void) {
    const struct gs_slot *slot = gs_slot();
    return slot ? GS_PAGE_OWNER(gs_self()->index, slot->generation) : 0;
}

/* Without a page the context is charged all the time that it is busy, since its peers cannot see
 * it. */
void gs_activity_claim(struct gs_compute *c, struct gs_activity *left) {
    struct gs_pages *own = device[c->dev].own;
    memset(left, 0, sizeof(*left));
    memset(&c->unshared, 0, sizeof(c->unshared));
    c->page = &c->unshared;
    for (uint32_t i = 0; i < GS_MAX_PAGES; i++) {
        uint64_t owner = atomic_load(&own->owner[i]);
        if (is_held(owner) ||
            !atomic_compare_exchange_strong(&own->owner[i], &owner, own_owner_word()))
            continue;
        if (was_held(owner))
            *left = own->page[i].buffer[atomic_load(&own->page[i].index) & 1];
        memset(&own->page[i].buffer, 0, sizeof(own->page[i].buffer));
        uint32_t high = atomic_load(&own->high);
        while (high <= i && !atomic_compare_exchange_weak(&own->high, &high, i + 1))
            ;
        c->page = &own->page[i];
        c->page_index = i;
        return;
    }
}

/* The context has ended: none of its work is busy any more. */
void gs_activity_give(struct gs_compute *c) {
    if (c->page == &c->unshared)
        return;
    struct gs_pages *own = device[c->dev].own;
    uint64_t name = own_owner_word();
    for (unsigned i = 0; i < 2; i++)
        c->page->buffer[i].busy_from_ns = c->page->buffer[i].busy_until_ns = 0;
    atomic_compare_exchange_strong(&own->owner[c->page_index], &name, 0);
    c->page = &c->unshared;
}

/* ---- files of other containers -------------------------------------------------------------- */

struct reading {
    struct gs_compute *c;
    struct gs_peer *out;
    unsigned n, max;
    struct gs_throttle_limit granted; /* to the container whose file is being read */
};

static struct gs_activity *next_buffer(struct reading *r) {
    return r->n < r->max && r->n < MAX_PEERS ? &r->c->told[r->n] : NULL;
}

/* A context that was never busy has nothing to report. */
static void add_peer(struct reading *r, uint32_t container) {
    struct gs_activity *a = &r->c->told[r->n];
    if (!a->busy_until_ns && !a->n)
        return;
    r->out[r->n++] = (struct gs_peer){a, container, r->granted};
}

/* Free the page of a dead process. The process that succeeds in this charges the remaining work. */
static void inherit_from_dead(struct gs_compute *c, struct gs_page *page, _Atomic uint64_t *at,
                              uint64_t owner) {
    struct gs_activity last = page->buffer[atomic_load(&page->index) & 1];
    if (atomic_compare_exchange_strong(at, &owner, 0))
        gs_throttle_inherit(&c->throttle, &last, c->env.now(c->env.arg));
}

/* Read the other contexts of this container, in this process and in others. */
static void read_own_container(struct reading *r, uint32_t container) {
    struct gs_pages *own = device[r->c->dev].own;
    uint32_t high = atomic_load(&own->high);
    for (uint32_t i = 0; i < high && i < GS_MAX_PAGES; i++) {
        struct gs_activity *a = next_buffer(r);
        uint64_t owner = atomic_load(&own->owner[i]);
        if (!a || &own->page[i] == r->c->page)
            continue;
        if (!is_held(owner)) {
            if (was_held(owner))
                inherit_from_dead(r->c, &own->page[i], &own->owner[i], owner);
            continue;
        }
        for (unsigned tries = 0; tries < TRIES; tries++) {
            uint32_t index = atomic_load(&own->page[i].index);
            memcpy(a, &own->page[i].buffer[index & 1], sizeof(*a));
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load(&own->page[i].index) == index)
                break;
        }
        add_peer(r, container);
    }
}

static void read_activity(struct reading *r, int fd, uint32_t i, uint32_t container) {
    struct gs_activity *a = next_buffer(r);
    size_t at = offsetof(struct gs_pages, page) + i * sizeof(struct gs_page);
    struct gs_page copy;
    uint32_t index;
    for (unsigned tries = 0; a && tries < TRIES; tries++) {
        if (!read_at(fd, &copy, sizeof(copy), at) || !read_at(fd, &index, sizeof(index), at))
            return;
        if (index != atomic_load(&copy.index) && tries + 1 < TRIES)
            continue;
        *a = copy.buffer[index & 1];
        add_peer(r, container);
        return;
    }
}

/* No descriptor is kept open. Pages without an owner are skipped. Only the owner's container can
 * tell whether the owner is alive; the reports of a dead owner expire. */
static void read_file(struct reading *r, const char *uuid, uint32_t number) {
    char path[PATH_MOST];
    struct head head;
    struct stat st;
    snprintf(path, sizeof(path), PEER_PATH, uuid, number);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    if (fd < 0) {
        r->c->throttle.peers_hidden = true;
        return;
    }
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && read_at(fd, &head, sizeof(head), 0) &&
        header_is_valid(&head))
        for (uint32_t i = 0; i < head.high && i < GS_MAX_PAGES; i++)
            if (head.owner[i])
                read_activity(r, fd, i, number);
    close(fd);
}

uint32_t gs_activity_others_ppm(const struct gs_compute *c) {
    int saved = errno;
    struct index index;
    uint64_t ppm = 0;
    current_index((unsigned)c->dev, &index);
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (i != c->throttle.container && is_used(&index, i)) {
            struct gs_throttle_limit granted = granted_to(&index, i);
            ppm += gs_throttle_may_have(&granted);
        }
    errno = saved;
    return (uint32_t)min64(ppm, 1000000);
}

struct gs_turn *gs_activity_slice(int dev) {
    return gs_activity_are_open(dev) ? &device[dev].own->turn : NULL;
}

/* Read `bytes` at `offset` of the activity file of each other container, and call for each. */
static void read_others(int dev, size_t bytes, size_t offset,
                        void (*each)(const struct index *index, uint32_t number, void *arg),
                        void *to, void *arg) {
    const struct gs_device_limit *limit = device[dev].limit;
    int saved = errno;
    struct index index;
    current_index((unsigned)dev, &index);
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++) {
        char path[PATH_MOST];
        struct stat st;
        if (!is_used(&index, i) || i == limit->page)
            continue;
        snprintf(path, sizeof(path), PEER_PATH, limit->uuid_text, i);
        int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && read_at(fd, to, bytes, offset))
            each(&index, i, arg);
        if (fd >= 0)
            close(fd);
    }
    errno = saved;
}

struct slices {
    struct gs_turn turn;
    void (*each)(const struct gs_turn *turn, uint32_t number, void *arg);
    void *arg;
};

static void each_slice(const struct index *index, uint32_t number, void *arg) {
    struct slices *s = arg;
    (void)index;
    s->each(&s->turn, number, s->arg);
}

void gs_activity_slices(int dev,
                        void (*each)(const struct gs_turn *turn, uint32_t number, void *arg),
                        void *arg) {
    struct slices s = {.each = each, .arg = arg};
    read_others(dev, sizeof(s.turn), offsetof(struct gs_pages, turn), each_slice, &s.turn, &s);
}

struct gs_compute_turn *gs_activity_turn(int dev) {
    return gs_activity_are_open(dev) ? &device[dev].own->compute_turn : NULL;
}

struct turns {
    struct gs_compute_turn turn;
    struct gs_turn_of *out;
    unsigned n, max;
};

static void each_turn(const struct index *index, uint32_t number, void *arg) {
    struct turns *t = arg;
    if (t->n < t->max)
        t->out[t->n++] = (struct gs_turn_of){t->turn, number, granted_to(index, number)};
}

unsigned gs_activity_turns(int dev, struct gs_turn_of *out, unsigned max) {
    struct turns t = {.out = out, .max = max};
    read_others(dev, sizeof(t.turn), offsetof(struct gs_pages, compute_turn), each_turn, &t.turn,
                &t);
    return t.n;
}

unsigned gs_activity_peers(struct gs_compute *c, struct gs_peer *out, unsigned max) {
    struct reading r = {.c = c, .out = out, .max = max, .granted = c->throttle.limit};
    const struct gs_device_limit *limit = device[c->dev].limit;
    int saved = errno;
    uint32_t mine = __atomic_load_n(&limit->page, __ATOMIC_RELAXED);
    struct index index;
    c->throttle.peers_hidden = true;
    if (c->page == &c->unshared)
        return 0;
    c->throttle.peers_hidden = !current_index((unsigned)c->dev, &index);
    uint32_t others = 0;
    if (mine < GS_MAX_PEERS)
        index.used[mine / 64] &= ~(UINT64_C(1) << mine % 64);
    for (unsigned w = 0; w < GS_MAX_PEERS / 64; w++)
        others += (uint32_t)__builtin_popcountll(index.used[w]);
    read_own_container(&r, mine);
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (is_used(&index, i)) {
            /* The contexts of one container must not prevent the next file from being read. */
            r.max = r.n + (max - r.n + others - 1) / others;
            others--;
            r.granted = granted_to(&index, i);
            read_file(&r, limit->uuid_text, i);
        }
    errno = saved;
    return r.n;
}
