/* Threads put and take keys, each its own, while another one takes every entry of one context. */
#include <pthread.h>
#include <stdio.h>

#include "gs.h"

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

int main(void) {
    pthread_t thread[THREADS], walker;
    pthread_create(&walker, NULL, walk, NULL);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, churn, (void *)i);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    stop = 1;
    pthread_join(walker, NULL);
    printf("%d\n", wrong);
    return 0;
}
