/* Small parts of the API: the linker, the profiler, textures, advice on managed memory. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

/* No private table is simulated: callers must cope without what only such a table offers. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    CHECK_VALUE(table && id);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);
EXPORT CUresult cuProfilerStart(void) {
    ENTER();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuProfilerStop(void) {
    ENTER();
    return CUDA_SUCCESS;
}

/* The linker returns the last image that it was given. */
struct link {
    uint32_t magic;
    void *data;
    size_t size;
};

EXPORT CUresult cuLinkCreate_v2(unsigned int n, CUjit_option *options, void **values,
                                CUlinkState *out) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK_VALUE(out && (!n || (options && values)));
    struct link *l = calloc(1, sizeof *l);
    CHECK(l, CUDA_ERROR_OUT_OF_MEMORY);
    l->magic = OBJ_LINK;
    *out = (CUlinkState)l;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size,
                                 const char *name, unsigned int n, CUjit_option *options,
                                 void **values) {
    ENTER();
    struct link *l = (struct link *)state;
    (void)type;
    (void)name;
    CHECK_HANDLE(sim_is(l, OBJ_LINK));
    CHECK_VALUE(data && size && (!n || (options && values)));
    void *copy = realloc(l->data, size + 1);
    CHECK(copy, CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(copy, data, size);
    ((char *)copy)[size] = '\0';
    l->data = copy;
    l->size = size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkComplete(CUlinkState state, void **cubin, size_t *size) {
    ENTER();
    struct link *l = (struct link *)state;
    CHECK_HANDLE(sim_is(l, OBJ_LINK));
    CHECK_VALUE(cubin && l->data);
    *cubin = l->data;
    if (size)
        *size = l->size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkDestroy(CUlinkState state) {
    ENTER();
    struct link *l = (struct link *)state;
    CHECK_HANDLE(sim_is(l, OBJ_LINK));
    free(l->data);
    l->magic = 0;
    free(l);
    return CUDA_SUCCESS;
}

/* Textures and surfaces: only their description is stored, for queries. */
struct texture {
    uint32_t magic;
    CUDA_RESOURCE_DESC resource;
    CUDA_TEXTURE_DESC texture;
};

static CUresult open_texture(unsigned long long *out, const CUDA_RESOURCE_DESC *resource,
                             const CUDA_TEXTURE_DESC *texture) {
    CHECK_VALUE(out && resource);
    struct texture *t = calloc(1, sizeof *t);
    CHECK(t, CUDA_ERROR_OUT_OF_MEMORY);
    t->magic = OBJ_TEXTURE;
    t->resource = *resource;
    if (texture)
        t->texture = *texture;
    *out = (unsigned long long)t;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuTexObjectCreate(CUtexObject *out, const CUDA_RESOURCE_DESC *resource,
                                  const CUDA_TEXTURE_DESC *texture,
                                  const CUDA_RESOURCE_VIEW_DESC *view) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    (void)view;
    CHECK_VALUE(texture);
    return open_texture(out, resource, texture);
}

EXPORT CUresult cuSurfObjectCreate(CUsurfObject *out, const CUDA_RESOURCE_DESC *resource) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    return open_texture(out, resource, NULL);
}

EXPORT CUresult cuTexObjectDestroy(CUtexObject object) {
    ENTER();
    struct texture *t = (struct texture *)object;
    CHECK_VALUE(sim_is(t, OBJ_TEXTURE));
    t->magic = 0;
    free(t);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuSurfObjectDestroy(CUsurfObject object) {
    return cuTexObjectDestroy(object);
}

EXPORT CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *out, CUtexObject object) {
    ENTER();
    struct texture *t = (struct texture *)object;
    CHECK_VALUE(out && sim_is(t, OBJ_TEXTURE));
    *out = t->resource;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *out, CUsurfObject object) {
    return cuTexObjectGetResourceDesc(out, object);
}

EXPORT CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *out, CUtexObject object) {
    ENTER();
    struct texture *t = (struct texture *)object;
    CHECK_VALUE(out && sim_is(t, OBJ_TEXTURE));
    *out = t->texture;
    return CUDA_SUCCESS;
}
