/* Products for any number of lanes: a part of an instruction set's file, which gives the primitives (lanes512.h,
 * avxvnni.c) and dots(), the exact products of a block.
 *
 * A few activations at a time (16 fill the registers of AVX-512) are copied into a panel in the order of use, so that the
 * inner loop reads them with one pointer. Each block of weights is spread out to bytes in registers once for all of them. */
#ifndef EDGE_NATIVE_LANES_PRODUCTS_H
#define EDGE_NATIVE_LANES_PRODUCTS_H

#include "kernels.h"

enum {
    PANEL_BYTES = 18 * 1024,  /* leaves a third of a cache of 32 KiB to the weights that stream through */
    GROUP_BYTES = 192 * 1024, /* weights that several panels use one after the other, in the second cache */
    AHEAD_BYTES = 4096,       /* of prefetching where weights are read once: more than DRAM's delay times its rate */
    ACT_BYTES = 48,           /* of an activation's block in the panel: q, d, ds, and what the sums start from */
    TILE_PARTS = EN_TILE / LANES,
};

_Static_assert((int)PANEL_BYTES <= (int)EN_SCRATCH_BYTES, "a panel must fit the scratch");
_Static_assert(PANEL_BYTES / (ACT_BYTES * MOST_TOKENS) >= 8, "and hold a superblock of each");

typedef enum en_format format;

INLINE int is_super(format f) { return f == EN_PACKED_Q4_K || f == EN_PACKED_Q5_K || f == EN_PACKED_Q6_K; }

INLINE int has_minimum(format f) {
    return f == EN_PACKED_Q4_1 || f == EN_PACKED_Q5_1 || f == EN_PACKED_Q4_K || f == EN_PACKED_Q5_K;
}

/* What the unsigned weights are above the true ones. */
INLINE int offset_of(format f) {
    return f == EN_PACKED_Q4_0 ? 8 : f == EN_PACKED_Q5_0 ? 16 : f == EN_PACKED_Q6_K ? 32 : f == EN_PACKED_Q8_0 ? Q8_OFFSET : 0;
}

INLINE int largest_weight(format f) {
    return f == EN_PACKED_Q4_0 || f == EN_PACKED_Q4_1 || f == EN_PACKED_Q4_K   ? 15
           : f == EN_PACKED_Q5_0 || f == EN_PACKED_Q5_1 || f == EN_PACKED_Q5_K ? 31
           : f == EN_PACKED_Q6_K                                               ? 63
                                                                               : 128;
}

INLINE size_t bytes_of_tile(format f) {
    return f == EN_PACKED_Q4_0   ? sizeof(en_tile_q4_0)
           : f == EN_PACKED_Q4_1 ? sizeof(en_tile_q4_1)
           : f == EN_PACKED_Q5_0 ? sizeof(en_tile_q5_0)
           : f == EN_PACKED_Q5_1 ? sizeof(en_tile_q5_1)
           : f == EN_PACKED_Q8_0 ? sizeof(en_tile_q8_0)
           : f == EN_PACKED_Q4_K ? sizeof(en_tile_q4_k)
           : f == EN_PACKED_Q5_K ? sizeof(en_tile_q5_k)
                                 : sizeof(en_tile_q6_k);
}

/* Block j of a tile (0 where a tile is one block). */
typedef struct block {
    const uint16_t *d, *m;
    const uint8_t *scales, *mins, *q, *h;
} block;

