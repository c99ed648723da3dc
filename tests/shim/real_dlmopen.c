/* real_dlmopen SONAME OURS THEIRS: opens a library in a new namespace and prints the files that
 * define two of its functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void print_file(void *handle, const char *name) {
    Dl_info info = {0};
    void *function = dlsym(handle, name);
    if (function && dladdr(function, &info))
        puts(strrchr(info.dli_fname, '/') + 1);
    else
        puts("none");
}

int main(int argc, char **argv) {
    void *handle = argc == 4 ? dlmopen(LM_ID_NEWLM, argv[1], RTLD_NOW) : NULL;
    if (!handle) {
        fprintf(stderr, "real_dlmopen: %s\n", dlerror());
        return 1;
    }
    print_file(handle, argv[2]);
    print_file(handle, argv[3]);
    return 0;
}
