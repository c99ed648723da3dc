/* What contexts tell each other. Our own file is mapped and written; the files of others are read
 * with pread, each time anew: who owns one can truncate it, which would kill a reader that maps it.
 * What is read is only checked for its form: throttle.c believes it no further than it must. */
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
    const struct gs_peers *index;
    const struct gs_device_limit *limit;
} device[GS_MAX_DEVICES];

/* The beginning of struct gs_pages. */
struct head {
    uint64_t magic;
    uint32_t version, size, n_pages, high;
    uint8_t reserved[40];
    uint64_t owner[GS_MAX_PAGES];
};
_Static_assert(sizeof(struct head) == offsetof(struct gs_pages, turn), "struct gs_pages");

static bool right_pages(const struct head *p) {
    return p->magic == GS_PAGES_MAGIC && p->version == GS_ABI_VERSION &&
           p->size == sizeof(struct gs_pages) && p->n_pages == GS_MAX_PAGES;
}

bool gs_pages_open(const struct gs_limits *limits, unsigned dev) {
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
    snprintf(path, sizeof(path), INDEX_PATH, uuid);
    const struct gs_peers *index =
        gs_map_exact(path, O_RDONLY, PROT_READ, sizeof(struct gs_peers), &why);
    if (!index || !right_pages((const struct head *)own) || index->magic != GS_PEERS_MAGIC ||
        index->version != GS_ABI_VERSION || index->size != sizeof(*index)) {
        munmap(own, sizeof(*own));
        if (index)
            munmap((void *)index, sizeof(*index));
        return false;
    }
    device[dev].own = own;
    device[dev].index = index;
    device[dev].limit = &limits->device[dev];
    return true;
}

bool gs_pages_are_open(int dev) {
    return dev >= 0 && device[dev].own;
}

/* ---- our own pages -------------------------------------------------------------------------- */

static bool is_held(uint64_t owner) {
    uint64_t slot = (owner & UINT32_MAX) - 1;
    if (!owner || slot >= GS_MAX_SLOTS)
        return false;
    const struct gs_slot *s = &gs_region()->usage->slot[slot];
    return __atomic_load_n(&s->generation, __ATOMIC_SEQ_CST) == (uint32_t)(owner >> 32) &&
           gs_alive(s);
}

/* It was a process of this container, and is gone: no nonsense that somebody wrote there. */
static bool was_held(uint64_t owner) {
    uint64_t slot = (owner & UINT32_MAX) - 1;
    if (!owner || slot >= GS_MAX_SLOTS || is_held(owner))
        return false;
    uint32_t now = __atomic_load_n(&gs_region()->usage->slot[slot].generation, __ATOMIC_SEQ_CST);
    return owner >> 32 && owner >> 32 <= now;
}

static uint64_t my_name(void) {
    const struct gs_slot *slot = gs_slot();
    return slot ? GS_PAGE_OWNER(gs_self()->index, slot->generation) : 0;
}

/* Without one, the context is charged all the time that it is busy: nobody would hear of it. */
void gs_pages_claim(struct gs_compute *c, struct gs_activity *left) {
    struct gs_pages *own = device[c->dev].own;
    memset(left, 0, sizeof(*left));
    memset(&c->unshared, 0, sizeof(c->unshared));
    c->page = &c->unshared;
    for (uint32_t i = 0; i < GS_MAX_PAGES; i++) {
        uint64_t owner = atomic_load(&own->owner[i]);
        if (is_held(owner) || !atomic_compare_exchange_strong(&own->owner[i], &owner, my_name()))
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

/* Its context is gone: nothing of it is busy any more. */
void gs_pages_give(struct gs_compute *c) {
    if (c->page == &c->unshared)
        return;
    struct gs_pages *own = device[c->dev].own;
    uint64_t name = my_name();
    for (unsigned i = 0; i < 2; i++)
        c->page->buffer[i].busy_from_ns = c->page->buffer[i].busy_until_ns = 0;
    atomic_compare_exchange_strong(&own->owner[c->page_index], &name, 0);
    c->page = &c->unshared;
}

/* ---- the pages of others ----------------------------------------------------------------------
 */

struct reading {
    struct gs_compute *c;
    struct gs_peer *out;
    unsigned n, max;
    struct gs_throttle_limit granted; /* to the container that is being read */
};

static struct gs_activity *next(struct reading *r) {
    return r->n < r->max && r->n < MAX_PEERS ? &r->c->told[r->n] : NULL;
}

/* One that never was busy says nothing. */
static void said(struct reading *r, uint32_t container) {
    struct gs_activity *a = &r->c->told[r->n];
    if (!a->busy_until_ns && !a->n)
        return;
    r->out[r->n++] = (struct gs_peer){a, container, r->granted};
}

/* The page of a process that died: who makes it nobody's charges what it had. */
static void bury(struct gs_compute *c, struct gs_page *page, _Atomic uint64_t *at, uint64_t owner) {
    struct gs_activity last = page->buffer[atomic_load(&page->index) & 1];
    if (atomic_compare_exchange_strong(at, &owner, 0))
        gs_throttle_inherit(&c->law, &last, c->env.now(c->env.arg));
}

/* The others of our container: processes, and contexts of this one. */
static void read_own(struct reading *r, uint32_t container) {
    struct gs_pages *own = device[r->c->dev].own;
    uint32_t high = atomic_load(&own->high);
    for (uint32_t i = 0; i < high && i < GS_MAX_PAGES; i++) {
        struct gs_activity *a = next(r);
        uint64_t owner = atomic_load(&own->owner[i]);
        if (!a || &own->page[i] == r->c->page)
            continue;
        if (!is_held(owner)) {
            if (was_held(owner))
                bury(r->c, &own->page[i], &own->owner[i], owner);
            continue;
        }
        for (unsigned tries = 0; tries < TRIES; tries++) {
            uint32_t index = atomic_load(&own->page[i].index);
            memcpy(a, &own->page[i].buffer[index & 1], sizeof(*a));
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load(&own->page[i].index) == index)
                break;
        }
        said(r, container);
    }
}

static bool get(int fd, void *to, size_t bytes, size_t offset) {
    return pread(fd, to, bytes, (off_t)offset) == (ssize_t)bytes;
}

static void read_page(struct reading *r, int fd, uint32_t i, uint32_t container) {
    struct gs_activity *a = next(r);
    size_t at = offsetof(struct gs_pages, page) + i * sizeof(struct gs_page);
    struct gs_page copy;
    uint32_t index;
    for (unsigned tries = 0; a && tries < TRIES; tries++) {
        if (!get(fd, &copy, sizeof(copy), at) || !get(fd, &index, sizeof(index), at))
            return;
        if (index != atomic_load(&copy.index) && tries + 1 < TRIES)
            continue;
        *a = copy.buffer[index & 1];
        said(r, container);
        return;
    }
}

/* No descriptor is kept. A page that nobody owns is not looked at; whether its owner lives, only
 * its own container knows: what a dead one said expires. */
static void read_file(struct reading *r, const char *uuid, uint32_t number) {
    char path[PATH_MOST];
    struct head head;
    struct stat st;
    snprintf(path, sizeof(path), PEER_PATH, uuid, number);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && get(fd, &head, sizeof(head), 0) &&
        right_pages(&head))
        for (uint32_t i = 0; i < head.high && i < GS_MAX_PAGES; i++)
            if (head.owner[i])
                read_page(r, fd, i, number);
    close(fd);
}

