/* cuMemFreeAsync of memory from cuMemAlloc: it is freed when the stream's earlier work has ended
 * and a call notices that, at the latest one that waits for the stream. */
#include "work.h"

#include <stdlib.h>

struct late {
    uint64_t va, id; /* the id of its span, since another one may have the address later */
    bool due;
    struct late *next;
};

static struct late *all;
static unsigned n_due;

static struct late **find(uint64_t va) {
    struct late **at = &all;
    while (*at && (*at)->va != va)
        at = &(*at)->next;
    return at;
}

static void drop(struct late **at) {
    struct late *l = *at;
    *at = l->next;
    free(l);
}

CUresult late_free(struct stream *s, uint64_t va) {
    uint64_t start, size;
    struct mem *m;
    CHECK_VALUE(mem_range(va, &start, &size, &m) && start == va && !*find(va));
    struct late *l = malloc(sizeof *l);
    CHECK(l, CUDA_ERROR_OUT_OF_MEMORY);
    *l = (struct late){.va = va, .id = m->id, .next = all};
    all = l;
    struct work work = {.kind = WORK_FREE, .free = va};
    CUresult result = engine_add(s, &work, NULL);
    if (result != CUDA_SUCCESS)
        late_forget(va);
    return result;
}

void late_forget(uint64_t va) {
    struct late **at = find(va);
    if (*at)
        drop(at);
}

void late_due(uint64_t va) {
    struct late *l = *find(va);
    if (!l || l->due)
        return;
    l->due = true;
    n_due++;
}

void late_free_due(void) {
    for (struct late **at = &all; n_due && *at;) {
        struct late l = **at;
        if (!l.due) {
            at = &(*at)->next;
            continue;
        }
        n_due--;
        drop(at);
        struct mem *m = space_find(l.va);
        if (m && m->id == l.id)
            mem_free(l.va);
    }
}
