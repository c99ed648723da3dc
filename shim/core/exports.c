/* Memory that several processes of the container hold. The process that allocated it is charged.
 * When that process frees it or exits while another one has it open, the memory stays; then the
 * process's row in the usage file is charged to the container, until every process that has it open
 * has closed it or exited.
 *
 * Only its owner changes a row, under lock_exports; other processes read rows without a lock, and
 * claim those of processes that have exited. A death at any moment leaves nothing wrong for long:
 * rows name slots, and a slot tells by itself whether its process is alive. */
#include "gs.h"

#define BYTES (UINT64_MAX >> 8)

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static bool is_alive(const struct gs_usage *usage, uint64_t owner) {
    uint64_t index = owner & GS_SHARE_SLOT;
    if (index >= GS_MAX_SLOTS)
        return false;
    const struct gs_slot *slot = &usage->slot[index];
    return gs_alive(slot) &&
           __atomic_load_n(&slot->generation, __ATOMIC_SEQ_CST) == (uint32_t)(owner >> 32);
}

static bool matches(uint64_t imported, uint64_t exported) {
    return imported == exported || imported == GS_SHARE_ANY || exported == GS_SHARE_ANY;
}

static bool is_open(const struct gs_usage *usage, uint64_t id) {
    if (load(&usage->shares_used) & GS_SHARES_LOST)
        return true;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        uint64_t owner = load(&usage->share[i].owner), opened = load(&usage->share[i].id);
        if (owner & GS_SHARE_IMPORT && opened && matches(opened, id) && is_alive(usage, owner))
            return true;
    }
    return false;
}

/* An export whose bytes are charged to no process. */
static bool is_orphan(const struct gs_usage *usage, uint64_t owner) {
    return owner && !(owner & GS_SHARE_IMPORT) &&
           (owner & GS_SHARE_ORPHAN || !is_alive(usage, owner));
}

uint64_t gs_export_orphans(const struct gs_usage *usage, int dev) {
    uint64_t total = 0;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        const struct gs_share *row = &usage->share[i];
        uint64_t owner = load(&row->owner), id = load(&row->id), what = load(&row->what);
        if (id && (int)(what >> 56) == dev && what & BYTES && is_orphan(usage, owner) &&
            is_open(usage, id))
            total += what & BYTES;
    }
    return total;
}

/* Bytes of an id that its exporters have on a device. */
static uint64_t exported(const struct gs_usage *usage, uint64_t id, int dev, uint64_t not_by,
                         bool orphans) {
    uint64_t total = 0;
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        const struct gs_share *row = &usage->share[i];
        uint64_t owner = load(&row->owner), what = load(&row->what);
        bool orphan = is_orphan(usage, owner);
        if (owner && !(owner & GS_SHARE_IMPORT) &&
            (load(&row->id) == id || (id == GS_SHARE_ANY && load(&row->id))) &&
            (int)(what >> 56) == dev && (orphans ? orphan : orphan || owner != not_by))
            total += what & BYTES;
    }
    return total;
}

uint64_t gs_export_imported(int dev, bool orphans) {
    const struct gs_view *view = gs_region();
    const struct gs_slot *slot = gs_slot();
    uint64_t total = 0;
    if (!slot || !(load(&view->usage->shares_used)))
        return 0;
    uint64_t own = (uint64_t)slot->generation << 32 | (uint64_t)(slot - view->usage->slot);
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        const struct gs_share *row = &view->usage->share[i];
        uint64_t id = load(&row->id);
        if (load(&row->owner) != (own | GS_SHARE_IMPORT) || !id)
            continue;
        if (id == GS_SHARE_ANY) /* more memory than rows: any of it may be open here */
            return exported(view->usage, id, dev, own, orphans);
        total += exported(view->usage, id, dev, own, orphans);
    }
    return total;
}

/* ---- this process's rows; the caller holds lock_exports -------------------------------------- */

static void clear(struct gs_share *row) {
    store(&row->id, 0);
    store(&row->owner, 0);
}

static bool is_free(const struct gs_usage *usage, const struct gs_share *row, uint64_t owner) {
    if (owner == 0)
        return true;
    if (is_alive(usage, owner))
        return false;
    return owner & GS_SHARE_IMPORT || !is_open(usage, load(&row->id));
}

static uint64_t owner_word(const struct gs_usage *usage, uint64_t kind) {
    const struct gs_slot *slot = gs_slot();
    if (!slot) /* a forked child, whose calls are refused earlier */
        return kind;
    return (uint64_t)slot->generation << 32 | (uint64_t)(slot - usage->slot) | kind;
}

