/* Accounts for a simulated device's memory: what each client holds, and which client is evicted. */
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PF_EXITING 0x4u
#define SIGKILL_BIT (1u << 8)

/* True for a process that was killed but has open descriptors: the kernel closes them late in
 * exit. */
static bool is_exiting(uint32_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return true;
    text[n] = '\0';
    const char *rest = strrchr(text, ')');
    char state = 0;
    unsigned flags = 0;
    unsigned long pending = 0;
    if (!rest ||
        sscanf(rest + 1,
               " %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d "
               "%*u %*u %*d %*u %*u %*u %*u %*u %*u %lu",
               &state, &flags, &pending) != 3)
        return false;
    return state == 'Z' || state == 'X' || (flags & PF_EXITING) || (pending & SIGKILL_BIT);
}

/* Raises the group's peak, without the memory of processes that are exiting: a limit no longer
 * counts it. This check is slow, so it runs only when the peak grows. */
static void raise_peak(struct sim_device *device, struct sim_group *group) {
    struct sim_state *s = device->state;
    uint64_t bytes = 0;
    for (unsigned i = 0; i < s->clients_high; i++) {
        const struct sim_client *c = &s->client[i];
        if (c->state != SIM_CLIENT_LIVE || &s->group[c->group] != group)
            continue;
        if (i + 1 == device->client || (sim_client_lives(device, i) && !is_exiting(c->pid)))
            bytes += c->bytes;
    }
    if (bytes > group->peak_bytes)
        group->peak_bytes = bytes;
}

static bool is_gone(const struct sim_device *device, const struct sim_client *c) {
    return c->state != SIM_CLIENT_LIVE || c->generation != device->generation;
}

static void take_from(struct sim_state *s, struct sim_client *c, uint64_t bytes) {
    c->bytes -= bytes;
    s->group[c->group].current_bytes -= bytes;
    s->used_bytes -= bytes;
}

/* Evicts managed memory of other clients, first of the client with the most. */
static void evict(struct sim_device *device, uint64_t bytes) {
    struct sim_state *s = device->state;
    uint64_t total = s->config.total_bytes;
    while (bytes > total - s->used_bytes) {
        struct sim_client *victim = NULL;
        for (unsigned i = 0; i < s->clients_high; i++) {
            struct sim_client *c = &s->client[i];
            if (i + 1 != device->client && c->state == SIM_CLIENT_LIVE && c->managed_bytes &&
                (!victim || c->managed_bytes > victim->managed_bytes))
                victim = c;
        }
        if (!victim)
            return;
        uint64_t want = bytes - (total - s->used_bytes);
        uint64_t take = want < victim->managed_bytes ? want : victim->managed_bytes;
        take_from(s, victim, take);
        victim->managed_bytes -= take;
        victim->evicted_bytes += take;
    }
}

enum sim_result sim_charge(struct sim_device *device, uint64_t bytes) {
    enum sim_result result = SIM_OK;
    sim_lock(device);
    struct sim_state *s = device->state;
    struct sim_client *c = &s->client[device->client - 1];
    struct sim_group *group = &s->group[c->group];
    uint64_t total = s->config.total_bytes;
    if (is_gone(device, c)) {
        result = SIM_GONE;
    } else {
        if (bytes > total - s->used_bytes)
            sim_reap(device);
        if (bytes > total - s->used_bytes)
            evict(device, bytes);
        if (bytes > total - s->used_bytes) {
            group->refused++;
            result = SIM_NO_MEMORY;
        } else {
            s->used_bytes += bytes;
            c->bytes += bytes;
            c->allocations++;
            if (c->bytes > c->peak_bytes)
                c->peak_bytes = c->bytes;
            group->current_bytes += bytes;
            if (group->current_bytes > group->peak_bytes)
                raise_peak(device, group);
        }
    }
    sim_unlock(device);
    return result;
}

void sim_uncharge(struct sim_device *device, uint64_t bytes) {
    sim_lock(device);
    struct sim_state *s = device->state;
    struct sim_client *c = &s->client[device->client - 1];
    if (!is_gone(device, c))
        take_from(s, c, bytes);
    sim_unlock(device);
}

enum sim_result sim_charge_managed(struct sim_device *device, uint64_t bytes) {
    enum sim_result result = sim_charge(device, bytes);
    if (result == SIM_OK) {
        sim_lock(device);
        device->state->client[device->client - 1].managed_bytes += bytes;
        sim_unlock(device);
    }
    return result;
}

bool sim_was_evicted(struct sim_device *device, uint64_t bytes) {
    sim_lock(device);
    struct sim_client *c = &device->state->client[device->client - 1];
    bool was = !is_gone(device, c) && c->evicted_bytes >= bytes;
    if (was)
        c->evicted_bytes -= bytes;
    sim_unlock(device);
    return was;
}

void sim_uncharge_managed(struct sim_device *device, uint64_t bytes) {
    if (sim_was_evicted(device, bytes))
        return;
    sim_lock(device);
    struct sim_client *c = &device->state->client[device->client - 1];
    if (!is_gone(device, c)) {
        take_from(device->state, c, bytes);
        c->managed_bytes -= bytes;
    }
    sim_unlock(device);
}

void sim_unlist(struct sim_device *device, int64_t bytes) {
    sim_lock(device);
    struct sim_client *c = &device->state->client[device->client - 1];
    if (!is_gone(device, c))
        c->unlisted_bytes += (uint64_t)bytes;
    sim_unlock(device);
}

/* Managed memory belongs to a client of the kernel's in the real driver, not to the process. */
uint64_t sim_listed_bytes(const struct sim_client *c) {
    uint64_t hidden = c->unlisted_bytes + c->managed_bytes;
    return c->bytes > hidden ? c->bytes - hidden : 0;
}

void sim_set_aside(struct sim_device *device, struct sim_held *held) {
    sim_lock(device);
    struct sim_client *c = &device->state->client[device->client - 1];
    *held = (struct sim_held){0};
    if (!is_gone(device, c)) {
        *held = (struct sim_held){c->bytes, c->unlisted_bytes, c->contexts};
        take_from(device->state, c, c->bytes);
        c->unlisted_bytes = c->contexts = 0;
    }
    sim_unlock(device);
}

enum sim_result sim_take_back(struct sim_device *device, const struct sim_held *held) {
    enum sim_result result = sim_charge(device, held->bytes);
    if (result == SIM_OK) {
        sim_unlist(device, (int64_t)held->unlisted_bytes);
        sim_count_context(device, (int)held->contexts);
    }
    return result;
}

uint64_t sim_held_bytes(struct sim_device *device) {
    sim_lock(device);
    const struct sim_client *c = &device->state->client[device->client - 1];
    uint64_t bytes = is_gone(device, c) ? 0 : c->bytes;
    sim_unlock(device);
    return bytes;
}

void sim_count_context(struct sim_device *device, int delta) {
    sim_lock(device);
    struct sim_client *c = &device->state->client[device->client - 1];
    if (!is_gone(device, c))
        c->contexts += (uint32_t)delta;
    sim_unlock(device);
}

uint64_t sim_used_bytes(struct sim_device *device) {
    sim_lock(device);
    if (sim_now_ns() - device->state->last_reap_ns > 1000000u)
        sim_reap(device);
    uint64_t used = device->state->used_bytes;
    sim_unlock(device);
    return used;
}
