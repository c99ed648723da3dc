/* Memory that other containers borrow. A container that gets no memory from the driver although its
 * own request has room waits while `gpushare agent` takes back what others borrowed: it states the
 * bytes in its slot, where the agent reads them. If nothing is borrowed, it waits a moment for the
 * memory of a container that has just ended. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gs.h"

#define INDEX_PATH "/usr/lib/gpushare/peers/%s/index"
#define NAP_NS 5000000
#define RETURN_NS UINT64_C(100000000)     /* until the memory of an ended container is free */
#define PATIENCE_NS UINT64_C(10000000000) /* docs/lending.md */
#define MOVING_NS UINT64_C(600000000000)  /* in addition, while a container is being suspended */

static bool read_index(const struct gs_device_limit *limit, struct gs_peers *index) {
    char uuid[sizeof(limit->uuid_text)], path[sizeof(INDEX_PATH) + sizeof(uuid)];
    memcpy(uuid, limit->uuid_text, sizeof(uuid));
    uuid[sizeof(uuid) - 1] = '\0';
    if (strchr(uuid, '/'))
        return false;
    snprintf(path, sizeof(path), INDEX_PATH, uuid);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    bool right = fd >= 0 && pread(fd, index, sizeof(*index), 0) == (ssize_t)sizeof(*index) &&
                 index->magic == GS_PEERS_MAGIC && index->version == GS_ABI_VERSION;
    if (fd >= 0)
        close(fd);
    return right;
}

/* Whether another container on the device has one of the flags `any`, and none of `none`. */
static bool others_have(int dev, uint32_t any, uint32_t none) {
    const struct gs_view *view = gs_region();
    struct gs_peers index;
    int saved = errno;
    bool found = false;
    if (!view || dev < 0 || (uint32_t)dev >= view->limits->n_devices)
        return false;
    const struct gs_device_limit *limit = &view->limits->device[dev];
    if (read_index(limit, &index))
        for (uint32_t i = 0; i < GS_MAX_PEERS && !found; i++) {
            uint32_t flags = GS_GRANTED_FLAGS(index.granted[i]);
            found = i != limit->page && index.used[i / 64] >> i % 64 & 1 && flags & any &&
                    !(flags & none);
        }
    errno = saved;
    return found;
}

bool gs_others_borrow(int dev, bool until_evicted) {
    return others_have(dev, GS_DEVICE_LENT, until_evicted ? GS_DEVICE_OVERSUBSCRIBE : 0);
}

uint64_t gs_free_now(int dev, const struct gs_whole *whole, uint64_t free_real) {
    uint64_t own = whole->used < whole->request ? whole->request - whole->used : 0;
    if (whole->oversubscribed || whole->left <= free_real)
        return whole->left;
    return own > free_real && gs_others_borrow(dev, false) ? own : free_real;
}

bool gs_reclaim(struct gs_reclaim *reclaim, int dev, uint64_t bytes) {
    const struct timespec nap = {.tv_nsec = NAP_NS};
    struct gs_slot *slot = gs_slot();
    int saved = errno;
    if (!slot || dev < 0 || bytes >= UINT64_C(1) << 56)
        return false;
    if (!reclaim->since_ns) {
        struct gs_whole whole = gs_whole(dev);
        reclaim->lent = gs_used(dev) <= whole.request && gs_others_borrow(dev, true);
        reclaim->since_ns = reclaim->began_ns = gs_now_ns();
    } else if (reclaim->lent && gs_now_ns() - reclaim->began_ns < MOVING_NS &&
               others_have(dev, GS_DEVICE_MOVING, 0)) {
        reclaim->since_ns = gs_now_ns();
    } else if (gs_now_ns() - reclaim->since_ns > (reclaim->lent ? PATIENCE_NS : RETURN_NS)) {
        return false;
    }
    if (reclaim->lent) {
        /* Each waiting thread states its own need again and again: any of them is enough. */
        reclaim->wants = (uint64_t)dev << 56 | bytes;
        __atomic_store_n(&slot->wants, reclaim->wants, __ATOMIC_SEQ_CST);
    }
    nanosleep(&nap, NULL);
    errno = saved;
    return true;
}

void gs_reclaim_end(const struct gs_reclaim *reclaim) {
    struct gs_slot *slot = gs_slot();
    uint64_t wants = reclaim->wants;
    if (slot && wants)
        __atomic_compare_exchange_n(&slot->wants, &wants, 0, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST);
}
