/* Physical memory created by cuMemCreate, or imported. */
#ifndef SIM_VMM_H
#define SIM_VMM_H

#include "sim.h"

struct physical {
    uint32_t magic;
    int device;
    uint64_t bytes;
    CUmemAllocationProp props;
    unsigned refs, maps;
    bool on_host;
    /* of exportable or imported memory, which is charged through the shared table */
    uint64_t shared_id;
    int fd;             /* stands for it in other processes; -1: not exportable */
    bool shared;        /* exported or imported */
    bool fd_is_content; /* the descriptor has the memory's content, too */
    bool placed;
    uint64_t place;
    struct physical *next;
};

/* The file position of a described descriptor is (device + 1) << DEVICE_SHIFT, plus the id of the
 * memory, or one of the marks. */
#define DEVICE_SHIFT 39
#define DESCRIBED_POOL (1ull << 38)
#define DESCRIBED_HOST (1ull << 37)
int describe(int device, uint64_t what);
/* Returns the device, -1 if the descriptor describes nothing. */
int described(int fd, uint64_t *what);

struct physical *physical_open(int device, uint64_t bytes, const CUmemAllocationProp *props);
struct physical *physical_of(uint64_t handle);
struct physical *physical_shared_as(uint64_t shared_id);
#endif
