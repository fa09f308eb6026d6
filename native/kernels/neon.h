/* What the NEON files share: how tiles are read. Every function here is inlined and compiled for the instruction set of
 * the file that includes it; an int kind is an en_format or an en_panel, known when compiling. */
#ifndef EDGE_NATIVE_NEON_H
#define EDGE_NATIVE_NEON_H

#include "kernels.h"

#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))

/* Blocks with their levels spread out as signed bytes less the offset, and their scales as floats: worth it when several
 * activations use them. They are told apart by what else a block has: nothing, minima or two integer scales. Those of
 * Q8_0 have levels that take 8 bits. */
enum en_panel { PANEL_PLAIN = EN_N_FORMATS, PANEL_WIDE, PANEL_MINIMA, PANEL_HALVES };

INLINE int has_minima(int kind) {
    return kind == EN_PACKED_Q4_1 || kind == EN_PACKED_Q5_1 || kind == EN_PACKED_Q4_K || kind == EN_PACKED_Q5_K ||
           kind == PANEL_MINIMA;
}

/* Whether each 16 columns have an integer scale of their own. */
INLINE int has_halves(int kind) { return kind == EN_PACKED_Q6_K || kind == PANEL_HALVES; }

INLINE int panel_of(int kind) {
    return has_halves(kind) ? PANEL_HALVES : has_minima(kind) ? PANEL_MINIMA : kind == EN_PACKED_Q8_0 ? PANEL_WIDE : PANEL_PLAIN;
}

INLINE int has_fifth_bits(int kind) {
    return kind == EN_PACKED_Q5_0 || kind == EN_PACKED_Q5_1 || kind == EN_PACKED_Q5_K;
}

/* What is to be taken off the levels that pair() gives. */
INLINE int offset_of(int kind) {
    return kind == EN_PACKED_Q4_0 ? 8 : kind == EN_PACKED_Q5_0 ? 16 : kind == EN_PACKED_Q6_K ? 32 : 0;
}

/* The largest absolute level that pair() gives. */
INLINE int largest_level(int kind) {
    switch (kind) {
    case EN_PACKED_Q4_0:
    case EN_PACKED_Q4_1:
    case EN_PACKED_Q4_K: return 15;
    case EN_PACKED_Q5_0:
    case EN_PACKED_Q5_1:
    case EN_PACKED_Q5_K:
    case PANEL_MINIMA: return 31;
    case PANEL_PLAIN: return 16;
    case PANEL_HALVES: return 32;
    case EN_PACKED_Q6_K: return 63;
    default: return 128;
    }
}

INLINE int blocks_in_tile(int kind) {
    return kind == EN_PACKED_Q4_K || kind == EN_PACKED_Q5_K || kind == EN_PACKED_Q6_K ? 8 : 1;
}

/* A panel's block; rows by fours, as in the tiles. */
typedef struct panel_block {
    int8_t q[8][64]; /* [group of 4 columns][4 * row + column in the group] */
    float d[EN_TILE];
    union {
        float m[EN_TILE];
        int16_t halves[2][EN_TILE];
    };
} panel_block;

INLINE size_t tile_bytes(int kind) {
    switch (kind) {
    case EN_PACKED_Q4_0: return sizeof(en_tile_q4_0);
    case EN_PACKED_Q4_1: return sizeof(en_tile_q4_1);
    case EN_PACKED_Q5_0: return sizeof(en_tile_q5_0);
    case EN_PACKED_Q5_1: return sizeof(en_tile_q5_1);
    case EN_PACKED_Q8_0: return sizeof(en_tile_q8_0);
    case EN_PACKED_Q4_K: return sizeof(en_tile_q4_k);
    case EN_PACKED_Q5_K: return sizeof(en_tile_q5_k);
    case EN_PACKED_Q6_K: return sizeof(en_tile_q6_k);
    default: return sizeof(panel_block);
    }
}

/* The 8-bit levels of block sub of a tile, for kinds that have them. */
INLINE const int8_t *bytes_of(int kind, const void *tile) {
    return kind == EN_PACKED_Q8_0 ? ((const en_tile_q8_0 *)tile)->q[0] : ((const panel_block *)tile)->q[0];
}