INLINE block block_of(const void *tile, format f, int j) {
#define PLAIN(type, minima, fifth) \
    const type *t = tile; \
    return (block){.d = t->d, .m = minima, .q = (const uint8_t *)t->q, .h = fifth}
    switch (f) {
    case EN_PACKED_Q4_0: {
        PLAIN(en_tile_q4_0, NULL, NULL);
    }
    case EN_PACKED_Q4_1: {
        PLAIN(en_tile_q4_1, t->m, NULL);
    }
    case EN_PACKED_Q5_0: {
        PLAIN(en_tile_q5_0, NULL, t->h);
    }
    case EN_PACKED_Q5_1: {
        PLAIN(en_tile_q5_1, t->m, t->h);
    }
    case EN_PACKED_Q4_K: {
        const en_tile_q4_k *t = tile;
        return (block){t->d, t->dmin, t->scales[j], t->mins[j], t->q[j][0], NULL};
    }
    case EN_PACKED_Q5_K: {
        const en_tile_q5_k *t = tile;
        return (block){t->d, t->dmin, t->scales[j], t->mins[j], t->q[j][0], t->h[j]};
    }
    case EN_PACKED_Q6_K: {
        const en_tile_q6_k *t = tile;
        return (block){t->d, NULL, (const uint8_t *)t->scales[2 * j], NULL, t->q[j][0], t->h[j][0]};
    }
    default: {
        PLAIN(en_tile_q8_0, NULL, NULL);
    }
    }
#undef PLAIN
}

/* The weights of LANES rows as bytes: v[g] has columns 4*g to 4*g + 3 of each. */
INLINE void spread(const block *w, format f, int part, ints *v) {
    const int at = part * LANES * 4;
    if (f == EN_PACKED_Q8_0) {
UNROLL
        for (int g = 0; g < 8; g++) v[g] = byte_weights(load_ints(w->q + 64 * g + at));
        return;
    }
UNROLL
    for (int p = 0; p < 4; p++) {
        ints bytes = load_ints(w->q + 64 * p + at);
        v[2 * p] = low_nibbles(bytes);
        v[2 * p + 1] = high_nibbles(bytes);
    }
    if (f == EN_PACKED_Q6_K) {
UNROLL
        for (int g = 0; g < 8; g++) v[g] = with_bits(v[g], load_ints(w->h + g / 4 * 64 + at), 4 - g % 4 * 2, 0x30);
    } else if (largest_weight(f) == 31) {
UNROLL
        for (int g = 0; g < 8; g++) v[g] = with_bits(v[g], load_ints(w->h + at), 4 - g, 0x10);
    }
}

/* LANES rows by n_t activations of the panel over n_blocks blocks, for each part of a tile. */
INLINE void rows_by_panel(format f, const uint8_t *tile, const uint8_t *panel, int n_blocks, float *y, size_t ldy,
                          int from_zero, const int n_t) {
    const int n_each = is_super(f) ? 8 : 1, block_bytes = (int)bytes_of_tile(f) / n_each;
    for (int part = 0; part < TILE_PARTS; part++, y += LANES) {
        floats total[MOST_TOKENS];
UNROLL
        for (int t = 0; t < n_t; t++) total[t] = from_zero ? all(0.0f) : load(y + (size_t)t * ldy);
        const uint8_t *a = panel;
        for (int b = 0; b < n_blocks; b++, a += n_t * ACT_BYTES) {
            const uint8_t *at = tile + (size_t)(b / n_each) * bytes_of_tile(f);
            const block w = block_of(at, f, b % n_each);
            if (n_t <= 4)
                for (int i = 0; i < block_bytes; i += 64)
                    _mm_prefetch((const char *)(at + b % n_each * block_bytes + AHEAD_BYTES + i), _MM_HINT_T0);
            ints v[8];
            spread(&w, f, part, v);
            floats d = halves(w.d + LANES * part), m = all(0.0f), sc[2] = {m, m};
            if (f == EN_PACKED_Q4_K || f == EN_PACKED_Q5_K) {
                d = times(d, from_u8(w.scales + LANES * part));
                m = minus(m, times(halves(w.m + LANES * part), from_u8(w.mins + LANES * part)));
            } else if (has_minimum(f)) {
                m = halves(w.m + LANES * part);
            } else if (f == EN_PACKED_Q6_K) {
                for (int i = 0; i < 2; i++) sc[i] = from_i8((const int8_t *)w.scales + EN_TILE * i + LANES * part);
            }
            const float *ad = (const float *)(a + 32 * n_t), *ds = ad + n_t;
            const int32_t *start = (const int32_t *)(ds + n_t);
UNROLL
            for (int t0 = 0; t0 < n_t; t0 += ABREAST) {
                const int n = n_t - t0 < ABREAST ? n_t - t0 : ABREAST;
                const int8_t *q = (const int8_t *)a + 32 * t0;
                ints sums[ABREAST];
                floats dot[ABREAST];
                UNROLL
                for (int i = 0; i < n; i++) sums[i] = all_ints(offset_of(f) ? start[t0 + i] : 0);
                if (f == EN_PACKED_Q6_K) {
                    /* The integer sc0 * dot0 + sc1 * dot1 is below 2^24: exact in float. +0 first, for an integer has no -0. */
                    dots(sums, n, v, q, 4, 63);
                    UNROLL
                    for (int i = 0; i < n; i++) {
                        dot[i] = fused(to_floats(sums[i]), sc[0], all(0.0f));
                        sums[i] = all_ints(start[n_t + t0 + i]);
                    }
                    dots(sums, n, v + 4, q + 16, 4, 63);
                    UNROLL
                    for (int i = 0; i < n; i++) dot[i] = fused(to_floats(sums[i]), sc[1], dot[i]);
                } else {
                    dots(sums, n, v, q, 8, largest_weight(f));
                    UNROLL
                    for (int i = 0; i < n; i++) dot[i] = to_floats(sums[i]);
                }
                UNROLL
                for (int i = 0; i < n; i++) {
                    total[t0 + i] = fused(times(d, all(ad[t0 + i])), dot[i], total[t0 + i]);
                    if (has_minimum(f)) total[t0 + i] = fused(m, all(ds[t0 + i]), total[t0 + i]);
                }
            }
        }
UNROLL
        for (int t = 0; t < n_t; t++) store(y + (size_t)t * ldy, total[t]);
    }
}

