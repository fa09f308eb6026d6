/* The weights: checked against the configuration, then packed into one mapping. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int en_abi(void) { return EN_ABI; }

const char *en_layout(void) { return EN_LAYOUT; }

static const char *const layer_names[EN_PER_LAYER] = {
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
};

typedef struct loader {
    const en_config *config;
    const en_tensor *tensors;
    char *error;
    size_t error_size;
} loader;

/* Whether a tensor has the shape, a type the kernels know and as many bytes as that takes. */
static int check(const loader *l, int index, const char *name, int layer, int64_t n_cols, int64_t n_rows, int is_norm) {
    const en_tensor *t = &l->tensors[index];
    int cols, bytes;
    const char *problem = NULL;
    if (!t->data) problem = "is missing";
    else if (!en_type_layout(t->type, &cols, &bytes)) problem = "has a type without kernels";
    else if (is_norm && t->type != EN_F32) problem = "is not F32";
    else if (t->n_cols != n_cols || t->n_rows != n_rows) problem = "has another shape than the configuration says";
    else if (t->n_cols % cols) problem = "has rows that are no whole number of blocks";
    else if (t->n_bytes != (uint64_t)(n_cols / cols) * (uint64_t)bytes * (uint64_t)n_rows) problem = "has too few or too many bytes";
    if (problem) snprintf(l->error, l->error_size, "%s (layer %d) %s", name, layer, problem);
    return problem == NULL;
}

static int check_all(const loader *l) {
    const en_config *c = l->config;
    int64_t q_dim = (int64_t)c->n_heads * c->head_dim, kv_dim = (int64_t)c->n_kv_heads * c->head_dim;
    const int64_t cols[EN_PER_LAYER] = {c->n_embd, c->n_embd, c->n_embd, c->n_embd, q_dim, c->n_embd, c->n_embd, c->n_embd, c->n_ff};
    const int64_t rows[EN_PER_LAYER] = {1, q_dim, kv_dim, kv_dim, c->n_embd, 1, c->n_ff, c->n_ff, c->n_embd};
    if (!check(l, EN_TOKEN_EMBD, "token_embd", -1, c->n_embd, c->n_vocab, 0)) return 0;
    if (!check(l, EN_OUTPUT_NORM, "output_norm", -1, c->n_embd, 1, 1)) return 0;
    if (l->tensors[EN_OUTPUT].data && !check(l, EN_OUTPUT, "output", -1, c->n_embd, c->n_vocab, 0)) return 0;
    for (int i = 0; i < c->n_layers; i++)
        for (int j = 0; j < EN_PER_LAYER; j++)
            if (!check(l, EN_FIRST_LAYER + i * EN_PER_LAYER + j, layer_names[j], i, cols[j], rows[j],
                       j == EN_ATTN_NORM || j == EN_FFN_NORM))
                return 0;
    return 1;
}

static const char *unfit(const en_config *c) {
    if (c->n_layers < 1 || c->n_layers > 4096 || c->n_embd < 32 || c->n_embd > 1 << 20 || c->n_ff < 32 || c->n_ff > 1 << 22)
        return "a dimension is out of range";
    if (c->n_heads < 1 || c->n_kv_heads < 1 || c->n_heads % c->n_kv_heads || c->n_heads / c->n_kv_heads > EN_MAX_QUERIES)
        return "the heads do not divide into groups the kernels can take";
    if (c->n_embd % 32 || c->n_ff % 32) return "embedding or feed-forward length is no multiple of 32";
    if (c->head_dim < 16 || c->head_dim % 16 || c->head_dim > EN_MAX_HEAD_DIM) return "the head dimension is no multiple of 16 up to 512";
    if ((c->n_heads * c->head_dim) % 32) return "the attention's width is no multiple of 32";
    if (c->n_rot < 2 || c->n_rot % 2 || c->n_rot > c->head_dim) return "the rotary dimension does not fit the head";
    if (c->n_vocab < 1) return "the vocabulary is empty";
    return NULL;
}

/* Where the next tensor goes; pack says whether to put it there or only to count. */
typedef struct arena {
    uint8_t *start;
    size_t n_bytes;
    int packs;
} arena;

static void *take(arena *a, size_t n_bytes) {
    void *at = a->start + a->n_bytes;
    a->n_bytes += n_bytes;
    return at;
}

static en_matrix matrix_at(arena *a, const en_isa *isa, const en_tensor *tensor) {
    void *tiles = take(a, en_packed_bytes(tensor));
    if (a->packs) en_pack(tensor, tiles);
    return en_matrix_of(isa, tensor, tiles);
}

