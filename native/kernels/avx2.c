/* AVX2 with FMA and F16C: what is not a product of quantised weights. */
#include "avx2.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <math.h>

static int usable(void) {
    /* Clang's builtin does not know F16C before version 15. */
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

INLINE void float_rows16(const void *w, int is_half, int k, const float *x, float *y, size_t ldy, int accumulate,
                         const int n_t) {
    __m256 total[4][2];
    for (int t = 0; t < n_t; t++)
        for (int h = 0; h < 2; h++)
            total[t][h] = accumulate ? _mm256_loadu_ps(y + t * ldy + 8 * h) : _mm256_setzero_ps();
    for (int c = 0; c < k; c++) {
        __m256 v[2];
        for (int h = 0; h < 2; h++) {
            size_t at = (size_t)c * EN_TILE + 8 * h;
            v[h] = is_half ? halves((const uint16_t *)w + at) : _mm256_loadu_ps((const float *)w + at);
        }
#pragma GCC unroll 4
        for (int t = 0; t < n_t; t++) {
            __m256 a = _mm256_broadcast_ss(x + (size_t)t * k + c);
            for (int h = 0; h < 2; h++) total[t][h] = _mm256_fmadd_ps(v[h], a, total[t][h]);
        }
    }
    for (int t = 0; t < n_t; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(y + t * ldy + 8 * h, total[t][h]);
}

INLINE void matmul_float(int is_half, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y,
                         size_t ldy, int accumulate) {
    const uint8_t *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += (size_t)k * EN_TILE * (is_half ? 2 : 4), y += EN_TILE) {
        int t = 0;
        for (; m - t >= 4; t += 4)
            float_rows16(w, is_half, k, acts->x + (size_t)t * k, y + t * ldy, ldy, accumulate, 4);
        for (; m - t >= 1; t += 1)
            float_rows16(w, is_half, k, acts->x + (size_t)t * k, y + t * ldy, ldy, accumulate, 1);
    }
}

static void matmul_f16(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    matmul_float(1, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

static void matmul_f32(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    matmul_float(0, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float max8(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE int32_t sum8i(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static void quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int b = 0; b < n / EN_BLOCK; b++, x += EN_BLOCK, q += EN_BLOCK) {
        __m256 v[4], highest = _mm256_setzero_ps();
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            highest = _mm256_max_ps(_mm256_andnot_ps(sign, v[i]), highest);
        }
        float peak = max8(highest), inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
        __m256i r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
        int32_t first = sum8i(_mm256_add_epi32(r[0], r[1])), last = sum8i(_mm256_add_epi32(r[2], r[3]));
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, order));
        d[b] = peak / 127.0f;
        half_sums[2 * b] = (int16_t)first;
        half_sums[2 * b + 1] = (int16_t)last;
        sums[b] = half_sums[2 * b] + half_sums[2 * b + 1]; /* what was NaN makes any integer: first + last could overflow */
        ds[b] = d[b] * (float)sums[b];
    }
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *y) {
    __m256 square = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= n; i += 8) square = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i), square);
    float rest = 0.0f;
    for (; i < n; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((sum8(square) + rest) / (float)n + eps);
    for (i = 0; i + 8 <= n; i += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
    }
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* e^x for x in -87..88, which it is clamped to: 2^n * e^r with r within ln(2) / 2, the polynomial of Cephes' expf. Of two
 * operands, one a NaN, the second comes out: x, which stays one. */
INLINE __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

static void silu_mul(float *gate, const float *up, int n) {
    const __m256 one = _mm256_set1_ps(1.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), g));
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void to_half(const float *x, int n, uint16_t *y) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) y[i] = en_float_to_half(x[i]);
}

/* scores[i][16 of 32] of n_q queries: k is [head_dim][32] in float. */
INLINE void scores16(const float *q, int head_dim, const float *k, float *scores, const int n_q) {
    __m256 acc[6][2];
    for (int i = 0; i < n_q; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int c = 0; c < head_dim; c++) {
        __m256 k0 = _mm256_load_ps(k + c * EN_KV_BLOCK), k1 = _mm256_load_ps(k + c * EN_KV_BLOCK + 8);
#pragma GCC unroll 6
        for (int i = 0; i < n_q; i++) {
            __m256 a = _mm256_broadcast_ss(q + (size_t)i * head_dim + c);
            acc[i][0] = _mm256_fmadd_ps(a, k0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(a, k1, acc[i][1]);
        }
    }
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < 2; h++) _mm256_store_ps(scores + i * EN_KV_BLOCK + 8 * h, acc[i][h]);
}

/* out[i][16] += p[i][n_tokens] * v[n_tokens][16 of head_dim] */
INLINE void values16(const float *p, int n_tokens, const float *v, int head_dim, float *out, const int n_q) {
    __m256 acc[6][2];
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < 2; h++) acc[i][h] = _mm256_loadu_ps(out + (size_t)i * head_dim + 8 * h);
    for (int j = 0; j < n_tokens; j++) {
        __m256 v0 = _mm256_load_ps(v + (size_t)j * head_dim), v1 = _mm256_load_ps(v + (size_t)j * head_dim + 8);
#pragma GCC unroll 6
        for (int i = 0; i < n_q; i++) {
            __m256 a = _mm256_broadcast_ss(p + i * EN_KV_BLOCK + j);
            acc[i][0] = _mm256_fmadd_ps(a, v0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(a, v1, acc[i][1]);
        }
    }
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + (size_t)i * head_dim + 8 * h, acc[i][h]);
}

