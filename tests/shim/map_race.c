/* Each thread inserts and removes its own keys, while another removes every entry of one
 * context. Then one key is inserted and removed while another thread changes its value: no
 * change is lost. */
#include <pthread.h>
#include <stdio.h>

#include "core/gs.h"

#define THREADS 4
#define KEYS 64u

static struct gs_map map;
static _Atomic int stop, wrong;

static bool want(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)arg;
    return entry->context == 1;
}

static void taken(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)arg;
    if (entry->context != 1)
        wrong++;
    gs_map_put(&map, key, entry);
}

static void *walk(void *arg) {
    while (!stop)
        gs_map_take_all(&map, want, taken, NULL);
    return arg;
}

static void *churn(void *arg) {
    uint64_t first = (uint64_t)(uintptr_t)arg * KEYS + 1;
    struct gs_entry entry;
    for (unsigned i = 0; i < 100000; i++) {
        uint64_t key = first + i % KEYS;
        entry = (struct gs_entry){.bytes = key, .context = i % 3};
        gs_map_put(&map, key, &entry);
        while (!gs_map_take(&map, key, &entry))
            ;
        if (entry.bytes != key)
            wrong++;
    }
    return NULL;
}

#define SHARED UINT64_C(1000)
static _Atomic long swapped;

static void *swap(void *arg) {
    while (!stop)
        swapped += gs_map_swap(&map, SHARED, 5, 6);
    return arg;
}

static void swap_while_taken(void) {
    pthread_t thread;
    long seen = 0;
    stop = 0;
    pthread_create(&thread, NULL, swap, NULL);
    for (unsigned i = 0; i < 300000; i++) {
        struct gs_entry entry = {.extra = 5};
        gs_map_put(&map, SHARED, &entry);
        gs_map_take(&map, SHARED, &entry);
        seen += entry.extra == 6;
    }
    stop = 1;
    pthread_join(thread, NULL);
    wrong += seen != swapped;
}

int main(void) {
    pthread_t thread[THREADS], walker;
    pthread_create(&walker, NULL, walk, NULL);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, churn, (void *)i);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    stop = 1;
    pthread_join(walker, NULL);
    swap_while_taken();
    printf("%d\n", wrong);
    return 0;
}
