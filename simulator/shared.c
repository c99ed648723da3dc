/* Physical memory that several clients hold: one client exports it, others import it. */
#include "device.h"

static void set_holder(struct sim_shared *m, uint32_t client, bool held) {
    uint64_t bit = 1ull << (client % 64);
    if (held)
        m->holders[client / 64] |= bit;
    else
        m->holders[client / 64] &= ~bit;
}

static int first_holder(const struct sim_shared *m) {
    for (unsigned w = 0; w < SIM_MAX_CLIENTS / 64; w++)
        if (m->holders[w])
            return (int)(w * 64) + __builtin_ctzll(m->holders[w]);
    return -1;
}

static void move_bytes(struct sim_state *s, uint32_t from, uint32_t to, uint64_t bytes) {
    struct sim_client *a = &s->client[from], *b = &s->client[to];
    a->bytes -= bytes;
    b->bytes += bytes;
    if (a->state == SIM_CLIENT_LIVE)
        s->group[a->group].current_bytes -= bytes;
    if (b->state == SIM_CLIENT_LIVE)
        s->group[b->group].current_bytes += bytes;
}

/* The offset behind every live entry of the arena. Gaps cost nothing: the file is sparse. */
static uint64_t arena_offset(const struct sim_state *s) {
    uint64_t end = SIM_ARENA_OFFSET;
    for (unsigned i = 0; i < SIM_MAX_SHARED; i++) {
        const struct sim_shared *m = &s->shared[i];
        if (m->id && m->offset && m->offset + m->bytes > end)
            end = m->offset + m->bytes;
    }
    return end;
}

/* Registers memory that the caller has already charged, and assigns a place in the device file for
 * its content. Returns its ID, or 0 when the table is full. */
uint64_t sim_share(struct sim_device *device, uint64_t bytes, uint64_t *offset) {
    uint64_t id = 0;
    sim_lock(device);
    struct sim_state *s = device->state;
    for (unsigned i = 0; i < SIM_MAX_SHARED && !id; i++) {
        struct sim_shared *m = &s->shared[i];
        if (m->id)
            continue;
        *m = (struct sim_shared){.bytes = bytes, .owner = device->client - 1};
        *offset = m->offset = arena_offset(s);
        set_holder(m, device->client - 1, true);
        m->id = id = ++s->shared_next_id;
    }
    sim_unlock(device);
    return id;
}

/* Call locked. */
struct sim_shared *sim_find_shared(struct sim_device *device, uint64_t id) {
    for (unsigned i = 0; i < SIM_MAX_SHARED; i++) {
        struct sim_shared *m = &device->state->shared[i];
        if (m->id == id && id)
            return m;
    }
    return NULL;
}

enum sim_result sim_hold_shared(struct sim_device *device, uint64_t id) {
    sim_lock(device);
    sim_reap(device);
    struct sim_shared *m = sim_find_shared(device, id);
    if (m)
        set_holder(m, device->client - 1, true);
    sim_unlock(device);
    return m ? SIM_OK : SIM_GONE;
}

/* Removes a holder. The last one frees the memory; an owner that leaves passes the charge to
 * another holder. */
static void drop(struct sim_state *s, struct sim_shared *m, uint32_t client) {
    set_holder(m, client, false);
    int heir = first_holder(m);
    if (heir >= 0) {
        if (m->owner == client) {
            move_bytes(s, client, (uint32_t)heir, m->bytes);
            m->owner = (uint32_t)heir;
        }
        return;
    }
    /* A dead client's memory stays charged to it until its delayed return. */
    if (s->client[client].state == SIM_CLIENT_LIVE) {
        s->client[client].bytes -= m->bytes;
        s->group[s->client[client].group].current_bytes -= m->bytes;
        s->used_bytes -= m->bytes;
    }
    m->id = 0;
}

void sim_drop_shared(struct sim_device *device, uint64_t id) {
    sim_lock(device);
    struct sim_shared *m = sim_find_shared(device, id);
    if (m)
        drop(device->state, m, device->client - 1);
    sim_unlock(device);
}

/* Drops everything that a dead client holds. Call locked, after it was marked dead. */
void sim_bury_shared(struct sim_device *device, uint32_t dead_client) {
    struct sim_state *s = device->state;
    for (unsigned i = 0; i < SIM_MAX_SHARED; i++) {
        struct sim_shared *m = &s->shared[i];
        if (m->id && (m->holders[dead_client / 64] >> (dead_client % 64) & 1))
            drop(s, m, dead_client);
    }
}

uint64_t sim_imported_bytes(const struct sim_device *device, unsigned client) {
    const struct sim_state *s = device->state;
    uint64_t bytes = 0;
    for (unsigned i = 0; i < SIM_MAX_SHARED; i++) {
        const struct sim_shared *m = &s->shared[i];
        if (m->id && m->owner != client && m->holders[client / 64] >> (client % 64) & 1)
            bytes += m->bytes;
    }
    return bytes;
}
