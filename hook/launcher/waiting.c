/* Call the hook that a start left waiting (gpushare/programs/waiting.py): send the state, as on
 * standard input, and receive that it has begun, its lines, and its exit code. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

static int connected(const char *state_dir, const char *id) {
    char path[PATH_MAX + 64];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = ANSWER_S};
    snprintf(path, sizeof path, "%s/containers/%s", state_dir, id);
    int folder = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0)
        return -1;
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/" WAITING, folder);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
                    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0 ||
                    connect(fd, (struct sockaddr *)&address, sizeof address) != 0)) {
        close(fd);
        fd = -1;
    }
    close(folder);
    return fd;
}

int waiting_hook(const char *state_dir, const char *id, const char *text, size_t size) {
    static char said[64 << 10];
    size_t have = 0;
    int fd = connected(state_dir, id);
    if (fd < 0)
        return -1;
    for (ssize_t put; size > 0; text += put, size -= (size_t)put)
        if ((put = send(fd, text, size, MSG_NOSIGNAL)) <= 0)
            break;
    shutdown(fd, SHUT_WR);
    ssize_t got = 1;
    while (have < sizeof said && got > 0) {
        got = read(fd, said + have, sizeof said - have);
        have += got > 0 ? (size_t)got : 0;
    }
    if (have == 0 && (got == 0 || errno == ECONNRESET))
        return -1;
    if (got != 0 || have < 2) {
        fputs("gpushare: the hook of this container was killed; start the container again\n",
              stderr);
        return 1;
    }
    fwrite(said + 1, 1, have - 2, stderr);
    return (unsigned char)said[have - 1];
}
