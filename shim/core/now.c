/* The clock. Compute limits must not depend on a preloaded library that defines clock_gettime of
 * its own (faketime): two processes of a container with different clocks would share a bucket. So
 * take the function out of the C library itself. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "gs.h"

int (*gs_clock)(clockid_t clock, struct timespec *now) = clock_gettime;

__attribute__((constructor)) static void find_clock(void) {
    void *library = dlopen("libc.so.6", RTLD_NOLOAD | RTLD_LAZY);
    void *own = library ? dlsym(library, "clock_gettime") : NULL;
    if (own)
        *(void **)&gs_clock = own;
    else
        (void)dlerror(); /* clear our failure, which the program could take for its own */
}
