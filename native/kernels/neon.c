/* NEON of ARMv8.0, without dot products (Cortex-A53, A72). smlal multiplies bytes into 16-bit sums. */
#include "kernels.h"

#if defined(__aarch64__)

#include "neon.h"

/* Rows 0 and 1, rows 2 and 3; four lanes each, for the columns of a group. Only one of the widths is used. */
typedef struct row_sums {
    int16x8_t narrow[2];
    int32x4_t wide[2];
} row_sums;

/* Group 0..3 of 16 activations, for every row. */
INLINE int8x16_t columns(int8x16_t a, const int group) {
    int32x4_t words = vreinterpretq_s32_s8(a);
    switch (group) { /* the instruction has the number in it */
    case 0: return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 0));
    case 1: return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 1));
    case 2: return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 2));
    default: return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 3));
    }
}

INLINE row_sums no_sums(void) {
    return (row_sums){{vdupq_n_s16(0), vdupq_n_s16(0)}, {vdupq_n_s32(0), vdupq_n_s32(0)}};
}

/* A lane's sum of a block stays exact in 16 bits for levels of up to 5 bits, that of half a block for 6 bits: 8 products
 * of at most 31 * 127 are 31,496, 4 of 63 * 127 are 32,004. With 8 bits two products do, of -128 * 127: 32,512. */
INLINE int fits(const int largest) { return largest <= INT16_MAX; }

INLINE void add_narrow(row_sums *sums, int8x16_t w, int8x16_t a) {
    sums->narrow[0] = vmlal_s8(sums->narrow[0], vget_low_s8(w), vget_low_s8(a));
    sums->narrow[1] = vmlal_high_s8(sums->narrow[1], w, a);
}

INLINE void add_wide(row_sums *sums, int8x16_t low, int8x16_t high, int8x16_t a_low, int8x16_t a_high) {
    int16x8_t both = vmlal_s8(vmull_s8(vget_low_s8(low), vget_low_s8(a_low)), vget_low_s8(high), vget_low_s8(a_high));
    sums->wide[0] = vpadalq_s16(sums->wide[0], both);
    both = vmlal_high_s8(vmull_high_s8(low, a_low), high, a_high);
    sums->wide[1] = vpadalq_s16(sums->wide[1], both);
}

INLINE void add_products(row_sums sums[4][4], const int8x16_t low[4], const int8x16_t high[4], const int8x16_t a[4],
                         const int i, const int n_quads, const int n_t, const int largest) {
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++) {
        int8x16_t a_low = columns(a[t], 2 * i), a_high = columns(a[t], 2 * i + 1);
        if (fits(largest)) {
#pragma GCC unroll 4
            for (int j = 0; j < n_quads; j++) add_narrow(&sums[t][j], low[j], a_low);
#pragma GCC unroll 4
            for (int j = 0; j < n_quads; j++) add_narrow(&sums[t][j], high[j], a_high);
        } else {
#pragma GCC unroll 4
            for (int j = 0; j < n_quads; j++) add_wide(&sums[t][j], low[j], high[j], a_low, a_high);
        }
    }
}

INLINE int32x4_t totals(row_sums sums, const int largest) {
    if (fits(2 * largest)) return vpaddlq_s16(vpaddq_s16(sums.narrow[0], sums.narrow[1]));
    if (fits(largest)) return vpaddq_s32(vpaddlq_s16(sums.narrow[0]), vpaddlq_s16(sums.narrow[1]));
    return vpaddq_s32(sums.wide[0], sums.wide[1]);
}

#include "neon_rows.h"

static int usable(void) { return 1; } /* every AArch64 CPU that runs Linux has it */

const en_isa en_isa_neon = NEON_ISA("neon", usable);

#endif
