/* AVX-512 without VNNI (F, BW, VL, DQ): vpmaddubsw adds pairs of products in 16 bits, which as many groups of four columns
 * may share as stay exact; vpmaddwd widens. */
#include "kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "lanes512.h"

enum { Q8_OFFSET = 0, ABREAST = 1, PAIR = 2 * 127 };

INLINE ints byte_weights(ints v) { return v; }

INLINE ints all_four(const int8_t *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Signed weights: |w| times a with w's sign. Two products of 128 * 127 just fit, so nothing else may share the sum. */
INLINE ints signed_pairs(ints w, ints a) {
    ints turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), _mm512_setzero_si512(), a);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
}

/* sums[t] += the products of n_groups groups of weights and of activations at a + 32 * t. */
INLINE void dots(ints *sums, const int n, const ints *w, const int8_t *a, const int n_groups, const int largest) {
    const int exact = largest == 128 ? 1 : INT16_MAX / (largest * PAIR), span = exact < n_groups ? exact : n_groups;
    ints pairs[ABREAST];
    UNROLL
    for (int g = 0; g < n_groups; g++)
        UNROLL
        for (int t = 0; t < n; t++) {
            ints four = all_four(a + 32 * t + 4 * g);
            ints here = largest == 128 ? signed_pairs(w[g], four) : _mm512_maddubs_epi16(w[g], four);
            pairs[t] = g % span ? _mm512_add_epi16(pairs[t], here) : here;
            if ((g + 1) % span == 0)
                sums[t] = _mm512_add_epi32(sums[t], _mm512_madd_epi16(pairs[t], _mm512_set1_epi16(1)));
        }
}

#define ISA_NAME "avx512"
#define ISA_TABLE en_isa_avx512

static int usable(void) { return has_avx512(); }

#include "lanes_products.h"
#include "lanes_rows.h"
#include "lanes_attend.h"
#include "lanes_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
