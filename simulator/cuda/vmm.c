/* Virtual memory management: address ranges, physical memory, and mappings between them.
 * Physical memory lives until it has neither references nor mappings. */
#include "vmm.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct mapping {
    uint64_t va, bytes, offset;
    struct physical *physical;
    bool accessible;
    struct mapping *next;
};

struct reservation {
    uint64_t va, bytes, base, length; /* base, length: the host mapping that contains it */
    struct mapping *mappings;
    struct reservation *next;
};

static struct reservation *reservations;
static struct physical *physicals;
static int content_fd =
    -1; /* content of memory that is not exportable: a sparse file whose offsets are never reused */
static uint64_t content_end;

static struct reservation *reservation_of(uint64_t va, uint64_t bytes) {
    for (struct reservation *r = reservations; r; r = r->next)
        if (va >= r->va && va - r->va < r->bytes && bytes <= r->bytes - (va - r->va))
            return r;
    return NULL;
}

static struct mapping *mapping_of(uint64_t va) {
    struct reservation *r = reservation_of(va, 1);
    for (struct mapping *m = r ? r->mappings : NULL; m; m = m->next)
        if (va >= m->va && va - m->va < m->bytes)
            return m;
    return NULL;
}

bool vmm_range(uint64_t va, uint64_t *start, uint64_t *size, int *device) {
    struct mapping *m = mapping_of(va);
    if (!m || !m->accessible)
        return false;
    *start = m->va;
    *size = m->bytes;
    *device = m->physical->on_host ? -1 : m->physical->device;
    return true;
}

bool vmm_is_shared(void) {
    for (const struct physical *p = physicals; p; p = p->next)
        if (p->shared)
            return true;
    return false;
}

struct physical *physical_of(uint64_t handle) {
    for (struct physical *p = physicals; p; p = p->next)
        if ((uint64_t)p == handle && p->refs)
            return p;
    return NULL;
}

struct physical *physical_shared_as(uint64_t shared_id) {
    for (struct physical *p = physicals; p; p = p->next)
        if (p->shared_id == shared_id)
            return p;
    return NULL;
}

struct physical *physical_open(int device, uint64_t bytes, const CUmemAllocationProp *props) {
    struct physical *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    *p = (struct physical){.magic = OBJ_PHYSICAL,
                           .device = device,
                           .bytes = bytes,
                           .props = *props,
                           .refs = 1,
                           .fd = -1,
                           .next = physicals};
    physicals = p;
    return p;
}

static void close_if_unused(struct physical *p) {
    if (p->refs || p->maps)
        return;
    if (p->shared_id)
        sim_drop_shared(&sim.device[p->device].sim, p->shared_id);
    else if (!p->on_host)
        uncharge(p->device, p->bytes);
    if (p->fd >= 0)
        close(p->fd);
    if (p->placed)
        fallocate(content_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->place,
                  (off_t)p->bytes);
    for (struct physical **at = &physicals; *at; at = &(*at)->next) {
        if (*at != p)
            continue;
        *at = p->next;
        break;
    }
    free(p);
}

