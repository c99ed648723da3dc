/* Key -> entry, lock-free: open addressing in segments that only ever get added.
 *
 * A cell's key is EMPTY (never used), FREE (was used), BUSY (one thread owns its contents) or a
 * key. Cells never go back to EMPTY, so a search may stop there; FREE cells are used again, so
 * deletions leave no debt. A key is within PROBES cells of its home, or in a later segment. */
#include <sys/mman.h>

#include "gs.h"

#define EMPTY UINT64_C(0)
#define FREE UINT64_MAX
#define BUSY (UINT64_MAX - 1)
#define PROBES 16u
#define FIRST_CELLS_LOG2 12u

struct cell { /* a cache line of its own, so threads do not slow each other */
    _Alignas(64) _Atomic uint64_t key;
    struct gs_entry entry;
};
_Static_assert(sizeof(struct cell) == 64, "one cell, one cache line");

struct gs_map_segment {
    _Alignas(64) uint64_t mask;
    struct cell cell[];
};

#define SEGMENTS (sizeof(((struct gs_map *)0)->segment) / sizeof(void *))

static size_t segment_bytes(unsigned i) {
    return sizeof(struct gs_map_segment) +
           sizeof(struct cell) * ((size_t)1 << (FIRST_CELLS_LOG2 + i));
}

static uint64_t home(uint64_t key) {
    key ^= key >> 32;
    key *= UINT64_C(0x9e3779b97f4a7c15);
    return key >> 24;
}

static struct gs_map_segment *grown(struct gs_map *map, unsigned i) {
    struct gs_map_segment *segment = mmap(NULL, segment_bytes(i), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (segment == MAP_FAILED)
        return NULL;
    segment->mask = ((uint64_t)1 << (FIRST_CELLS_LOG2 + i)) - 1;
    struct gs_map_segment *none = NULL;
    if (atomic_compare_exchange_strong(&map->segment[i], &none, segment))
        return segment;
    munmap(segment, segment_bytes(i));
    return none;
}

/* The fence comes first: a thread that reads any of these words then finds a changed key. */
static void write_cell(struct cell *cell, const struct gs_entry *entry) {
    atomic_thread_fence(memory_order_release);
    for (size_t i = 0; i < sizeof(*entry) / sizeof(uint64_t); i++)
        __atomic_store_n((uint64_t *)&cell->entry + i, ((const uint64_t *)entry)[i],
                         __ATOMIC_RELAXED);
}

static bool put_in(struct gs_map_segment *segment, uint64_t key, const struct gs_entry *entry) {
    uint64_t at = home(key);
    for (unsigned i = 0; i < PROBES; i++) {
        struct cell *cell = &segment->cell[(at + i) & segment->mask];
        uint64_t seen = atomic_load_explicit(&cell->key, memory_order_relaxed);
        if (seen != EMPTY && seen != FREE)
            continue;
        if (!atomic_compare_exchange_strong_explicit(&cell->key, &seen, BUSY, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        write_cell(cell, entry);
        atomic_store_explicit(&cell->key, key, memory_order_release);
        return true;
    }
    return false;
}

bool gs_map_put(struct gs_map *map, uint64_t key, const struct gs_entry *entry) {
    for (unsigned i = 0; i < SEGMENTS; i++) {
        struct gs_map_segment *segment =
            atomic_load_explicit(&map->segment[i], memory_order_acquire);
        if (!segment && !(segment = grown(map, i)))
            return false;
        if (put_in(segment, key, entry))
            return true;
    }
    return false;
}

/* The cell that holds `key`, or NULL. */
static struct cell *find(const struct gs_map *map, uint64_t key) {
    uint64_t at = home(key);
    if (key == EMPTY || key >= BUSY)
        return NULL;
    for (unsigned s = 0; s < SEGMENTS; s++) {
        struct gs_map_segment *segment =
            atomic_load_explicit(&map->segment[s], memory_order_acquire);
        if (!segment)
            return NULL;
        for (unsigned i = 0; i < PROBES; i++) {
            struct cell *cell = &segment->cell[(at + i) & segment->mask];
            uint64_t seen = atomic_load_explicit(&cell->key, memory_order_acquire);
            if (seen == key)
                return cell;
            if (seen == EMPTY)
                break;
        }
    }
    return NULL;
}

static void copy_cell(const struct cell *cell, struct gs_entry *out) {
    for (size_t i = 0; i < sizeof(*out) / sizeof(uint64_t); i++)
        ((uint64_t *)out)[i] =
            __atomic_load_n((const uint64_t *)&cell->entry + i, __ATOMIC_RELAXED);
}

/* `extra` of an entry that was taken, so that a late swap changes nothing. */
#define NO_EXTRA (UINT64_MAX - 2)

static bool take_cell(struct cell *cell, uint64_t key, struct gs_entry *out) {
    if (!atomic_compare_exchange_strong_explicit(&cell->key, &key, BUSY, memory_order_acquire,
                                                 memory_order_relaxed))
        return false;
    uint64_t extra = __atomic_exchange_n(&cell->entry.extra, NO_EXTRA, __ATOMIC_SEQ_CST);
    copy_cell(cell, out);
    out->extra = extra;
    atomic_store_explicit(&cell->key, FREE, memory_order_release);
    return true;
}

bool gs_map_take(struct gs_map *map, uint64_t key, struct gs_entry *out) {
    struct cell *cell;
    while ((cell = find(map, key)))
        if (take_cell(cell, key, out))
            return true;
    return false;
}

/* The copy is valid if the key is the same before and after: a cell is rewritten only while BUSY.
 */
static bool read_cell(const struct cell *cell, uint64_t key, struct gs_entry *out) {
    copy_cell(cell, out);
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&cell->key, memory_order_relaxed) == key;
}

bool gs_map_get(const struct gs_map *map, uint64_t key, struct gs_entry *out) {
    struct cell *cell;
    while ((cell = find(map, key)))
        if (read_cell(cell, key, out))
            return true;
    return false;
}

bool gs_map_swap(struct gs_map *map, uint64_t key, uint64_t before, uint64_t after) {
    struct cell *cell = find(map, key);
    uint64_t was = before;
    if (!cell || !__atomic_compare_exchange_n(&cell->entry.extra, &was, after, false,
                                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return false;
    uint64_t now = atomic_load(&cell->key);
    if (now == key || now >= BUSY || now == EMPTY)
        return true; /* a thread that takes the entry now, or just took it, gets our value */
    __atomic_compare_exchange_n(&cell->entry.extra, &after, before, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST); /* another key's by now */
    return false;
}

void gs_map_take_all(struct gs_map *map,
                     bool (*want)(uint64_t key, const struct gs_entry *e, void *arg),
                     void (*taken)(uint64_t key, const struct gs_entry *e, void *arg), void *arg) {
    for (unsigned s = 0; s < SEGMENTS; s++) {
        struct gs_map_segment *segment =
            atomic_load_explicit(&map->segment[s], memory_order_acquire);
        for (uint64_t i = 0; segment && i <= segment->mask; i++) {
            struct cell *cell = &segment->cell[i];
            uint64_t key = atomic_load_explicit(&cell->key, memory_order_acquire);
            struct gs_entry entry;
            if (key == EMPTY || key >= BUSY || !read_cell(cell, key, &entry) ||
                !want(key, &entry, arg) || !take_cell(cell, key, &entry))
                continue;
            if (want(key, &entry, arg))
                taken(key, &entry, arg);
            else /* taken and put again in between, as something else */
                gs_map_put(map, key, &entry);
        }
    }
}