/* Turn 32 scores into weights relative to the new peak; what is beyond the limit weighs nothing. */
INLINE void soften(float *s, int limit, float *out, int head_dim, float *peak, float *total) {
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = -INFINITY;
    __m256 v[4], highest = _mm256_set1_ps(*peak);
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_load_ps(s + 8 * i);
        highest = _mm256_max_ps(highest, v[i]);
    }
    float now = max8(highest);
    if (now > *peak) {
        float keep = *peak == -INFINITY ? 0.0f : expf(*peak - now);
        *total *= keep;
        for (int c = 0; c < head_dim; c += 8)
            _mm256_storeu_ps(out + c, _mm256_mul_ps(_mm256_loadu_ps(out + c), _mm256_set1_ps(keep)));
        *peak = now;
    }
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        v[i] = exp8(_mm256_sub_ps(v[i], _mm256_set1_ps(now)));
        _mm256_store_ps(s + 8 * i, v[i]);
    }
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = 0.0f;
    for (int i = 0; i < 4; i++) sum = _mm256_add_ps(sum, _mm256_load_ps(s + 8 * i));
    *total += sum8(sum);
}

INLINE void attend_few(const float *q, const int32_t *limits, const float *k, const float *v, int head_dim, float *out,
                       float *peak, float *total, float *s, const int n_q) {
    int n_tokens = 0;
    for (int i = 0; i < n_q; i++) n_tokens = limits[i] > n_tokens ? limits[i] : n_tokens;
    if (n_tokens == 0) return;
    scores16(q, head_dim, k, s, n_q);
    if (n_tokens > 16) scores16(q, head_dim, k + 16, s + 16, n_q);
    for (int i = 0; i < n_q; i++)
        if (limits[i] == 0) memset(s + i * EN_KV_BLOCK, 0, EN_KV_BLOCK * sizeof *s);
        else soften(s + i * EN_KV_BLOCK, limits[i], out + (size_t)i * head_dim, head_dim, peak + i, total + i);
    for (int c = 0; c < head_dim; c += 16) values16(s, n_tokens, v + c, head_dim, out + c, n_q);
}

static void half_to_float(const uint16_t *x, int n, float *y) {
    for (int i = 0; i < n; i += 16) {
        _mm256_store_ps(y + i, halves(x + i));
        _mm256_store_ps(y + i + 8, halves(x + i + 8));
    }
}

INLINE __m256 bytes8(const int8_t *x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}

static void keys_from_int8(const int8_t *k, const float *scales, int head_dim, float *y) {
    __m256 scale[4];
    for (int i = 0; i < 4; i++) scale[i] = _mm256_loadu_ps(scales + 8 * i);
    for (int c = 0; c < head_dim; c++, k += EN_KV_BLOCK, y += EN_KV_BLOCK)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) _mm256_store_ps(y + 8 * i, _mm256_mul_ps(bytes8(k + 8 * i), scale[i]));
}

static void values_from_int8(const int8_t *v, const float *scales, int head_dim, float *y) {
    for (int j = 0; j < EN_KV_BLOCK; j++, v += head_dim, y += head_dim) {
        __m256 scale = _mm256_broadcast_ss(scales + j);
        for (int c = 0; c < head_dim; c += 8) _mm256_store_ps(y + c, _mm256_mul_ps(bytes8(v + c), scale));
    }
}

static void attend(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                   float *out, float *peak, float *total, float *scratch) {
    for (int i = 0; i < n_queries;) {
        size_t at = (size_t)i * head_dim;
#define FEW(n_q) attend_few(q + at, limits + i, k, v, head_dim, out + at, peak + i, total + i, scratch, n_q)
        if (n_queries - i >= 6) {
            FEW(6);
            i += 6;
        } else if (n_queries - i >= 3) {
            FEW(3);
            i += 3;
        } else {
            FEW(1);
            i += 1;
        }
    }
}

const en_isa en_isa_avx2 = {
    .name = "avx2",
    .usable = usable,
    .matmul = {[EN_PACKED_F32] = matmul_f32, [EN_PACKED_F16] = matmul_f16, [EN_PACKED_Q4_0] = en_avx2_q4_0,
               [EN_PACKED_Q4_1] = en_avx2_q4_1, [EN_PACKED_Q5_0] = en_avx2_q5_0, [EN_PACKED_Q5_1] = en_avx2_q5_1,
               [EN_PACKED_Q8_0] = en_avx2_q8_0, [EN_PACKED_Q4_K] = en_avx2_q4_k, [EN_PACKED_Q5_K] = en_avx2_q5_k,
               [EN_PACKED_Q6_K] = en_avx2_q6_k},
    .quantize = quantize,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_half = to_half,
    .half_to_float = half_to_float,
    .keys_from_int8 = keys_from_int8,
    .values_from_int8 = values_from_int8,
    .attend = attend,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
