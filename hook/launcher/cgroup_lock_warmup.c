/* Warm up the kernel's cgroup lock while Python works.
 *
 * The low-level runtime moves the container's first process into its cgroup. For that the kernel
 * takes a lock that every fork and exit of the machine reads (cgroup_threadgroup_rwsem). The first
 * writer after a pause waits for an RCU grace period: 10 to 20 ms with two processors and HZ=250,
 * which is longer than all of Python's work. A writer soon after another one does not wait
 * (rcu_sync). So this program's process asks the kernel, again and again, to move a process that
 * has exited, until the runtime has finished. The kernel takes the lock and moves no process, in
 * whatever cgroup: /sys/fs/cgroup may be the host's while the names that this process reads are of
 * its cgroup namespace.
 *
 * This only saves time. Without permission to write, nothing happens. On a kernel without the wait
 * (cgroup2 mounted with favordynmods) the writes return at once. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

#define AGAIN_MS 5 /* a grace period takes at least two ticks: 8 ms with HZ=250 */
#define TIMES 16

/* Open cgroup.procs of the cgroup that a line of /proc/self/cgroup names; < 0: not writable.
 * `line`: "5:devices:/a", or "0::/a" for the unified hierarchy. */
static int open_cgroup(char *line) {
    char path[2 * PATH_MAX], *controllers = strchr(line, ':');
    char *cgroup = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!cgroup)
        return -1;
    *cgroup++ = '\0';
    controllers++;
    if (strncmp(controllers, "name=", 5) == 0)
        controllers += 5;
    int length = snprintf(path, sizeof path, "/sys/fs/cgroup/%s%s/cgroup.procs", controllers,
                          strcmp(cgroup, "/") == 0 ? "" : cgroup);
    return length < (int)sizeof path ? open(path, O_WRONLY | O_NOFOLLOW) : -1;
}

static int open_own_cgroup(void) {
    char text[4 * PATH_MAX];
    int fd = open("/proc/self/cgroup", O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return -1;
    text[got] = '\0';
    fd = -1;
    for (char *rest, *line = strtok_r(text, "\n", &rest); line && fd < 0;
         line = strtok_r(NULL, "\n", &rest))
        fd = open_cgroup(line);
    return fd;
}

/* Return a child that has exited and is not reaped, so that its pid is not used again; < 0: none.
 */
static pid_t make_zombie(void) {
    siginfo_t ended;
    signal(SIGCHLD, SIG_DFL); /* if an engine ignores it, no zombie would remain */
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    if (child > 0 && waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT) == 0)
        return child;
    return -1;
}

/* Repeat until the process `start` ends, which becomes Python and then the low-level runtime. One
 * process serves all concurrent starts, because the lock delays them too. */
static void ask_while_alive(pid_t start, const char *state_dir) {
    char path[PATH_MAX], number[16];
    snprintf(path, sizeof path, "%s/containers",
             state_dir); /* no other user can open and lock it */
    int pidfd = (int)syscall(SYS_pidfd_open, start, 0);
    int turn = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    int cgroup = flock(turn, LOCK_EX | LOCK_NB) == 0 ? open_own_cgroup() : -1;
    pid_t dead = pidfd >= 0 && cgroup >= 0 ? make_zombie() : -1;
    int length = snprintf(number, sizeof number, "%d\n", dead);
    struct pollfd end = {.fd = pidfd, .events = POLLIN};
    for (int i = 0; dead > 0 && i < TIMES; i++)
        if (write(cgroup, number, (size_t)length) != length || poll(&end, 1, AGAIN_MS) != 0)
            return;
}

void warm_up_cgroup_lock(const char *state_dir) {
    pid_t self = getpid(), child = fork();
    if (child == 0) {
        /* Not a child of the process that becomes the runtime, which would not reap it, and with
         * none of its files: an engine reads them until they are closed */
        if (fork() == 0 && syscall(SYS_close_range, 0, ~0U, 0) == 0 && chdir("/") == 0)
            ask_while_alive(self, state_dir);
        _exit(0);
    }
    if (child > 0)
        waitpid(child, NULL, 0);
}
