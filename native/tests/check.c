/* Runs kernels and whole steps on random data, for builds with sanitizers: `make sanitize`. Exits 1 at a difference. */
#include "edge_native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t state = 1;

static uint32_t next(void) { return state = state * 1664525u + 1013904223u, state >> 8; }

static float uniform(void) { return (float)(next() % 20001) / 10000.0f - 1.0f; }

static const struct { int type, cols, bytes; } types[] = {
    {EN_F32, 1, 4},    {EN_F16, 1, 2},      {EN_Q4_0, 32, 18},   {EN_Q4_1, 32, 20},   {EN_Q8_0, 32, 34},
    {EN_Q5_0, 32, 22}, {EN_Q5_1, 32, 24}, {EN_Q4_K, 256, 144}, {EN_Q5_K, 256, 176}, {EN_Q6_K, 256, 210},
};

enum { N_TYPES = sizeof types / sizeof types[0] };

/* Exactly as many bytes as the tensor has, so that one read too far is seen; halves are small and finite. */
static en_tensor tensor(int which, int n_cols, int n_rows) {
    size_t n_bytes = (size_t)n_cols / types[which].cols * types[which].bytes * n_rows;
    uint8_t *data = malloc(n_bytes);
    for (size_t i = 0; i < n_bytes; i++) data[i] = (uint8_t)next();
    for (size_t at = 0; at < n_bytes; at += types[which].bytes) {
        if (types[which].type == EN_F32) {
            float f = uniform();
            memcpy(data + at, &f, sizeof f);
        } else {
            size_t d = types[which].type == EN_Q6_K ? at + 208 : at;
            data[d + 1] = (uint8_t)((data[d + 1] & 0x83) | 0x20);
            int type = types[which].type, has_minimum = type == EN_Q4_1 || type == EN_Q5_1 || type == EN_Q4_K || type == EN_Q5_K;
            if (has_minimum) data[d + 3] = (uint8_t)((data[d + 3] & 0x83) | 0x20);
        }
    }
    return (en_tensor){data, n_bytes, n_cols, n_rows, types[which].type, 0};
}

static int products(void) {
    for (int round = 0; round < 200; round++) {
        int which = (int)(next() % N_TYPES), n_rows = 1 + (int)(next() % 40);
        int n_cols = types[which].cols == 256 ? 256 * (1 + (int)(next() % 8)) : 32 * (1 + (int)(next() % 60));
        int m = 1 + (int)(next() % 9);
        en_tensor w = tensor(which, n_cols, n_rows);
        float *x = malloc(sizeof *x * m * n_cols), *y[2];
        for (int i = 0; i < m * n_cols; i++) x[i] = uniform();
        for (int isa = 0; isa < en_isa_count() && isa < 2; isa++) {
            y[isa] = calloc((size_t)m * n_rows, sizeof(float));
            if (en_isa_usable(isa) && en_matmul(isa, &w, x, m, y[isa], round % 2) != EN_OK) return 1;
        }
        if (en_isa_count() > 1 && en_isa_usable(1) && memcmp(y[0], y[1], sizeof(float) * m * n_rows) != 0) {
            printf("product of type %d, %d x %d by %d differs\n", types[which].type, n_rows, n_cols, m);
            return 1;
        }
        for (int isa = 0; isa < en_isa_count() && isa < 2; isa++) free(y[isa]);
        free(x);
        free((void *)w.data);
    }
    return 0;
}

static int steps(int which, int kv_type) {
    en_config g = {.n_layers = 2, .n_embd = 64, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .n_ff = 96, .n_vocab = 77,
                   .n_rot = 16, .rope_freq_base = 10000.0f, .norm_eps = 1e-5f};
    enum { N = EN_FIRST_LAYER + 2 * EN_PER_LAYER };
    const int cols[EN_PER_LAYER] = {64, 64, 64, 64, 64, 64, 64, 64, 96}, rows[EN_PER_LAYER] = {1, 64, 32, 32, 64, 1, 96, 96, 64};
    en_tensor t[N] = {tensor(4, 64, 77), tensor(0, 64, 1)};
    for (int i = 0; i < 2 * EN_PER_LAYER; i++) {
        int j = i % EN_PER_LAYER;
        t[EN_FIRST_LAYER + i] = tensor(j == EN_ATTN_NORM || j == EN_FFN_NORM ? 0 : which, cols[j], rows[j]);
    }
    char error[256];
    en_model *model = en_model_new(&g, t, N, -1, NULL, 0, error, sizeof error);
    if (!model) return printf("%s\n", error), 1;
    en_context *c = en_context_new(model, 128, 4, 24, 3, kv_type, error, sizeof error);
    if (!c) return printf("%s\n", error), 1;
    int32_t ids[128];
    for (int i = 0; i < 128; i++) ids[i] = (int32_t)(next() % 77);
    float *logits = malloc(sizeof(float) * 77 * 128), *again = malloc(sizeof(float) * 77 * 128);
    int failed = 0;
    for (int round = 0; round < 20 && !failed; round++) {
        en_rows first = {0, 0, 45, 2, ids}, more[] = {{0, 45, 1, 1, ids + 45}, {1, 33, 20, 2, ids + 33}};
        failed |= en_decode(c, &first, 1, logits) != EN_OK || en_seq_copy(c, 0, 1, 33) != EN_OK;
        failed |= en_decode(c, more, 2, again) != EN_OK;
        failed |= memcmp(logits + 33 * 77, again + 77, sizeof(float) * 77 * 12) != 0; /* the same tokens, another way */
        en_rows flood = {2, 0, 100, 0, ids}, wrong = {3, 1, 1, 1, ids};
        failed |= en_decode(c, &flood, 1, logits) != EN_NO_CELLS || en_decode(c, &wrong, 1, logits) != EN_BAD_ROWS;
        uint64_t n_bytes = en_seq_bytes(c, 1);
        void *saved = malloc(n_bytes);
        failed |= en_seq_save(c, 1, saved) != EN_OK;
        for (int seq = 0; seq < 4; seq++) en_seq_trim(c, seq, 0);
        failed |= en_free_blocks(c) != 4 || en_seq_load(c, 3, 53, saved, n_bytes) != EN_OK;
        en_rows last = {3, 53, 1, 1, ids + 53};
        failed |= en_decode(c, &last, 1, logits) != EN_OK || en_seq_length(c, 3) != 54;
        en_seq_trim(c, 3, 0);
        failed |= en_set_threads(c, 1 + round % 4) != EN_OK;
        free(saved);
    }
    if (failed) printf("steps with weights of type %d went wrong\n", types[which].type);
    free(logits), free(again);
    en_context_free(c);
    en_model_free(model);
    for (int i = 0; i < N; i++) free((void *)t[i].data);
    return failed;
}

int main(void) {
    int failed = products();
    for (int which = 0; which < N_TYPES; which++)
        if (types[which].cols <= 32) failed |= steps(which, EN_F16) | steps(which, EN_Q8_0);
    puts(failed ? "failed" : "all good");
    return failed;
}
