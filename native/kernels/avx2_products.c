/* Products of quantised weights with AVX2: vpmaddubsw takes the levels as unsigned bytes, and its 16-bit sums are added up
 * as long as they stay exact: those of 32 columns with 4 bits (16 products of at most 15 * 127 in each lane), of 16 with 5,
 * of 8 with 6. */
#include "avx2.h"

#if defined(__x86_64__)

#include "avx2_blocks.h"

enum {
    PANEL = 24,          /* blocks spread out at once: with the activations of four rows they stay in a 32 KiB cache */
    AHEAD_BYTES = 16384, /* of prefetching where weights are read once: more than DRAM's delay times its rate */
};
_Static_assert(PANEL * sizeof(spread_q6) <= EN_SCRATCH_BYTES, "a panel must fit the scratch");

/* A block of a few activations: where the first one's is, and how far it is to the next one's. */
typedef struct few {
    const int8_t *q;
    const float *d, *ds;
    const int32_t *sums;
    const int16_t *half_sums;
    size_t n_blocks, n_cols;
} few;

INLINE few few_at(const en_acts *acts, int k, int t, size_t b) {
    size_t n_blocks = (size_t)k / EN_BLOCK, at = t * n_blocks + b;
    return (few){.q = acts->q + at * EN_BLOCK,
                 .d = acts->d + at,
                 .ds = acts->ds + at,
                 .sums = acts->sums + at,
                 .half_sums = acts->half_sums + 2 * at,
                 .n_blocks = n_blocks,
                 .n_cols = (size_t)k};
}

INLINE void step(few *a) {
    a->q += EN_BLOCK, a->d++, a->ds++, a->sums++, a->half_sums += 2;
}

/* What to prefetch: a number of bytes at each block. */
typedef struct ahead {
    const uint8_t *from;
    size_t each;
} ahead;

/* The share of the pass that begins at activation t of m in n_blocks packed blocks that come next. */
INLINE ahead share_of(kind kind, const uint8_t *next, size_t n_blocks, int t, int m) {
    size_t pass = t / 4, n_passes = (m + 3) / 4, each = (block_bytes(kind) / n_passes + 63) / 64 * 64;
    return (ahead){next + pass * n_blocks * each, pass * each < block_bytes(kind) ? each : 0};
}

/* Keep a sum in its register: GCC would otherwise put off the additions of a block and spill its 64 products. */
INLINE void stay(__m256i *sum) { __asm__("" : "+x"(*sum)); }

/* Sums of 16 rows by n_t activations: in 32 bits with Q6_K and Q8_0, else in 16, those of the block's second half apart if 5 bits. */
typedef __m256i sums[2][4][2];

/* A block to multiply with: spread out, or packed. */
typedef struct weights {
    const int is_spread; /* known to the compiler: no branches */
    const spread *from;
    block packed;
} weights;

INLINE __m256i levels_of(kind kind, weights w, const int g, const int h) {
    return w.is_spread ? load(w.from->q[g] + 32 * h) : levels(kind, w.packed, g, h);
}

INLINE void multiply_block(kind kind, weights w, few a, sums sum, const int n_t) {
    const int n_groups = has_fifth_bit(kind) ? 4 : 8; /* in a sum */
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m256i v[2] = {levels_of(kind, w, g, 0), levels_of(kind, w, g, 1)};
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++) {
            __m256i q = broadcast4(a.q + t * a.n_cols + 4 * g);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256i *to = &sum[g / n_groups][t][h], product = _mm256_maddubs_epi16(v[h], q);
                *to = g % n_groups ? _mm256_add_epi16(*to, product) : product;
                stay(to);
            }
        }
    }
}

INLINE void multiply_block_q6(weights w, const pairs pair[2], few a, sums sum, const int n_t) {
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        __m256i v[2][2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            for (int odd = 0; odd < 2; odd++) v[h][odd] = levels_of(Q6_K, w, 2 * p + odd, h);
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++) {
            const int8_t *q = a.q + t * a.n_cols + 8 * p;
            __m256i q0 = broadcast4(q), q1 = broadcast4(q + 4);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256i *to = &sum[0][t][h];
                __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(v[h][0], q0), _mm256_maddubs_epi16(v[h][1], q1));
                __m256i scaled = _mm256_madd_epi16(both, pair[h].half[p / 2]);
                *to = p ? _mm256_add_epi32(*to, scaled) : scaled;
                stay(to);
            }
        }
    }
}

/* vpmaddubsw wants one factor unsigned: |w| times a with w's sign. Two products of 128 * 127 fit 16 bits. */
INLINE void multiply_block_q8(block w, few a, sums sum, const int n_t) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m256i v[2] = {load(w.q[g]), load(w.q[g] + 32)}, size[2] = {_mm256_abs_epi8(v[0]), _mm256_abs_epi8(v[1])};
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++) {
            __m256i q = broadcast4(a.q + t * a.n_cols + 4 * g);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256i *to = &sum[0][t][h];
                __m256i part = _mm256_madd_epi16(_mm256_maddubs_epi16(size[h], _mm256_sign_epi8(q, v[h])), ones);
                *to = g ? _mm256_add_epi32(*to, part) : part;
                stay(to);
            }
        }
    }
}

/* The dot products in 32 bits, of the levels less their offset. */
INLINE __m256i whole(kind kind, sums sum, few a, const pairs pair[2], const int t, const int h) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (kind == Q8_0) return sum[0][t][h];
    if (kind == Q6_K) {
        __m256i half_sums = broadcast4(a.half_sums + 2 * t * a.n_blocks);
        return _mm256_add_epi32(sum[0][t][h], _mm256_madd_epi16(pair[h].offset, half_sums));
    }
    __m256i dot = _mm256_madd_epi16(sum[0][t][h], ones);
    if (has_fifth_bit(kind)) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(sum[1][t][h], ones));
    if (!offset_bits(kind)) return dot;
    return _mm256_sub_epi32(dot, _mm256_slli_epi32(broadcast4(a.sums + t * a.n_blocks), offset_bits(kind)));
}

