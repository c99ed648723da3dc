#ifndef SIM_PROCADDRESS_H
#define SIM_PROCADDRESS_H
#include <stdbool.h>
struct sim_proc {
    const char *name;
    bool per_thread;
    unsigned version; /* 12020 = CUDA 12.2 */
    void *function;
};
struct sim_error {
    int code;
    const char *name, *text;
};
#endif
