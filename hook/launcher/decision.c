/* The line for a lease that this program gives back, as gpushare/decision.py writes it. All that is
 * said about the container comes ready from the ticket, quoted there. Nothing here waits: what the
 * other end does not take at once is lost. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

#define MAX_HEAD 96

static struct timespec began;

void decision_begin(void) {
    clock_gettime(CLOCK_MONOTONIC, &began);
}

static int open_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (strlen(path) < sizeof address.sun_path)
        strcpy(address.sun_path, path);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

/* What stands before the line, and who it is for: a file, or a socket as /dev/log. */
static int open_sink(const char *where, char head[MAX_HEAD]) {
    bool is_file = strcmp(where, DECISION_SYSLOG) != 0;
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = is_file ? open(where, flags, 0640) : -1;
    time_t now = time(NULL);
    struct tm broken;
    char format[64];
    if (is_file && fd < 0 && errno != ENXIO)
        return -1;
    if (fd < 0 && (fd = open_socket(is_file ? where : DECISION_SOCKET)) < 0)
        return -1;
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) {
        strftime(format, sizeof format, "%b %e %H:%M:%S", localtime_r(&now, &broken));
        snprintf(head, MAX_HEAD, "<%d>%s " DECISION_IDENTIFIER "[%d]: ", DECISION_INFO, format,
                 getpid());
    } else
        strftime(head, MAX_HEAD, "time=%Y-%m-%dT%H:%M:%SZ ", gmtime_r(&now, &broken));
    return fd;
}

void decision_released(const char *where, const char *facts, const char *by) {
    static char line[MAX_HEAD + MAX_FACTS + 128];
    char head[MAX_HEAD] = "";
    struct timespec now;
    int fd = *where && strcmp(where, DECISION_NOWHERE) != 0 ? open_sink(where, head) : -1;
    if (fd < 0)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double ms =
        (double)(now.tv_sec - began.tv_sec) * 1e3 + (double)(now.tv_nsec - began.tv_nsec) / 1e6;
    int size = snprintf(line, sizeof line, "%sdecision=released %.*s by=%s ms=%.1f%s", head,
                        MAX_FACTS, facts, by, ms, *head == '<' ? "" : "\n");
    ssize_t written = write(fd, line, (size_t)size);
    (void)written;
    close(fd);
}
