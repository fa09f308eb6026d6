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

/* The level of a weight before its offset: row r, column c of a block. */
static int place(int r, int c) { return 32 * (r / 8) + 4 * (r % 8) + c % 4; }

static int32_t nibble(const en_nibbles q, int r, int c) { return q[c / 8][place(r, c)] >> (c % 8 < 4 ? 0 : 4) & 15; }

static int32_t fifth(const en_fifth_bits h, int r, int c) { return (h[place(r, c)] >> c / 4 & 1) << 4; }

static int32_t sixth(const en_sixth_bits h, int r, int c) { return (h[c / 16][place(r, c)] >> 2 * (c / 4 % 4) & 3) << 4; }

/* The exact product of the 32 levels of a row less an offset and 32 activations; h may be NULL. */
static int32_t dot(const en_nibbles q, const uint8_t *h, int r, int32_t offset, const int8_t *a) {
    int32_t sum = 0;
    for (int c = 0; c < EN_BLOCK; c++) sum += (nibble(q, r, c) + (h ? fifth(h, r, c) : 0) - offset) * a[c];
    return sum;
}

/* Add a tile's row r times the activations of the blocks from at on to sum. */
typedef float tile_fn(const void *tile, int r, const en_acts *acts, size_t at, float sum);

static float add_block(uint16_t d, int32_t product, const en_acts *acts, size_t at, float sum) {
    return fmaf(en_half_to_float(d) * acts->d[at], (float)product, sum);
}

static float add_minimum(uint16_t m, const en_acts *acts, size_t at, float sum) {
    return fmaf(en_half_to_float(m), acts->ds[at], sum);
}

static float q4_0(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q4_0 *w = tile;
    return add_block(w->d[r], dot(w->q, NULL, r, 8, acts->q + at * EN_BLOCK), acts, at, sum);
}

static float q4_1(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q4_1 *w = tile;
    sum = add_block(w->d[r], dot(w->q, NULL, r, 0, acts->q + at * EN_BLOCK), acts, at, sum);
    return add_minimum(w->m[r], acts, at, sum);
}

static float q5_0(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q5_0 *w = tile;
    return add_block(w->d[r], dot(w->q, w->h, r, 16, acts->q + at * EN_BLOCK), acts, at, sum);
}

static float q5_1(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q5_1 *w = tile;
    sum = add_block(w->d[r], dot(w->q, w->h, r, 0, acts->q + at * EN_BLOCK), acts, at, sum);
    return add_minimum(w->m[r], acts, at, sum);
}

static float q8_0(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q8_0 *w = tile;
    const int8_t *a = acts->q + at * EN_BLOCK;
    int32_t product = 0;
    for (int c = 0; c < EN_BLOCK; c++) product += w->q[c / 4][place(r, c)] * a[c];
    return add_block(w->d[r], product, acts, at, sum);
}

/* A block of Q4_K or Q5_K. */
static float add_scaled(uint16_t d, uint8_t scale, uint16_t dmin, uint8_t min, int32_t product, const en_acts *acts,
                        size_t at, float sum) {
    sum = fmaf(en_half_to_float(d) * (float)scale * acts->d[at], (float)product, sum);
    return fmaf(-(en_half_to_float(dmin) * (float)min), acts->ds[at], sum);
}

static float q4_k(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q4_k *w = tile;
    for (int b = 0; b < 8; b++, at++)
        sum = add_scaled(w->d[r], w->scales[b][r], w->dmin[r], w->mins[b][r],
                         dot(w->q[b], NULL, r, 0, acts->q + at * EN_BLOCK), acts, at, sum);
    return sum;
}

static float q5_k(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q5_k *w = tile;
    for (int b = 0; b < 8; b++, at++)
        sum = add_scaled(w->d[r], w->scales[b][r], w->dmin[r], w->mins[b][r],
                         dot(w->q[b], w->h[b], r, 0, acts->q + at * EN_BLOCK), acts, at, sum);
    return sum;
}

/* Scaled dots stay exact in float too: 2 * 16 * 32 * 127 * 128 is below 2^24. */
static float q6_k(const void *tile, int r, const en_acts *acts, size_t at, float sum) {
    const en_tile_q6_k *w = tile;
    for (int b = 0; b < 8; b++, at++) {
        const int8_t *a = acts->q + at * EN_BLOCK;
        int32_t product = 0;
        for (int c = 0; c < EN_BLOCK; c++)
            product += w->scales[2 * b + c / 16][r] * (nibble(w->q[b], r, c) + sixth(w->h[b], r, c) - 32) * a[c];
        sum = add_block(w->d[r], product, acts, at, sum);
    }
    return sum;
}

static void multiply(tile_fn *fn, size_t tile_bytes, int tile_cols, const void *tiles, int n_tiles, int k,
                     const en_acts *acts, int m, float *y, size_t ldy, int accumulate) {
    const uint8_t *w = tiles;
    size_t n_blocks = (size_t)k / EN_BLOCK, n_steps = (size_t)k / tile_cols;
    for (int i = 0; i < n_tiles; i++, w += n_steps * tile_bytes, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = accumulate ? *out : 0.0f;
                for (size_t s = 0; s < n_steps; s++)
                    sum = fn(w + s * tile_bytes, r, acts, t * n_blocks + s * (tile_cols / EN_BLOCK), sum);
                *out = sum;
            }
}

