/* libFuzzer target: `make fuzz`. A small sound model, of which the input changes a configuration, tensors, packed bytes and
 * then rows and sequences. Whatever they are: an error, or answers; no read or write outside what was given. */
#include "edge_native.h"

#include <stdlib.h>
#include <string.h>

enum { N_LAYERS = 2, N_TENSORS = EN_FIRST_LAYER + N_LAYERS * EN_PER_LAYER, MAX_ROWS = 4, MAX_IDS = 40 };

typedef struct input {
    const uint8_t *at;
    size_t n_left;
} input;

static uint32_t take(input *in, int n_bytes) {
    uint32_t value = 0;
    for (int i = 0; i < n_bytes && in->n_left > 0; i++, in->n_left--) value = value << 8 | *in->at++;
    return value;
}

static const int32_t types[] = {EN_F32, EN_F16, EN_Q4_0, EN_Q4_1, EN_Q5_0, EN_Q5_1, EN_Q8_0, EN_Q4_K, EN_Q5_K, EN_Q6_K};
static const int32_t type_bytes[] = {4, 2, 18, 20, 22, 24, 34, 144, 176, 210}, type_cols[] = {1, 1, 32, 32, 32, 32, 32, 256, 256, 256};
enum { N_TYPES = 10, FIRST_K = 7, Q8_0 = 6 };

/* As many bytes as the shape says, allocated for themselves, so that one read too far is seen. */
static en_tensor tensor(input *in, int64_t n_cols, int64_t n_rows, int which) {
    if (which >= FIRST_K && n_cols % type_cols[which]) which = Q8_0;
    uint64_t n_bytes = (uint64_t)n_cols / type_cols[which] * type_bytes[which] * n_rows;
    uint8_t *data = malloc(n_bytes), seed = (uint8_t)take(in, 1);
    for (uint64_t i = 0; i < n_bytes; i++) data[i] = (uint8_t)(seed * (i + 1) >> 3) & 0x3f;
    return (en_tensor){data, n_bytes, n_cols, n_rows, types[which], 0};
}

static void fill(input *in, en_config *g, en_tensor *t) {
    int which = (int)(take(in, 1) % N_TYPES);
    if (which >= FIRST_K) g->n_embd = 256; /* rows that its blocks fit into */
    t[EN_TOKEN_EMBD] = tensor(in, g->n_embd, g->n_vocab, which);
    t[EN_OUTPUT_NORM] = tensor(in, g->n_embd, 1, 0);
    for (int i = 0; i < N_LAYERS; i++) {
        en_tensor *l = t + EN_FIRST_LAYER + i * EN_PER_LAYER;
        int q_dim = g->layers[i].n_heads * g->head_dim, kv_dim = g->layers[i].n_kv_heads * g->head_dim, n_ff = g->layers[i].n_ff;
        l[EN_ATTN_NORM] = tensor(in, g->n_embd, 1, 0);
        l[EN_FFN_NORM] = tensor(in, g->n_embd, 1, 0);
        l[EN_ATTN_Q] = tensor(in, g->n_embd, q_dim, which);
        l[EN_ATTN_K] = tensor(in, g->n_embd, kv_dim, which);
        l[EN_ATTN_V] = tensor(in, g->n_embd, kv_dim, which);
        l[EN_ATTN_OUT] = tensor(in, q_dim, g->n_embd, which);
        l[EN_FFN_GATE] = tensor(in, g->n_embd, n_ff, which);
        l[EN_FFN_UP] = tensor(in, g->n_embd, n_ff, which);
        l[EN_FFN_DOWN] = tensor(in, n_ff, g->n_embd, which);
        if (take(in, 1) & 1) l[EN_ATTN_Q_NORM] = tensor(in, g->head_dim, 1, 0);
        if (take(in, 1) & 1) l[EN_ATTN_Q_BIAS] = tensor(in, q_dim, 1, 0);
        if (take(in, 1) & 1) l[EN_FFN_DOWN_BIAS] = tensor(in, g->n_embd, 1, 0);
    }
}

