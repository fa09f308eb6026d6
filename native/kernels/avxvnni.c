/* AVX2 with AVX-VNNI: vpdpbusd on eight rows at a time, without the wide registers of AVX-512. */
#include "kernels.h"

#if defined(__x86_64__) && EN_HAS_AVXVNNI

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#include "lanes.h"

typedef __m256 floats;
typedef __m256i ints;

/* Signed weights w are taken as the unsigned w + 128. */
enum { LANES = 8, MOST_TOKENS = 4, ABREAST = 4, MOST_QUERIES = 6, Q8_OFFSET = 128 };

INLINE floats all(float x) { return _mm256_set1_ps(x); }
INLINE floats load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, floats v) { _mm256_storeu_ps(p, v); }
INLINE floats halves(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store_halves(uint16_t *p, floats v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE floats plus(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE floats minus(floats a, floats b) { return _mm256_sub_ps(a, b); }
INLINE floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm256_div_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats fused_minus(floats a, floats b, floats c) { return _mm256_fnmadd_ps(a, b, c); } /* c - a * b */
INLINE floats larger(floats a, floats b) { return _mm256_max_ps(a, b); }
INLINE floats smaller(floats a, floats b) { return _mm256_min_ps(a, b); }
INLINE floats size_of(floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
INLINE floats whole(floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE ints rounded(floats v) { return _mm256_cvtps_epi32(v); }
INLINE floats to_floats(ints v) { return _mm256_cvtepi32_ps(v); }
/* v * 2^n */
INLINE floats doubled(floats v, floats n) {
    ints power = _mm256_slli_epi32(_mm256_add_epi32(rounded(n), _mm256_set1_epi32(127)), 23);
    return times(v, _mm256_castsi256_ps(power));
}
INLINE float sum_of(floats v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float largest_of(floats v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE ints load_ints(const void *p) { return _mm256_loadu_si256(p); }
INLINE ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
INLINE floats from_u8(const uint8_t *p) { return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE floats from_i8(const int8_t *p) { return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
/* 16 integers in two. */
INLINE int32_t sum_of_ints(const ints *v) {
    ints both = _mm256_add_epi32(v[0], v[1]);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
INLINE void store_bytes(int8_t *p, const ints *v) {
    ints words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

/* Bytes as weights: nibbles, and what 5 and 6 bits add to them. */
INLINE ints low_nibbles(ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE ints high_nibbles(ints v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
/* v | (h shifted left by n & mask), n below zero shifting right; what shifts over from the next byte is masked away. */
INLINE ints with_bits(ints v, ints h, int n, int mask) {
    ints moved = n >= 0 ? _mm256_slli_epi16(h, n) : _mm256_srli_epi16(h, -n);
    return _mm256_or_si256(v, _mm256_and_si256(moved, _mm256_set1_epi8((char)mask)));
}
INLINE ints byte_weights(ints v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }

INLINE ints dot4(ints sum, ints w, const int8_t *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm256_dpbusd_avx_epi32(sum, w, _mm256_set1_epi32(four));
}

/* sums[t] += the products of n_groups groups of weights and of activations at a + 32 * t. */
INLINE void dots(ints *sums, const int n, const ints *w, const int8_t *a, const int n_groups, const int largest) {
    (void)largest;
    UNROLL
    for (int g = 0; g < n_groups; g++)
        UNROLL
        for (int t = 0; t < n; t++) sums[t] = dot4(sums[t], w[g], a + 32 * t + 4 * g);
}

#define ISA_NAME "avxvnni"
#define ISA_TABLE en_isa_avxvnni

/* Not every compiler's __builtin_cpu_supports knows F16C and AVX-VNNI; they need nothing of the system that AVX2 does not,
 * for which its answer includes that the system saves the registers (XGETBV). */
static int usable(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

#include "lanes_products.h"
#include "lanes_rows.h"
#include "lanes_attend.h"
#include "lanes_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
