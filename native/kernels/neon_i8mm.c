/* NEON with the matrix products of FEAT_I8MM (Neoverse V1 and N2, Cortex-A510, A710, X2): smmla multiplies eight columns
 * of two rows by those of two activations. Few activations at once are left to sdot, which wastes nothing on them. */
#include "kernels.h"

#if defined(EN_NEON_EXTENSIONS)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

#include "neon_sdot.h"

#define NEON_OWN_PANEL

/* A block for smmla. Its results are row 0 by activations 0 and 1, row 1 by 0 and 1: what belongs to a row stands twice. */
typedef struct spread_block {
    int8_t q[4][8][16]; /* [8 columns][pair of rows][8 * row in the pair + column] */
    float d[2 * EN_TILE];
    union {
        float m[2 * EN_TILE];
        int16_t halves[2][2 * EN_TILE];
    };
} spread_block;

INLINE void twice(float32x4_t v, float *out) {
    vst1q_f32(out, vzip1q_f32(v, v));
    vst1q_f32(out + 4, vzip2q_f32(v, v));
}

INLINE void spread(const int kind, const void *tile, int sub, spread_block *out) {
    int8x16_t offset = vdupq_n_s8((int8_t)offset_of(kind));
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++)
        for (int quad = 0; quad < 4; quad++) {
            int8x16_t low, high;
            pair(kind, tile, sub, p, quad, &low, &high);
            int32x4_t l = vreinterpretq_s32_s8(vsubq_s8(low, offset)), h = vreinterpretq_s32_s8(vsubq_s8(high, offset));
            vst1q_s8(out->q[p][2 * quad], vreinterpretq_s8_s32(vzip1q_s32(l, h)));
            vst1q_s8(out->q[p][2 * quad + 1], vreinterpretq_s8_s32(vzip2q_s32(l, h)));
        }
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        twice(scales(kind, tile, sub, quad), out->d + 8 * quad);
        if (has_minima(kind)) twice(minima(kind, tile, sub, quad), out->m + 8 * quad);
        if (has_halves(kind))
            for (int half = 0; half < 2; half++) {
                int16x4_t s = vmovn_s32(half_scales(kind, tile, sub, half, quad));
                vst1q_s16(out->halves[half] + 8 * quad, vcombine_s16(vzip1_s16(s, s), vzip2_s16(s, s)));
            }
    }
}

/* a, b, a, b */
INLINE float32x4_t alternate(const float *a, const float *b) {
    float32x2_t both = vld1_lane_f32(b, vld1_dup_f32(a), 1);
    return vcombine_f32(both, both);
}

/* The dots of block w, of eight pairs of rows by the activations q0 and q1. */
INLINE void pair_dots(const int panel, const spread_block *w, const int8_t *q0, const int8_t *q1, int32x4_t dots[8]) {
    int32x4_t sums[8];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64x2_t a0 = vreinterpretq_s64_s8(vld1q_s8(q0 + 16 * half)), a1 = vreinterpretq_s64_s8(vld1q_s8(q1 + 16 * half));
        int8x16_t a[2] = {vreinterpretq_s8_s64(vzip1q_s64(a0, a1)), vreinterpretq_s8_s64(vzip2q_s64(a0, a1))};
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            if (half == 0 || panel == PANEL_HALVES) sums[r] = vdupq_n_s32(0);
            sums[r] = vmmlaq_s32(sums[r], vld1q_s8(w->q[2 * half][r]), a[0]);
            sums[r] = vmmlaq_s32(sums[r], vld1q_s8(w->q[2 * half + 1][r]), a[1]);
            if (panel == PANEL_HALVES) {
                int32x4_t scale = vmovl_s16(vld1_s16(w->halves[half] + 4 * r));
                dots[r] = half ? vmlaq_s32(dots[r], sums[r], scale) : vmulq_s32(sums[r], scale);
            }
        }
    }
    if (panel != PANEL_HALVES)
        for (int r = 0; r < 8; r++) dots[r] = sums[r];
}

/* Sixteen rows by two activations, of which the second may be the first again. */
INLINE void pair_rows(const int panel, const spread_block *w, int n_blocks, acts_from a0, acts_from a1, float *y0, float *y1,
                      int from_zero) {
    float32x4_t total[8];
    for (int quad = 0; quad < 4; quad++) {
        float32x4_t v0 = from_zero ? vdupq_n_f32(0.0f) : vld1q_f32(y0 + 4 * quad);
        float32x4_t v1 = from_zero ? vdupq_n_f32(0.0f) : vld1q_f32(y1 + 4 * quad);
        total[2 * quad] = vzip1q_f32(v0, v1);
        total[2 * quad + 1] = vzip2q_f32(v0, v1);
    }
    for (int b = 0; b < n_blocks; b++, w++) {
        int32x4_t dots[8];
        pair_dots(panel, w, a0.q + (size_t)b * EN_BLOCK, a1.q + (size_t)b * EN_BLOCK, dots);
        float32x4_t d = alternate(a0.d + b, a1.d + b), ds = alternate(a0.ds + b, a1.ds + b);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            total[r] = vfmaq_f32(total[r], vmulq_f32(vld1q_f32(w->d + 4 * r), d), vcvtq_f32_s32(dots[r]));
            if (panel == PANEL_MINIMA) total[r] = vfmaq_f32(total[r], vld1q_f32(w->m + 4 * r), ds);
        }
    }
    for (int quad = 0; quad < 4; quad++) {
        vst1q_f32(y1 + 4 * quad, vuzp2q_f32(total[2 * quad], total[2 * quad + 1]));
        vst1q_f32(y0 + 4 * quad, vuzp1q_f32(total[2 * quad], total[2 * quad + 1]));
    }
}

#define PANEL(name, panel)                                                                                              \
    static void name(const spread_block *w, int n_blocks, const en_acts *acts, size_t stride, size_t b0, int m, float *y, \
                     size_t ldy, int from_zero) {                                                                       \
        float unused[EN_TILE] = {0};                                                                                    \
        for (int t = 0; t < m; t += 2) {                                                                                \
            int last = t + 1 == m;                                                                                      \
            pair_rows(panel, w, n_blocks, from(acts, stride, t, b0), from(acts, stride, last ? t : t + 1, b0),          \
                      y + t * ldy, last ? unused : y + (t + 1) * ldy, from_zero);                                       \
        }                                                                                                               \
    }

PANEL(plain_panel, PANEL_PLAIN)
PANEL(minima_panel, PANEL_MINIMA)
PANEL(halves_panel, PANEL_HALVES)

INLINE void multiply_panel(const int kind, const spread_block *panel, int n_blocks, const en_acts *acts, size_t stride,
                           size_t b0, int m, float *y, size_t ldy, int from_zero) {
    if (has_halves(kind)) halves_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero);
    else if (has_minima(kind)) minima_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero);
    else plain_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero);
}

#include "neon_rows.h"

#include <sys/auxv.h>

static int usable(void) {
    return (getauxval(AT_HWCAP) >> 20 & 1) && (getauxval(AT_HWCAP2) >> 13 & 1); /* HWCAP_ASIMDDP, HWCAP2_I8MM */
}

const en_isa en_isa_neon_i8mm = NEON_ISA("neon_i8mm", usable);

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
