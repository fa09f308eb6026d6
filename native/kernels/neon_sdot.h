/* Sums of products by sdot, for neon_rows.h: it multiplies four columns of four rows by four activations, which it takes
 * from a quarter of a register, so 16 activations are loaded once and never spread. */
#ifndef EDGE_NATIVE_NEON_SDOT_H
#define EDGE_NATIVE_NEON_SDOT_H

#include "neon.h"

typedef struct columns {
    int8x16_t all;
    int group;
} columns;

typedef int32x4_t row_sums;

INLINE columns columns_of(int8x16_t a, int group) { return (columns){a, group}; }

INLINE row_sums no_sums(void) { return vdupq_n_s32(0); }

INLINE int32x4_t dot(int32x4_t sum, int8x16_t w, columns a) {
    switch (a.group) { /* the instruction has the number in it */
    case 0: return vdotq_laneq_s32(sum, w, a.all, 0);
    case 1: return vdotq_laneq_s32(sum, w, a.all, 1);
    case 2: return vdotq_laneq_s32(sum, w, a.all, 2);
    default: return vdotq_laneq_s32(sum, w, a.all, 3);
    }
}

INLINE void add_pair(row_sums *sums, int8x16_t low, int8x16_t high, columns a_low, columns a_high, const int largest) {
    (void)largest;
    *sums = dot(dot(*sums, low, a_low), high, a_high);
}

INLINE int32x4_t totals(row_sums sums, const int largest) {
    (void)largest;
    return sums;
}

#endif