INLINE const uint8_t *nibbles_of(int kind, const void *tile, int sub) {
    switch (kind) {
    case EN_PACKED_Q4_0: return ((const en_tile_q4_0 *)tile)->q[0];
    case EN_PACKED_Q4_1: return ((const en_tile_q4_1 *)tile)->q[0];
    case EN_PACKED_Q5_0: return ((const en_tile_q5_0 *)tile)->q[0];
    case EN_PACKED_Q5_1: return ((const en_tile_q5_1 *)tile)->q[0];
    case EN_PACKED_Q4_K: return ((const en_tile_q4_k *)tile)->q[sub][0];
    case EN_PACKED_Q5_K: return ((const en_tile_q5_k *)tile)->q[sub][0];
    default: return ((const en_tile_q6_k *)tile)->q[sub][0];
    }
}

INLINE const uint8_t *high_bits_of(int kind, const void *tile, int sub) {
    switch (kind) {
    case EN_PACKED_Q5_0: return ((const en_tile_q5_0 *)tile)->h;
    case EN_PACKED_Q5_1: return ((const en_tile_q5_1 *)tile)->h;
    case EN_PACKED_Q5_K: return ((const en_tile_q5_k *)tile)->h[sub];
    default: return ((const en_tile_q6_k *)tile)->h[sub][0];
    }
}

/* Bits from position on, in all bytes, moved to position to: plain operators, so that the shift is an immediate. */
INLINE uint8x16_t move_bits(uint8x16_t bits, int from, int to) { return from < to ? bits << (to - from) : bits >> (from - to); }

/* The levels of rows 4*quad..4*quad+3 and columns 8*p..8*p+3 (low), 8*p+4..8*p+7 (high). */
INLINE void pair(int kind, const void *tile, int sub, int p, int quad, int8x16_t *low, int8x16_t *high) {
    if (kind == EN_PACKED_Q8_0 || kind > EN_N_FORMATS - 1) {
        const int8_t *q = bytes_of(kind, tile) + 128 * p + 16 * quad;
        *low = vld1q_s8(q);
        *high = vld1q_s8(q + 64);
        return;
    }
    uint8x16_t nibbles = vld1q_u8(nibbles_of(kind, tile, sub) + 64 * p + 16 * quad);
    uint8x16_t l = nibbles & 15, h = nibbles >> 4;
    if (has_fifth_bits(kind)) {
        uint8x16_t bits = vld1q_u8(high_bits_of(kind, tile, sub) + 16 * quad), mask = vdupq_n_u8(0x10);
        l = vbslq_u8(mask, move_bits(bits, 2 * p, 4), l);
        h = vbslq_u8(mask, move_bits(bits, 2 * p + 1, 4), h);
    }
    if (kind == EN_PACKED_Q6_K) {
        uint8x16_t bits = vld1q_u8(high_bits_of(kind, tile, sub) + 64 * (p / 2) + 16 * quad), mask = vdupq_n_u8(0x30);
        l = vbslq_u8(mask, move_bits(bits, 4 * (p % 2), 4), l);
        h = vbslq_u8(mask, move_bits(bits, 4 * (p % 2) + 2, 4), h);
    }
    *low = vreinterpretq_s8_u8(l);
    *high = vreinterpretq_s8_u8(h);
}

INLINE float32x4_t halves(const uint16_t *h) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))); }

/* Bytes 4*quad..4*quad+3 as floats. */
INLINE float32x4_t bytes_to_float(const uint8_t *bytes, int quad) {
    uint8x16_t all = vld1q_u8(bytes);
    uint16x8_t words = quad < 2 ? vmovl_u8(vget_low_u8(all)) : vmovl_high_u8(all);
    return vcvtq_f32_u32(quad % 2 ? vmovl_high_u16(words) : vmovl_u16(vget_low_u16(words)));
}

