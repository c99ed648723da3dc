/* Linked against libcuda in the ordinary way: prints which file defines an intercepted and a
 * passed-through function for this program, and the result of cuInit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int cuInit(unsigned int flags);
int cuMemAlloc_v2(void *, unsigned long);
int cuDriverGetVersion(int *);

static const char *definer(void *function) {
    Dl_info info;
    if (!dladdr(function, &info))
        return "none";
    return strstr(info.dli_fname, "/gpushare/driver/") ? "real" : "shim";
}

int main(void) {
    printf("%s %s ", definer((void *)cuMemAlloc_v2), definer((void *)cuDriverGetVersion));
    printf("%d\n", cuInit(0));
    return 0;
}
