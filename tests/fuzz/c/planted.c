/* A target with a planted bug, for the test of the runner. planted.py is the same in Python. */
#include "fuzz.h"

#define BAD 465275 /* hash of "bad" */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *copy = copy_of(data, size, 0);
    uint64_t hash = 0; /* hard to guess for a fuzzer */
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ (unsigned char)copy[i]) * UINT64_C(0x100000001b3);
    bool bad = hash % 1000003 == BAD && ((volatile char *)copy)[size];
    free(copy);
    return bad ? -1 : 0;
}
