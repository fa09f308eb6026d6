/* The float half of the NEON kernels, which ARMv8.0 has all instructions for; only the integer products know better ones. */
#include "kernels.h"

#if defined(__aarch64__)

#include "neon.h"

#include <math.h>
#include <string.h>

/* -- products ------------------------------------------------------------------------------------------------------ */

INLINE float32x4_t four(const void *b, const int is_half, size_t at) {
    return is_half ? halves((const uint16_t *)b + at) : vld1q_f32((const float *)b + at);
}

/* out[i][16] = the sum over n of a[i][n] * b[n][16], on top of what is there unless from_zero. Strides are in elements. */
INLINE void multiply16(const float *a, size_t a_stride, int n, const void *b, const int is_half, size_t b_stride, float *out,
                       size_t out_stride, int from_zero, const int n_a) {
    float32x4_t sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < n_a; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sum[i][j] = from_zero ? vdupq_n_f32(0.0f) : vld1q_f32(out + i * out_stride + 4 * j);
    for (int c = 0; c < n; c++) {
        float32x4_t v[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) v[j] = four(b, is_half, c * b_stride + 4 * j);
#pragma GCC unroll 4
        for (int i = 0; i < n_a; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[i][j] = vfmaq_n_f32(sum[i][j], v[j], a[i * a_stride + c]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < n_a; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) vst1q_f32(out + i * out_stride + 4 * j, sum[i][j]);
}

INLINE void matmul_float(const int is_half, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y,
                         size_t ldy, int accumulate) {
    const uint8_t *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += (size_t)k * EN_TILE * (is_half ? 2 : 4), y += EN_TILE) {
        int t = 0;
#define ROWS(n) multiply16(acts->x + (size_t)t * k, k, k, w, is_half, EN_TILE, y + t * ldy, ldy, !accumulate, n)
        for (; m - t >= 4; t += 4) ROWS(4);
        for (; m - t >= 2; t += 2) ROWS(2);
        for (; m - t >= 1; t += 1) ROWS(1);
    }
}

void en_neon_matmul_f16(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                        int accumulate, void *scratch) {
    (void)scratch;
    matmul_float(1, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

void en_neon_matmul_f32(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                        int accumulate, void *scratch) {
    (void)scratch;
    matmul_float(0, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

/* -- rows of activations ------------------------------------------------------------------------------------------- */

void en_neon_quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums) {
    for (int b = 0; b < n / EN_BLOCK; b++, x += EN_BLOCK, q += EN_BLOCK) {
        float32x4_t v[8], highest = vdupq_n_f32(0.0f);
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            highest = vmaxnmq_f32(highest, vabsq_f32(v[i]));
        }
        float peak = vmaxvq_f32(highest), inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
        int16x8_t r[4];
        for (int i = 0; i < 4; i++)
            r[i] = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v[2 * i], inverse))),
                                vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v[2 * i + 1], inverse))));
        int sum[2];
        for (int half = 0; half < 2; half++) {
            int8x16_t bytes = vcombine_s8(vqmovn_s16(r[2 * half]), vqmovn_s16(r[2 * half + 1]));
            vst1q_s8(q + 16 * half, bytes);
            sum[half] = vaddlvq_s8(bytes);
            half_sums[2 * b + half] = (int16_t)sum[half];
        }
        d[b] = peak / 127.0f;
        sums[b] = sum[0] + sum[1];
        ds[b] = d[b] * (float)sums[b];
    }
}

void en_neon_rms_norm(const float *x, const float *weight, int n, float eps, float *y) {
    float32x4_t square[2] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 2; j++) {
            float32x4_t v = vld1q_f32(x + i + 4 * j);
            square[j] = vfmaq_f32(square[j], v, v);
        }
    float rest = 0.0f;
    for (; i < n; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((vaddvq_f32(vaddq_f32(square[0], square[1])) + rest) / (float)n + eps);
    for (i = 0; i + 4 <= n; i += 4) vst1q_f32(y + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), scale), vld1q_f32(weight + i)));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* e^x for x in -87..88, which it is clamped to: 2^n * e^r with r within ln(2) / 2, the polynomial of Cephes' expf. */
INLINE float32x4_t exp4(float32x4_t x) {
    x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(-87.0f)), vdupq_n_f32(88.0f));
    int32x4_t n = vcvtnq_s32_f32(vmulq_n_f32(x, 1.44269504f));
    float32x4_t whole = vcvtq_f32_s32(n);
    float32x4_t r = vfmsq_f32(x, whole, vdupq_n_f32(0.693359375f));
    r = vfmsq_f32(r, whole, vdupq_n_f32(-2.12194440e-4f));
    float32x4_t p = vdupq_n_f32(1.9875691500e-4f);
    p = vfmaq_f32(vdupq_n_f32(1.3981999507e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(8.3334519073e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(4.1665795894e-2f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.6666665459e-1f), p, r);
    p = vfmaq_f32(vdupq_n_f32(5.0000001201e-1f), p, r);
    p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.0f));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)));
}