static const float *norm_at(arena *a, const en_tensor *tensor) {
    size_t n_bytes = (size_t)tensor->n_cols * sizeof(float);
    float *at = take(a, (n_bytes + 63) / 64 * 64);
    if (a->packs) memcpy(at, tensor->data, n_bytes);
    return at;
}

/* The one order of all that is packed. */
static void lay_out(en_model *model, const en_tensor *tensors, arena *a) {
    const en_isa *isa = model->isa;
    for (int i = 0; i < model->config.n_layers; i++) {
        const en_tensor *t = tensors + EN_FIRST_LAYER + i * EN_PER_LAYER;
        model->layers[i] = (en_layer){
            .attn_norm = norm_at(a, &t[EN_ATTN_NORM]),
            .ffn_norm = norm_at(a, &t[EN_FFN_NORM]),
            .q = matrix_at(a, isa, &t[EN_ATTN_Q]),
            .k = matrix_at(a, isa, &t[EN_ATTN_K]),
            .v = matrix_at(a, isa, &t[EN_ATTN_V]),
            .out = matrix_at(a, isa, &t[EN_ATTN_OUT]),
            .gate = matrix_at(a, isa, &t[EN_FFN_GATE]),
            .up = matrix_at(a, isa, &t[EN_FFN_UP]),
            .down = matrix_at(a, isa, &t[EN_FFN_DOWN]),
        };
    }
    model->output_norm = norm_at(a, &tensors[EN_OUTPUT_NORM]);
    model->output = matrix_at(a, isa, &tensors[tensors[EN_OUTPUT].data ? EN_OUTPUT : EN_TOKEN_EMBD]);
}

/* A model whose layers point into no memory yet. */
static en_model *plan(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, char *error, size_t error_size) {
    loader l = {config, tensors, error, error_size};
    const char *problem = unfit(config);
    if (!problem && n_tensors != EN_FIRST_LAYER + config->n_layers * EN_PER_LAYER) problem = "the number of tensors is wrong";
    const en_isa *chosen = isa < 0 ? en_isa_best() : en_isa_at(isa);
    if (!problem && (!chosen || !chosen->usable())) problem = "this CPU lacks the instruction set";
    if (problem) {
        snprintf(error, error_size, "%s", problem);
        return NULL;
    }
    if (!check_all(&l)) return NULL;
    en_model *model = calloc(1, sizeof *model);
    en_layer *layers = calloc((size_t)config->n_layers, sizeof *layers);
    if (!model || !layers) {
        snprintf(error, error_size, "no memory for %d layers", config->n_layers);
        free(layers);
        free(model);
        return NULL;
    }
    *model = (en_model){.config = *config, .isa = chosen, .token_embd = tensors[EN_TOKEN_EMBD], .layers = layers};
    arena counting = {.start = NULL};
    lay_out(model, tensors, &counting);
    model->arena_bytes = counting.n_bytes;
    return model;
}

int64_t en_pack_model(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, void *memory, char *error,
                      size_t error_size) {
    en_model *model = plan(config, tensors, n_tensors, isa, error, error_size);
    if (!model) return -1;
    int64_t n_bytes = (int64_t)model->arena_bytes;
    arena a = {.start = memory, .packs = 1};
    if (memory) lay_out(model, tensors, &a);
    en_model_free(model);
    return n_bytes;
}

en_model *en_model_new(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, const void *packed,
                       uint64_t packed_bytes, char *error, size_t error_size) {
    en_model *model = plan(config, tensors, n_tensors, isa, error, error_size);
    if (!model) return NULL;
    /* What is packed is only read. */
    arena a = {.start = (uint8_t *)(uintptr_t)packed, .packs = !packed};
    if (packed && packed_bytes != model->arena_bytes) {
        snprintf(error, error_size, "packed weights have %llu bytes, %zu are needed", (unsigned long long)packed_bytes,
                 model->arena_bytes);
    } else if (!packed) {
        void *own = mmap(NULL, model->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (own == MAP_FAILED) {
            snprintf(error, error_size, "no memory for %zu bytes of packed weights", model->arena_bytes);
        } else {
            madvise(own, model->arena_bytes, MADV_HUGEPAGE);
            model->arena = a.start = own;
        }
    }
    if (!a.start || (packed && packed_bytes != model->arena_bytes)) {
        en_model_free(model);
        return NULL;
    }
    lay_out(model, tensors, &a);
    if (model->arena) mprotect(model->arena, model->arena_bytes, PROT_READ);
    return model;
}

void en_model_free(en_model *model) {
    if (!model) return;
    if (model->arena) munmap(model->arena, model->arena_bytes);
    free(model->layers);
    free(model);
}

uint64_t en_model_bytes(const en_model *model) { return model->arena_bytes; }

const char *en_model_isa(const en_model *model) { return model->isa->name; }