static bool is_used(const struct gs_peers *index, uint32_t number) {
    return atomic_load_explicit(&index->used[number / 64], memory_order_acquire) >> number % 64 & 1;
}

static struct gs_throttle_limit granted_to(const struct gs_peers *index, uint32_t number) {
    uint64_t word = atomic_load_explicit(&index->granted[number], memory_order_relaxed);
    return gs_compute_limit(GS_GRANTED_PERCENT(word), GS_GRANTED_FLAGS(word),
                            GS_GRANTED_PRIORITY(word), GS_GRANTED_WEIGHT(word));
}

uint32_t gs_pages_others_ppm(const struct gs_compute *c) {
    const struct gs_peers *index = device[c->dev].index;
    uint64_t ppm = 0;
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (i != c->law.container && is_used(index, i)) {
            struct gs_throttle_limit granted = granted_to(index, i);
            ppm += gs_throttle_may_have(&granted);
        }
    return (uint32_t)min64(ppm, 1000000);
}

struct gs_turn *gs_pages_turn(int dev) {
    return gs_pages_are_open(dev) ? &device[dev].own->turn : NULL;
}

void gs_pages_turns(int dev, void (*each)(const struct gs_turn *turn, uint32_t number, void *arg),
                    void *arg) {
    const struct gs_device_limit *limit = device[dev].limit;
    int saved = errno;
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++) {
        char path[PATH_MOST];
        struct gs_turn turn;
        uint64_t used =
            atomic_load_explicit(&device[dev].index->used[i / 64], memory_order_relaxed);
        if (!(used >> i % 64 & 1) || i == limit->page)
            continue;
        snprintf(path, sizeof(path), PEER_PATH, limit->uuid_text, i);
        int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
        struct stat st;
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
            get(fd, &turn, sizeof(turn), offsetof(struct gs_pages, turn)))
            each(&turn, i, arg);
        if (fd >= 0)
            close(fd);
    }
    errno = saved;
}

unsigned gs_pages_peers(struct gs_compute *c, struct gs_peer *out, unsigned max) {
    struct reading r = {.c = c, .out = out, .max = max, .granted = c->law.limit};
    const struct gs_device_limit *limit = device[c->dev].limit;
    int saved = errno;
    uint32_t mine = __atomic_load_n(&limit->page, __ATOMIC_RELAXED);
    if (c->page == &c->unshared)
        return 0;
    const struct gs_peers *index = device[c->dev].index;
    uint64_t used[GS_MAX_PEERS / 64]; /* as it was: containers come and go meanwhile */
    uint32_t others = 0;
    for (unsigned w = 0; w < GS_MAX_PEERS / 64; w++) {
        used[w] = atomic_load_explicit(&index->used[w], memory_order_acquire);
        if (mine / 64 == w)
            used[w] &= ~(UINT64_C(1) << mine % 64);
        others += (uint32_t)__builtin_popcountll(used[w]);
    }
    read_own(&r, mine);
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (used[i / 64] >> i % 64 & 1) {
            /* No one's contexts keep us from hearing those of the next. */
            r.max = r.n + (max - r.n + others - 1) / others;
            others--;
            r.granted = granted_to(index, i);
            read_file(&r, limit->uuid_text, i);
        }
    errno = saved;
    return r.n;
}
