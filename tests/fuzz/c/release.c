/* hook/launcher/release.c: `held` and the ticket beside it, of a container that has ended. Nothing
 * goes but that container's files and the pages that its ticket names.
 *
 * The input is the text of `held`, a line "--", and the ticket's words, each on a line; "$v" at the
 * beginning of either is the version that counts. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "fuzz.h"

/* It ends before it would free a ticket; here it runs many times. */
static void *ticket;
static void *keep(size_t size) {
    free(ticket);
    return ticket = malloc(size);
}
#define malloc keep
#include "../../../hook/launcher/release.c"

#define TOP "/mnt"

static int first;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    folder_enter(TOP);
    first = dup(0);
    close(first);
    return 0;
}

static void fill(int top) {
    static const unsigned char index[4096] = {[PEERS_USED] = 0xff};
    folder_empty(top);
    close(folder_open(top, "outside"));
    int state = folder_open(top, "state"), devices = folder_open(state, PAGES_FOLDER);
    close(folder_open(state, TRASH_NAME));
    folder_put(state, "lock", "", 0);
    int device = folder_open(devices, "GPU-f");
    folder_put(device, PAGES_INDEX, index, sizeof index);
    folder_put(device, "0", "mine", 4);
    folder_put(device, "5", "mine", 4);
    folder_put(devices, "5", "not a page", 10);
    close(folder_open(state, "containers"));
    int container = folder_open(state, "containers/c");
    folder_put(container, LEASE_FILE, "{}", 2);
    close(folder_open(container, SHARE_NAME));
    folder_put(container, SHARE_NAME "/limits", "", 0);
    close(folder_open(state, "containers/other"));
}

static void put(int container, const char *name, const char *version, const char *text,
                size_t size) {
    bool known = size > 2 && memcmp(text, "$v", 2) == 0;
    size_t before = known ? strlen(version) : 0, cut = known ? 2 : 0;
    char *whole = copy_of((const uint8_t *)version, before, size - cut);
    memcpy(whole + before, text + cut, size - cut);
    folder_put(container, name, whole, before + size - cut);
    free(whole);
}

/* `held` as it is, and the ticket with NULs for the ends of lines. */
static void put_texts(int container, const uint8_t *data, size_t size) {
    const uint8_t *parts = size ? memmem(data, size, "\n--\n", 4) : NULL;
    size_t held = parts ? (size_t)(parts - data) + 1 : size;
    put(container, HELD_FILE, HELD_VERSION, (const char *)data, held);
    size_t left = parts ? size - held - 3 : 0;
    char *words = copy_of(data + size - left, left, 1);
    for (char *at = words; (at = memchr(at, '\n', left - (size_t)(at - words)));)
        *at = '\0';
    put(container, TICKET_FILE, TICKET_VERSION, words, left + (left > 0));
    free(words);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int top = open(TOP, O_RDONLY | O_DIRECTORY);
    fill(top);
    int container = open(TOP "/state/containers/c", O_RDONLY | O_DIRECTORY);
    put_texts(container, data, size);
    enum release how = release(TOP "/state", "c", size & 1 ? "/bundle" : NULL);
    bool there = faccessat(top, "state/containers/c", F_OK, 0) == 0;
    require(how != RELEASE_DONE || !there);
    require(how != RELEASE_IN_USE || there);
    require(faccessat(top, "outside", F_OK, 0) == 0);
    require(faccessat(top, "state/containers/other", F_OK, 0) == 0);
    require(faccessat(top, "state/" PAGES_FOLDER "/5", F_OK, 0) == 0);
    require(faccessat(top, "state/" PAGES_FOLDER "/GPU-f/" PAGES_INDEX, F_OK, 0) == 0);
    folder_close_all(first);
    return 0;
}
