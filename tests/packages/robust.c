/* qemu-user lacks set_robust_list(2), by which the kernel marks the slot of a dead process. Without
 * it a program gets no slot. This stub grants it; no process dies here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>

long syscall(long number, ...) {
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    long (*next)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return number == SYS_set_robust_list ? 0 : next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
