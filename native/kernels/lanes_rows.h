/* What is done to rows of floats, for any number of lanes: a part of an instruction set's file. */
#ifndef EDGE_NATIVE_LANES_ROWS_H
#define EDGE_NATIVE_LANES_ROWS_H

#include "kernels.h"

#include <math.h>

static void quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums) {
    enum { N = EN_BLOCK / LANES, HALF = N / 2 };
    for (int b = 0; b < n / EN_BLOCK; b++, x += EN_BLOCK, q += EN_BLOCK) {
        floats v[N], highest = all(0.0f);
        for (int i = 0; i < N; i++) {
            v[i] = load(x + LANES * i);
            highest = larger(size_of(v[i]), highest);
        }
        float peak = largest_of(highest), inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
        ints r[N];
        for (int i = 0; i < N; i++) r[i] = rounded(times(v[i], all(inverse)));
        int32_t sum = 0;
        for (int h = 0; h < 2; h++) {
            int32_t half = sum_of_ints(r + HALF * h);
            half_sums[2 * b + h] = (int16_t)half;
            sum += half_sums[2 * b + h]; /* what was NaN makes any integer: a sum of them could overflow */
            store_bytes(q + 16 * h, r + HALF * h);
        }
        d[b] = peak / 127.0f;
        sums[b] = sum;
        ds[b] = d[b] * (float)sum;
    }
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *y) {
    floats square = all(0.0f);
    int i = 0;
    for (; i + LANES <= n; i += LANES) square = fused(load(x + i), load(x + i), square);
    float rest = 0.0f;
    for (; i < n; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((sum_of(square) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, times(times(load(x + i), all(scale)), load(weight + i)));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* e^x for x in -87..88, which it is clamped to: 2^n * e^r with r within ln(2) / 2, the polynomial of Cephes' expf. Of two
 * operands, one a NaN, the second comes out: x, which stays one. */
INLINE floats exponential(floats x) {
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    floats n = whole(times(x, all(1.44269504f)));
    floats r = fused_minus(n, all(0.693359375f), x);
    r = fused_minus(n, all(-2.12194440e-4f), r);
    floats p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    return doubled(plus(fused(p, times(r, r), r), all(1.0f)), n);
}

static void silu_mul(float *gate, const float *up, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats g = load(gate + i);
        store(gate + i, times(over(g, plus(all(1.0f), exponential(minus(all(0.0f), g)))), load(up + i)));
    }
    for (; i < n; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void to_half(const float *x, int n, uint16_t *y) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_halves(y + i, load(x + i));
    for (; i < n; i++) y[i] = en_float_to_half(x[i]);
}

static void half_to_float(const uint16_t *x, int n, float *y) {
    for (int i = 0; i < n; i += LANES) store(y + i, halves(x + i));
}

static void keys_from_int8(const int8_t *k, const float *scales, int head_dim, float *y) {
    for (int c = 0; c < head_dim; c++, k += EN_KV_BLOCK, y += EN_KV_BLOCK)
        for (int j = 0; j < EN_KV_BLOCK; j += LANES) store(y + j, times(from_i8(k + j), load(scales + j)));
}

static void values_from_int8(const int8_t *v, const float *scales, int head_dim, float *y) {
    for (int j = 0; j < EN_KV_BLOCK; j++, v += head_dim, y += head_dim)
        for (int c = 0; c < head_dim; c += LANES) store(y + c, times(from_i8(v + c), all(scales[j])));
}

#endif
