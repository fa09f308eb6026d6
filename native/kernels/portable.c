/* The reference: plain C, the definition of what every other instruction set must compute. */
#include "kernels.h"

#include <math.h>
#include <string.h>

float en_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float f = (float)mantissa * 0x1p-24f; /* subnormal or zero */
        return sign ? -f : f;
    }
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

uint16_t en_float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00; /* rounds to 65536 or beyond */
    if (size < 0x38800000) {                      /* below the smallest normal half: units of 2^-24 */
        float scaled;
        memcpy(&scaled, &size, sizeof scaled);
        return sign | (uint16_t)lrintf(scaled * 0x1p24f);
    }
    return sign | (uint16_t)((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

static int always(void) { return 1; }

static float start_of(const float *y, int accumulate) { return accumulate ? *y : 0.0f; }

/* The exact product of 32 weights of a row and 32 activations. */
static int32_t dot_q4(const uint8_t q[4][64], int row, const int8_t *a) {
    int32_t sum = 0;
    for (int p = 0; p < 4; p++) {
        const uint8_t *bytes = q[p] + 4 * row;
        for (int e = 0; e < 4; e++) sum += (bytes[e] & 15) * a[8 * p + e] + (bytes[e] >> 4) * a[8 * p + 4 + e];
    }
    return sum;
}

static void matmul_q4_0(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                        int accumulate, void *scratch) {
    (void)scratch;
    const en_tile_q4_0 *w = tiles;
    int n_blocks = k / EN_BLOCK;
    for (int i = 0; i < n_tiles; i++, w += n_blocks, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = start_of(out, accumulate);
                for (int b = 0; b < n_blocks; b++) {
                    size_t at = (size_t)t * n_blocks + b;
                    int32_t dot = dot_q4(w[b].q, r, acts->q + at * EN_BLOCK) - 8 * acts->sums[at];
                    sum = fmaf(en_half_to_float(w[b].d[r]) * acts->d[at], (float)dot, sum);
                }
                *out = sum;
            }
}

static void matmul_q4_1(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                        int accumulate, void *scratch) {
    (void)scratch;
    const en_tile_q4_1 *w = tiles;
    int n_blocks = k / EN_BLOCK;
    for (int i = 0; i < n_tiles; i++, w += n_blocks, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = start_of(out, accumulate);
                for (int b = 0; b < n_blocks; b++) {
                    size_t at = (size_t)t * n_blocks + b;
                    int32_t dot = dot_q4(w[b].q, r, acts->q + at * EN_BLOCK);
                    sum = fmaf(en_half_to_float(w[b].d[r]) * acts->d[at], (float)dot, sum);
                    sum = fmaf(en_half_to_float(w[b].m[r]), acts->ds[at], sum);
                }
                *out = sum;
            }
}

static void matmul_q8_0(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                        int accumulate, void *scratch) {
    (void)scratch;
    const en_tile_q8_0 *w = tiles;
    int n_blocks = k / EN_BLOCK;
    for (int i = 0; i < n_tiles; i++, w += n_blocks, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = start_of(out, accumulate);
                for (int b = 0; b < n_blocks; b++) {
                    size_t at = (size_t)t * n_blocks + b;
                    const int8_t *a = acts->q + at * EN_BLOCK;
                    int32_t dot = 0;
                    for (int g = 0; g < 8; g++)
                        for (int e = 0; e < 4; e++) dot += w[b].q[g][4 * r + e] * a[4 * g + e];
                    sum = fmaf(en_half_to_float(w[b].d[r]) * acts->d[at], (float)dot, sum);
                }
                *out = sum;
            }
}

static void matmul_f16(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    const uint16_t *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += (size_t)k * EN_TILE, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = start_of(out, accumulate);
                for (int c = 0; c < k; c++)
                    sum = fmaf(en_half_to_float(w[(size_t)c * EN_TILE + r]), acts->x[(size_t)t * k + c], sum);
                *out = sum;
            }
}

static void matmul_f32(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    const float *w = tiles;
    for (int i = 0; i < n_tiles; i++, w += (size_t)k * EN_TILE, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = start_of(out, accumulate);
                for (int c = 0; c < k; c++) sum = fmaf(w[(size_t)c * EN_TILE + r], acts->x[(size_t)t * k + c], sum);
                *out = sum;
            }
}

static void quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds) {
    for (int b = 0; b < n / EN_BLOCK; b++, x += EN_BLOCK, q += EN_BLOCK) {
        float peak = 0.0f;
        for (int i = 0; i < EN_BLOCK; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
        /* Below the threshold 127 / peak would overflow: such a block is nothing. */
        float inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < EN_BLOCK; i++) {
            q[i] = (int8_t)lrintf(x[i] * inverse);
            sum += q[i];
        }
        d[b] = peak / 127.0f;
        sums[b] = sum;
        ds[b] = d[b] * (float)sum;
    }
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *y) {
    double square = 0.0;
    for (int i = 0; i < n; i++) square += (double)x[i] * x[i];
    float scale = 1.0f / sqrtf((float)(square / n) + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

static void silu_mul(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void to_half(const float *x, int n, uint16_t *y) {
    for (int i = 0; i < n; i++) y[i] = en_float_to_half(x[i]);
}

static void attend(const float *q, int n_queries, const int32_t *limits, const uint16_t *k, const uint16_t *v,
                   int head_dim, float *out, float *peak, float *total, float *scratch) {
    (void)scratch;
    for (int i = 0; i < n_queries; i++, q += head_dim, out += head_dim) {
        if (limits[i] == 0) continue;
        float scores[EN_KV_BLOCK], highest = peak[i];
        for (int j = 0; j < limits[i]; j++) {
            scores[j] = 0.0f;
            for (int c = 0; c < head_dim; c++) scores[j] += q[c] * en_half_to_float(k[c * EN_KV_BLOCK + j]);
            highest = scores[j] > highest ? scores[j] : highest;
        }
        float keep = expf(peak[i] - highest);
        for (int c = 0; c < head_dim; c++) out[c] *= keep;
        total[i] *= keep;
        peak[i] = highest;
        for (int j = 0; j < limits[i]; j++) {
            float p = expf(scores[j] - highest);
            total[i] += p;
            for (int c = 0; c < head_dim; c++) out[c] += p * en_half_to_float(v[j * head_dim + c]);
        }
    }
}

const en_isa en_isa_portable = {
    .name = "portable",
    .usable = always,
    .matmul_q4_0 = matmul_q4_0,
    .matmul_q4_1 = matmul_q4_1,
    .matmul_q8_0 = matmul_q8_0,
    .matmul_f16 = matmul_f16,
    .matmul_f32 = matmul_f32,
    .quantize = quantize,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_half = to_half,
    .attend = attend,
};
