/* A tenant that corrupts its writable memory, which other processes read, until it is killed.
 *
 *   scribble garbage|noise|idle|crowd|most USAGE PAGES
 *
 * garbage: any value anywhere in both files, mostly extremes. noise: the same in PAGES alone, so
 * that the tenant itself can still work. idle: its contexts appear to have no work. crowd: as many
 * contexts as possible appear to work all the time, also to its own process. most: one extra
 * context, which nothing in its own container reads, appears to have used most of the device. It
 * starts when a context exists in the container: before, there is nothing to corrupt. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "gpushare_abi.h"

static uint64_t state = 0x9e3779b97f4a7c15ull;
static uint64_t chance(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t some_word(void) {
    const uint64_t words[] = {0, 1, ~0ull, 1ull << 63, (1ull << 63) - 1, UINT32_MAX, GS_RUNS};
    uint64_t which = chance() % 16;
    if (which < sizeof words / sizeof *words)
        return words[which];
    return which < 12 ? now_ns() + chance() % 40000000 - 20000000 : chance();
}

/* Keep the head of a file correct most of the time: readers stop at a wrong one. */
static void garbage(uint64_t *file, size_t bytes, size_t head) {
    uint64_t was[16];
    memcpy(was, file, head);
    for (unsigned i = 0; i < 4096; i++)
        file[chance() % (bytes / 8)] = some_word();
    if (chance() % 4)
        memcpy(file, was, head);
    else
        file[chance() % (head / 8)] = some_word();
}

static void claim(struct gs_pages *pages, int busy) {
    struct gs_activity said = {.busy_from_ns = 1,
                               .busy_until_ns = UINT64_MAX,
                               .weight = 1,
                               .priority = 1,
                               .expects_ns = 1000000000};
    if (!busy)
        memset(&said, 0, sizeof said);
    for (unsigned i = 0; i < GS_MAX_PAGES; i++) {
        if (busy)
            pages->owner[i] = pages->owner[0] ? (uint64_t)pages->owner[0] : 1;
        pages->page[i].buffer[0] = pages->page[i].buffer[1] = said;
    }
    if (busy)
        pages->high = GS_MAX_PAGES;
}

/* Its owner is in no slot, so only other containers read it. */
static void had_most(struct gs_pages *pages) {
    uint64_t now = now_ns();
    struct gs_activity said = {
        .horizon_ns = now, .busy_until_ns = now + 1000000, .n = GS_RUNS, .last = GS_RUNS - 1};
    for (unsigned i = 0; i < GS_RUNS; i++) {
        uint64_t start = (now / 100000 - GS_RUNS + i) * 100000;
        said.run[i] = (struct gs_run){start, start + 60000, 60000};
    }
    pages->page[GS_MAX_PAGES - 1].buffer[0] = pages->page[GS_MAX_PAGES - 1].buffer[1] = said;
    pages->owner[GS_MAX_PAGES - 1] = UINT32_MAX;
    pages->high = GS_MAX_PAGES;
}

static void *map(const char *path, size_t bytes) {
    int fd = open(path, O_RDWR);
    void *file = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return file;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    uint64_t *usage = map(argv[2], sizeof(struct gs_usage));
    struct gs_pages *pages = map(argv[3], sizeof *pages);
    if ((void *)usage == MAP_FAILED || (void *)pages == MAP_FAILED)
        return perror(argv[2]), 1;
    while (!pages->owner[0])
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (char what = argv[1][0];;) {
        if (what == 'g')
            garbage(usage, sizeof(struct gs_usage), 40);
        if (what == 'g' || what == 'n')
            garbage((uint64_t *)pages, sizeof *pages, 24);
        else if (what == 'm')
            had_most(pages);
        else
            claim(pages, what == 'c');
        /* Far more often than its own shim writes, and without a processor that the others need */
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}
