/* Products of int8 activations on NEON, for a file that defines before:
 *     row_sums        integer sums of four rows, no_sums() to start with;
 *     add_products    adds the products of 8 columns (low: the first 4 of them) of n_quads times 4 rows by those of n_t
 *                     activations, the number i (0 or 1) of the 16 in a; largest is the most that the products of the columns
 *                     summed up before totals() can be in a lane (of four);
 *     totals          the sums as 32 bits.
 * NEON_OWN_PANEL says that spread and multiply_panel are there too. Gives the table NEON_ISA(name, usable). */
#ifndef EDGE_NATIVE_NEON_ROWS_H
#define EDGE_NATIVE_NEON_ROWS_H

#include "neon.h"

#if !defined(__clang__)
/* Left to itself GCC sums up one row after the other and spills what it loaded too early: up to a third more instructions. */
#pragma GCC optimize("no-schedule-insns")
#endif

INLINE int largest_sum(int kind) { return (has_halves(kind) ? 4 : 8) * 127 * largest_level(kind); }

/* Sixteen columns (half a block) of n_quads times 4 rows by n_t activations, added to sums. */
INLINE void add_half(const int kind, const void *tile, int sub, int half, const int first_quad, const int n_quads,
                     const int8_t *q, size_t stride, const int n_t, row_sums sums[4][4]) {
    int8x16_t a[4];
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++) a[t] = vld1q_s8(q + t * stride + 16 * half);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        int8x16_t low[4], high[4];
#pragma GCC unroll 4
        for (int j = 0; j < n_quads; j++) pair(kind, tile, sub, 2 * half + i, first_quad + j, &low[j], &high[j]);
        add_products(sums, low, high, a, i, n_quads, n_t, largest_sum(kind));
    }
}

/* What half a block (half 0 or 1) or a whole one (half -1) sums up to, of which the first half is in dots already. */
INLINE void end_sums(const int kind, const void *tile, int sub, const int half, const int first_quad, const int n_quads,
                     acts_from acts, int b, const int n_t, row_sums sums[4][4], int32x4_t dots[4][4]) {
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++) {
        size_t at = t * acts.n_blocks + b;
        int32x4_t off = vdupq_n_s32(offset_of(kind) * (half < 0 ? acts.sums[at] : acts.half_sums[2 * at + half]));
#pragma GCC unroll 4
        for (int j = 0; j < n_quads; j++) {
            int32x4_t dot = totals(sums[t][j], largest_sum(kind));
            if (offset_of(kind)) dot = vsubq_s32(dot, off);
            if (half < 0) {
                dots[t][j] = dot;
            } else {
                int32x4_t scale = half_scales(kind, tile, sub, half, first_quad + j);
                dots[t][j] = half ? vmlaq_s32(dots[t][j], dot, scale) : vmulq_s32(dot, scale);
            }
        }
    }
}

INLINE void clear(row_sums sums[4][4], const int n_t, const int n_quads) {
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++)
#pragma GCC unroll 4
        for (int j = 0; j < n_quads; j++) sums[t][j] = no_sums();
}

/* The integer dots of a block. */
INLINE void block_dots(const int kind, const void *tile, int sub, const int first_quad, const int n_quads, acts_from acts,
                       int b, const int n_t, int32x4_t dots[4][4]) {
    const int8_t *q = acts.q + (size_t)b * EN_BLOCK;
    size_t stride = acts.n_blocks * EN_BLOCK;
    row_sums sums[4][4];
    clear(sums, n_t, n_quads);
    add_half(kind, tile, sub, 0, first_quad, n_quads, q, stride, n_t, sums);
    if (has_halves(kind)) {
        end_sums(kind, tile, sub, 0, first_quad, n_quads, acts, b, n_t, sums, dots);
        clear(sums, n_t, n_quads);
    }
    add_half(kind, tile, sub, 1, first_quad, n_quads, q, stride, n_t, sums);
    end_sums(kind, tile, sub, has_halves(kind) ? 1 : -1, first_quad, n_quads, acts, b, n_t, sums, dots);
}

