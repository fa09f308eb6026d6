/* Sums of products by sdot, for neon_rows.h: it multiplies four columns of four rows by four activations, which it takes
 * from a quarter of a register, so 16 activations are loaded once and never spread. */
#ifndef EDGE_NATIVE_NEON_SDOT_H
#define EDGE_NATIVE_NEON_SDOT_H

#include "neon.h"

typedef int32x4_t row_sums;

INLINE row_sums no_sums(void) { return vdupq_n_s32(0); }

INLINE int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t a, const int group) {
    switch (group) { /* the instruction has the number in it */
    case 0: return vdotq_laneq_s32(sum, w, a, 0);
    case 1: return vdotq_laneq_s32(sum, w, a, 1);
    case 2: return vdotq_laneq_s32(sum, w, a, 2);
    default: return vdotq_laneq_s32(sum, w, a, 3);
    }
}

INLINE void add_products(row_sums sums[4][4], const int8x16_t low[4], const int8x16_t high[4], const int8x16_t a[4],
                         const int i, const int n_quads, const int n_t, const int largest) {
    (void)largest;
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++)
#pragma GCC unroll 4
            for (int j = 0; j < n_quads; j++) sums[t][j] = dot(sums[t][j], odd ? high[j] : low[j], a[t], 2 * i + odd);
}

INLINE int32x4_t totals(row_sums sums, const int largest) {
    (void)largest;
    return sums;
}

#endif