/* Change some words of the configuration and of tensors: all but pointers. */
static void spoil(input *in, en_config *g, en_layer_config *layers, en_tensor *t) {
    for (int n = (int)(take(in, 1) % 5); n > 0; n--) {
        uint32_t where = take(in, 2), value = take(in, 4);
        int32_t *words[] = {&g->n_layers, &g->n_embd, &g->head_dim, &g->n_vocab, &g->n_rot, &g->pairs_halves};
        en_tensor *some = &t[(where >> 4) % N_TENSORS];
        switch (where & 15) {
        case 0: *words[where >> 4 & 7 ? (where >> 4) % 6 : 0] = (int32_t)value; break;
        case 1: memcpy((uint8_t *)&layers[where >> 4 & 1] + (where >> 5) % 5 * 4, &value, 4); break;
        case 2: some->type = (int32_t)(value % 16); break;
        case 3: some->n_bytes = value; break;
        case 4: some->n_cols = (int64_t)(int32_t)value; break;
        case 5: some->n_rows = (int64_t)((uint64_t)value << (where >> 10 & 31)); break;
        case 6: free((void *)(uintptr_t)some->data), some->data = NULL; break;
        default: memcpy(&g->norm_eps, &value, 4);
        }
    }
}

/* A draft of any shape: refused, or loaded. */
static void draft(input *in, en_context *c, int n_embd) {
    char error[128];
    int n_ff = 32 * (int)(take(in, 1) % 4), which = (int)(take(in, 1) % N_TYPES), n_tokens = (int)(take(in, 1) % 3);
    int32_t vocabulary[2] = {(int32_t)(take(in, 1) % 32) - 1, (int32_t)(take(in, 1) % 32) - 1};
    en_tensor t[EN_N_DRAFT];
    for (int i = 0; i < EN_N_DRAFT; i++) {
        int is_wide = i == EN_DRAFT_FFN_GATE || i == EN_DRAFT_FFN_UP, n_cols = i == EN_DRAFT_FFN_DOWN && n_ff > 0 ? n_ff : n_embd;
        t[i] = tensor(in, n_cols, i < EN_DRAFT_STATE ? 1 : is_wide ? n_ff : i == EN_DRAFT_OUTPUT ? n_tokens : n_embd, i < EN_DRAFT_STATE ? 0 : which);
    }
    en_tensor *some = &t[take(in, 1) % EN_N_DRAFT];
    switch (take(in, 1) & 15) {
    case 0: some->n_cols = (int64_t)(int32_t)take(in, 4); break;
    case 1: some->n_rows = (int64_t)(int32_t)take(in, 4); break;
    case 2: some->n_bytes = take(in, 4); break;
    case 3: some->type = (int32_t)(take(in, 1) % 16); break;
    case 4: n_ff = (int)(int32_t)take(in, 4); break;
    }
    en_draft_load(c, t, n_ff, vocabulary, n_tokens, error, sizeof error);
    for (int i = 0; i < EN_N_DRAFT; i++) free((void *)(uintptr_t)t[i].data);
}

static void guess(input *in, en_context *c) {
    enum { N_MAX = 4 };
    en_asked asked[3];
    int32_t tokens[3 * N_MAX], n_guessed[3];
    float chances[3 * N_MAX];
    for (int i = 0; i < 3; i++)
        asked[i] = (en_asked){(int32_t)(take(in, 1) % 5) - 1, (int32_t)(take(in, 1) % 32) - 1, (int32_t)(take(in, 1) % 6) - 1,
                              (float)take(in, 1) / 256.0f};
    en_draft(c, asked, (int)(take(in, 1) % 4), N_MAX, tokens, chances, n_guessed);
}

