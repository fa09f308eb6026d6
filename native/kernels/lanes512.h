/* Sixteen lanes: what lanes_*.h need, in AVX-512 F, BW, VL and DQ. The dot product itself comes from the includer. */
#ifndef EDGE_NATIVE_LANES512_H
#define EDGE_NATIVE_LANES512_H

#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#include "lanes.h"

typedef __m512 floats;
typedef __m512i ints;

enum { LANES = 16, MOST_TOKENS = 16, MOST_QUERIES = 6 };

INLINE int has_avx512(void) {
    __builtin_cpu_init(); /* its answers for AVX-512 include that the system saves the registers (XGETBV) */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

INLINE floats all(float x) { return _mm512_set1_ps(x); }
INLINE floats load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, floats v) { _mm512_storeu_ps(p, v); }
INLINE floats halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store_halves(uint16_t *p, floats v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE floats plus(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats minus(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats times(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats fused_minus(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a * b */
INLINE floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats smaller(floats a, floats b) { return _mm512_min_ps(a, b); }
INLINE floats size_of(floats v) { return _mm512_abs_ps(v); }
INLINE floats whole(floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE floats doubled(floats v, floats n) { return _mm512_scalef_ps(v, n); } /* v * 2^n */
INLINE float sum_of(floats v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(floats v) { return _mm512_reduce_max_ps(v); }

INLINE ints load_ints(const void *p) { return _mm512_loadu_si512(p); }
INLINE ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ints rounded(floats v) { return _mm512_cvtps_epi32(v); }
INLINE floats to_floats(ints v) { return _mm512_cvtepi32_ps(v); }
INLINE floats from_u8(const uint8_t *p) { return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE floats from_i8(const int8_t *p) { return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE int32_t sum_of_ints(const ints *v) { return _mm512_reduce_add_epi32(*v); }
/* 16 integers as bytes. */
INLINE void store_bytes(int8_t *p, const ints *v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(*v)); }

/* Bytes as weights: nibbles, and what 5 and 6 bits add to them. */
INLINE ints low_nibbles(ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE ints high_nibbles(ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
/* v | (h shifted left by n & mask), n below zero shifting right; what shifts over from the next byte is masked away. */
INLINE ints with_bits(ints v, ints h, int n, int mask) {
    ints moved = n >= 0 ? _mm512_slli_epi16(h, (unsigned)n) : _mm512_srli_epi16(h, (unsigned)-n);
    return _mm512_ternarylogic_epi32(v, moved, _mm512_set1_epi8((char)mask), 0xf8);
}

#endif
