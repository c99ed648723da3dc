/* MPS: the driver connects to a control daemon during its initialisation. It reads from the
 * environment which daemon, and how much this client may use. So the shim sets these variables,
 * whatever the environment of the container or of an exec contains. A driver that finds no daemon
 * continues without MPS, and so without a compute limit: the shim checks before and after that a
 * daemon accepts connections. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "driver.h"

#define PIPES "/usr/lib/gpushare/mps/"
#define PATIENCE_S 10
#define ANY_UID UINT32_MAX

/* The inode of the socket before initialisation, to check that it is the same one afterwards. */
static ino_t socket_inode;
/* The driver was initialised without a daemon. It initialises only once, so this stays so. */
static bool no_daemon;

static const struct gs_device_limit *mps_device(const struct gs_limits *limits) {
    uint32_t device = limits->mps_device;
    return device && device <= limits->n_devices ? &limits->device[device - 1] : NULL;
}

/* Return the inode of the socket if a daemon accepts connections there, else 0. */
static ino_t listening_inode(const char *pipe) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct stat st;
    int saved = errno, length = snprintf(to.sun_path, sizeof(to.sun_path), "%s/control", pipe);
    int fd = length > 0 && (size_t)length < sizeof(to.sun_path)
                 ? socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)
                 : -1;
    const struct timeval patience = {.tv_sec = PATIENCE_S};
    ino_t found = 0;
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
        if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 && stat(to.sun_path, &st) == 0)
            found = st.st_ino;
        close(fd);
    }
    errno = saved;
    return found;
}

static void format_pipe(const struct gs_device_limit *device, char *out, size_t size) {
    snprintf(out, size, PIPES "%.63s", device->uuid_text);
}

/* Return whether the text is "12" or "12.5", at least 1 and at most `percent`. Spellings that
 * readers parse differently (0x1E, 1e1, 12,5 in some locales) are rejected: for the driver, a value
 * that it cannot parse is no limit. */
static bool is_within(const char *text, uint32_t percent) {
    size_t whole = strspn(text, "0123456789"), part = 0;
    if (whole == 0 || whole > 3)
        return false;
    if (text[whole] == '.') {
        part = strspn(text + whole + 1, "0123456789");
        if (part == 0 || part > 6)
            return false;
    }
    bool over = part && strspn(text + whole + 1, "0") != part;
    unsigned long number = strtoul(text, NULL, 10);
    return text[whole + (part ? part + 1 : 0)] == 0 && number >= 1 && number + over <= percent;
}

/* A lower percentage that the program set itself is kept. A value that the shim set for the parent
 * process is replaced, since the limit may have been raised. */
static void set_percent(uint32_t percent) {
    const char *name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", *ours = "_GPUSHARE_MPS_SAID";
    const char *own = getenv(name), *said = getenv(ours);
    char text[16];
    if (own && !(said && strcmp(own, said) == 0) && is_within(own, percent))
        return;
    snprintf(text, sizeof(text), "%u", percent);
    setenv(name, text, 1);
    setenv(ours, text, 1);
}

static void set_memory_limit(uint64_t bytes) {
    char text[40];
    uint64_t mib = bytes / (1 << 20) + (bytes % (1 << 20) != 0);
    snprintf(text, sizeof(text), "0=%lluM", (unsigned long long)(mib ? mib : 1));
    setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", text, 1);
}

static CUresult refuse(const char *why, const char *hint) {
    gs_log("cuInit refused", why, hint);
    return CUDA_ERROR_MPS_CONNECTION_FAILED;
}

CUresult gs_mps_enter(const struct gs_limits *limits) {
    const struct gs_device_limit *device = mps_device(limits);
    if (!device)
        return CUDA_SUCCESS;
    if (limits->mps_uid != ANY_UID && limits->mps_uid != geteuid())
        return refuse("the MPS daemon serves one user, and this process runs as another user",
                      "run the program as the user for whom the daemon was started");
    if (no_daemon)
        return refuse("this process initialised the driver while the MPS daemon did not run",
                      "restart the program");
    char pipe[128];
    format_pipe(device, pipe, sizeof(pipe));
    if (!(socket_inode = listening_inode(pipe)))
        return refuse("the MPS daemon does not run", "run `gpushare mps start` on the host");
    struct gs_limit_now now = gs_limit_stated(limits, limits->mps_device - 1);
    setenv("CUDA_MPS_PIPE_DIRECTORY", pipe, 1);
    setenv("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING", "0", 1);
    if (now.percent < GS_NO_PERCENT)
        set_percent(now.percent);
    if (now.memory_bytes != GS_UNLIMITED)
        set_memory_limit(now.memory_bytes);
    return CUDA_SUCCESS;
}

CUresult gs_mps_entered(const struct gs_limits *limits) {
    const struct gs_device_limit *device = mps_device(limits);
    char pipe[128];
    if (!device)
        return CUDA_SUCCESS;
    format_pipe(device, pipe, sizeof(pipe));
    no_daemon = listening_inode(pipe) != socket_inode;
    return no_daemon ? refuse("the MPS daemon ended while the driver started",
                              "run `gpushare mps start` on the host, then restart the program")
                     : CUDA_SUCCESS;
}
