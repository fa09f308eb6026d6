/* Sequences from outside: length, copy, trim, state. */
#include "context.h"

#include <string.h>

static int is_seq(const en_context *c, int seq) { return seq >= 0 && seq < c->kv.n_seqs; }

int en_seq_length(const en_context *c, int seq_id) { return is_seq(c, seq_id) ? c->kv.lengths[seq_id] : -1; }

int en_free_blocks(const en_context *c) { return c->kv.n_free; }

int en_seq_copy(en_context *c, int src, int dst, int n_tokens) {
    if (!is_seq(c, src) || !is_seq(c, dst) || src == dst || c->kv.lengths[dst] != 0) return EN_BAD_SEQ;
    if (n_tokens < 0 || n_tokens > c->kv.lengths[src]) return EN_BAD_ROWS;
    en_kv_share(&c->kv, src, dst, n_tokens);
    return EN_OK;
}

int en_seq_trim(en_context *c, int seq_id, int n_tokens) {
    if (!is_seq(c, seq_id) || n_tokens < 0) return EN_BAD_SEQ;
    en_kv_trim(&c->kv, seq_id, n_tokens);
    en_states_trim(c, seq_id, n_tokens);
    return EN_OK;
}

static uint64_t blocks_of(int n_tokens) { return ((uint64_t)n_tokens + EN_KV_BLOCK - 1) / EN_KV_BLOCK; }

uint64_t en_seq_bytes(const en_context *c, int seq_id) {
    return is_seq(c, seq_id) ? blocks_of(c->kv.lengths[seq_id]) * c->kv.block_bytes : 0;
}

int en_seq_save_blocks(const en_context *c, int seq_id, int first, int n_blocks, void *state) {
    if (!is_seq(c, seq_id)) return EN_BAD_SEQ;
    int n_held = (int)blocks_of(c->kv.lengths[seq_id]);
    if (first < 0 || n_blocks < 0 || first > n_held || n_blocks > n_held - first) return EN_BAD_ROWS;
    for (int i = 0; i < n_blocks; i++)
        memcpy((uint8_t *)state + i * c->kv.block_bytes, en_kv_block(&c->kv, seq_id, first + i), c->kv.block_bytes);
    return EN_OK;
}

int en_seq_save(const en_context *c, int seq_id, void *state) {
    if (!is_seq(c, seq_id)) return EN_BAD_SEQ;
    return en_seq_save_blocks(c, seq_id, 0, (int)blocks_of(c->kv.lengths[seq_id]), state);
}

int en_seq_append(en_context *c, int seq_id, int n_tokens, const void *state, uint64_t n_bytes) {
    if (!is_seq(c, seq_id)) return EN_BAD_SEQ;
    int length = c->kv.lengths[seq_id], first = length / EN_KV_BLOCK;
    if (length % EN_KV_BLOCK != 0 || n_tokens < 0 || n_tokens > c->n_ctx - length) return EN_BAD_ROWS;
    if (n_bytes != blocks_of(n_tokens) * c->kv.block_bytes) return EN_BAD_ROWS;
    if (en_kv_need(&c->kv, seq_id, length, n_tokens) > c->kv.n_free) return EN_NO_CELLS;
    en_kv_extend(&c->kv, seq_id, n_tokens);
    for (int i = 0; i < (int)blocks_of(n_tokens); i++)
        memcpy(en_kv_block(&c->kv, seq_id, first + i), (const uint8_t *)state + i * c->kv.block_bytes, c->kv.block_bytes);
    return EN_OK;
}

int en_seq_load(en_context *c, int seq_id, int n_tokens, const void *state, uint64_t n_bytes) {
    if (!is_seq(c, seq_id) || c->kv.lengths[seq_id] != 0) return EN_BAD_SEQ;
    return en_seq_append(c, seq_id, n_tokens, state, n_bytes);
}
