/* A client of MPS, as an MPS control daemon without a GPU sees the driver
 * (simulator/mpscontrol.py is the other end). It connects and reads the environment once, during
 * initialisation, and continues without MPS if no daemon listens. After the first four bytes the
 * protocol is the simulator's own. The limits follow the documentation: the smaller of the
 * client's and the daemon's. */
#include "sim.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct asked {
    double percent;
    uint64_t memory_bytes; /* 0: not set */
};
struct answer {
    uint32_t result;
    uint32_t reserved;
    double percent;
    uint64_t memory_bytes; /* 0: no limit */
    char shared[64];       /* name in /dev/shm */
};

static struct answer granted;
static bool is_client;
static uint64_t used_bytes;

static int connected(void) {
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int length = snprintf(to.sun_path, sizeof(to.sun_path), "%s/control",
                          directory ? directory : "/tmp/nvidia-mps");
    if (length >= (int)sizeof(to.sun_path))
        return -1;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on));
    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Parses "0=1500M"; the suffix G works too. */
static uint64_t pinned_limit(void) {
    const char *text = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    unsigned long long number;
    char unit = 0;
    if (!text || sscanf(text, "0=%llu%c", &number, &unit) != 2)
        return 0;
    return unit == 'G' ? number << 30 : unit == 'M' ? number << 20 : 0;
}

CUresult mps_connect(void) {
    int fd = connected();
    if (fd < 0)
        return CUDA_SUCCESS;
    const char *percent = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    struct asked asked = {percent ? atof(percent) : 100, pinned_limit()};
    char hello[9];
    uint32_t client = 2;
    bool answered = recv(fd, hello, sizeof(hello), 0) == sizeof(hello) &&
                    send(fd, "OUTBCRED", 9, MSG_NOSIGNAL) == 9 &&
                    send(fd, &client, sizeof(client), MSG_NOSIGNAL) == sizeof(client) &&
                    send(fd, &asked, sizeof(asked), MSG_NOSIGNAL) == sizeof(asked) &&
                    recv(fd, &granted, sizeof(granted), 0) == sizeof(granted);
    int shared = answered && !granted.result ? shm_open(granted.shared, O_RDWR, 0) : -1;
    if (shared >= 0) {
        close(shared);
        /* the socket stays open: the daemon detects this client's exit by its closing */
        is_client = true;
        return CUDA_SUCCESS;
    }
    close(fd);
    return answered && granted.result ? (CUresult)granted.result : CUDA_ERROR_MPS_CONNECTION_FAILED;
}

bool mps_is_client(void) {
    return is_client;
}

int mps_multiprocessors(int of_device) {
    return is_client ? (int)ceil(of_device * granted.percent / 100) : of_device;
}

bool mps_charge(uint64_t bytes) {
    if (is_client && granted.memory_bytes && used_bytes + bytes > granted.memory_bytes)
        return false;
    used_bytes += bytes;
    return true;
}

void mps_uncharge(uint64_t bytes) {
    used_bytes -= bytes;
}
