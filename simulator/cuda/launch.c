/* Functions and launches. A kernel only takes time: see module.c. */
#include "module.h"
#include "work.h"

#include <stdlib.h>
#include <string.h>

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction hfunc) {
    ENTER_FUNCTION(f, hfunc);
    CHECK_VALUE(value && attribute < CU_FUNC_ATTRIBUTE_MAX);
    *value = f->attributes[attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attribute, int value) {
    ENTER_FUNCTION(f, hfunc);
    CHECK_VALUE(attribute < CU_FUNC_ATTRIBUTE_MAX);
    f->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetModule(CUmodule *hmod, CUfunction hfunc) {
    ENTER_FUNCTION(f, hfunc);
    CHECK_VALUE(hmod);
    *hmod = (CUmodule)f->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    (void)config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    (void)config;
    return CUDA_SUCCESS;
}

/* Reads an argument of 64 bits, if all before it are 64 bits too. False when there are no
 * arguments. */
static bool argument(const CUDA_KERNEL_NODE_PARAMS *p, unsigned index, uint64_t *value) {
    const void *at = p->kernelParams ? p->kernelParams[index] : NULL;
    for (void **extra = p->extra; !at && extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            at = (uint64_t *)extra[1] + index;
    if (at)
        memcpy(value, at, sizeof *value);
    return at != NULL;
}

/* Kernels can depend on each other as on hardware: wait_flag(address, value) spins until the
 * 32-bit value at the address is at least `value`, and set_flag(address, value) writes it when
 * it ends. */
static void read_flag(const struct function *f, const CUDA_KERNEL_NODE_PARAMS *p,
                      struct kernel_call *call) {
    uint64_t address, value;
    if (!(f->waits || f->sets) || !argument(p, 0, &address) || !argument(p, 1, &value))
        return;
    if (!space_has(address) && !host_range(address, &(uint64_t){0}, &(uint64_t){0}))
        return;
    call->waits = f->waits;
    call->sets = f->sets;
    call->flag = (struct value){.address = address,
                                .value = (uint32_t)value,
                                .flags = CU_STREAM_WAIT_VALUE_GEQ,
                                .write = f->sets};
}

static uint64_t duration_of(const struct function *f, const CUDA_KERNEL_NODE_PARAMS *p) {
    uint64_t ns, address, bytes;
    if (!f->time_in_argument || !argument(p, 0, &ns))
        return f->duration_ns;
    if (f->reads && argument(p, 1, &address) && argument(p, 2, &bytes))
        ns += managed_read_ns(address, bytes);
    return ns;
}

static unsigned parts_of(const struct context *ctx, const CUDA_KERNEL_NODE_PARAMS *p) {
    uint64_t blocks = (uint64_t)p->gridDimX * p->gridDimY * p->gridDimZ;
    uint64_t processors = sim.device[ctx->device].sim.state->config.sm_count;
    if (blocks >= processors)
        return SIM_PARTS;
    return (unsigned)((blocks * SIM_PARTS + processors - 1) / processors);
}

/* Fills the work of a launch. Call locked. */
CUresult kernel_work(struct context *ctx, const CUDA_KERNEL_NODE_PARAMS *p, struct work *work) {
    CUresult error;
    struct function *f = function_of(ctx, p->func ? p->func : (CUfunction)p->kern, &error);
    CHECK(f, error);
    CHECK_VALUE(p->gridDimX && p->gridDimY && p->gridDimZ && p->blockDimX && p->blockDimY &&
                p->blockDimZ);
    CHECK_VALUE((uint64_t)p->blockDimX * p->blockDimY * p->blockDimZ <= MAX_BLOCK &&
                p->gridDimX <= 2147483647u && p->gridDimY <= 65535 && p->gridDimZ <= 65535);
    CHECK_VALUE(!(p->kernelParams && p->extra));
    error = local_room(ctx, (uint64_t)f->attributes[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES]);
    CHECK(error == CUDA_SUCCESS, error);
    *work = (struct work){.kind = WORK_KERNEL,
                          .duration_ns = duration_of(f, p),
                          .kernel = {.function = f, .params = *p}};
    work->kernel.parts = parts_of(ctx, p);
    read_flag(f, p, &work->kernel);
    return CUDA_SUCCESS;
}

struct attributes {
    bool cooperative, programmatic;
};

/* All blocks of a cooperative launch must fit on the device at the same time. */
static CUresult check_cooperative(struct context *ctx, const CUDA_KERNEL_NODE_PARAMS *p) {
    uint64_t threads = (uint64_t)p->blockDimX * p->blockDimY * p->blockDimZ;
    uint64_t blocks = (uint64_t)p->gridDimX * p->gridDimY * p->gridDimZ;
    CHECK_VALUE(threads && threads <= MAX_BLOCK);
    uint64_t most = blocks_per_processor((int)threads) *
                    (uint64_t)sim.device[ctx->device].sim.state->config.sm_count;
    CHECK(blocks <= most, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    return CUDA_SUCCESS;
}

static CUresult issue(const CUDA_KERNEL_NODE_PARAMS *p, CUstream hStream,
                      const struct attributes *attributes, uint64_t *cost_ns) {
    ENTER();
    struct context *ctx = current_context();
    struct stream *s = stream_of(ctx, hStream);
    struct work work;
    CHECK(s,
          hStream > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    *cost_ns = sim.device[s->ctx->device].sim.state->config.launch_ns;
    CUresult result = kernel_work(s->ctx, p, &work);
    if (result == CUDA_SUCCESS && attributes->cooperative)
        result = check_cooperative(s->ctx, p);
    work.kernel.programmatic = attributes->programmatic;
    return result == CUDA_SUCCESS ? dispatch_on(s, &work) : result;
}

static CUresult launch(const CUDA_KERNEL_NODE_PARAMS *p, CUstream hStream,
                       const struct attributes *attributes) {
    uint64_t began_ns = sim_now_ns(), cost_ns = 0;
    CUresult result = issue(p, hStream, attributes, &cost_ns);
    engine_spend(began_ns + cost_ns);
    return result;
}

static CUDA_KERNEL_NODE_PARAMS shape_of(CUfunction f, unsigned gx, unsigned gy, unsigned gz,
                                        unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                        void **params, void **extra) {
    return (CUDA_KERNEL_NODE_PARAMS){.func = f,
                                     .gridDimX = gx,
                                     .gridDimY = gy,
                                     .gridDimZ = gz,
                                     .blockDimX = bx,
                                     .blockDimY = by,
                                     .blockDimZ = bz,
                                     .sharedMemBytes = shared,
                                     .kernelParams = params,
                                     .extra = extra};
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                               unsigned int bx, unsigned int by, unsigned int bz,
                               unsigned int shared, CUstream hStream, void **params, void **extra) {
    CUDA_KERNEL_NODE_PARAMS p = shape_of(f, gx, gy, gz, bx, by, bz, shared, params, extra);
    return launch(&p, hStream, &(struct attributes){0});
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy,
                                          unsigned int gz, unsigned int bx, unsigned int by,
                                          unsigned int bz, unsigned int shared, CUstream hStream,
                                          void **params) {
    CUDA_KERNEL_NODE_PARAMS p = shape_of(f, gx, gy, gz, bx, by, bz, shared, params, NULL);
    return launch(&p, hStream, &(struct attributes){.cooperative = true});
}

static CUresult read_attributes(const CUlaunchConfig *c, struct attributes *a) {
    CHECK_VALUE(c && (!c->numAttrs || c->attrs));
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const CUlaunchAttribute *at = &c->attrs[i];
        CHECK_VALUE((int)at->id >= 0 && at->id <= CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN);
        if (at->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            a->cooperative = at->value.cooperative;
        if (at->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            a->programmatic = at->value.programmaticStreamSerializationAllowed;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params,
                                 void **extra) {
    struct attributes attributes = {0};
    CUresult result = read_attributes(c, &attributes);
    if (result != CUDA_SUCCESS)
        return result;
    CUDA_KERNEL_NODE_PARAMS p =
        shape_of(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                 c->sharedMemBytes, params, extra);
    return launch(&p, c->hStream, &attributes);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **params,
                                      void **extra) {
    CHECK_VALUE(c);
    CUlaunchConfig mine = *c;
    if (!mine.hStream)
        mine.hStream = CU_STREAM_PER_THREAD;
    return cuLaunchKernelEx(&mine, f, params, extra);
}

EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int n,
                                                     unsigned int flags) {
    CHECK_VALUE(list && n && !(flags & ~3u));
    for (unsigned i = 0; i < n; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        CUresult result = cuLaunchCooperativeKernel(
            p->function, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY,
            p->blockDimZ, p->sharedMemBytes, p->hStream, p->kernelParams);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

/* The launch functions of CUDA 1: block shape and parameters are state of the function. */
EXPORT CUresult cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    CHECK_VALUE(x > 0 && y > 0 && z > 0);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetSharedSize(CUfunction hfunc, unsigned int bytes) {
    ENTER_FUNCTION(f, hfunc);
    (void)f;
    (void)bytes;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuParamSetSize(CUfunction hfunc, unsigned int bytes) {
    return cuFuncSetSharedSize(hfunc, bytes);
}
EXPORT CUresult cuParamSeti(CUfunction hfunc, int offset, unsigned int value) {
    CHECK_VALUE(offset >= 0);
    return cuFuncSetSharedSize(hfunc, value);
}
EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    CHECK_VALUE(width > 0 && height > 0);
    return cuLaunchKernel(f, (unsigned)width, (unsigned)height, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}
EXPORT CUresult cuLaunch(CUfunction f) {
    return cuLaunchGrid(f, 1, 1);
}
EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream hStream) {
    CHECK_VALUE(width > 0 && height > 0);
    return cuLaunchKernel(f, (unsigned)width, (unsigned)height, 1, 1, 1, 1, 0, hStream, NULL, NULL);
}

EXPORT CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) {
    CHECK_VALUE(fn);
    struct work work = {.kind = WORK_HOST, .host = {.fn = fn, .userData = userData}};
    return dispatch(hStream, &work, false);
}

struct callback {
    CUstreamCallback function;
    CUstream stream;
    void *data;
};

static void call_back(void *data) {
    struct callback c = *(struct callback *)data;
    free(data);
    c.function(c.stream, CUDA_SUCCESS, c.data);
}

EXPORT CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData,
                                    unsigned int flags) {
    CHECK_VALUE(callback && !flags);
    struct callback *c = malloc(sizeof *c);
    CHECK(c, CUDA_ERROR_OUT_OF_MEMORY);
    *c = (struct callback){callback, hStream, userData};
    CUresult result = cuLaunchHostFunc(hStream, call_back, c);
    if (result != CUDA_SUCCESS)
        free(c);
    return result;
}
