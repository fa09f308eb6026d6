/* What one KV head keeps of a block of 32 tokens. K is [head_dim][32], V is [32][head_dim]; both are f16, or int8 with
 * a scale for each token: K, V, 32 scales of K, 32 scales of V. */
#include "engine.h"

#include <math.h>
#include <string.h>

typedef struct int8_head {
    int8_t *k, *v;
    float *k_scales, *v_scales;
} int8_head;

static int8_head int8_of(const void *head, int head_dim) {
    int8_t *k = (int8_t *)head, *v = k + (size_t)EN_KV_BLOCK * head_dim;
    float *scales = (float *)(v + (size_t)EN_KV_BLOCK * head_dim);
    return (int8_head){k, v, scales, scales + EN_KV_BLOCK};
}

size_t en_kv_head_bytes(int type, int head_dim) {
    size_t n = (size_t)2 * EN_KV_BLOCK * head_dim;
    return type == EN_Q8_0 ? n + 2 * EN_KV_BLOCK * sizeof(float) : n * sizeof(uint16_t);
}

/* q = round(x / scale), the scale such that the largest is 127; ties go to the even number. Written so that a compiler
 * without lrintf in vectors can vectorise it: after 1.5 * 2^23 is added the number stands in the low bits. */
static float to_int8(const float *x, int n, int8_t *q) {
    float peaks[16] = {0}, peak = 0.0f;
    for (int i = 0; i < n; i += 16)
        for (int j = 0; j < 16; j++) {
            float size = fabsf(x[i + j]);
            peaks[j] = size > peaks[j] ? size : peaks[j];
        }
    for (int j = 0; j < 16; j++) peak = peaks[j] > peak ? peaks[j] : peak;
    float inverse = peak > 1e-36f ? 127.0f / peak : 0.0f;
    for (int i = 0; i < n; i++) {
        float shifted = x[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        q[i] = (int8_t)(bits & 0xff);
    }
    return en_all_finite(x, n) ? peak / 127.0f : NAN;
}

void en_kv_keep(const en_isa *isa, int type, void *head, int head_dim, int slot, const float *k, const float *v) {
    if (type == EN_Q8_0) {
        int8_head h = int8_of(head, head_dim);
        int8_t column[EN_MAX_HEAD_DIM];
        h.k_scales[slot] = to_int8(k, head_dim, column);
        for (int i = 0; i < head_dim; i++) h.k[i * EN_KV_BLOCK + slot] = column[i];
        h.v_scales[slot] = to_int8(v, head_dim, h.v + (size_t)slot * head_dim);
        return;
    }
    uint16_t column[EN_MAX_HEAD_DIM], *keys = head;
    isa->to_half(k, head_dim, column);
    for (int i = 0; i < head_dim; i++) keys[i * EN_KV_BLOCK + slot] = column[i];
    isa->to_half(v, head_dim, keys + (size_t)(EN_KV_BLOCK + slot) * head_dim);
}

void en_kv_spread(const en_isa *isa, int type, const void *head, int head_dim, float *k, float *v) {
    if (type == EN_Q8_0) {
        int8_head h = int8_of(head, head_dim);
        isa->keys_from_int8(h.k, h.k_scales, head_dim, k);
        isa->values_from_int8(h.v, h.v_scales, head_dim, v);
        return;
    }
    int n = EN_KV_BLOCK * head_dim;
    isa->half_to_float(head, n, k);
    isa->half_to_float((const uint16_t *)head + n, n, v);
}