/* Blocks b0 to b0 + n of n_t activations, block after block. */
INLINE void fill_panel(format f, const en_acts *acts, size_t first, size_t n_blocks, size_t b0, int n, uint8_t *panel, int n_t) {
    for (int b = 0; b < n; b++, panel += n_t * ACT_BYTES) {
        float *d = (float *)(panel + 32 * n_t), *ds = d + n_t;
        int32_t *start = (int32_t *)(ds + n_t);
        for (int t = 0; t < n_t; t++) {
            size_t at = (first + t) * n_blocks + b0 + b;
            memcpy(panel + 32 * t, acts->q + at * EN_BLOCK, EN_BLOCK);
            d[t] = acts->d[at];
            if (has_minimum(f)) ds[t] = acts->ds[at];
            if (f == EN_PACKED_Q6_K)
                for (int i = 0; i < 2; i++) start[i * n_t + t] = -32 * acts->half_sums[2 * at + i];
            else if (offset_of(f)) start[t] = -offset_of(f) * acts->sums[at];
        }
    }
}

/* How many of the m activations left go together. */
INLINE int together(int m) { return m >= MOST_TOKENS ? MOST_TOKENS : m >= 8 && MOST_TOKENS > 8 ? 8 : m > 4 ? 4 : m; }

#define FOR_TOGETHER(n_t, call) \
    switch (n_t) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 8: call(MOST_TOKENS > 4 ? 8 : 4); break; \
    default: call(MOST_TOKENS); \
    }

INLINE void product(format f, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                    int accumulate, void *scratch) {
    const int n_blocks = k / EN_BLOCK, n_each = is_super(f) ? 8 : 1;
    const size_t row_bytes = (size_t)n_blocks / n_each * bytes_of_tile(f);
    int most = PANEL_BYTES / (ACT_BYTES * together(m)) / 8 * 8;
    most = most < n_blocks ? most : n_blocks;
    int group = n_tiles, fit = (int)(GROUP_BYTES / (most / n_each * bytes_of_tile(f)));
    if (m > together(m) && fit < n_tiles) group = fit > 1 ? fit : 1;
    for (int first = 0; first < n_tiles; first += group)
        for (int b0 = 0; b0 < n_blocks; b0 += most) {
            int end = first + group < n_tiles ? first + group : n_tiles, n = n_blocks - b0 < most ? n_blocks - b0 : most;
            for (int t = 0, n_t; t < m; t += n_t) {
                n_t = together(m - t);
                fill_panel(f, acts, (size_t)t, (size_t)n_blocks, (size_t)b0, n, scratch, n_t);
                for (int i = first; i < end; i++) {
                    const uint8_t *w = (const uint8_t *)tiles + (size_t)i * row_bytes + (size_t)(b0 / n_each) * bytes_of_tile(f);
                    float *out = y + (size_t)t * ldy + (size_t)i * EN_TILE;
                    int from_zero = b0 == 0 && !accumulate;
#define ROWS(count) rows_by_panel(f, w, scratch, n, out, ldy, from_zero, count)
                    FOR_TOGETHER(n_t, ROWS)
#undef ROWS
                }
            }
        }
}

