/* The weights: checked against the configuration, then packed into one mapping. */
#include "engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int en_abi(void) { return EN_ABI; }

const char *en_layout(void) { return EN_LAYOUT; }

/* -- what the configuration asks for -------------------------------------------------------------------------------- */

static const char *const layer_names[EN_PER_LAYER] = {
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    "attn_q_norm", "attn_k_norm", "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "ffn_gate.bias",
    "ffn_up.bias", "ffn_down.bias",
};

enum { ABSENT, OPTIONAL, NEEDED };

typedef struct shape {
    int64_t n_cols, n_rows; /* n_rows 0: floats that are no matrix, n_cols of them */
    int need;
} shape;

static shape matrix(int64_t n_cols, int64_t n_rows, int is_there) { return (shape){n_cols, n_rows, is_there ? NEEDED : ABSENT}; }

static shape vector(int64_t n, int need) { return (shape){n, 0, need}; }

static void layer_shapes(const en_config *c, const en_layer_config *w, shape *to) {
    int64_t n_embd = c->n_embd, q_dim = (int64_t)w->n_heads * c->head_dim, kv_dim = (int64_t)w->n_kv_heads * c->head_dim;
    int mixes = w->n_heads > 0, attends = w->n_kv_heads > 0, feeds = w->n_ff > 0;
    int attention_bias = attends ? OPTIONAL : ABSENT, feed_bias = feeds ? OPTIONAL : ABSENT;
    to[EN_ATTN_NORM] = vector(n_embd, mixes ? NEEDED : ABSENT);
    to[EN_ATTN_Q] = matrix(n_embd, q_dim, attends);
    to[EN_ATTN_K] = to[EN_ATTN_V] = matrix(n_embd, kv_dim, attends);
    to[EN_ATTN_OUT] = matrix(attends ? q_dim : n_embd, n_embd, mixes);
    to[EN_ATTN_Q_NORM] = to[EN_ATTN_K_NORM] = vector(c->head_dim, attention_bias);
    to[EN_ATTN_Q_BIAS] = vector(q_dim, attention_bias);
    to[EN_ATTN_K_BIAS] = to[EN_ATTN_V_BIAS] = vector(kv_dim, attention_bias);
    to[EN_ATTN_OUT_BIAS] = vector(n_embd, attention_bias);
    to[EN_FFN_NORM] = vector(n_embd, feeds ? NEEDED : ABSENT);
    to[EN_FFN_GATE] = to[EN_FFN_UP] = matrix(n_embd, w->n_ff, feeds);
    to[EN_FFN_DOWN] = matrix(w->n_ff, n_embd, feeds);
    to[EN_FFN_GATE_BIAS] = to[EN_FFN_UP_BIAS] = vector(w->n_ff, feed_bias);
    to[EN_FFN_DOWN_BIAS] = vector(n_embd, feed_bias);
}

/* -- checks --------------------------------------------------------------------------------------------------------- */

typedef struct loader {
    const en_config *config;
    const en_tensor *tensors;
    char *error;
    size_t error_size;
} loader;

/* Whether a tensor has the shape, a type the kernels know and as many bytes as that takes. */
static int check(const loader *l, int index, const char *name, int layer, shape wanted) {
    const en_tensor *t = &l->tensors[index];
    int cols = 1, bytes = 0;
    int64_t n_rows = wanted.n_rows > 0 ? wanted.n_rows : 1;
    const char *problem = NULL;
    if (!t->data && wanted.need != NEEDED) return 1;
    if (!t->data) problem = "is missing";
    else if (wanted.need == ABSENT) problem = "has no place in such a layer";
    else if (!en_type_layout(t->type, &cols, &bytes)) problem = "has a type without kernels";
    else if (wanted.n_rows == 0 && t->type != EN_F32) problem = "is not F32";
    else if (t->n_cols != wanted.n_cols || t->n_rows != n_rows) problem = "has another shape than the configuration says";
    else if (t->n_cols % cols) problem = "has rows that are no whole number of blocks";
    else if (t->n_bytes != (uint64_t)(t->n_cols / cols) * (uint64_t)bytes * (uint64_t)n_rows) problem = "has too few or too many bytes";
    if (problem && layer < 0) snprintf(l->error, l->error_size, "%s %s", name, problem);
    else if (problem) snprintf(l->error, l->error_size, "%s (layer %d) %s", name, layer, problem);
    return problem == NULL;
}

