/* Memory and threads of a context. */
#include "context.h"

#include <stdio.h>
#include <stdlib.h>

/* So many rows of the longest sequence can be split among threads at once. */
enum { SPLIT_ROWS = 16 };

static size_t aligned(size_t n) { return (n + 63) / 64 * 64; }

static void *cut(uint8_t **next, size_t n_bytes) {
    uint8_t *at = *next;
    *next = (uint8_t *)((uintptr_t)at + aligned(n_bytes)); /* from NULL it only counts */
    return at;
}

static int max_width(const en_context *c) {
    int width = c->model->config.n_embd;
    width = c->max_q_dim > width ? c->max_q_dim : width;
    return c->max_ff > width ? c->max_ff : width;
}

static void find_widths(en_context *c) {
    int head_dim = c->model->config.head_dim;
    for (int i = 0; i < c->model->config.n_layers; i++) {
        const en_layer_config *w = &c->model->layers[i].config;
        int q_dim = w->n_kv_heads > 0 ? w->n_heads * head_dim : 0, qkv_dim = q_dim + 2 * w->n_kv_heads * head_dim;
        c->max_q_dim = q_dim > c->max_q_dim ? q_dim : c->max_q_dim;
        c->max_qkv_dim = qkv_dim > c->max_qkv_dim ? qkv_dim : c->max_qkv_dim;
        c->max_ff = w->n_ff > c->max_ff ? w->n_ff : c->max_ff;
    }
}

static size_t max_products(const en_context *c) {
    size_t width = c->model->config.n_embd, wide = 2 * (size_t)c->max_ff;
    width = (size_t)c->max_qkv_dim > width ? (size_t)c->max_qkv_dim : width;
    return wide > width ? wide : width;
}

/* Lay the scratch out; with next NULL only count. */
static size_t lay_out(en_context *c, uint8_t *memory) {
    const en_config *g = &c->model->config;
    size_t n = (size_t)c->n_ubatch, width = (size_t)max_width(c);
    uint8_t *next = memory;
    c->places = cut(&next, n * sizeof *c->places);
    c->tasks = cut(&next, (n + c->max_slots) * sizeof *c->tasks);
    c->slots = cut(&next, n * sizeof *c->slots);
    c->parts = cut(&next, (size_t)c->max_slots * (c->max_q_dim / g->head_dim) * (g->head_dim + 2) * sizeof(float));
    c->x = cut(&next, n * g->n_embd * sizeof(float));
    c->qkv = cut(&next, n * c->max_qkv_dim * sizeof(float));
    c->attended = cut(&next, n * c->max_q_dim * sizeof(float));
    c->gate = cut(&next, n * c->max_ff * sizeof(float));
    c->up = cut(&next, n * c->max_ff * sizeof(float));
    c->turns = cut(&next, n * g->n_rot * sizeof(float));
    c->normed = cut(&next, n * g->n_embd * sizeof(float));
    c->products = cut(&next, c->model->is_external ? n * max_products(c) * sizeof(float) : 0);
    c->q8 = cut(&next, n * width);
    c->q8_d = cut(&next, n * width / EN_BLOCK * sizeof(float));
    c->q8_ds = cut(&next, n * width / EN_BLOCK * sizeof(float));
    c->q8_sums = cut(&next, n * width / EN_BLOCK * sizeof(int32_t));
    c->q8_half_sums = cut(&next, n * width / EN_BLOCK * 2 * sizeof(int16_t));
    return (size_t)((uintptr_t)next - (uintptr_t)memory);
}

static int lay_out_threads(en_context *c, int n_threads) {
    size_t head = (size_t)c->model->config.head_dim;
    size_t kernel = EN_SCRATCH_BYTES, attend = EN_ATTEND_FLOATS * sizeof(float);
    size_t block = EN_KV_BLOCK * head * sizeof(float), queries = EN_TASK_QUERIES * head * sizeof(float);
    size_t partial = aligned((size_t)c->n_ubatch * EN_TILE * sizeof(float));
    size_t each = kernel + attend + 4 * block + 3 * queries + partial;
    uint8_t *memory = aligned_alloc(64, each * n_threads);
    if (!memory) return EN_NO_MEMORY;
    free(c->thread_block);
    c->thread_block = memory;
    for (int i = 0; i < n_threads; i++) {
        uint8_t *next = memory + each * i;
        c->threads[i].kernel = cut(&next, kernel);
        c->threads[i].attend = cut(&next, attend);
        c->threads[i].k = cut(&next, block);
        c->threads[i].v = cut(&next, block);
        c->threads[i].k_cut = cut(&next, block);
        c->threads[i].v_cut = cut(&next, block);
        c->threads[i].q = cut(&next, queries);
        c->threads[i].out = cut(&next, queries);
        c->threads[i].sum = cut(&next, queries);
        c->threads[i].partial = cut(&next, partial);
    }
    return EN_OK;
}

en_context *en_context_new(const en_model *model, int n_ctx, int n_seq_max, int n_ubatch, int n_threads, int kv_type,
                           char *error, size_t error_size) {
    if (n_ctx < 1 || n_ctx > 1 << 24 || n_seq_max < 1 || n_seq_max > 1 << 16 || n_ubatch < 1 || n_ubatch > 1 << 16) {
        snprintf(error, error_size, "a context of %d tokens, %d sequences, %d rows at once: at most 2^24, 2^16 and 2^16 are possible",
                 n_ctx, n_seq_max, n_ubatch);
        return NULL;
    }
    if (kv_type != EN_F16 && kv_type != EN_Q8_0) {
        snprintf(error, error_size, "KV is kept as F16 or Q8_0, not as type %d", kv_type);
        return NULL;
    }
    en_context *c = calloc(1, sizeof *c);
    if (!c) {
        snprintf(error, error_size, "no memory for the context");
        return NULL;
    }
    c->model = model;
    c->n_ctx = n_ctx;
    c->n_ubatch = n_ubatch;
    c->max_slots = en_max_parts(n_ctx) > 1 ? SPLIT_ROWS * en_max_parts(n_ctx) : 0;
    find_widths(c);
    size_t n_bytes = lay_out(c, NULL);
    c->memory = aligned_alloc(64, aligned(n_bytes));
    if (c->memory) lay_out(c, c->memory);
    int failed = !c->memory || en_kv_init(&c->kv, model, kv_type, n_ctx, n_seq_max) != EN_OK ||
                 en_set_threads(c, n_threads) != EN_OK;
    if (failed) {
        snprintf(error, error_size, "no memory or no threads for the context");
        en_context_free(c);
        return NULL;
    }
    return c;
}

void en_context_free(en_context *context) {
    if (!context) return;
    en_pool_free(context->pool);
    en_kv_drop(&context->kv);
    en_states_drop(&context->states);
    en_draft_drop(context->draft);
    free(context->memory);
    free(context->thread_block);
    free(context);
}

void en_set_linear(en_context *c, en_linear_fn *linear, void *user) {
    c->linear = linear;
    c->linear_user = user;
}

int en_set_threads(en_context *c, int n_threads) {
    if (c->pool && en_pool_threads(c->pool) == n_threads) return EN_OK;
    en_pool *pool = en_pool_new(n_threads);
    if (pool && c->is_pinned && !en_pool_pin(pool, &c->cpus)) {
        en_pool_free(pool);
        return EN_BAD_CPUS;
    }
    if (!pool || lay_out_threads(c, n_threads) != EN_OK) {
        en_pool_free(pool);
        return EN_NO_MEMORY;
    }
    en_pool_free(c->pool);
    c->pool = pool;
    return EN_OK;
}