static int find(const struct gs_usage *usage, uint64_t owner, uint64_t id, int dev) {
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        const struct gs_share *row = &usage->share[i];
        if (load(&row->owner) == owner && load(&row->id) == id &&
            (int)(load(&row->what) >> 56) == dev)
            return (int)i;
    }
    return -1;
}

/* Return the row of (owner, id, dev), created if necessary; -1 if all are taken. */
static int row_for(struct gs_usage *usage, uint64_t owner, uint64_t id, int dev) {
    int known = find(usage, owner, id, dev);
    for (unsigned i = id == GS_SHARE_ANY ? GS_SHARES_OWN : 0;
         known < 0 && i < (id == GS_SHARE_ANY ? GS_MAX_SHARES : GS_SHARES_OWN); i++) {
        struct gs_share *row = &usage->share[i];
        uint64_t before = load(&row->owner);
        if (!is_free(usage, row, before) ||
            !__atomic_compare_exchange_n(&row->owner, &before, owner, false, __ATOMIC_SEQ_CST,
                                         __ATOMIC_SEQ_CST))
            continue;
        store(&row->id, 0);
        store(&row->what, (uint64_t)(unsigned)dev << 56);
        __atomic_fetch_or(&usage->shares_used, 1, __ATOMIC_SEQ_CST);
        store(&row->id, id);
        known = (int)i;
    }
    return known;
}

/* Remove rows of memory that this process has freed and that no process has open any more. */
static void drop_closed(struct gs_usage *usage) {
    uint64_t orphan = owner_word(usage, GS_SHARE_ORPHAN);
    for (unsigned i = 0; i < GS_MAX_SHARES; i++) {
        struct gs_share *row = &usage->share[i];
        if (load(&row->owner) == orphan && !is_open(usage, load(&row->id)))
            clear(row);
    }
}

static int add(struct gs_usage *usage, uint64_t kind, uint64_t id, int dev, uint64_t bytes) {
    uint64_t owner = owner_word(usage, kind);
    int row = row_for(usage, owner, id, dev);
    if (row < 0)
        row = row_for(usage, owner, GS_SHARE_ANY, dev);
    if (row >= 0)
        store(&usage->share[row].what, load(&usage->share[row].what) + bytes);
    return row;
}

/* Subtract `bytes` from a row of this process, and free the row with the last of them. */
static void subtract(struct gs_share *row, uint64_t bytes) {
    uint64_t what = load(&row->what);
    store(&row->what, what - ((what & BYTES) < bytes ? what & BYTES : bytes));
    if ((load(&row->what) & BYTES) == 0)
        clear(row);
}

int gs_export_add(uint64_t id, bool import, int dev, uint64_t bytes) {
    struct gs_usage *usage = gs_region()->usage;
    if (!gs_slot()) /* a forked child, whose calls are refused earlier */
        return -1;
    gs_lock(&gs_self()->lock_exports);
    drop_closed(usage);
    int row = import ? add(usage, GS_SHARE_IMPORT, id, 0, 1) : add(usage, 0, id, dev, bytes);
    gs_unlock(&gs_self()->lock_exports);
    if (row < 0 && import) /* from now on whatever was exported counts as open */
        __atomic_fetch_or(&usage->shares_used, GS_SHARES_LOST, __ATOMIC_SEQ_CST);
    return row;
}

void gs_export_freed(int row, uint64_t bytes) {
    struct gs_usage *usage = gs_region()->usage;
    struct gs_share *share = &usage->share[row];
    gs_lock(&gs_self()->lock_exports);
    uint64_t id = load(&share->id);
    /* First counted twice, then once: never not at all. */
    if (is_open(usage, id) &&
        add(usage, GS_SHARE_ORPHAN, id, (int)(load(&share->what) >> 56), bytes) < 0)
        store(&share->owner, load(&share->owner) | GS_SHARE_ORPHAN);
    else
        subtract(share, bytes);
    gs_unlock(&gs_self()->lock_exports);
}

void gs_export_closed(int row) {
    struct gs_usage *usage = gs_region()->usage;
    if (row < 0)
        return;
    gs_lock(&gs_self()->lock_exports);
    subtract(&usage->share[row], 1);
    drop_closed(usage);
    gs_unlock(&gs_self()->lock_exports);
}

uint64_t gs_export_new_id(void) {
    static _Atomic uint64_t number;
    struct gs_usage *usage = gs_region()->usage;
    uint64_t name[3] = {usage->nonce, owner_word(usage, 0), atomic_fetch_add(&number, 1)};
    return (gs_export_id(name, sizeof(name)) >> 2) + 1; /* an offset in a file */
}

uint64_t gs_export_id(const void *name, size_t size) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)name)[i]) * UINT64_C(0x100000001b3);
    return hash && hash != GS_SHARE_ANY ? hash : 1;
}
