/* The two shared files: opened so that a file of a tenant cannot block the process (O_NONBLOCK: a
 * FIFO), checked for exact size and header, mapped, and closed again. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gs.h"

#define LIMITS_PATH "/usr/lib/gpushare/limits"
#define USAGE_PATH "/usr/lib/gpushare/rw/usage"
/* A static text about one of these two files */
#define WITH_PATH(path, text) \
    (strcmp(path, USAGE_PATH) == 0 ? USAGE_PATH " " text : LIMITS_PATH " " text)

static _Atomic(const struct gs_view *) the_view;
static _Atomic(const char *) refusal = LIMITS_PATH " was not opened yet";
static _Atomic bool log_on;

void gs_log_open(void) {
    const char *value = getenv("GPUSHARE_LOG");
    atomic_store(&log_on, value && strcmp(value, "1") == 0);
}

void gs_log(const char *text, const char *detail, const char *hint) {
    if (atomic_load(&log_on))
        gs_tell(text, detail, hint);
}

void gs_tell(const char *text, const char *detail, const char *hint) {
    char line[256];
    size_t n = 0;
    const char *part[] = {"gpushare: ", text, ": ", detail, "; ", hint};
    for (size_t i = 0; i < sizeof(part) / sizeof(part[0]); i++)
        for (const char *c = part[i]; *c && n < sizeof(line) - 1; c++)
            line[n++] = *c;
    line[n++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, line, n);
    (void)ignored;
}

/* Linux 3.15, and not in the C library of 2013 that the shim is linked against. */
#ifndef F_OFD_SETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

/* Lock one byte, whose offset is the time. A mapping keeps the open file, and with it this lock,
 * until it is unmapped or its process and all forked children have ended or executed a program. So
 * the host sees that a process of this container lives (leftover.py), and the other processes see
 * whether children of a dead one do (gs_has_children). A failure is no error: another process holds
 * a conflicting lock, or the kernel has no such locks. */
static uint64_t lock_byte(int fd) {
    uint64_t at = gs_now_ns();
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)at, .l_len = 1};
    int saved = errno;
    fcntl(fd, F_OFD_SETLK, &lock);
    errno = saved;
    return at;
}

bool gs_has_children(uint64_t started_ns) {
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)started_ns, .l_len = 1};
    int saved = errno;
    int fd = open(USAGE_PATH, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    /* Not known if the program is out of descriptors or has another root directory. */
    bool locked = fd < 0 || (fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK);
    if (fd >= 0)
        close(fd);
    errno = saved;
    return locked;
}

/* Map one file of exactly `size` bytes, or NULL with `*why`. The descriptor is closed: programs
 * close descriptors that they do not know (close_range), and may be handed its number. */
static void *map_exact(const char *path, int flags, int prot, size_t size, const char **why,
                       uint64_t *started_ns) {
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        *why =
            errno == ENOENT ? WITH_PATH(path, "is missing") : WITH_PATH(path, "cannot be opened");
        return NULL;
    }
    struct stat st;
    void *at = MAP_FAILED;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        *why = WITH_PATH(path, "is not a regular file");
    else if ((uint64_t)st.st_size != size)
        *why = WITH_PATH(path, "has the wrong size");
    else if ((at = mmap(NULL, size, prot, MAP_SHARED, fd, 0)) == MAP_FAILED)
        *why = WITH_PATH(path, "cannot be mapped");
    else if (started_ns)
        *started_ns = lock_byte(fd);
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

void *gs_map_exact(const char *path, int flags, int prot, size_t size, const char **why) {
    return map_exact(path, flags, prot, size, why, NULL);
}

static const char *wrong_limits(const struct gs_limits *l) {
    if (l->magic != GS_LIMITS_MAGIC)
        return LIMITS_PATH " is not a limits file";
    if (l->version != GS_ABI_VERSION || l->size != sizeof(*l))
        return LIMITS_PATH " is of another version of gpushare";
    if (l->n_devices > GS_MAX_DEVICES)
        return LIMITS_PATH " lists too many devices";
    for (uint32_t i = 0; i < l->n_devices; i++)
        if (l->device[i].granularity_bytes != GS_BLOCK)
            return LIMITS_PATH " has blocks of another size than 2 MiB";
    return NULL;
}

static const char *wrong_usage(const struct gs_usage *u, const struct gs_limits *l) {
    if (u->magic != GS_USAGE_MAGIC)
        return USAGE_PATH " is not a usage file";
    if (u->version != GS_ABI_VERSION || u->size != sizeof(*u) || u->n_slots != GS_MAX_SLOTS)
        return USAGE_PATH " is of another version of gpushare";
    return u->nonce == l->nonce ? NULL : USAGE_PATH " belongs to another container";
}

const struct gs_view *gs_region(void) {
    const struct gs_view *view = atomic_load_explicit(&the_view, memory_order_acquire);
    if (view)
        return view;
    const char *why = NULL;
    struct gs_view fresh = {0};
    uint64_t started_ns = 0;
    fresh.limits = gs_map_exact(LIMITS_PATH, O_RDONLY, PROT_READ, sizeof(struct gs_limits), &why);
    if (fresh.limits && !(why = wrong_limits(fresh.limits)))
        fresh.usage = map_exact(USAGE_PATH, O_RDWR, PROT_READ | PROT_WRITE, sizeof(struct gs_usage),
                                &why, &started_ns);
    if (fresh.usage)
        why = wrong_usage(fresh.usage, fresh.limits);
    struct gs_view *mine = why ? NULL : malloc(sizeof(*mine));
    if (mine) {
        const struct gs_view *none = NULL;
        struct gs_self *self = gs_self();
        *mine = fresh;
        if (atomic_compare_exchange_strong(&the_view, &none, mine)) {
            if (self)
                self->started_ns = started_ns;
            return mine;
        }
        free(mine); /* another thread was first: its view is as good */
    }
    if (fresh.usage)
        munmap(fresh.usage, sizeof(struct gs_usage));
    if (fresh.limits)
        munmap((void *)fresh.limits, sizeof(struct gs_limits));
    atomic_store(&refusal,
                 why ? why : LIMITS_PATH " cannot be used: this process has no memory left");
    return atomic_load_explicit(&the_view, memory_order_acquire);
}

/* A process can be forked after a cuInit that failed. It shares the mapping of its parent, whose
 * lock does not tell when this process and its own children have ended. */
uint64_t gs_started(void) {
    struct gs_self *self = gs_self();
    const char *why;
    if (self && !self->started_ns)
        map_exact(USAGE_PATH, O_RDONLY, PROT_READ, sizeof(struct gs_usage), &why,
                  &self->started_ns);
    return self ? self->started_ns : 0;
}

const char *gs_region_refusal(void) {
    return atomic_load(&refusal);
}

int gs_slot_of_uuid(const uint8_t uuid[16]) {
    const struct gs_view *view = gs_region();
    for (uint32_t i = 0; view && i < view->limits->n_devices; i++)
        if (memcmp(view->limits->device[i].uuid, uuid, 16) == 0)
            return (int)i;
    return GS_NO_DEV;
}
