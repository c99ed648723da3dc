/* Memory that several processes of the container hold. Whoever allocated it is charged. When that
 * process frees it or dies while another one has it open, it stays; then its row in the usage file
 * is charged to the container, until the last one that has it open closes it or dies. No lock, and
 * nothing that a death at any moment could leave wrong for long: rows name slots, and a slot tells
 * by itself whether its process is alive. */
#include "gs.h"

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static bool lives(const struct gs_usage *usage, uint64_t owner) {
    uint64_t index = owner & GS_SHARE_SLOT;
    if (index >= GS_MAX_SLOTS)
        return false;
    const struct gs_slot *slot = &usage->slot[index];
    return gs_alive(slot) &&
           __atomic_load_n(&slot->generation, __ATOMIC_SEQ_CST) == (uint32_t)(owner >> 32);
}

static bool is_open(const struct gs_usage *usage, uint64_t id) {
    if (load(&usage->shares_used) & GS_SHARES_LOST)
        return true;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        uint64_t owner = load(&usage->share[i].owner);
        if (owner & GS_SHARE_IMPORT && load(&usage->share[i].id) == id && lives(usage, owner))
            return true;
    }
    return false;
}

/* An export whose bytes are charged to no process. */
static bool is_orphan(const struct gs_usage *usage, uint64_t owner) {
    return owner && !(owner & GS_SHARE_IMPORT) && (owner & GS_SHARE_ORPHAN || !lives(usage, owner));
}

uint64_t gs_share_orphans(const struct gs_usage *usage, int dev, bool surely) {
    uint64_t total = 0;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        const struct gs_share *row = &usage->share[i];
        uint64_t owner = load(&row->owner), id = load(&row->id), what = load(&row->what);
        if (!id || (int)(what >> 56) != dev || !is_orphan(usage, owner))
            continue;
        if (!surely || is_open(usage, id))
            total += what & (UINT64_MAX >> 8);
    }
    return total;
}

static void clear(struct gs_share *row) {
    store(&row->id, 0);
    store(&row->owner, 0);
}

static bool is_free(const struct gs_usage *usage, const struct gs_share *row, uint64_t owner) {
    if (owner == 0)
        return true;
    if (owner & GS_SHARE_IMPORT)
        return !lives(usage, owner);
    return is_orphan(usage, owner) && !is_open(usage, load(&row->id));
}

int gs_share_add(uint64_t id, bool import, int dev, uint64_t bytes) {
    struct gs_usage *usage = gs_region()->usage;
    const struct gs_slot *slot = gs_slot();
    if (!slot) /* a forked child, whose calls do not come this far */
        return -1;
    uint64_t mine = (uint64_t)slot->generation << 32 | (uint64_t)(slot - usage->slot);
    if (import)
        mine |= GS_SHARE_IMPORT;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        struct gs_share *row = &usage->share[i];
        uint64_t owner = load(&row->owner);
        if (!is_free(usage, row, owner) ||
            !__atomic_compare_exchange_n(&row->owner, &owner, mine, false, __ATOMIC_SEQ_CST,
                                         __ATOMIC_SEQ_CST))
            continue;
        store(&row->id, 0);
        store(&row->what, (uint64_t)(unsigned)dev << 56 | bytes);
        __atomic_fetch_or(&usage->shares_used, 1, __ATOMIC_SEQ_CST);
        store(&row->id, id);
        return (int)i;
    }
    if (import) /* from now on whatever was exported counts as open */
        __atomic_fetch_or(&usage->shares_used, GS_SHARES_LOST, __ATOMIC_SEQ_CST);
    return -1;
}

void gs_share_freed(int row) {
    struct gs_usage *usage = gs_region()->usage;
    struct gs_share *share = &usage->share[row];
    store(&share->owner, load(&share->owner) | GS_SHARE_ORPHAN);
    if (!is_open(usage, load(&share->id)))
        clear(share);
}

void gs_share_closed(int row) {
    struct gs_usage *usage = gs_region()->usage;
    if (row < 0)
        return;
    uint64_t id = load(&usage->share[row].id);
    clear(&usage->share[row]);
    for (unsigned i = 0; i < GS_MAX_SHARES && !is_open(usage, id); i++) {
        struct gs_share *other = &usage->share[i];
        uint64_t owner = load(&other->owner);
        if (load(&other->id) == id && is_orphan(usage, owner))
            clear(other);
    }
}

uint64_t gs_share_id(const void *name, size_t size) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)name)[i]) * UINT64_C(0x100000001b3);
    return hash ? hash : 1;
}
