/* Paged KV: one pool of blocks of 32 tokens, tables of blocks for the sequences, copies only on write. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int en_kv_init(en_kv *kv, const en_model *model, int type, int n_ctx, int n_seqs) {
    int n_layers = model->config.n_layers, n_heads = 0;
    *kv = (en_kv){.type = type, .n_seqs = n_seqs};
    kv->first_heads = malloc(sizeof(int32_t) * n_layers);
    for (int i = 0; i < n_layers && kv->first_heads; i++) {
        kv->first_heads[i] = n_heads;
        n_heads += model->layers[i].config.n_kv_heads;
    }
    kv->n_blocks = kv->n_free = kv->max_blocks = (n_ctx + EN_KV_BLOCK - 1) / EN_KV_BLOCK;
    kv->head_bytes = en_kv_head_bytes(type, model->config.head_dim);
    kv->block_bytes = kv->head_bytes * n_heads;
    kv->memory_bytes = kv->block_bytes * kv->n_blocks;
    kv->free_blocks = malloc(sizeof(int32_t) * kv->n_blocks);
    kv->n_refs = calloc(kv->n_blocks, sizeof(int32_t));
    kv->lengths = calloc(n_seqs, sizeof(int32_t));
    kv->tables = calloc((size_t)n_seqs * kv->max_blocks, sizeof(int32_t));
    /* Pages that no token has reached take no memory. */
    void *memory = mmap(NULL, kv->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    kv->memory = memory == MAP_FAILED ? NULL : memory;
    if (!kv->first_heads || !kv->free_blocks || !kv->n_refs || !kv->lengths || !kv->tables || !kv->memory) return EN_NO_MEMORY;
    for (int i = 0; i < kv->n_blocks; i++) kv->free_blocks[i] = kv->n_blocks - 1 - i; /* the first is taken first */
    return EN_OK;
}

void en_kv_drop(en_kv *kv) {
    if (kv->memory) munmap(kv->memory, kv->memory_bytes);
    free(kv->first_heads);
    free(kv->free_blocks);
    free(kv->n_refs);
    free(kv->lengths);
    free(kv->tables);
}

static int n_blocks_of(int n_tokens) { return (n_tokens + EN_KV_BLOCK - 1) / EN_KV_BLOCK; }

static int32_t *table_of(const en_kv *kv, int seq) { return kv->tables + (size_t)seq * kv->max_blocks; }

static void release(en_kv *kv, int32_t block) {
    if (--kv->n_refs[block] == 0) kv->free_blocks[kv->n_free++] = block;
}

static int32_t take(en_kv *kv) {
    int32_t block = kv->free_blocks[--kv->n_free];
    kv->n_refs[block] = 1;
    return block;
}

int en_kv_need(const en_kv *kv, int seq, int length, int n) {
    int need = n_blocks_of(length + n) - n_blocks_of(length);
    if (n > 0 && length == kv->lengths[seq] && length % EN_KV_BLOCK != 0 &&
        kv->n_refs[table_of(kv, seq)[length / EN_KV_BLOCK]] > 1)
        need++;
    return need;
}

void en_kv_extend(en_kv *kv, int seq, int n) {
    int32_t *table = table_of(kv, seq);
    int length = kv->lengths[seq], last = length / EN_KV_BLOCK;
    if (n > 0 && length % EN_KV_BLOCK != 0 && kv->n_refs[table[last]] > 1) {
        int32_t own = take(kv);
        memcpy(kv->memory + own * kv->block_bytes, kv->memory + table[last] * kv->block_bytes, kv->block_bytes);
        release(kv, table[last]);
        table[last] = own;
    }
    for (int i = n_blocks_of(length); i < n_blocks_of(length + n); i++) table[i] = take(kv);
    kv->lengths[seq] += n;
}

void en_kv_trim(en_kv *kv, int seq, int n_tokens) {
    if (n_tokens >= kv->lengths[seq]) return;
    for (int i = n_blocks_of(n_tokens); i < n_blocks_of(kv->lengths[seq]); i++) release(kv, table_of(kv, seq)[i]);
    kv->lengths[seq] = n_tokens;
}

void en_kv_share(en_kv *kv, int src, int dst, int n_tokens) {
    for (int i = 0; i < n_blocks_of(n_tokens); i++) {
        int32_t block = table_of(kv, src)[i];
        table_of(kv, dst)[i] = block;
        kv->n_refs[block]++;
    }
    kv->lengths[dst] = n_tokens;
}

void *en_kv_block(const en_kv *kv, int seq, int block) {
    return kv->memory + (size_t)table_of(kv, seq)[block] * kv->block_bytes;
}

void *en_kv_head(const en_kv *kv, int seq, int block, int layer, int head) {
    return (uint8_t *)en_kv_block(kv, seq, block) + (size_t)(kv->first_heads[layer] + head) * kv->head_bytes;
}
