/* AVX-512 with VNNI: vpdpbusd adds four products of a byte of the weights (unsigned) and one of the activations (signed)
 * to each of 16 sums, exactly. */
#include "kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif

#include "lanes512.h"

/* Signed weights w are taken as the unsigned w + 128. */
enum { Q8_OFFSET = 128, ABREAST = 4 };

INLINE ints byte_weights(ints v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }

/* As assembly: GCC 12 does not make a broadcast an operand of vpdpbusd by itself. */
INLINE ints dot4(ints sum, ints w, const int8_t *a) {
    typedef const int8_t four[4];
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(four *)a));
    return sum;
}

/* sums[t] += the products of n_groups groups of weights and of activations at a + 32 * t. */
INLINE void dots(ints *sums, const int n, const ints *w, const int8_t *a, const int n_groups, const int largest) {
    (void)largest;
    UNROLL
    for (int g = 0; g < n_groups; g++)
        UNROLL
        for (int t = 0; t < n; t++) sums[t] = dot4(sums[t], w[g], a + 32 * t + 4 * g);
}

#define ISA_NAME "avx512vnni"
#define ISA_TABLE en_isa_avx512vnni

static int usable(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#include "lanes_products.h"
#include "lanes_rows.h"
#include "lanes_attend.h"
#include "lanes_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
