/* A stand-in for nvidia-cuda-mps-control without a daemon: creates its directories (-d), and
 * answers the commands that gpushare sends. simulator/mpscontrol.py is a whole daemon. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void make_directory(const char *variable, const char *usual) {
    const char *path = getenv(variable);
    mkdir(path ? path : usual, 0755);
}

int main(int count, char **words) {
    char line[256];
    if (count > 1 && !strcmp(words[1], "-d")) {
        make_directory("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps");
        make_directory("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps");
        return 0;
    }
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, " \n")] = 0;
        if (!strcmp(line, "get_default_active_thread_percentage"))
            puts("100.0");
        else if (strcmp(line, "get_server_list") && strcmp(line, "quit") &&
                 strncmp(line, "set_default_", 12))
            printf("Unrecognized command: %s\n", line);
    }
    return 0;
}