/* Returns the descriptor of p's content and its offset there. */
static int content_of(struct physical *p, uint64_t *offset) {
    *offset = p->place;
    if (p->shared_id)
        return sim.device[p->device].sim.fd;
    if (p->fd_is_content)
        return p->fd;
    if (content_fd < 0)
        content_fd = memfd_create("sim-device-memory", MFD_CLOEXEC);
    if (!p->placed) {
        p->place = content_end;
        content_end += p->bytes;
        p->placed = ftruncate(content_fd, (off_t)content_end) == 0;
        *offset = p->place;
    }
    return content_fd;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                              CUmemAllocationGranularity_flags option) {
    ENTER();
    CHECK_VALUE(granularity && prop && option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        CHECK_DEVICE(prop->location.id);
    *granularity = SIM_BLOCK;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment,
                                    CUdeviceptr addr, unsigned long long flags) {
    ENTER();
    CHECK_VALUE(ptr && size && size % SIM_BLOCK == 0 && !flags && !(alignment & (alignment - 1)));
    CHECK(size < 1ull << 47, CUDA_ERROR_OUT_OF_MEMORY);
    if (alignment < SIM_BLOCK)
        alignment = SIM_BLOCK;
    struct reservation *r = calloc(1, sizeof *r);
    CHECK(r, CUDA_ERROR_OUT_OF_MEMORY);
    int hint = addr && addr % alignment == 0 ? MAP_FIXED_NOREPLACE : 0;
    void *p = MAP_FAILED;
    r->length = size;
    if (hint)
        p = mmap((void *)addr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | hint,
                 -1, 0);
    if (p == MAP_FAILED) {
        r->length = size + alignment;
        p = mmap(NULL, r->length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (p == MAP_FAILED)
        return free(r), CUDA_ERROR_OUT_OF_MEMORY;
    madvise(p, r->length, MADV_DONTFORK);
    r->base = (uint64_t)p;
    r->va = round_up(r->base, alignment);
    r->bytes = size;
    r->next = reservations;
    reservations = r;
    *ptr = r->va;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    ENTER();
    for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
        struct reservation *r = *at;
        if (r->va != ptr || r->bytes != size)
            continue;
        CHECK_VALUE(!r->mappings);
        *at = r->next;
        munmap((void *)r->base, r->length);
        free(r);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* As the real driver's, all descriptors of exported memory are the control device, and look alike.
 * The file position, which every copy of a descriptor shares, tells what it stands for. */
int describe(int device, uint64_t what) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/nvidiactl", sim_device_dir());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        lseek(fd, (off_t)((uint64_t)(device + 1) << DEVICE_SHIFT | what), SEEK_SET);
    return fd;
}

int described(int fd, uint64_t *what) {
    off_t position = lseek(fd, 0, SEEK_CUR);
    int device = position > 0 ? (int)(position >> DEVICE_SHIFT) - 1 : -1;
    *what = (uint64_t)position & ((1ull << DEVICE_SHIFT) - 1);
    return device < sim.n_devices ? device : -1;
}

/* The content of exportable memory is in the device file. */
static CUresult make_exportable(struct physical *p) {
    if (p->on_host && costs_of(p->device)->one_descriptor) {
        p->fd = describe(p->device, DESCRIBED_HOST);
        return p->fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    }
    if (p->on_host) { /* not registered: importing host memory is not simulated */
        p->fd_is_content = true;
        p->fd = memfd_create("sim-host-memory", MFD_CLOEXEC);
        return p->fd < 0 || ftruncate(p->fd, (off_t)p->bytes) ? CUDA_ERROR_OPERATING_SYSTEM
                                                              : CUDA_SUCCESS;
    }
    struct sim_device *d = &sim.device[p->device].sim;
    struct stat st;
    p->shared_id = sim_share(d, p->bytes, &p->place);
    CHECK(p->shared_id, CUDA_ERROR_OUT_OF_MEMORY);
    bool fits = !fstat(d->fd, &st) && ((uint64_t)st.st_size >= p->place + p->bytes ||
                                       !ftruncate(d->fd, (off_t)(p->place + p->bytes)));
    p->fd = describe(p->device, p->shared_id);
    return fits && p->fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *prop, unsigned long long flags) {
    ENTER();
    CHECK_VALUE(handle && prop && !flags && size && size % SIM_BLOCK == 0);
    CHECK_VALUE(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED);
    CHECK_VALUE(!(prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    bool on_host = prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CHECK_VALUE(on_host ? prop->location.id == 0
                        : prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    int device = on_host ? 0 : prop->location.id;
    CHECK_DEVICE(device);
    CUresult result = join_device(device);
    if (result == CUDA_SUCCESS && !on_host)
        result = charge(device, size);
    if (result != CUDA_SUCCESS)
        return result;
    struct physical *p = physical_open(device, size, prop);
    CHECK(p, CUDA_ERROR_OUT_OF_MEMORY);
    p->on_host = on_host;
    if (prop->requestedHandleTypes)
        result = make_exportable(p);
    if (result == CUDA_SUCCESS) {
        *handle = (CUmemGenericAllocationHandle)p;
    } else {
        p->refs = 0;
        close_if_unused(p);
    }
    return result;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    struct physical *p = physical_of(handle);
    CHECK_VALUE(p);
    p->refs--;
    close_if_unused(p);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    ENTER();
    struct mapping *m = mapping_of((uint64_t)addr);
    CHECK_VALUE(handle && m);
    m->physical->refs++;
    *handle = (CUmemGenericAllocationHandle)m->physical;
    return CUDA_SUCCESS;
}

static bool overlaps(const struct reservation *r, uint64_t va, uint64_t bytes) {
    for (const struct mapping *m = r->mappings; m; m = m->next)
        if (va < m->va + m->bytes && m->va < va + bytes)
            return true;
    return false;
}

EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER();
    struct physical *p = physical_of(handle);
    struct reservation *r = reservation_of(ptr, size);
    CHECK_VALUE(p && r && !flags && size && size % SIM_BLOCK == 0 && ptr % SIM_BLOCK == 0 &&
                offset % SIM_BLOCK == 0);
    CHECK_VALUE(offset <= p->bytes && size <= p->bytes - offset && !overlaps(r, ptr, size));
    uint64_t place;
    int fd = content_of(p, &place);
    CHECK(mmap((void *)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, (off_t)(place + offset)) !=
              MAP_FAILED,
          CUDA_ERROR_OPERATING_SYSTEM);
    madvise((void *)ptr, size, MADV_DONTFORK);
    struct mapping *m = malloc(sizeof *m);
    CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    *m = (struct mapping){
        .va = ptr, .bytes = size, .offset = offset, .physical = p, .next = r->mappings};
    r->mappings = m;
    p->maps++;
    return CUDA_SUCCESS;
}

/* True when [ptr, ptr + size) consists of whole mappings. */
static bool is_whole(struct reservation *r, uint64_t ptr, uint64_t size) {
    uint64_t covered = 0;
    for (const struct mapping *m = r->mappings; m; m = m->next) {
        if (m->va >= ptr && m->va + m->bytes <= ptr + size)
            covered += m->bytes;
        else if (ptr < m->va + m->bytes && m->va < ptr + size)
            return false;
    }
    return covered == size;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    ENTER();
    struct reservation *r = reservation_of(ptr, size);
    CHECK_VALUE(r && size && is_whole(r, ptr, size));
    for (struct mapping **at = &r->mappings; *at;) {
        struct mapping *m = *at;
        if (m->va < ptr || m->va >= ptr + size) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        mmap((void *)m->va, m->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        m->physical->maps--;
        close_if_unused(m->physical);
        free(m);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc,
                               size_t count) {
    ENTER();
    struct reservation *r = reservation_of(ptr, size);
    CHECK_VALUE(r && desc && count && is_whole(r, ptr, size));
    bool some = false;
    for (size_t i = 0; i < count; i++) {
        if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE)
            CHECK_DEVICE(desc[i].location.id);
        some |= desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    for (struct mapping *m = r->mappings; m; m = m->next) {
        if (m->va < ptr || m->va >= ptr + size)
            continue;
        m->accessible = some;
        mprotect((void *)m->va, m->bytes, some ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                               CUdeviceptr ptr) {
    ENTER();
    struct mapping *m = mapping_of(ptr);
    CHECK_VALUE(flags && location && m);
    *flags = m->accessible && location->id == m->physical->device
                 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                       CUmemGenericAllocationHandle handle) {
    ENTER();
    struct physical *p = physical_of(handle);
    CHECK_VALUE(prop && p);
    *prop = p->props;
    return CUDA_SUCCESS;
}
