/* What an instruction set provides. Weights are packed into tiles of 16 rows; see the structs for the order inside. */
#ifndef EDGE_NATIVE_KERNELS_H
#define EDGE_NATIVE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { EN_TILE = 16, EN_BLOCK = 32, EN_KV_BLOCK = 32, EN_MAX_QUERIES = 32 };

/* What a matrix is packed as. */
enum en_format {
    EN_PACKED_F32,
    EN_PACKED_F16,
    EN_PACKED_Q4_0,
    EN_PACKED_Q4_1,
    EN_PACKED_Q5_0,
    EN_PACKED_Q5_1,
    EN_PACKED_Q8_0,
    EN_PACKED_Q4_K,
    EN_PACKED_Q5_K,
    EN_PACKED_Q6_K,
    EN_N_FORMATS
};

/* The low four bits of 16 rows by 32 columns: byte 32*h + 4*r + e of group pair p holds row 8*h + r, column 8*p + e in
 * the low nibble and column 8*p + 4 + e in the high one. */
typedef uint8_t en_nibbles[4][64];

/* The fifth bits: bit g of byte 32*h + 4*r + e is that of row 8*h + r, column 4*g + e. */
typedef uint8_t en_fifth_bits[64];

/* The fifth and sixth bits: bits 2*i and 2*i + 1 of byte 32*h + 4*r + e of plane p are those of row 8*h + r, column
 * 16*p + 4*i + e. */
typedef uint8_t en_sixth_bits[2][64];

/* Weights of 16 rows by 32 columns, by EN_PACKED_...: d * (q - 8), d * q + m, d * (q - 16), d * q + m and d * q. */
typedef struct en_tile_q4_0 {
    uint16_t d[EN_TILE];
    en_nibbles q;
} en_tile_q4_0;

typedef struct en_tile_q4_1 {
    uint16_t d[EN_TILE], m[EN_TILE];
    en_nibbles q;
} en_tile_q4_1;

typedef struct en_tile_q5_0 {
    uint16_t d[EN_TILE];
    en_nibbles q;
    en_fifth_bits h;
} en_tile_q5_0;

typedef struct en_tile_q5_1 {
    uint16_t d[EN_TILE], m[EN_TILE];
    en_nibbles q;
    en_fifth_bits h;
} en_tile_q5_1;

/* Byte 32*h + 4*r + e of group g holds row 8*h + r, column 4*g + e. */
typedef struct en_tile_q8_0 {
    uint16_t d[EN_TILE];
    int8_t q[8][64];
} en_tile_q8_0;

/* Weights of 16 rows by 256 columns, in 8 blocks of 32: d * scales * q - dmin * mins for Q4_K and Q5_K; Q6_K has a scale
 * for each 16 columns, d * scales * (q - 32). */
typedef struct en_tile_q4_k {
    uint16_t d[EN_TILE], dmin[EN_TILE];
    uint8_t scales[8][EN_TILE], mins[8][EN_TILE];
    en_nibbles q[8];
} en_tile_q4_k;

typedef struct en_tile_q5_k {
    uint16_t d[EN_TILE], dmin[EN_TILE];
    uint8_t scales[8][EN_TILE], mins[8][EN_TILE];
    en_nibbles q[8];
    en_fifth_bits h[8];
} en_tile_q5_k;

typedef struct en_tile_q6_k {
    uint16_t d[EN_TILE];
    int8_t scales[16][EN_TILE];
    en_nibbles q[8];
    en_sixth_bits h[8];
} en_tile_q6_k;

/* Activations, row after row: x as they are, and q = round(x / d) with d, sums (of q) and ds = d * sums for each
 * block of 32, and half_sums, the sums of q over a block's first and last 16. q is in -127..127. */
typedef struct en_acts {
    const float *x;
    const int8_t *q;
    const float *d;
    const int32_t *sums;
    const float *ds;
    const int16_t *half_sums;
} en_acts;

/* Thread-private memory a kernel may use. */
enum { EN_SCRATCH_BYTES = 32 * 1024 };

/* y[t][16*i + r] = the product of row r of tile i and activations t, added to what is there if accumulate.
 * k columns (a multiple of what a tile has), m activations, ldy floats from one y[t] to the next.
 *
 * Every instruction set gives the same bits, whatever m is, so results do not depend on the batch either: the dot product
 * of a block of 32 is an exact integer (of q less its offset), and the sum runs over the blocks in order, with
 *     sum = fmaf(d * acts.d, (float)dot, sum)   and, where there are minima,   sum = fmaf(m, acts.ds, sum).
 * The K forms have d * scales for d (exact in float) and -(dmin * mins) for m; Q6_K has d alone for d, its scales being
 * multiplied into the integer dot of each 16 columns. */
typedef void en_matmul_fn(const void *tiles, int n_tiles, int k, const en_acts *acts, int m, float *y, size_t ldy,
                          int accumulate, void *scratch);

typedef struct en_isa {
    const char *name;
    int (*usable)(void);
    en_matmul_fn *matmul[EN_N_FORMATS];
    void (*quantize)(const float *x, int n, int8_t *q, float *d, int32_t *sums, float *ds, int16_t *half_sums);
    void (*rms_norm)(const float *x, const float *weight, int n, float eps, float *y);
    /* gate[i] = silu(gate[i]) * up[i] */
    void (*silu_mul)(float *gate, const float *up, int n);
    void (*to_half)(const float *x, int n, uint16_t *y);
    /* Spread a block of KV out to floats. y is aligned to 64 bytes, x, k and v to 32; n is a multiple of 16.
     * keys: y[c][j] = k[c][j] * scales[j] of [head_dim][32]; values: y[j][c] = v[j][c] * scales[j] of [32][head_dim]. */
    void (*half_to_float)(const uint16_t *x, int n, float *y);
    void (*keys_from_int8)(const int8_t *k, const float *scales, int head_dim, float *y);
    void (*values_from_int8)(const int8_t *v, const float *scales, int head_dim, float *y);
    /* One block of KV (k[head_dim][32], v[32][head_dim], both aligned to 64 bytes) into the running softmax of n_queries
     * (at most EN_MAX_QUERIES) queries: limits[i] of the 32 tokens are visible to query i; out, peak and total carry on
     * from block to block. What no query sees may be anything, NaN too. A query's result does not depend on its company.
     * scratch has EN_ATTEND_FLOATS. */
    void (*attend)(const float *q, int n_queries, const int32_t *limits, const float *k, const float *v, int head_dim,
                   float *out, float *peak, float *total, float *scratch);
} en_isa;

enum { EN_ATTEND_FLOATS = EN_MAX_QUERIES * EN_KV_BLOCK };

extern const en_isa en_isa_portable;
#if defined(__x86_64__)
extern const en_isa en_isa_avx2, en_isa_avx512, en_isa_avx512vnni;
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define EN_HAS_AVXVNNI 1 /* older compilers do not know the instructions */
extern const en_isa en_isa_avxvnni;
#endif
#endif
#if defined(__aarch64__)
extern const en_isa en_isa_neon;
#endif
/* Clang before 16 has the intrinsics of an extension only where the whole file is compiled for it. */
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16)
#define EN_NEON_EXTENSIONS
extern const en_isa en_isa_neon_dotprod, en_isa_neon_i8mm;
#endif

const en_isa *en_isa_at(int isa);
const en_isa *en_isa_best(void);

float en_half_to_float(uint16_t h);
uint16_t en_float_to_half(float f);

#endif