#define MATMUL(form, cols)                                                                                              \
    static void matmul_##form(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,    \
                              int accumulate, void *scratch) {                                                          \
        (void)scratch;                                                                                                  \
        multiply(form, sizeof(en_tile_##form), cols, tiles, n_tiles, k, acts, m, y, ldy, accumulate);                    \
    }

MATMUL(q4_0, 32)
MATMUL(q4_1, 32)
MATMUL(q5_0, 32)
MATMUL(q5_1, 32)
MATMUL(q8_0, 32)
MATMUL(q4_k, 256)
MATMUL(q5_k, 256)
MATMUL(q6_k, 256)

static float weight_at(const void *w, int is_half, size_t at) {
    return is_half ? en_half_to_float(((const uint16_t *)w)[at]) : ((const float *)w)[at];
}

static void multiply_floats(int is_half, const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y,
                            size_t ldy, int accumulate) {
    for (size_t i = 0; i < (size_t)n_tiles; i++, y += EN_TILE)
        for (int t = 0; t < m; t++)
            for (int r = 0; r < EN_TILE; r++) {
                float *out = y + (size_t)t * ldy + r, sum = accumulate ? *out : 0.0f;
                for (int c = 0; c < k; c++)
                    sum = fmaf(weight_at(tiles, is_half, (i * k + c) * EN_TILE + r), acts->x[(size_t)t * k + c], sum);
                *out = sum;
            }
}

static void matmul_f16(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    multiply_floats(1, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

static void matmul_f32(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                       int accumulate, void *scratch) {
    (void)scratch;
    multiply_floats(0, tiles, n_tiles, k, acts, m, y, ldy, accumulate);
}

static void quantize(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums) {
    for (int b = 0; b < n / EN_BLOCK; b++, x += EN_BLOCK, q += EN_BLOCK) {
        float peak = 0.0f;
        for (int i = 0; i < EN_BLOCK; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
        /* Below the threshold 127 / peak would overflow: such a block is nothing. */
        float inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
        int sum[2] = {0, 0};
        for (int i = 0; i < EN_BLOCK; i++) {
            q[i] = (int8_t)lrintf(x[i] * inverse);
            sum[i / 16] += q[i];
        }
        d[b] = peak / 127.0f;
        sums[b] = sum[0] + sum[1];
        ds[b] = d[b] * (float)sums[b];
        half_sums[2 * b] = (int16_t)sum[0];
        half_sums[2 * b + 1] = (int16_t)sum[1];
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

static void half_to_float(const uint16_t *x, int n, float *y) {
    for (int i = 0; i < n; i++) y[i] = en_half_to_float(x[i]);
}

static void keys_from_int8(const int8_t *k, const float *scales, int head_dim, float *y) {
    for (int c = 0; c < head_dim; c++)
        for (int j = 0; j < EN_KV_BLOCK; j++) y[c * EN_KV_BLOCK + j] = (float)k[c * EN_KV_BLOCK + j] * scales[j];
}

static void values_from_int8(const int8_t *v, const float *scales, int head_dim, float *y) {
    for (int j = 0; j < EN_KV_BLOCK; j++)
        for (int c = 0; c < head_dim; c++) y[j * head_dim + c] = (float)v[j * head_dim + c] * scales[j];
}

static void attend(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                   float *out, float *peak, float *total, float *scratch) {
    (void)scratch;
    for (int i = 0; i < n_queries; i++, q += head_dim, out += head_dim) {
        if (limits[i] == 0) continue;
        float scores[EN_KV_BLOCK], highest = peak[i];
        for (int j = 0; j < limits[i]; j++) {
            scores[j] = 0.0f;
            for (int c = 0; c < head_dim; c++) scores[j] += q[c] * k[c * EN_KV_BLOCK + j];
            highest = scores[j] > highest ? scores[j] : highest;
        }
        float keep = expf(peak[i] - highest);
        for (int c = 0; c < head_dim; c++) out[c] *= keep;
        total[i] *= keep;
        peak[i] = highest;
        for (int j = 0; j < limits[i]; j++) {
            float p = expf(scores[j] - highest);
            total[i] += p;
            for (int c = 0; c < head_dim; c++) out[c] += p * v[j * head_dim + c];
        }
    }
}

const en_isa en_isa_portable = {
    .name = "portable",
    .usable = always,
    .matmul = {[EN_PACKED_F32] = matmul_f32, [EN_PACKED_F16] = matmul_f16, [EN_PACKED_Q4_0] = matmul_q4_0,
               [EN_PACKED_Q4_1] = matmul_q4_1, [EN_PACKED_Q5_0] = matmul_q5_0, [EN_PACKED_Q5_1] = matmul_q5_1,
               [EN_PACKED_Q8_0] = matmul_q8_0, [EN_PACKED_Q4_K] = matmul_q4_k, [EN_PACKED_Q5_K] = matmul_q5_k,
               [EN_PACKED_Q6_K] = matmul_q6_k},
    .quantize = quantize,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_half = to_half,
    .half_to_float = half_to_float,
    .keys_from_int8 = keys_from_int8,
    .values_from_int8 = values_from_int8,
    .attend = attend,
};
