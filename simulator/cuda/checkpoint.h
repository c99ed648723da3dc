/* The memory that a process shares with callers of the checkpoint API: a file in memory that it
 * keeps open under SIM_CONTROL_NAME, with a record lock on its first byte. A caller finds the file
 * in /proc/PID/fd, and by the lock that the process itself made it: a forked child has only a copy
 * of the descriptor. */
#ifndef SIM_CHECKPOINT_H
#define SIM_CHECKPOINT_H

#include "sim.h"

#define SIM_CONTROL_NAME "sim-checkpoint"
#define SIM_CONTROL_BYTES 4096u
#define SIM_CHECKPOINT_CUDA 12080 /* the first version with the API, of driver 570 */

enum control_operation {
    CONTROL_STATE,
    CONTROL_THREAD,
    CONTROL_LOCK,
    CONTROL_CHECKPOINT,
    CONTROL_RESTORE,
    CONTROL_UNLOCK
};

struct control {
    pthread_mutex_t callers; /* one operation at a time; robust */
    uint32_t requested;      /* operations that callers asked for */
    uint32_t finished;       /* of those, the ones that the process has done */
    uint32_t operation;
    uint32_t timeout_ms;
    uint32_t result; /* CUresult */
    uint32_t answer; /* state, or id of the thread in the process's pid namespace */
};

/* The control of this process; NULL if it is not initialised. */
struct control *checkpoint_control(void);
/* Waits while *word is `value`, at most for `ms`. */
void control_wait(uint32_t *word, uint32_t value, unsigned ms);
void control_wake(uint32_t *word);
#endif