/* Rows from 4*first_quad on, n_quads times 4 of them, by n_t activations over n_blocks blocks. */
INLINE void rows(const int kind, const void *tiles, int n_blocks, acts_from acts, const int first_quad, const int n_quads,
                 const int n_t, float *y, size_t ldy, int from_zero) {
    const uint8_t *tile = tiles;
    float32x4_t total[4][4];
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++)
#pragma GCC unroll 4
        for (int j = 0; j < n_quads; j++)
            total[t][j] = from_zero ? vdupq_n_f32(0.0f) : vld1q_f32(y + t * ldy + 4 * (first_quad + j));
    for (int b = 0; b < n_blocks; tile += tile_bytes(kind))
        for (int sub = 0; sub < blocks_in_tile(kind); sub++, b++) {
            int32x4_t dots[4][4];
            block_dots(kind, tile, sub, first_quad, n_quads, acts, b, n_t, dots);
#pragma GCC unroll 4
            for (int j = 0; j < n_quads; j++) {
                float32x4_t d = scales(kind, tile, sub, first_quad + j), m = d;
                if (has_minima(kind)) m = minima(kind, tile, sub, first_quad + j);
#pragma GCC unroll 4
                for (int t = 0; t < n_t; t++) {
                    size_t at = t * acts.n_blocks + b;
                    total[t][j] = vfmaq_f32(total[t][j], vmulq_n_f32(d, acts.d[at]), vcvtq_f32_s32(dots[t][j]));
                    if (has_minima(kind)) total[t][j] = vfmaq_n_f32(total[t][j], m, acts.ds[at]);
                }
            }
        }
#pragma GCC unroll 4
    for (int t = 0; t < n_t; t++)
#pragma GCC unroll 4
        for (int j = 0; j < n_quads; j++) vst1q_f32(y + t * ldy + 4 * (first_quad + j), total[t][j]);
}

/* A tile's 16 rows by at most 4 activations: by 3 and 4 in two halves, so that all sums have a register. */
INLINE void few(const int kind, const void *tiles, int n_blocks, acts_from acts, int n_t, float *y, size_t ldy, int from_zero) {
    switch (n_t) {
    case 1: rows(kind, tiles, n_blocks, acts, 0, 4, 1, y, ldy, from_zero); break;
    case 2: rows(kind, tiles, n_blocks, acts, 0, 4, 2, y, ldy, from_zero); break;
    case 3:
        rows(kind, tiles, n_blocks, acts, 0, 2, 3, y, ldy, from_zero);
        rows(kind, tiles, n_blocks, acts, 2, 2, 3, y, ldy, from_zero);
        break;
    default:
        rows(kind, tiles, n_blocks, acts, 0, 2, 4, y, ldy, from_zero);
        rows(kind, tiles, n_blocks, acts, 2, 2, 4, y, ldy, from_zero);
    }
}

enum { MAX_FEW = 4 };

#if !defined(NEON_OWN_PANEL)
typedef panel_block spread_block;

INLINE void spread(const int kind, const void *tile, int sub, spread_block *out) {
    int8x16_t offset = vdupq_n_s8((int8_t)offset_of(kind));
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++)
        for (int quad = 0; quad < 4; quad++) {
            int8x16_t low, high;
            pair(kind, tile, sub, p, quad, &low, &high);
            vst1q_s8(out->q[2 * p] + 16 * quad, vsubq_s8(low, offset));
            vst1q_s8(out->q[2 * p + 1] + 16 * quad, vsubq_s8(high, offset));
        }
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
        vst1q_f32(out->d + 4 * quad, scales(kind, tile, sub, quad));
        if (has_minima(kind)) vst1q_f32(out->m + 4 * quad, minima(kind, tile, sub, quad));
        if (has_halves(kind))
            for (int half = 0; half < 2; half++)
                vst1_s16(out->halves[half] + 4 * quad, vmovn_s32(half_scales(kind, tile, sub, half, quad)));
    }
}

#define PANEL(name, kind)                                                                                               \
    static void name(const panel_block *panel, int n_blocks, const en_acts *acts, size_t stride, size_t b0, int m, float *y, \
                     size_t ldy, int from_zero) {                                                                       \
        for (int t = 0; t < m; t += MAX_FEW)                                                                            \
            few(kind, panel, n_blocks, from(acts, stride, t, b0), m - t < MAX_FEW ? m - t : MAX_FEW, y + t * ldy, ldy, from_zero); \
    }

PANEL(plain_panel, PANEL_PLAIN)
PANEL(wide_panel, PANEL_WIDE)
PANEL(minima_panel, PANEL_MINIMA)
PANEL(halves_panel, PANEL_HALVES)