static int check_all(const loader *l) {
    const en_config *c = l->config;
    shape vocabulary = matrix(c->n_embd, c->n_vocab, 1);
    if (!check(l, EN_TOKEN_EMBD, "token_embd", -1, vocabulary)) return 0;
    if (!check(l, EN_OUTPUT_NORM, "output_norm", -1, vector(c->n_embd, NEEDED))) return 0;
    vocabulary.need = OPTIONAL;
    if (!check(l, EN_OUTPUT, "output", -1, vocabulary)) return 0;
    if (!check(l, EN_OUTPUT_BIAS, "output.bias", -1, vector(c->n_vocab, OPTIONAL))) return 0;
    for (int i = 0; i < c->n_layers; i++) {
        shape shapes[EN_PER_LAYER];
        layer_shapes(c, &c->layers[i], shapes);
        for (int j = 0; j < EN_PER_LAYER; j++)
            if (!check(l, EN_FIRST_LAYER + i * EN_PER_LAYER + j, layer_names[j], i, shapes[j])) return 0;
    }
    return 1;
}

static const char *unfit_layer(const en_config *c, const en_layer_config *w) {
    if (w->n_ff < 0 || w->n_ff > 1 << 22 || w->window < 0) return "a dimension is out of range";
    if (w->n_ff % 32) return "the feed-forward length is no multiple of 32";
    if (w->n_heads < 0 || w->n_heads > 1 << 16 || w->n_kv_heads < 0) return "the number of heads is out of range";
    if (w->n_kv_heads == 0) return NULL;
    if (w->n_heads < 1 || w->n_heads % w->n_kv_heads || w->n_heads / w->n_kv_heads > EN_MAX_QUERIES)
        return "the heads do not divide into groups the kernels can take";
    if ((w->n_heads * c->head_dim) % 32) return "the attention's width is no multiple of 32";
    return NULL;
}

static const char *unfit(const en_config *c) {
    int attends = 0;
    if (c->n_layers < 1 || c->n_layers > 4096 || c->n_embd < 32 || c->n_embd > 1 << 20) return "a dimension is out of range";
    if (c->n_embd % 32) return "the embedding length is no multiple of 32";
    if (c->head_dim < 16 || c->head_dim % 16 || c->head_dim > EN_MAX_HEAD_DIM) return "the head dimension is no multiple of 16 up to 512";
    if (c->n_rot < 2 || c->n_rot % 2 || c->n_rot > c->head_dim) return "the rotary dimension does not fit the head";
    if (c->n_vocab < 1) return "the vocabulary is empty";
    if (c->temperature_scale != 0.0f && c->temperature_length < 1) return "the temperature's length is out of range";
    for (int i = 0; i < c->n_rot / 2; i++)
        if (!isfinite(c->frequencies[i])) return "a frequency of RoPE is not finite";
    for (int i = 0; i < c->n_layers; i++) {
        const char *problem = unfit_layer(c, &c->layers[i]);
        if (problem) return problem;
        attends |= c->layers[i].n_kv_heads;
    }
    return attends ? NULL : "no layer has attention";
}

/* -- packing -------------------------------------------------------------------------------------------------------- */

/* Where the next tensor goes; pack says whether to put it there or only to count. Matrices of an external model go nowhere. */
typedef struct arena {
    uint8_t *start;
    size_t n_bytes;
    int packs, is_external;
} arena;

static void *take(arena *a, size_t n_bytes) {
    void *at = a->start ? a->start + a->n_bytes : NULL;
    a->n_bytes += n_bytes;
    return at;
}

static const float *floats_at(arena *a, const en_tensor *tensor) {
    if (!tensor->data) return NULL;
    size_t n_bytes = (size_t)tensor->n_cols * sizeof(float);
    float *at = take(a, (n_bytes + 63) / 64 * 64);
    if (a->packs) memcpy(at, tensor->data, n_bytes);
    return at;
}

static en_matrix matrix_at(arena *a, const en_isa *isa, const en_tensor *tensor, const en_tensor *bias) {
    if (!tensor->data) return (en_matrix){0};
    if (a->is_external)
        return (en_matrix){.n_rows = (int)tensor->n_rows, .n_cols = (int)tensor->n_cols, .type = tensor->type, .bias = floats_at(a, bias)};
    void *tiles = take(a, en_packed_bytes(tensor));
    if (a->packs) en_pack(tensor, tiles);
    en_matrix matrix = en_matrix_of(isa, tensor, tiles);
    matrix.bias = floats_at(a, bias);
    return matrix;
}