/* The same for float weights: k columns of 16, the panel being x transposed. */
INLINE void float_rows_by_panel(int is_half, const void *w, const float *panel, int n, float *y, size_t ldy, int from_zero,
                                const int n_t) {
    floats total[MOST_TOKENS][TILE_PARTS];
UNROLL
    for (int t = 0; t < n_t; t++)
        for (int part = 0; part < TILE_PARTS; part++)
            total[t][part] = from_zero ? all(0.0f) : load(y + (size_t)t * ldy + LANES * part);
    for (int c = 0; c < n; c++, panel += n_t) {
        floats v[TILE_PARTS];
        for (int part = 0; part < TILE_PARTS; part++) {
            size_t at = (size_t)c * EN_TILE + LANES * part;
            v[part] = is_half ? halves((const uint16_t *)w + at) : load((const float *)w + at);
        }
UNROLL
        for (int t = 0; t < n_t; t++)
            for (int part = 0; part < TILE_PARTS; part++) total[t][part] = fused(v[part], all(panel[t]), total[t][part]);
    }
UNROLL
    for (int t = 0; t < n_t; t++)
        for (int part = 0; part < TILE_PARTS; part++) store(y + (size_t)t * ldy + LANES * part, total[t][part]);
}

INLINE void float_product(int is_half, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y,
                          size_t ldy, int accumulate, float *panel) {
    const size_t column_bytes = EN_TILE * (is_half ? 2 : 4);
    int most = (int)(PANEL_BYTES / sizeof(float)) / together(m);
    for (int c0 = 0; c0 < k; c0 += most)
        for (int t = 0, n_t; t < m; t += n_t) {
            int n = k - c0 < most ? k - c0 : most;
            n_t = together(m - t);
            for (int c = 0; c < n; c++)
                for (int i = 0; i < n_t; i++) panel[c * n_t + i] = acts->x[(size_t)(t + i) * k + c0 + c];
            for (int i = 0; i < n_tiles; i++) {
                const uint8_t *w = (const uint8_t *)tiles + ((size_t)i * k + c0) * column_bytes;
                float *out = y + (size_t)t * ldy + (size_t)i * EN_TILE;
                int from_zero = c0 == 0 && !accumulate;
#define ROWS(count) float_rows_by_panel(is_half, w, panel, n, out, ldy, from_zero, count)
                FOR_TOGETHER(n_t, ROWS)
#undef ROWS
            }
        }
}

#define PRODUCT(name, function, which) \
    static void name(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy, int accumulate, \
                     void *scratch) { \
        function(which, tiles, n_tiles, k, acts, m, y, ldy, accumulate, scratch); \
    }

PRODUCT(matmul_f32, float_product, 0)
PRODUCT(matmul_f16, float_product, 1)
PRODUCT(matmul_q4_0, product, EN_PACKED_Q4_0)
PRODUCT(matmul_q4_1, product, EN_PACKED_Q4_1)
PRODUCT(matmul_q5_0, product, EN_PACKED_Q5_0)
PRODUCT(matmul_q5_1, product, EN_PACKED_Q5_1)
PRODUCT(matmul_q8_0, product, EN_PACKED_Q8_0)
PRODUCT(matmul_q4_k, product, EN_PACKED_Q4_K)
PRODUCT(matmul_q5_k, product, EN_PACKED_Q5_K)
PRODUCT(matmul_q6_k, product, EN_PACKED_Q6_K)

#undef PRODUCT
#undef FOR_TOGETHER

#endif