/* The float scales of rows 4*quad..4*quad+3. */
INLINE float32x4_t scales(int kind, const void *tile, int sub, int quad) {
    switch (kind) {
    case EN_PACKED_Q4_K: {
        const en_tile_q4_k *w = tile;
        return vmulq_f32(halves(w->d + 4 * quad), bytes_to_float(w->scales[sub], quad));
    }
    case EN_PACKED_Q5_K: {
        const en_tile_q5_k *w = tile;
        return vmulq_f32(halves(w->d + 4 * quad), bytes_to_float(w->scales[sub], quad));
    }
    case EN_PACKED_Q4_0: return halves(((const en_tile_q4_0 *)tile)->d + 4 * quad);
    case EN_PACKED_Q4_1: return halves(((const en_tile_q4_1 *)tile)->d + 4 * quad);
    case EN_PACKED_Q5_0: return halves(((const en_tile_q5_0 *)tile)->d + 4 * quad);
    case EN_PACKED_Q5_1: return halves(((const en_tile_q5_1 *)tile)->d + 4 * quad);
    case EN_PACKED_Q8_0: return halves(((const en_tile_q8_0 *)tile)->d + 4 * quad);
    case EN_PACKED_Q6_K: return halves(((const en_tile_q6_k *)tile)->d + 4 * quad);
    default: return vld1q_f32(((const panel_block *)tile)->d + 4 * quad);
    }
}

INLINE float32x4_t minima(int kind, const void *tile, int sub, int quad) {
    switch (kind) {
    case EN_PACKED_Q4_K: {
        const en_tile_q4_k *w = tile;
        return vmulq_f32(vnegq_f32(halves(w->dmin + 4 * quad)), bytes_to_float(w->mins[sub], quad));
    }
    case EN_PACKED_Q5_K: {
        const en_tile_q5_k *w = tile;
        return vmulq_f32(vnegq_f32(halves(w->dmin + 4 * quad)), bytes_to_float(w->mins[sub], quad));
    }
    case EN_PACKED_Q4_1: return halves(((const en_tile_q4_1 *)tile)->m + 4 * quad);
    case EN_PACKED_Q5_1: return halves(((const en_tile_q5_1 *)tile)->m + 4 * quad);
    default: return vld1q_f32(((const panel_block *)tile)->m + 4 * quad);
    }
}

/* The integer scales of rows 4*quad..4*quad+3 for the columns 16*half..16*half+15. */
INLINE int32x4_t half_scales(int kind, const void *tile, int sub, int half, int quad) {
    if (kind == PANEL_HALVES) return vmovl_s16(vld1_s16(((const panel_block *)tile)->halves[half] + 4 * quad));
    int8x16_t all = vld1q_s8(((const en_tile_q6_k *)tile)->scales[2 * sub + half]);
    int16x8_t words = quad < 2 ? vmovl_s8(vget_low_s8(all)) : vmovl_high_s8(all);
    return quad % 2 ? vmovl_high_s16(words) : vmovl_s16(vget_low_s16(words));
}

/* Activations from a row and a block on. */
typedef struct acts_from {
    const int8_t *q;
    const float *d, *ds;
    const int32_t *sums;
    const int16_t *half_sums;
    size_t n_blocks; /* from one row to the next */
} acts_from;

INLINE acts_from from(const en_acts *acts, size_t n_blocks, size_t row, size_t block) {
    size_t at = row * n_blocks + block;
    return (acts_from){acts->q + at * EN_BLOCK, acts->d + at, acts->ds + at, acts->sums + at, acts->half_sums + 2 * at, n_blocks};
}

/* neon_float.c: what needs no more than ARMv8.0 anywhere. */
en_matmul_fn en_neon_matmul_f16, en_neon_matmul_f32;
void en_neon_quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums);
void en_neon_rms_norm(const float *x, const float *weight, int n, float eps, float *y);
void en_neon_silu_mul(float *gate, const float *up, int n);
void en_neon_to_half(const float *x, int n, uint16_t *y);
void en_neon_half_to_float(const uint16_t *x, int n, float *y);
void en_neon_keys_from_int8(const int8_t *k, const float *scales, int head_dim, float *y);
void en_neon_values_from_int8(const int8_t *v, const float *scales, int head_dim, float *y);
void en_neon_attend(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                    float *out, float *peak, float *total, float *scratch);

#endif
