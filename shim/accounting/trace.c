/* GPUSHARE_TRACE=FILE: a line of JSON for each interval that is charged, which tells why it was
 * charged so much (docs/internals/debugging.md). The file is opened for each line: a program may
 * close descriptors that it did not open. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compute_parts.h"

static char path[PATH_MAX]; /* a copy: the program may change its environment */

bool gs_trace_is_on(void) {
    const char *asked = path[0] ? NULL : secure_getenv("GPUSHARE_TRACE");
    if (asked && strlen(asked) < sizeof(path))
        strcpy(path, asked);
    return path[0];
}

#define U(value) ((unsigned long long)(value))
#define I(value) ((long long)(value))

void gs_trace_write(int dev, const struct gs_trace *r) {
    static const char *const why[GS_WHYS] = {"", "bucket", "turn", "room", "unknown"};
    static const char *const yes[] = {"false", "true"};
    static _Atomic bool failed;
    char line[1024];
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
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0600);
    if ((fd < 0 || write(fd, line, (size_t)n) != n) && !atomic_exchange(&failed, true))
        gs_tell("GPUSHARE_TRACE cannot be written", path,
                "name a file that this program may write, in a folder that exists and has room");
    if (fd >= 0)
        close(fd);
    errno = saved;
}
