/* Blocks of 16 rows by 32 columns of the packed forms, as vectors of levels and scales: a part of
 * avx2_products.c. */
#ifndef EDGE_NATIVE_AVX2_BLOCKS_H
#define EDGE_NATIVE_AVX2_BLOCKS_H

#include "avx2.h"

typedef enum kind { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K } kind;

INLINE int is_superblock(kind kind) { return kind >= Q4_K; }
INLINE int has_fifth_bit(kind kind) { return kind == Q5_0 || kind == Q5_1 || kind == Q5_K; }
INLINE int has_minimum(kind kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }
INLINE int offset_bits(kind kind) { return kind == Q4_0 ? 3 : kind == Q5_0 ? 4 : 0; }

INLINE size_t tile_bytes(kind kind) {
    switch (kind) {
    case Q8_0: return sizeof(en_tile_q8_0);
    case Q4_0: return sizeof(en_tile_q4_0);
    case Q4_1: return sizeof(en_tile_q4_1);
    case Q5_0: return sizeof(en_tile_q5_0);
    case Q5_1: return sizeof(en_tile_q5_1);
    case Q4_K: return sizeof(en_tile_q4_k);
    case Q5_K: return sizeof(en_tile_q5_k);
    default: return sizeof(en_tile_q6_k);
    }
}

INLINE size_t block_bytes(kind kind) { return tile_bytes(kind) / (is_superblock(kind) ? 8 : 1); }

/* Where the parts of a block of 16 rows by 32 columns are. */
typedef struct block {
    const uint8_t (*q)[64];
    const uint8_t *h;
    const uint16_t *d, *m;
    const uint8_t *scales, *mins; /* of superblocks; 16 more scales for the second half of a block of Q6_K */
} block;

/* Block b of the packed tiles of sixteen rows. */
INLINE block block_at(kind kind, const void *tiles, size_t b) {
    const void *tile = (const uint8_t *)tiles + b / (is_superblock(kind) ? 8 : 1) * tile_bytes(kind);
    size_t i = b % 8;
#define PLAIN(form, high, min) \
    const en_tile_##form *w = tile; \
    return (block){(const uint8_t(*)[64])w->q, high, w->d, min, NULL, NULL}
#define SUPER(form, high) \
    const en_tile_##form *w = tile; \
    return (block){w->q[i], high, w->d, w->dmin, w->scales[i], w->mins[i]}
    switch (kind) {
    case Q8_0: { PLAIN(q8_0, NULL, NULL); }
    case Q4_0: { PLAIN(q4_0, NULL, NULL); }
    case Q4_1: { PLAIN(q4_1, NULL, w->m); }
    case Q5_0: { PLAIN(q5_0, w->h, NULL); }
    case Q5_1: { PLAIN(q5_1, w->h, w->m); }
    case Q4_K: { SUPER(q4_k, NULL); }
    case Q5_K: { SUPER(q5_k, w->h[i]); }
    default: break;
    }
    const en_tile_q6_k *w = tile;
    return (block){w->q[i], w->h[i][0], w->d, NULL, (const uint8_t *)w->scales[2 * i], NULL};
#undef PLAIN
#undef SUPER
}

/* x shifted left by n bits, right if n is negative; bits that cross from byte to byte are for the caller to mask. */
INLINE __m256i shifted(__m256i x, const int n) {
    return n > 0 ? _mm256_slli_epi16(x, n) : n < 0 ? _mm256_srli_epi16(x, -n) : x;
}

/* The levels of rows 8 * h to 8 * h + 7 in columns 4 * g to 4 * g + 3. */
INLINE __m256i levels(kind kind, block w, const int g, const int h) {
    __m256i low = _mm256_and_si256(shifted(load(w.q[g / 2] + 32 * h), g % 2 ? -4 : 0), _mm256_set1_epi8(15));
    if (has_fifth_bit(kind)) {
        __m256i bit = _mm256_and_si256(shifted(load(w.h + 32 * h), 4 - g), _mm256_set1_epi8(16));
        return _mm256_or_si256(low, bit);
    }
    if (kind == Q6_K) {
        __m256i plane = load(w.h + 64 * (g / 4) + 32 * h);
        return _mm256_or_si256(low, _mm256_and_si256(shifted(plane, 4 - 2 * (g % 4)), _mm256_set1_epi8(48)));
    }
    return low;
}

INLINE __m256 bytes_to_float(const uint8_t *x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}

INLINE __m256 scale_of(kind kind, block w, const int h) {
    __m256 d = halves(w.d + 8 * h);
    return is_superblock(kind) && kind != Q6_K ? _mm256_mul_ps(d, bytes_to_float(w.scales + 8 * h)) : d;
}

INLINE __m256 minimum_of(kind kind, block w, const int h) {
    __m256 m = halves(w.m + 8 * h);
    if (!is_superblock(kind)) return m;
    return _mm256_xor_ps(_mm256_mul_ps(m, bytes_to_float(w.mins + 8 * h)), _mm256_set1_ps(-0.0f));
}

/* The scales of Q6_K for rows 8 * h to 8 * h + 7, a pair of 16 bits each. */
typedef struct pairs {
    __m256i half[2]; /* the scale of a half of the block, twice */
    __m256i offset;  /* -32 times the scale of each half */
} pairs;

INLINE pairs pairs_of(block w, const int h) {
    __m256i v[2];
    for (int i = 0; i < 2; i++)
        v[i] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w.scales + EN_TILE * i + 8 * h)));
    pairs p;
    for (int i = 0; i < 2; i++) p.half[i] = _mm256_blend_epi16(v[i], _mm256_slli_epi32(v[i], 16), 0xaa);
    __m256i both = _mm256_blend_epi16(v[0], _mm256_slli_epi32(v[1], 16), 0xaa);
    p.offset = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(both, 5));
    return p;
}

/* A block spread out: worth it when several activations use it. */
typedef struct spread {
    uint8_t q[8][64];
    float d[EN_TILE], m[EN_TILE];
} spread;

typedef struct spread_q6 {
    spread block;
    pairs pairs[2];
} spread_q6;

INLINE size_t spread_bytes(kind kind) { return kind == Q6_K ? sizeof(spread_q6) : sizeof(spread); }

INLINE void spread_out(kind kind, const void *tiles, size_t b, void *to) {
    block w = block_at(kind, tiles, b);
    spread *out = to;
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) _mm256_store_si256((__m256i *)(out->q[g] + 32 * h), levels(kind, w, g, h));
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        _mm256_store_ps(out->d + 8 * h, scale_of(kind, w, h));
        if (has_minimum(kind)) _mm256_store_ps(out->m + 8 * h, minimum_of(kind, w, h));
        if (kind == Q6_K) ((spread_q6 *)to)->pairs[h] = pairs_of(w, h);
    }
}

#endif
