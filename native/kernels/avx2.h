/* What the files of AVX2 share. Each ends with the pop that belongs to the push in here. */
#ifndef EDGE_NATIVE_AVX2_H
#define EDGE_NATIVE_AVX2_H

#include "kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

en_matmul_fn en_avx2_q4_0, en_avx2_q4_1, en_avx2_q5_0, en_avx2_q5_1, en_avx2_q8_0, en_avx2_q4_k, en_avx2_q5_k, en_avx2_q6_k;

INLINE __m256i load(const void *p) { return _mm256_loadu_si256(p); }

INLINE __m256 halves(const uint16_t *h) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)h)); }

/* The same four bytes in every lane. */
INLINE __m256i broadcast4(const void *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm256_set1_epi32(four);
}

#endif
#endif
