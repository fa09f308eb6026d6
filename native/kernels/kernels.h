/* What an instruction set provides. Weights are packed into tiles of 16 rows; see the structs for the order inside. */
#ifndef EDGE_NATIVE_KERNELS_H
#define EDGE_NATIVE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { EN_TILE = 16, EN_BLOCK = 32, EN_KV_BLOCK = 32, EN_MAX_QUERIES = 32 };

/* 16 rows by 32 columns. Byte 32*h + 4*r + e of group pair p holds row 8*h + r: column 8*p + e in the low nibble and
 * column 8*p + 4 + e in the high one. */
typedef struct en_tile_q4_0 {
    uint16_t d[EN_TILE];
    uint8_t q[4][64];
} en_tile_q4_0;

typedef struct en_tile_q4_1 {
    uint16_t d[EN_TILE], m[EN_TILE];
    uint8_t q[4][64];
} en_tile_q4_1;

/* Byte 32*h + 4*r + e of group g holds row 8*h + r, column 4*g + e. */
typedef struct en_tile_q8_0 {
    uint16_t d[EN_TILE];
    int8_t q[8][64];
} en_tile_q8_0;

/* Activations, row after row: x as they are, and q = round(x / d) with d, sums (of q) and ds = d * sums for each
 * block of 32. q is in -127..127. */
typedef struct en_acts {
    const float *x;
    const int8_t *q;
    const float *d;
    const int32_t *sums;
    const float *ds;
} en_acts;

/* Thread-private memory a kernel may use. */
enum { EN_SCRATCH_BYTES = 32 * 1024 };

/* y[t][16*i + r] = the product of row r of tile i and activations t, added to what is there if accumulate.
 * k columns (a multiple of 32 for quantised tiles), m activations, ldy floats from one y[t] to the next. The sum runs over
 * the blocks in order, with one fused multiply-add each, whatever m is: results do not depend on the batch. */
typedef void en_matmul_fn(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                          int accumulate, void *scratch);

typedef struct en_isa {
    const char *name;
    int (*usable)(void);
    en_matmul_fn *matmul_q4_0, *matmul_q4_1, *matmul_q8_0, *matmul_f16, *matmul_f32;
    void (*quantize)(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds);
    void (*rms_norm)(const float *x, const float *weight, int n, float eps, float *y);
    /* gate[i] = silu(gate[i]) * up[i] */
    void (*silu_mul)(float *gate, const float *up, int n);
    void (*to_half)(const float *x, int n, uint16_t *y);
    /* One block of KV (k[head_dim][32], v[32][head_dim]) into the running softmax of n_queries (at most EN_MAX_QUERIES)
     * queries: limits[i] of the 32 tokens are visible to query i; out, peak and total carry on from block to block. */
    void (*attend)(const float *q, int n_queries, const int32_t *limits, const uint16_t *k, const uint16_t *v,
                   int head_dim, float *out, float *peak, float *total, float *scratch);
} en_isa;

/* Floats of scratch that attend needs. */
static inline size_t en_attend_floats(int head_dim) { return (size_t)head_dim * 2 * EN_KV_BLOCK + 8 * EN_KV_BLOCK; }

extern const en_isa en_isa_portable;
#if defined(__x86_64__)
extern const en_isa en_isa_avx2;
#endif

const en_isa *en_isa_at(int isa);
const en_isa *en_isa_best(void);

float en_half_to_float(uint16_t h);
uint16_t en_float_to_half(float f);

#endif
