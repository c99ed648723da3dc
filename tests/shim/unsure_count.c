/* shim/core/overhead.c with a scripted driver: what a comparison may change while another thread is
 * in the middle of an allocation. Prints the charge, in MiB, after each comparison. */
#include <stdio.h>

#include "core/busy.h"
#include "core/gs.h"
#include "core/overhead.h"

#define MIB (UINT64_C(1) << 20)

static struct gs_slot slot;
static struct gs_self self = {.slot = &slot};
static struct gs_limits limits = {.n_devices = 1};
static struct gs_view view = {.limits = &limits};
static uint64_t counted;
static bool held;
_Atomic(struct gs_self *) gs_self_page = &self;

struct gs_self *gs_self(void) {
    return &self;
}

const struct gs_view *gs_region(void) {
    return &view;
}

enum gs_counted gs_driver_count(int dev, uint64_t *bytes) {
    (void)dev;
    *bytes = counted;
    return GS_LISTED;
}

void gs_charge_anyway(int dev, uint64_t bytes) {
    slot.bytes[dev] += bytes;
}

void gs_release(int dev, uint64_t bytes) {
    slot.bytes[dev] -= bytes;
}

uint64_t gs_limit(int dev) {
    (void)dev;
    return 1000 * MIB;
}

uint64_t gs_used(int dev) {
    return slot.bytes[dev];
}

bool gs_over(int dev) {
    return gs_used(dev) > gs_limit(dev);
}

bool gs_hold_others(void) {
    return held;
}

bool gs_others_are_held(void) {
    return held;
}

void gs_let_others_go(void) {
}

uint32_t gs_busy_leave(void) {
    return 0;
}

void gs_busy_return(uint32_t depth) {
    (void)depth;
}

void gs_lock(_Atomic uint32_t *word) {
    (void)word;
}

void gs_unlock(_Atomic uint32_t *word) {
    (void)word;
}

void gs_log(const char *text, const char *detail, const char *hint) {
    fprintf(stderr, "%s %s %s\n", text, detail, hint);
}

uint64_t gs_export_imported(int dev, bool all) {
    (void)dev;
    (void)all;
    return 0;
}

static void compare(uint64_t mib, bool others_are_held) {
    counted = mib * MIB;
    held = others_are_held;
    gs_overhead_contexts(0, 0); /* always compares */
    printf("%llu ", (unsigned long long)(slot.bytes[0] / MIB));
}

int main(void) {
    counted = 100 * MIB;
    slot.bytes[0] = 100 * MIB;
    gs_overhead_of_context(0, 0, 100 * MIB);
    gs_overhead_contexts(0, 1);
    compare(100, true);
    gs_overhead_keeps(0,
                      2 * MIB); /* a stream, which takes 2 MiB: pending until the next comparison */
    slot.bytes[0] += 2 * MIB;   /* another thread has reserved 2 MiB, which the driver lacks */
    compare(102, false);
    compare(102, false);
    slot.bytes[0] -= 2 * MIB;
    compare(102, true);
    compare(108, false); /* another one may have freed 6 MiB and not released them */
    compare(108, false); /* two in a row */
    compare(102, true);
    printf("\n");
    return 0;
}
