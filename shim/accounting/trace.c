/* GPUSHARE_TRACE=FILE: a line of JSON for each interval that is charged, which tells why it was
 * charged so much (docs/internals/debugging.md). The file is opened for each line: a program may
 * close descriptors that it did not open. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "compute_parts.h"

static const char *path_of_trace(void) {
    const char *path = secure_getenv("GPUSHARE_TRACE");
    return path && *path ? path : NULL;
}

bool gs_trace_is_on(void) {
    return path_of_trace();
}

#define U(value) ((unsigned long long)(value))
#define I(value) ((long long)(value))

void gs_trace_write(int dev, const struct gs_trace *r) {
    static const char *const why[GS_WHYS] = {"", "bucket", "turn", "room", "unknown"};
    static const char *const yes[] = {"false", "true"};
    const char *path = path_of_trace();
    char line[512];
    int saved = errno;
    int n = snprintf(line, sizeof(line),
                     "{\"pid\": %d, \"slot\": %d, \"start_ns\": %llu, \"end_ns\": %llu, "
                     "\"launches\": %u, \"single\": %s, \"expected_ns\": %lld, \"sure\": %s, "
                     "\"others\": %u, \"preemptions\": %u, \"away_ns\": %llu, "
                     "\"own_ns\": %lld, \"switch_ns\": %lld, \"charged_ns\": %lld, "
                     "\"turn\": %s, \"due_in_ns\": %llu, \"waited_ns\": %llu, \"why\": \"%s\"}\n",
                     (int)getpid(), dev, U(r->start_ns), U(r->end_ns), r->launches, yes[r->single],
                     I(r->expected_ns), yes[r->sure], r->others, r->preemptions, U(r->away_ns),
                     I(r->own_ns), I(r->switch_ns), I(r->charged_ns), yes[r->in_turn],
                     U(r->until_due_ns), U(r->waited_ns), why[r->why]);
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0600) : -1;
    if (fd >= 0 && write(fd, line, (size_t)n) != n)
        gs_log("GPUSHARE_TRACE", "a record could not be written", "is there room for it?");
    if (fd >= 0)
        close(fd);
    errno = saved;
}