static void steps(input *in, const en_model *model, int n_vocab, int n_embd) {
    char error[128];
    int kv_type = take(in, 1) & 1 ? EN_F16 : EN_Q8_0, n_ctx = (int)(take(in, 1) % 130), n_seqs = (int)(take(in, 1) % 4);
    en_context *c = en_context_new(model, n_ctx, n_seqs, (int)(take(in, 1) % 9), 1, kv_type, error, sizeof error);
    if (!c) return;
    float *logits = malloc(sizeof(float) * (size_t)n_vocab * MAX_ROWS * MAX_IDS);
    for (int n = 0; n < 12 && in->n_left > 0; n++) {
        int what = (int)(take(in, 1) % 7), seq = (int)(take(in, 1) % 6) - 1, other = (int)(take(in, 1) % 6) - 1;
        if (what == 0) en_seq_copy(c, seq, other, (int)take(in, 1) - 4);
        else if (what == 1) en_seq_trim(c, seq, (int)take(in, 1) - 4);
        else if (what == 5) draft(in, c, n_embd);
        else if (what == 6) guess(in, c);
        else if (what == 2) {
            uint64_t n_bytes = en_seq_bytes(c, seq);
            void *state = malloc(n_bytes + 1);
            if (en_seq_save(c, seq, state) == EN_OK) en_seq_load(c, other, (int)take(in, 1), state, n_bytes);
            free(state);
        } else {
            int32_t ids[MAX_ROWS][MAX_IDS];
            en_rows rows[MAX_ROWS];
            int n_rows = 1 + (int)(take(in, 1) % MAX_ROWS);
            for (int i = 0; i < n_rows; i++) {
                int32_t length = en_seq_length(c, seq + i);
                rows[i] = (en_rows){seq + i, (take(in, 1) & 7) ? length : (int32_t)take(in, 1), (int32_t)(take(in, 1) % MAX_IDS), (int32_t)(take(in, 1) % 3), ids[i]};
                for (int j = 0; j < MAX_IDS; j++) ids[i][j] = (int32_t)(take(in, 1) & 31) - (in->n_left & 63 ? 0 : 1);
            }
            en_decode(c, rows, n_rows, logits);
        }
    }
    for (int i = 0; i < n_seqs; i++) en_seq_trim(c, i, 0);
    if (en_free_blocks(c) != (n_ctx + 31) / 32) abort();
    free(logits);
    en_context_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, size};
    en_layer_config layers[4096] = {{2, 1, 32, 0, 1}, {4, 2, 64, (int32_t)(take(&in, 1) % 70), 1}};
    double frequencies[256];
    for (int i = 0; i < 256; i++) frequencies[i] = 1.0 / (1 + i);
    en_config g = {.n_layers = N_LAYERS, .n_embd = 32, .head_dim = 16, .n_vocab = 29, .n_rot = 16, .norm_eps = 1e-5f,
                   .attention_factor = 1.0f, .layers = layers, .frequencies = frequencies};
    en_tensor t[N_TENSORS + 1] = {{0}};
    fill(&in, &g, t);
    spoil(&in, &g, layers, t);
    char error[200];
    int n_tensors = N_TENSORS - (take(&in, 1) == 77), isa = (int)(take(&in, 1) % 4) - 1;
    /* Sizes that the input made up fit no tensor here, so nothing large is ever allocated. */
    int64_t n_bytes = en_pack_model(&g, t, n_tensors, isa, NULL, error, sizeof error);
    if (n_bytes >= 0) {
        void *packed = aligned_alloc(64, (size_t)(n_bytes + 63) / 64 * 64);
        if (en_pack_model(&g, t, n_tensors, isa, packed, error, sizeof error) != n_bytes) abort();
        for (int n = (int)(take(&in, 1) % 8); n > 0; n--) ((uint8_t *)packed)[take(&in, 3) % (size_t)n_bytes] = (uint8_t)take(&in, 1);
        if (en_model_new(&g, t, n_tensors, isa, packed, (uint64_t)n_bytes + 64, error, sizeof error)) abort();
        en_model *model = en_model_new(&g, t, n_tensors, isa, packed, (uint64_t)n_bytes, error, sizeof error);
        if (!model) abort();
        steps(&in, model, g.n_vocab, g.n_embd);
        en_model_free(model);
        free(packed);
    }
    for (int i = 0; i < N_TENSORS; i++) free((void *)(uintptr_t)t[i].data);
    return 0;
}
