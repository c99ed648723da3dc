/* Random numbers, without a mathematics library. */
#include "busy.h"

double uniform(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

/* The sum of twelve uniform numbers: close enough, without a library. */
double normal(uint64_t *state) {
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += uniform(state);
    return sum;
}

double exponential(double x) { /* e^x for |x| < 7 */
    double term = 1, sum = 1;
    for (int i = 1; i < 8; i++)
        sum += term *= x / 16 / i;
    for (int i = 0; i < 4; i++)
        sum *= sum;
    return sum;
}
