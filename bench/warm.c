/* warm STATE_DIR PROGRAM [WORD]...: runs the lock warm-up of a start, then executes PROGRAM. */

#include <unistd.h>

#include "../../hook/launcher/launcher.h"

int main(int count, char **argv) {
    if (count < 3)
        return 127;
    warm_up_cgroup_lock(argv[1]);
    execvp(argv[2], argv + 2);
    return 127;
}
