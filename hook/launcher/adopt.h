/* What the parts of an adoption share, and of its end: adopt.c, place.c, attach.c and release.c. */

#ifndef GPUSHARE_ADOPT_H
#define GPUSHARE_ADOPT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_TICKET (256 << 10)
#define MAX_MADE 1024
#define MAX_ATTACHED 512
#define MAX_QUIET 64

/* attach.c: mounts that are ready, and what has to be known to put them where they belong. */
struct attachments {
    struct {
        int tree, target;
    } one[MAX_ATTACHED];
    size_t count;
    struct {
        unsigned long long mount;
        int top;
    } quiet[MAX_QUIET]; /* mounts that ours will be on, and their roots */
    size_t quiet_count;
    int userns; /* of mounts that hide the owner; 0: not opened */
};

/* adopt.c: what the ticket is about. */
struct adoption {
    int container; /* STATE_DIR/containers/<id> */
    int init;      /* /proc/<pid> */
    int root;      /* the container's root in its own mount namespace */
    unsigned long long mount;
    unsigned long long init_start;
    const char *id, *state_dir;
    char *at, *end; /* of the ticket */
    struct made {
        int parent, flags; /* of unlinkat */
        char *name;
    } made[MAX_MADE];
    size_t made_count;
    struct attachments attachments;
};

/* A short file, ended by a NUL; -1 when it is not there whole. */
ssize_t read_at(int directory, const char *name, char *text, size_t size);

/* The start time of the process whose /proc directory this is, if it runs. */
bool start_time(int process, unsigned long long *start);

/* The next word of the ticket; NULL, or false, when there is none. */
char *ticket_word(struct adoption *a);
bool ticket_number(struct adoption *a, unsigned long long *value);

/* place.c. A path in a container's root, whatever links are on the way: an O_PATH descriptor. */
int in_root(int root, const char *path, int flags);
void in_root_begin(void); /* from here on look-ups have a budget of processor time */
bool mount_of(int fd, unsigned long long *mount);

/* The directory that holds `path`, made if need be, if it is no volume's. `name` is in `path`. */
int place_parent(struct adoption *a, char *path, const char **name);

/* What the ticket's next words say: true when it is there. */
bool place_link(struct adoption *a);
bool place_bind(struct adoption *a);
void place_undo(struct adoption *a); /* takes back all that place_* made */

/* attach.c. A detached mount for `target`, where nothing is changed yet. `directory` is one on the
 * mount of `target`. */
bool attach_add(struct attachments *all, int tree, uint64_t attributes, int target, int directory);
bool attach_mask(struct adoption *a); /* over /proc/driver/nvidia, where that is */
bool attach_all(struct attachments *all, int init);

#endif