/* Sixteen rows by n_t activations over n_blocks blocks: those packed at blocks, or those of a panel of blocks spread out. The
 * integer sums of a block live in registers, the float ones beside them on the stack. */
INLINE void rows16(kind kind, const int is_spread, const void *blocks, int n_blocks, few a, float *y, size_t ldy,
                   int from_zero, ahead ahead, const int n_t) {
    __m256 total[4][2];
    for (int t = 0; t < n_t; t++)
        for (int h = 0; h < 2; h++)
            total[t][h] = from_zero ? _mm256_setzero_ps() : _mm256_loadu_ps(y + t * ldy + 8 * h);
    for (int b = 0; b < n_blocks; b++, step(&a)) {
        const char *next = (const char *)ahead.from + b * ahead.each;
        for (size_t i = 0; i < ahead.each; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
        const void *spread_at = (const uint8_t *)blocks + b * spread_bytes(kind);
        weights w = {is_spread, spread_at, is_spread ? (block){0} : block_at(kind, blocks, b)};
        pairs pair[2];
        __m256 wd[2], wm[2];
        sums sum;
        for (int h = 0; h < 2; h++)
            if (kind == Q6_K) pair[h] = is_spread ? ((const spread_q6 *)spread_at)->pairs[h] : pairs_of(w.packed, h);
        if (kind == Q6_K) multiply_block_q6(w, pair, a, sum, n_t);
        else if (kind == Q8_0) multiply_block_q8(w.packed, a, sum, n_t);
        else multiply_block(kind, w, a, sum, n_t);
        for (int h = 0; h < 2; h++) {
            wd[h] = is_spread ? _mm256_load_ps(w.from->d + 8 * h) : scale_of(kind, w.packed, h);
            if (has_minimum(kind)) wm[h] = is_spread ? _mm256_load_ps(w.from->m + 8 * h) : minimum_of(kind, w.packed, h);
        }
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++) {
            __m256 d = _mm256_broadcast_ss(a.d + t * a.n_blocks);
            __m256 ds = _mm256_broadcast_ss(a.ds + t * a.n_blocks);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256 dot = _mm256_cvtepi32_ps(whole(kind, sum, a, pair, t, h));
                total[t][h] = _mm256_fmadd_ps(_mm256_mul_ps(wd[h], d), dot, total[t][h]);
                if (has_minimum(kind)) total[t][h] = _mm256_fmadd_ps(wm[h], ds, total[t][h]);
            }
        }
    }
    for (int t = 0; t < n_t; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(y + t * ldy + 8 * h, total[t][h]);
}

/* All m activations, four at a time. next is what will be multiplied after this. */
INLINE void rows16_by_all(kind kind, const int is_spread, const void *blocks, int n_blocks, const en_acts *acts, int k,
                          size_t b, int m, float *y, size_t ldy, int from_zero, const uint8_t *next) {
    for (int t = 0; t < m; t += 4, y += 4 * ldy) {
        few a = few_at(acts, k, t, b);
        ahead ahead = share_of(kind, next, n_blocks, t, m);
#define ROWS(n_t) rows16(kind, is_spread, blocks, n_blocks, a, y, ldy, from_zero, ahead, n_t)
        if (m - t >= 4) ROWS(4);
        else if (m - t == 3) ROWS(3);
        else if (m - t == 2) ROWS(2);
        else ROWS(1);
#undef ROWS
    }
}

/* Up to this many activations, spreading a block out costs more than taking it apart for each four of them. */
INLINE int most_direct(kind kind) { return kind == Q4_0 || kind == Q4_1 || kind == Q4_K ? 8 : 4; }

INLINE void matmul(kind kind, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                   int accumulate, void *scratch) {
    size_t n_blocks = (size_t)k / EN_BLOCK, strip = n_blocks * block_bytes(kind);
    const uint8_t *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += strip, y += EN_TILE) {
        if (kind == Q8_0 || m <= most_direct(kind)) {
            const uint8_t *next = w + (m <= 4 ? AHEAD_BYTES : strip);
            rows16_by_all(kind, 0, w, (int)n_blocks, acts, k, 0, m, y, ldy, !accumulate, next);
            continue;
        }
        for (size_t b0 = 0; b0 < n_blocks; b0 += PANEL) {
            int n = (int)(n_blocks - b0 < PANEL ? n_blocks - b0 : PANEL);
            for (int b = 0; b < n; b++) spread_out(kind, w, b0 + b, (uint8_t *)scratch + b * spread_bytes(kind));
            const uint8_t *next = w + (b0 + n) * block_bytes(kind);
            rows16_by_all(kind, 1, scratch, n, acts, k, b0, m, y, ldy, !accumulate && b0 == 0, next);
        }
    }
}

#define MATMUL(form, kind)                                                                                               \
    void en_avx2_##form(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,          \
                        int accumulate, void *scratch) {                                                                  \
        matmul(kind, tiles, n_tiles, k, acts, m, y, ldy, accumulate, scratch);                                            \
    }

MATMUL(q4_0, Q4_0)
MATMUL(q4_1, Q4_1)
MATMUL(q5_0, Q5_0)
MATMUL(q5_1, Q5_1)
MATMUL(q4_k, Q4_K)
MATMUL(q5_k, Q5_K)
MATMUL(q6_k, Q6_K)
MATMUL(q8_0, Q8_0)

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
