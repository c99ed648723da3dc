/* The memory limits of NVML of driver 615, kept in a file beside this library: one line for each
 * call, "uuid cgroup soft hard". Files beside it change the behaviour: "broken" has the code that a
 * set returns; with "deaf" a set succeeds without effect; with "mute" a query returns nothing; with
 * "hangs" a call never returns. With SIMULATOR it is part of the simulated NVML. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct set {
    const char *name;
    uint64_t soft, hard;
};

struct get {
    struct set limits;
    uint64_t used;
};

static char uuid_of[96];

static FILE *beside(const char *name, const char *mode) {
    Dl_info info;
    char path[4096];
    if (!dladdr((void *)beside, &info))
        return NULL;
    const char *slash = strrchr(info.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s/%s", (int)(slash - info.dli_fname), info.dli_fname, name);
    return fopen(path, mode);
}

#ifdef SIMULATOR
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size);

static int known(void *device) {
    return nvmlDeviceGetUUID(device, uuid_of, sizeof uuid_of) == 0;
}
#else
static int known(void *device) {
    return device == uuid_of;
}

int nvmlInit_v2(void);
int nvmlInit_v2(void) {
    while (beside("hangs", "r"))
        pause();
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    snprintf(uuid_of, sizeof uuid_of, "%s", uuid);
    *device = uuid_of;
    return strncmp(uuid, "MIG-", 4) == 0 ? 3 : 0;
}

#endif

int nvmlDeviceSetMemoryLimits_v1(void *device, struct set *limits);
int nvmlDeviceSetMemoryLimits_v1(void *device, struct set *limits) {
    int code = 0;
    FILE *broken = beside("broken", "r");
    if (!known(device) || (broken && fscanf(broken, "%d", &code) == 1))
        return broken ? code : 2;
    if (beside("deaf", "r"))
        return 0;
    FILE *file = beside("limits", "a");
    fprintf(file, "%s %s %llu %llu\n", uuid_of, limits->name, (unsigned long long)limits->soft,
            (unsigned long long)limits->hard);
    return fclose(file);
}

int nvmlDeviceGetMemoryLimits_v1(void *device, struct get *found);
int nvmlDeviceGetMemoryLimits_v1(void *device, struct get *found) {
    char uuid[96], name[4096];
    unsigned long long soft, hard;
    FILE *file = beside("limits", "r");
    if (beside("mute", "r"))
        return 0;
    found->limits.soft = 0;
    found->limits.hard = UINT64_MAX;
    while (file && known(device) &&
           fscanf(file, "%95s %4095s %llu %llu", uuid, name, &soft, &hard) == 4)
        if (strcmp(uuid, uuid_of) == 0 && strcmp(name, found->limits.name) == 0) {
            found->limits.soft = soft;
            found->limits.hard = hard;
        }
    return 0;
}
