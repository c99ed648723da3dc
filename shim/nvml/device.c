/* The slot of the limits file for an NVML handle, cached without a lock. */
#include <string.h>

#include "nvml_shim.h"

_Thread_local unsigned gs_nvml_depth;

/* One cell per handle, never removed. `answer` = epoch << 8 | slot + 1; it is void if its epoch is
 * older. */
#define CELLS 256u
static struct {
    _Atomic(nvmlDevice_t) device;
    _Atomic uint64_t answer;
} cell[CELLS];
static _Atomic uint64_t epoch = 1;

void gs_nvml_forget(void) {
    atomic_fetch_add(&epoch, 1);
}

/* Return the cell of a handle; CELLS if all are taken. */
static unsigned find_cell(nvmlDevice_t device) {
    unsigned start = (unsigned)(((uint64_t)(uintptr_t)device * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
    for (unsigned i = 0; i < CELLS; i++) {
        unsigned at = (start + i) % CELLS;
        nvmlDevice_t seen = atomic_load_explicit(&cell[at].device, memory_order_acquire);
        if (seen == device ||
            (!seen && atomic_compare_exchange_strong(&cell[at].device, &seen, device)) ||
            seen == device)
            return at;
    }
    return CELLS;
}

static int slot_of_text(const char *uuid) {
    const struct gs_view *view = gs_region();
    for (uint32_t i = 0; view && i < view->limits->n_devices; i++)
        if (strncmp(view->limits->device[i].uuid_text, uuid,
                    sizeof(view->limits->device[i].uuid_text)) == 0)
            return (int)i;
    return GS_NO_DEV;
}

static nvmlReturn_t permission_of(int found, int *dev) {
    *dev = found;
    return found == GS_NO_DEV ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS;
}

nvmlReturn_t gs_nvml_dev(nvmlDevice_t device, int *dev) {
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    __typeof__(&nvmlDeviceGetUUID) get_uuid = GS_REAL(nvmlDeviceGetUUID);
    uint64_t now = atomic_load(&epoch);
    unsigned at = find_cell(device);
    uint64_t known = at < CELLS ? atomic_load_explicit(&cell[at].answer, memory_order_relaxed) : 0;
    if (known >> 8 == now)
        return permission_of((int)(known & 0xff) - 1, dev);
    if (!get_uuid)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn_t result = GS_NVML_CALL(get_uuid, device, uuid, sizeof(uuid));
    if (result != NVML_SUCCESS)
        return result;
    int found = slot_of_text(uuid);
    if (found == GS_NO_DEV)
        gs_warn(GS_WARN_UNGRANTED);
    if (at < CELLS)
        atomic_store_explicit(&cell[at].answer, now << 8 | (uint64_t)(found + 1),
                              memory_order_relaxed);
    return permission_of(found, dev);
}
