/* In the place of hook/launcher/cgroup_lock_warmup.c: a launcher without the lock warm-up, to see
 * what that is worth. */

#include "../../hook/launcher/launcher.h"

void warm_up_cgroup_lock(const char *state_dir) {
    (void)state_dir;
}
