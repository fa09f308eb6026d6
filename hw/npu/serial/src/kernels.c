/* Sums of products: Helium (MVE) where the compiler targets it, plain C elsewhere. The same numbers either way. */
#include "model.h"

#if defined(__ARM_FEATURE_MVE) && __ARM_FEATURE_MVE & 1
#include <arm_mve.h>

const char *kernels_name(void) { return "helium"; }

void dot4_int8(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]) {
    const int8_t *a = rows, *b = a + row_bytes, *c = b + row_bytes, *d = c + row_bytes;
    int32_t sa = 0, sb = 0, sc = 0, sd = 0;
    for (uint32_t i = 0; i < n; i += 16) {
        int8x16_t values = vld1q_s8(x + i);
        sa = vmladavaq_s8(sa, values, vld1q_s8(a + i));
        sb = vmladavaq_s8(sb, values, vld1q_s8(b + i));
        sc = vmladavaq_s8(sc, values, vld1q_s8(c + i));
        sd = vmladavaq_s8(sd, values, vld1q_s8(d + i));
    }
    sums[0] = sa, sums[1] = sb, sums[2] = sc, sums[3] = sd;
}

static inline int32_t dot_block(int32_t sum, int8x16_t low, int8x16_t high, const int8_t *packed) {
    int8x16_t both = vld1q_s8(packed);
    sum = vmladavaq_s8(sum, low, vshrq_n_s8(vshlq_n_s8(both, 4), 4));
    return vmladavaq_s8(sum, high, vshrq_n_s8(both, 4));
}

void dot4_int4(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]) {
    const int8_t *a = rows, *b = a + row_bytes, *c = b + row_bytes, *d = c + row_bytes;
    int32_t sa = 0, sb = 0, sc = 0, sd = 0;
    for (uint32_t i = 0; i < n; i += 32) {
        int8x16_t low = vld1q_s8(x + i), high = vld1q_s8(x + i + 16);
        sa = dot_block(sa, low, high, a + i / 2);
        sb = dot_block(sb, low, high, b + i / 2);
        sc = dot_block(sc, low, high, c + i / 2);
        sd = dot_block(sd, low, high, d + i / 2);
    }
    sums[0] = sa, sums[1] = sb, sums[2] = sc, sums[3] = sd;
}

int32_t dot_int8(const int8_t *x, const int8_t *row, uint32_t n) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i += 16) sum = vmladavaq_s8(sum, vld1q_s8(x + i), vld1q_s8(row + i));
    return sum;
}

int32_t dot_int4(const int8_t *x, const int8_t *row, uint32_t n) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i += 32) sum = dot_block(sum, vld1q_s8(x + i), vld1q_s8(x + i + 16), row + i / 2);
    return sum;
}

void multiply_add(const int8_t *x, const int8_t *weights, uint32_t n, int32_t *sums) {
    for (uint32_t i = 0; i < n; i += 4) {
        mve_pred16_t live = vctp32q(n - i);
        int32x4_t product = vmulq_s32(vldrbq_z_s32(x + i, live), vldrbq_z_s32(weights + i, live));
        vst1q_p_s32(sums + i, vaddq_s32(vld1q_z_s32(sums + i, live), product), live);
    }
}

void unpack_int4(const int8_t *packed, uint32_t n, int8_t *out) {
    for (uint32_t i = 0; i < n; i += 32) {
        int8x16_t both = vld1q_s8(packed + i / 2);
        vst1q_s8(out + i, vshrq_n_s8(vshlq_n_s8(both, 4), 4));
        vst1q_s8(out + i + 16, vshrq_n_s8(both, 4));
    }
}

#else

const char *kernels_name(void) { return "plain"; }

int32_t dot_int8(const int8_t *x, const int8_t *row, uint32_t n) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += x[i] * row[i];
    return sum;
}

static int32_t lower(int8_t both) { return (both & 15) - ((both & 8) << 1); }

int32_t dot_int4(const int8_t *x, const int8_t *row, uint32_t n) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i += 32)
        for (uint32_t j = 0; j < 16; j++) {
            int8_t both = row[i / 2 + j];
            sum += x[i + j] * lower(both) + x[i + j + 16] * (both >> 4);
        }
    return sum;
}

void dot4_int8(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]) {
    for (int i = 0; i < 4; i++, rows += row_bytes) sums[i] = dot_int8(x, rows, n);
}

void dot4_int4(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]) {
    for (int i = 0; i < 4; i++, rows += row_bytes) sums[i] = dot_int4(x, rows, n);
}

void multiply_add(const int8_t *x, const int8_t *weights, uint32_t n, int32_t *sums) {
    for (uint32_t i = 0; i < n; i++) sums[i] += x[i] * weights[i];
}

void unpack_int4(const int8_t *packed, uint32_t n, int8_t *out) {
    for (uint32_t i = 0; i < n; i += 32)
        for (uint32_t j = 0; j < 16; j++) {
            int8_t both = packed[i / 2 + j];
            out[i + j] = (int8_t)lower(both);
            out[i + j + 16] = (int8_t)(both >> 4);
        }
}

#endif
