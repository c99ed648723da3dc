/* What the parts of an adoption share, and of its end: adopt.c, mask.c and release.c. */

#ifndef GPUSHARE_ADOPT_H
#define GPUSHARE_ADOPT_H

#include <stdbool.h>
#include <sys/types.h>

#define MAX_TICKET (256 << 10)

/* adopt.c. A short file, ended by a NUL; -1 when it is not there whole. */
ssize_t read_at(int directory, const char *name, char *text, size_t size);

/* The start time of the process whose /proc directory this is, if it runs. */
bool start_time(int process, unsigned long long *start);

/* A path in a container's root, whatever links are on the way: an O_PATH descriptor. */
int in_root(int root, const char *path, int flags);
bool mount_of(int fd, unsigned long long *mount);

/* mask.c: first everything that can be found wrong, then the mount itself. */
struct mask {
    bool wanted;
    int tree, target, top; /* what, where, and the root of the mount that this is on */
    int theirs, ours, our_root, our_directory;
};
bool mask_prepare(struct mask *mask, int container, int init, int root);
bool mask_attach(const struct mask *mask);

#endif
