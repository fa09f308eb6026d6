/* What the parts of the engine share. */
#ifndef EDGE_NATIVE_ENGINE_H
#define EDGE_NATIVE_ENGINE_H

#include "edge_native.h"
#include "kernels.h"
#include "pool.h"

#include <string.h>

/* A packed matrix of n_rows rows of n_cols columns in n_tiles tiles; the last may have rows that are padding. */
typedef struct en_matrix {
    void *tiles;
    size_t tile_bytes; /* of all blocks of one tile */
    int n_rows, n_cols, n_tiles, type;
    en_matmul_fn *matmul;
    const float *bias; /* of n_rows; NULL: none */
} en_matrix;

typedef struct en_layer {
    en_layer_config config;
    const float *attn_norm, *ffn_norm, *q_norm, *k_norm; /* the last two NULL where q and k are not normalised */
    en_matrix q, k, v, out, gate, up, down;
} en_layer;

struct en_model {
    en_config config; /* its pointers are the model's own frequencies, and NULL for the layers */
    const en_isa *isa;
    int is_external; /* its matrices have no tiles */
    en_tensor token_embd; /* as the file has it; without data where it is the output matrix too, which is packed */
    const float *output_norm;
    en_matrix output;
    en_layer *layers;
    double *frequencies;
    uint8_t *arena; /* NULL where the packed weights belong to the caller */
    size_t arena_bytes;
};

/* Whether all are finite: one added to an exponent of all ones carries into the sign's place. */
static inline int en_all_finite(const float *x, int n) {
    uint32_t carries = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        carries |= (bits & 0x7fffffff) + 0x00800000;
    }
    return carries >> 31 == 0;
}

/* formats.c */
int en_format_of(int type); /* en_format, or -1 */
int en_type_layout(int type, int *block_cols, int *block_bytes);
size_t en_tile_bytes(int format); /* of 16 rows of one block */
void en_pack_block(int format, const uint8_t *from, int row, uint8_t *tile);
void en_row_to_float(const en_tensor *tensor, int64_t row, float *out);
void en_packed_row_to_float(const en_matrix *matrix, int64_t row, float *out);

/* pack.c */
size_t en_packed_bytes(const en_tensor *tensor);
/* Pack into memory of en_packed_bytes, aligned to 64. */
void en_pack(const en_tensor *tensor, void *memory);
/* A tensor that is packed at tiles. */
en_matrix en_matrix_of(const en_isa *isa, const en_tensor *tensor, void *tiles);

/* kv.c: blocks of 32 tokens, each holding K and V of all layers; sequences share them by reference counts. */
typedef struct en_kv {
    int type; /* EN_F16 or EN_Q8_0 */
    uint8_t *memory;
    size_t memory_bytes, block_bytes, head_bytes;
    int n_blocks, n_free, n_seqs, max_blocks;
    int32_t *free_blocks, *n_refs;
    int32_t *lengths; /* tokens of each sequence */
    int32_t *tables;  /* n_seqs by max_blocks */
    int32_t *first_heads; /* of the layers, in a block */
} en_kv;

int en_kv_init(en_kv *kv, const en_model *model, int type, int n_ctx, int n_seqs);
void en_kv_drop(en_kv *kv);
/* Blocks that n more tokens of a sequence take: new ones, and a copy of a last one it shares. */
int en_kv_need(const en_kv *kv, int seq, int length, int n);
/* Make room for n more tokens and count them in; the caller has checked the need. */
void en_kv_extend(en_kv *kv, int seq, int n);
void en_kv_trim(en_kv *kv, int seq, int n_tokens);
void en_kv_share(en_kv *kv, int src, int dst, int n_tokens);
void *en_kv_block(const en_kv *kv, int seq, int block);
/* What one KV head of a layer keeps of a block, for the functions of kv_head.c. */
void *en_kv_head(const en_kv *kv, int seq, int block, int layer, int head);

/* kv_head.c */
enum { EN_MAX_HEAD_DIM = 512 };
size_t en_kv_head_bytes(int type, int head_dim);
/* Put k and v of one token at its slot of the block. */
void en_kv_keep(const en_isa *isa, int type, void *head, int head_dim, int slot, const float *k, const float *v);
/* Give the whole block as floats, k[head_dim][32] and v[32][head_dim]. */
void en_kv_spread(const en_isa *isa, int type, const void *head, int head_dim, float *k, float *v);

#endif