INLINE void multiply_panel(const int kind, const panel_block *panel, int n_blocks, const en_acts *acts, size_t stride,
                           size_t b0, int m, float *y, size_t ldy, int from_zero) {
    switch (panel_of(kind)) {
    case PANEL_PLAIN: plain_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero); break;
    case PANEL_WIDE: wide_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero); break;
    case PANEL_MINIMA: minima_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero); break;
    default: halves_panel(panel, n_blocks, acts, stride, b0, m, y, ldy, from_zero);
    }
}
#endif

enum { PANEL_BLOCKS = 24 }; /* with the activations of four rows they stay in a 32 KiB cache */
_Static_assert(PANEL_BLOCKS * sizeof(spread_block) <= EN_SCRATCH_BYTES, "a panel must fit the scratch");
_Static_assert(PANEL_BLOCKS % 8 == 0, "a panel begins where a tile of 256 columns does");

INLINE void matmul(const int kind, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                   int accumulate, void *scratch) {
    size_t n_blocks = (size_t)k / EN_BLOCK, row_bytes = n_blocks / blocks_in_tile(kind) * tile_bytes(kind);
    const uint8_t *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += row_bytes, y += EN_TILE) {
        if (m <= MAX_FEW) {
            few(kind, w, (int)n_blocks, from(acts, n_blocks, 0, 0), m, y, ldy, !accumulate);
            continue;
        }
        spread_block *panel = scratch;
        for (size_t b0 = 0; b0 < n_blocks; b0 += PANEL_BLOCKS) {
            int n = (int)(n_blocks - b0 < PANEL_BLOCKS ? n_blocks - b0 : PANEL_BLOCKS);
            const uint8_t *tile = w + b0 / blocks_in_tile(kind) * tile_bytes(kind);
            for (int b = 0; b < n; b += blocks_in_tile(kind), tile += tile_bytes(kind))
                for (int sub = 0; sub < blocks_in_tile(kind); sub++) spread(kind, tile, sub, panel + b + sub);
            multiply_panel(kind, panel, n, acts, n_blocks, b0, m, y, ldy, !accumulate && b0 == 0);
        }
    }
}

#define MATMUL(name, kind)                                                                                              \
    static void name(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,           \
                     int accumulate, void *scratch) {                                                                   \
        matmul(kind, tiles, n_tiles, k, acts, m, y, ldy, accumulate, scratch);                                          \
    }

MATMUL(matmul_q4_0, EN_PACKED_Q4_0)
MATMUL(matmul_q4_1, EN_PACKED_Q4_1)
MATMUL(matmul_q5_0, EN_PACKED_Q5_0)
MATMUL(matmul_q5_1, EN_PACKED_Q5_1)
MATMUL(matmul_q8_0, EN_PACKED_Q8_0)
MATMUL(matmul_q4_k, EN_PACKED_Q4_K)
MATMUL(matmul_q5_k, EN_PACKED_Q5_K)
MATMUL(matmul_q6_k, EN_PACKED_Q6_K)

#define NEON_ISA(isa_name, is_usable)                                                                                   \
    {                                                                                                                   \
        .name = isa_name,                                                                                               \
        .usable = is_usable,                                                                                            \
        .matmul = {[EN_PACKED_F32] = en_neon_matmul_f32,                                                                \
                   [EN_PACKED_F16] = en_neon_matmul_f16,                                                                \
                   [EN_PACKED_Q4_0] = matmul_q4_0,                                                                      \
                   [EN_PACKED_Q4_1] = matmul_q4_1,                                                                      \
                   [EN_PACKED_Q5_0] = matmul_q5_0,                                                                      \
                   [EN_PACKED_Q5_1] = matmul_q5_1,                                                                      \
                   [EN_PACKED_Q8_0] = matmul_q8_0,                                                                      \
                   [EN_PACKED_Q4_K] = matmul_q4_k,                                                                      \
                   [EN_PACKED_Q5_K] = matmul_q5_k,                                                                      \
                   [EN_PACKED_Q6_K] = matmul_q6_k},                                                                     \
        .quantize = en_neon_quantize,                                                                                   \
        .rms_norm = en_neon_rms_norm,                                                                                   \
        .silu_mul = en_neon_silu_mul,                                                                                   \
        .to_half = en_neon_to_half,                                                                                     \
        .half_to_float = en_neon_half_to_float,                                                                         \
        .keys_from_int8 = en_neon_keys_from_int8,                                                                       \
        .values_from_int8 = en_neon_values_from_int8,                                                                   \
        .attend = en_neon_attend,                                                                                       \
    }

#endif
