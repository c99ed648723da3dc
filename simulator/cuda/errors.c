/* Names and descriptions of results, as in a real 535 driver (exports/errors-535.txt). */
#include "sim.h"

#include "procaddress.h"

extern const struct sim_error sim_errors[];
extern const unsigned sim_n_errors;

static const struct sim_error *find(CUresult error) {
    for (unsigned i = 0; i < sim_n_errors; i++)
        if (sim_errors[i].code == (int)error)
            return &sim_errors[i];
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    const struct sim_error *e = find(error);
    CHECK_VALUE(text && e);
    *text = e->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    const struct sim_error *e = find(error);
    CHECK_VALUE(text && e);
    *text = e->text;
    return CUDA_SUCCESS;
}