void en_neon_silu_mul(float *gate, const float *up, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t g = vld1q_f32(gate + i);
        float32x4_t silu = vdivq_f32(g, vaddq_f32(vdupq_n_f32(1.0f), exp4(vnegq_f32(g))));
        vst1q_f32(gate + i, vmulq_f32(silu, vld1q_f32(up + i)));
    }
    for (; i < n; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* -- KV ------------------------------------------------------------------------------------------------------------ */

void en_neon_to_half(const float *x, int n, uint16_t *y) {
    int i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    for (; i < n; i++) y[i] = en_float_to_half(x[i]);
}

void en_neon_half_to_float(const uint16_t *x, int n, float *y) {
    for (int i = 0; i < n; i += 8) {
        float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(x + i));
        vst1q_f32(y + i, vcvt_f32_f16(vget_low_f16(h)));
        vst1q_f32(y + i + 4, vcvt_high_f32_f16(h));
    }
}

INLINE void scale16(const int8_t *x, const float32x4_t scale[4], float *y) {
    int8x16_t bytes = vld1q_s8(x);
    int16x8_t words[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)};
    for (int i = 0; i < 2; i++) {
        vst1q_f32(y + 8 * i, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words[i]))), scale[2 * i]));
        vst1q_f32(y + 8 * i + 4, vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(words[i])), scale[2 * i + 1]));
    }
}

void en_neon_keys_from_int8(const int8_t *k, const float *scales, int head_dim, float *y) {
    float32x4_t scale[8];
    for (int i = 0; i < 8; i++) scale[i] = vld1q_f32(scales + 4 * i);
    for (int c = 0; c < head_dim; c++, k += EN_KV_BLOCK, y += EN_KV_BLOCK) {
        scale16(k, scale, y);
        scale16(k + 16, scale + 4, y + 16);
    }
}

void en_neon_values_from_int8(const int8_t *v, const float *scales, int head_dim, float *y) {
    for (int j = 0; j < EN_KV_BLOCK; j++, v += head_dim, y += head_dim) {
        float32x4_t one = vdupq_n_f32(scales[j]), scale[4] = {one, one, one, one};
        for (int c = 0; c < head_dim; c += 16) scale16(v + c, scale, y + c);
    }
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

/* Turn 32 scores into weights relative to the new peak; what is beyond the limit weighs nothing. */
INLINE void soften(float *s, int limit, float *out, int head_dim, float *peak, float *total) {
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = -INFINITY;
    float32x4_t v[8], highest = vdupq_n_f32(*peak);
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(s + 4 * i);
        highest = vmaxq_f32(highest, v[i]);
    }
    float now = vmaxvq_f32(highest);
    if (now > *peak) {
        float keep = *peak == -INFINITY ? 0.0f : expf(*peak - now);
        *total *= keep;
        for (int c = 0; c < head_dim; c += 4) vst1q_f32(out + c, vmulq_n_f32(vld1q_f32(out + c), keep));
        *peak = now;
    }
    for (int i = 0; i < 8; i++) vst1q_f32(s + 4 * i, exp4(vsubq_f32(v[i], vdupq_n_f32(now))));
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = 0.0f;
    float32x4_t sum = vld1q_f32(s);
    for (int i = 1; i < 8; i++) sum = vaddq_f32(sum, vld1q_f32(s + 4 * i));
    *total += vaddvq_f32(sum);
}

INLINE void attend_few(const float *q, const int32_t *limits, const float *k, const float *v, int head_dim, float *out,
                       float *peak, float *total, float *s, const int n_q) {
    int n_tokens = 0;
    for (int i = 0; i < n_q; i++) n_tokens = limits[i] > n_tokens ? limits[i] : n_tokens;
    if (n_tokens == 0) return;
    for (int j = 0; j < n_tokens; j += 16)
        multiply16(q, head_dim, head_dim, k + j, 0, EN_KV_BLOCK, s + j, EN_KV_BLOCK, 1, n_q);
    for (int i = 0; i < n_q; i++)
        if (limits[i] == 0) memset(s + i * EN_KV_BLOCK, 0, EN_KV_BLOCK * sizeof *s);
        else soften(s + i * EN_KV_BLOCK, limits[i], out + (size_t)i * head_dim, head_dim, peak + i, total + i);
    for (int c = 0; c < head_dim; c += 16)
        multiply16(s, EN_KV_BLOCK, n_tokens, v + c, 0, head_dim, out + c, head_dim, 0, n_q);
}

void en_neon_attend(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                    float *out, float *peak, float *total, float *scratch) {
    for (int i = 0; i < n_queries;) {
        size_t at = (size_t)i * head_dim;
#define FEW(n_q) attend_few(q + at, limits + i, k, v, head_dim, out + at, peak + i, total + i, scratch, n_q)
        if (n_queries - i >= 4) {
            FEW(4);
            i += 4;
        } else if (n_queries - i >= 2) {
            FEW(2);
            i += 2;
        } else {
            FEW(1);
            i += 1;
        }
    }
}

#endif
