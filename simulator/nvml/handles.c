/* How a device is found and identified. */
#include "simnvml.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER();
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = nvml_count();
    return NVML_SUCCESS;
}

/* The oldest version counts only devices that can be opened. */
EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
    nvmlDevice_t device;
    nvmlReturn_t result = nvmlDeviceGetCount_v2(count);
    unsigned all = result == NVML_SUCCESS ? *count : 0, usable = 0;
    for (unsigned i = 0; i < all; i++)
        usable += nvmlDeviceGetHandleByIndex_v2(i, &device) == NVML_SUCCESS;
    if (result == NVML_SUCCESS)
        *count = usable;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    ENTER();
    if (!device || index >= nvml_count())
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = nvml_device(index);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char text[41];
    ENTER();
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < nvml_count_all(); i++) {
        sim_uuid_text(&nvml_device(i)->sim.state->config, text);
        if (strcmp(text, uuid) == 0)
            return *device = nvml_device(i), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t by_bus_id(const char *text, nvmlDevice_t *device) {
    unsigned domain = 0, bus = 0, slot = 0;
    ENTER();
    if (!text || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned i = 0; i < nvml_count(); i++) {
        const struct sim_config *c = &nvml_device(i)->sim.state->config;
        if (c->pci_domain == domain && c->pci_bus == bus && c->pci_device == slot)
            return *device = nvml_device(i), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
    return by_bus_id(text, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device) {
    return by_bus_id(text, device);
}

static void serial_text(const struct nvmlDevice_st *device, char text[32]) {
    snprintf(text, 32, "15700000%05u", SIM_GPU(device->sim.state->config.index));
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    char text[32];
    ENTER_DEVICE(device, serial);
    serial_text(device, text);
    return nvml_put_text(serial, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    char text[32];
    ENTER();
    if (!serial || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < nvml_count(); i++) {
        serial_text(nvml_device(i), text);
        if (strcmp(text, serial) == 0)
            return *device = nvml_device(i), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    char text[41];
    ENTER_DEVICE(device, uuid);
    sim_uuid_text(&device->sim.state->config, text);
    return nvml_put_text(uuid, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    ENTER_DEVICE(device, name);
    return nvml_put_text(name, length, device->sim.state->config.model);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    ENTER_DEVICE(device, index);
    *index = (unsigned)(device - nvml_device(0));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    ENTER_DEVICE(device, minor);
    *minor = device->sim.state->config.minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER_DEVICE(device, pci);
    const struct sim_config *c = &device->sim.state->config;
    *pci = (nvmlPciInfo_t){.domain = c->pci_domain,
                           .bus = c->pci_bus,
                           .device = c->pci_device,
                           .pciDeviceId = c->pci_device_id,
                           .pciSubSystemId = 0x14a910deu};
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", c->pci_domain,
             c->pci_bus, c->pci_device);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", c->pci_domain, c->pci_bus,
             c->pci_device);
    return NVML_SUCCESS;
}

/* The older structures are prefixes of the current one up to pciSubSystemId, so fill the current
 * one and copy the part that both versions have. */
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlPciInfo_t full;
    ENTER_DEVICE(device, pci);
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &full);
    if (result == NVML_SUCCESS)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, busId));
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlPciInfo_t full;
    ENTER_DEVICE(device, pci);
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v2(device, &full);
    if (result == NVML_SUCCESS)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, pciSubSystemId));
    return result;
}
