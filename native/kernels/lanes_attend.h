/* Attention to one block of KV, for any number of lanes: a part of an instruction set's file. */
#ifndef EDGE_NATIVE_LANES_ATTEND_H
#define EDGE_NATIVE_LANES_ATTEND_H

#include "kernels.h"

#include <math.h>
#include <string.h>

/* scores[i][2 * LANES of 32] of n_q queries. */
INLINE void scores_of(const float *q, int head_dim, const float *k, float *scores, const int n_q) {
    floats acc[MOST_QUERIES][2];
UNROLL
    for (int i = 0; i < n_q; i++) acc[i][0] = acc[i][1] = all(0.0f);
    for (int c = 0; c < head_dim; c++) {
        floats k0 = load(k + c * EN_KV_BLOCK), k1 = load(k + c * EN_KV_BLOCK + LANES);
UNROLL
        for (int i = 0; i < n_q; i++) {
            floats a = all(q[(size_t)i * head_dim + c]);
            acc[i][0] = fused(a, k0, acc[i][0]);
            acc[i][1] = fused(a, k1, acc[i][1]);
        }
    }
UNROLL
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < 2; h++) store(scores + i * EN_KV_BLOCK + LANES * h, acc[i][h]);
}

/* out[i][n_v * LANES of head_dim] += p[i][n_tokens] * v[n_tokens][the same] */
INLINE void add_values(const float *p, int n_tokens, const float *v, int head_dim, float *out, const int n_q, const int n_v) {
    floats acc[MOST_QUERIES][2];
UNROLL
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < n_v; h++) acc[i][h] = load(out + (size_t)i * head_dim + LANES * h);
    for (int j = 0; j < n_tokens; j++) {
        floats value[2];
        for (int h = 0; h < n_v; h++) value[h] = load(v + (size_t)j * head_dim + LANES * h);
UNROLL
        for (int i = 0; i < n_q; i++) {
            floats a = all(p[i * EN_KV_BLOCK + j]);
            for (int h = 0; h < n_v; h++) acc[i][h] = fused(a, value[h], acc[i][h]);
        }
    }
UNROLL
    for (int i = 0; i < n_q; i++)
        for (int h = 0; h < n_v; h++) store(out + (size_t)i * head_dim + LANES * h, acc[i][h]);
}

/* Turn 32 scores into weights relative to the new peak; what is beyond the limit weighs nothing. */
INLINE void soften(float *s, int limit, float *out, int head_dim, float *peak, float *total) {
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = -INFINITY;
    floats highest = all(*peak);
    for (int j = 0; j < EN_KV_BLOCK; j += LANES) highest = larger(highest, load(s + j));
    float now = largest_of(highest);
    if (now > *peak) {
        float keep = *peak == -INFINITY ? 0.0f : expf(*peak - now);
        *total *= keep;
        for (int c = 0; c < head_dim; c += LANES) store(out + c, times(load(out + c), all(keep)));
        *peak = now;
    }
    for (int j = 0; j < EN_KV_BLOCK; j += LANES) store(s + j, exponential(minus(load(s + j), all(now))));
    for (int j = limit; j < EN_KV_BLOCK; j++) s[j] = 0.0f;
    floats sum = all(0.0f);
    for (int j = 0; j < EN_KV_BLOCK; j += LANES) sum = plus(sum, load(s + j));
    *total += sum_of(sum);
}

INLINE void attend_few(const float *q, const int32_t *limits, const float *k, const float *v, int head_dim, float *out,
                       float *peak, float *total, float *s, const int n_q) {
    int n_tokens = 0, c = 0;
    for (int i = 0; i < n_q; i++) n_tokens = limits[i] > n_tokens ? limits[i] : n_tokens;
    if (n_tokens == 0) return;
    for (int j = 0; j < n_tokens; j += 2 * LANES) scores_of(q, head_dim, k + j, s + j, n_q);
    for (int i = 0; i < n_q; i++)
        if (limits[i] == 0) memset(s + i * EN_KV_BLOCK, 0, EN_KV_BLOCK * sizeof *s);
        else soften(s + i * EN_KV_BLOCK, limits[i], out + (size_t)i * head_dim, head_dim, peak + i, total + i);
    for (; c + 2 * LANES <= head_dim; c += 2 * LANES) add_values(s, n_tokens, v + c, head_dim, out + c, n_q, 2);
    if (c < head_dim) add_values(s, n_tokens, v + c, head_dim, out + c, n_q, 1); /* head_dim is a multiple of 16 */
}

static void attend(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                   float *out, float *peak, float *total, float *scratch) {
    for (int i = 0, n; i < n_queries; i += n) {
        size_t at = (size_t)i * head_dim;
        n = n_queries - i >= 6 ? 6 : n_queries - i >= 3 ? 3 : 1;
#define FEW(n_q) attend_few(q + at, limits + i, k, v, head_dim, out + at, peak + i, total + i, scratch, n_q)
        if (n == 6) FEW(6);
        else if (n == 3) FEW(3);
        else FEW(1);
#undef FEW
    }
}

#endif
