/* In the place of hook/launcher/hurry.c: a launcher without the lock warm-up, to see what that is
 * worth. */

#include "../../hook/launcher/launcher.h"

void hurry(const char *state_dir) {
    (void)state_dir;
}