/* The one order of all that is packed. */
static void lay_out(en_model *model, const en_tensor *tensors, arena *a) {
    const en_isa *isa = model->isa;
    for (int i = 0; i < model->config.n_layers; i++) {
        const en_tensor *t = tensors + EN_FIRST_LAYER + i * EN_PER_LAYER;
        en_layer *to = &model->layers[i];
        to->attn_norm = floats_at(a, &t[EN_ATTN_NORM]);
        to->ffn_norm = floats_at(a, &t[EN_FFN_NORM]);
        to->q_norm = floats_at(a, &t[EN_ATTN_Q_NORM]);
        to->k_norm = floats_at(a, &t[EN_ATTN_K_NORM]);
        to->q = matrix_at(a, isa, &t[EN_ATTN_Q], &t[EN_ATTN_Q_BIAS]);
        to->k = matrix_at(a, isa, &t[EN_ATTN_K], &t[EN_ATTN_K_BIAS]);
        to->v = matrix_at(a, isa, &t[EN_ATTN_V], &t[EN_ATTN_V_BIAS]);
        to->out = matrix_at(a, isa, &t[EN_ATTN_OUT], &t[EN_ATTN_OUT_BIAS]);
        to->gate = matrix_at(a, isa, &t[EN_FFN_GATE], &t[EN_FFN_GATE_BIAS]);
        to->up = matrix_at(a, isa, &t[EN_FFN_UP], &t[EN_FFN_UP_BIAS]);
        to->down = matrix_at(a, isa, &t[EN_FFN_DOWN], &t[EN_FFN_DOWN_BIAS]);
    }
    model->output_norm = floats_at(a, &tensors[EN_OUTPUT_NORM]);
    model->output = matrix_at(a, isa, &tensors[tensors[EN_OUTPUT].data ? EN_OUTPUT : EN_TOKEN_EMBD], &tensors[EN_OUTPUT_BIAS]);
}

/* A model whose layers point into no memory yet. */
static en_model *plan(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, int is_external, char *error,
                      size_t error_size) {
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
    size_t n_pairs = (size_t)config->n_rot / 2;
    double *frequencies = malloc(n_pairs * sizeof *frequencies);
    if (!model || !layers || !frequencies) {
        snprintf(error, error_size, "no memory for %d layers", config->n_layers);
        free(frequencies);
        free(layers);
        free(model);
        return NULL;
    }
    *model = (en_model){.config = *config, .isa = chosen, .is_external = is_external, .layers = layers, .frequencies = frequencies};
    if (tensors[EN_OUTPUT].data || is_external) model->token_embd = tensors[EN_TOKEN_EMBD];
    memcpy(frequencies, config->frequencies, n_pairs * sizeof *frequencies);
    for (int i = 0; i < config->n_layers; i++) layers[i].config = config->layers[i];
    model->config.layers = NULL; /* the caller's */
    model->config.frequencies = frequencies;
    arena counting = {.start = NULL, .is_external = is_external};
    lay_out(model, tensors, &counting);
    model->arena_bytes = counting.n_bytes;
    return model;
}

int64_t en_pack_model(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, void *memory, char *error,
                      size_t error_size) {
    en_model *model = plan(config, tensors, n_tensors, isa, 0, error, error_size);
    if (!model) return -1;
    int64_t n_bytes = (int64_t)model->arena_bytes;
    arena a = {.start = memory, .packs = 1};
    if (memory) lay_out(model, tensors, &a);
    en_model_free(model);
    return n_bytes;
}

static en_model *open_model(en_model *model, const en_tensor *tensors, const void *packed, uint64_t packed_bytes, char *error,
                            size_t error_size) {
    if (!model) return NULL;
    /* What is packed is only read. */
    arena a = {.start = (uint8_t *)(uintptr_t)packed, .packs = !packed, .is_external = model->is_external};
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

en_model *en_model_new(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, const void *packed,
                       uint64_t packed_bytes, char *error, size_t error_size) {
    en_model *model = plan(config, tensors, n_tensors, isa, 0, error, error_size);
    return open_model(model, tensors, packed, packed_bytes, error, error_size);
}

en_model *en_model_external(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, char *error,
                            size_t error_size) {
    en_model *model = plan(config, tensors, n_tensors, isa, 1, error, error_size);
    return open_model(model, tensors, NULL, 0, error, error_size);
}

void en_model_free(en_model *model) {
    if (!model) return;
    if (model->arena) munmap(model->arena, model->arena_bytes);
    free(model->frequencies);
    free(model->layers);
    free(model);
}

uint64_t en_model_bytes(const en_model *model) { return model->arena_bytes; }

const char *en_model_isa(const en_model *model) { return model->isa->name; }
