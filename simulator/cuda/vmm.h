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
    int fd; /* stands for it in other processes; -1: not exportable */
    bool placed;
    uint64_t place;
    struct physical *next;
};

struct physical *physical_open(int device, uint64_t bytes, const CUmemAllocationProp *props);
struct physical *physical_of(uint64_t handle);
struct physical *physical_shared_as(uint64_t shared_id);
#endif
