/* Runs kernels and whole steps on random data, with every instruction set that this CPU has, for builds with sanitizers
 * (`make sanitize`) and for emulators: check [rounds]. Prints which set a model would get. Exits 1 at a difference. */
#include "edge_native.h"
#include "kernels.h"

#include <math.h>
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

enum fill { RANDOM, EXTREME, NO_SCALE, N_FILLS };

static void put_scale(uint8_t *half, enum fill fill) {
    half[1] = fill == NO_SCALE ? 0 : (uint8_t)((half[1] & 0x83) | 0x20); /* small and finite */
    if (fill == NO_SCALE) half[0] = 0;
}

/* Exactly as many bytes as the tensor has, so that one read too far is seen. */
static en_tensor tensor(int which, int n_cols, int n_rows, enum fill fill) {
    static const uint8_t ends[] = {0x00, 0xff, 0x0f, 0xf0, 0x7f, 0x80};
    int type = types[which].type, n_bytes = types[which].bytes, d = type == EN_Q6_K ? 208 : 0;
    int has_minimum = type == EN_Q4_1 || type == EN_Q5_1 || type == EN_Q4_K || type == EN_Q5_K;
    size_t n_blocks = (size_t)n_cols / types[which].cols * n_rows;
    uint8_t *data = malloc(n_blocks * n_bytes);
    for (uint8_t *block = data; block < data + n_blocks * n_bytes; block += n_bytes) {
        int end = ends[next() % sizeof ends];
        for (int i = 0; i < n_bytes; i++) block[i] = (uint8_t)(fill == EXTREME ? end : (int)next());
        if (type == EN_F32) {
            float f = uniform();
            memcpy(block, &f, sizeof f);
        } else {
            put_scale(block + d, fill);
            if (has_minimum) put_scale(block + d + 2, fill);
        }
    }
    return (en_tensor){data, n_blocks * n_bytes, n_cols, n_rows, type, 0};
}

/* Rows of the product by every instruction set, each to have the bits of the first. */
static int product(int which, int n_cols, int n_rows, int m, enum fill fill) {
    en_tensor w = tensor(which, n_cols, n_rows, fill);
    size_t n = (size_t)m * n_rows, n_bytes = n * sizeof(float);
    float *x = malloc(sizeof *x * m * n_cols), *start = malloc(n_bytes), *expected = malloc(n_bytes), *y = malloc(n_bytes);
    for (int i = 0; i < m * n_cols; i++) x[i] = fill == EXTREME ? (i / 32 % 3 ? 3.0f : -3.0f) : uniform();
    for (size_t i = 0; i < n; i++) start[i] = uniform();
    int accumulate = (int)(next() % 2), failed = 0;
    for (int isa = 0; isa < en_isa_count(); isa++) {
        if (!en_isa_usable(isa)) continue;
        memcpy(y, start, n_bytes);
        failed |= en_matmul(isa, &w, x, m, y, accumulate) != EN_OK;
        if (isa == 0) memcpy(expected, y, n_bytes);
        if (memcmp(y, expected, n_bytes) == 0) continue;
        printf("%s: product of type %d, %d x %d by %d, differs\n", en_isa_name(isa), w.type, n_rows, n_cols, m);
        failed = 1;
    }
    free(x), free(start), free(expected), free(y), free((void *)w.data);
    return failed;
}

static int products(int n_rounds) {
    int failed = 0;
    for (int which = 0; which < N_TYPES; which++)
        for (int round = 0; round < n_rounds; round++) {
            int n_cols = types[which].cols == 1 ? 1 + (int)(next() % 400)
                                                : types[which].cols * (1 + (int)(next() % (1600 / types[which].cols)));
            failed |= product(which, n_cols, 1 + (int)(next() % 40), 1 + (int)(next() % (round % 4 ? 13 : 40)), round % N_FILLS);
        }
    return failed;
}

static int quantized(int n_rounds) {
    enum { N = 96 };
    int failed = 0;
    for (int round = 0; round < 4 * n_rounds; round++) {
        float x[N], d[2][N / 32], size = ldexpf(1.0f, (int)(next() % 240) - 140);
        int8_t q[2][N];
        int32_t sums[2][N / 32];
        int16_t half_sums[2][N / 16];
        for (int i = 0; i < N; i++) x[i] = i < 32 && round % 8 == 0 ? 0.0f : uniform() * size;
        for (int isa = 0; isa < en_isa_count(); isa++) {
            if (!en_isa_usable(isa)) continue;
            int at = isa > 0;
            failed |= en_quantize(isa, x, N, q[at], d[at], sums[at], half_sums[at]) != EN_OK;
            if (isa == 0) continue;
            int differs = memcmp(q[0], q[1], sizeof q[0]) || memcmp(d[0], d[1], sizeof d[0]) ||
                          memcmp(sums[0], sums[1], sizeof sums[0]) || memcmp(half_sums[0], half_sums[1], sizeof half_sums[0]);
            if (differs) printf("%s: quantised activations differ\n", en_isa_name(isa));
            failed |= differs;
        }
    }
    return failed;
}

static void *floats_of(int n) { return aligned_alloc(64, ((size_t)n * sizeof(float) + 63) / 64 * 64); }

/* Conversions have one right answer. */
static int conversions(void) {
    enum { N = 1 << 16, DIM = 48, KV = DIM * EN_KV_BLOCK };
    uint16_t *halves = floats_of(N), *again = floats_of(N);
    int8_t *bytes = floats_of(KV);
    float *x[2] = {floats_of(N), floats_of(N)}, scales[EN_KV_BLOCK];
    int failed = 0;
    for (int i = 0; i < N; i++) halves[i] = (uint16_t)((i & 0x7c00) == 0x7c00 ? i & 0xfc00 : i); /* any but a NaN */
    for (int i = 0; i < KV; i++) bytes[i] = (int8_t)next();
    for (int i = 0; i < EN_KV_BLOCK; i++) scales[i] = uniform();
    for (int at = 0; at < en_isa_count(); at++) {
        const en_isa *isa = en_isa_at(at), *reference = en_isa_at(0);
        if (!isa->usable()) continue;
        int differs = 0;
        isa->half_to_float(halves, N, x[0]);
        reference->half_to_float(halves, N, x[1]);
        differs |= memcmp(x[0], x[1], N * sizeof(float)) != 0;
        isa->to_half(x[0], N, again);
        differs |= memcmp(halves, again, N * sizeof *halves) != 0;
        for (int i = 0; i < N; i++) x[0][i] = ldexpf(uniform(), (int)(next() % 48) - 30); /* ties, too small, too large */
        isa->to_half(x[0], N - 3, again);
        for (int i = 0; i < N - 3; i++) differs |= again[i] != en_float_to_half(x[0][i]);
        isa->keys_from_int8(bytes, scales, DIM, x[0]);
        reference->keys_from_int8(bytes, scales, DIM, x[1]);
        differs |= memcmp(x[0], x[1], KV * sizeof(float)) != 0;
        isa->values_from_int8(bytes, scales, DIM, x[0]);
        reference->values_from_int8(bytes, scales, DIM, x[1]);
        differs |= memcmp(x[0], x[1], KV * sizeof(float)) != 0;
        if (differs) printf("%s: conversions differ\n", isa->name);
        failed |= differs;
    }
    free(halves), free(again), free(bytes), free(x[0]), free(x[1]);
    return failed;
}

/* The largest difference of b from a, against the largest of a. */
static float distance(const float *a, const float *b, int n) {
    float largest = 0.0f, apart = 0.0f;
    for (int i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(a[i]));
        apart = fmaxf(apart, isfinite(b[i]) ? fabsf(a[i] - b[i]) : INFINITY);
    }
    return largest > 0.0f ? apart / largest : apart;
}

/* The largest difference of b from a, against the same element of a. */
static float relative_distance(const float *a, const float *b, int n) {
    float apart = 0.0f;
    for (int i = 0; i < n; i++) apart = a[i] == b[i] ? apart : fmaxf(apart, distance(a + i, b + i, 1));
    return apart;
}

/* What is summed in another order, or has an exponential in it: norm, silu, attention and its totals. */
static int floats(int n_rounds) {
    enum { N = EN_KV_BLOCK * 128, NORM = 0, SILU, OUT, TOTAL, N_RESULTS };
    static const char *const names[N_RESULTS] = {"norm", "silu", "attention", "attention's total"};
    /* Scores reach some hundreds here: the last bit of one is 3e-5, and the exponential makes that a factor. */
    static const float tolerances[N_RESULTS] = {1e-5f, 2e-6f, 2e-4f, 2e-4f};
    float *a = floats_of(2 * N), *b = floats_of(N), *c = floats_of(N), *scratch = floats_of(EN_ATTEND_FLOATS);
    float *y[2][N_RESULTS], peak[EN_MAX_QUERIES];
    for (int i = 0; i < 2 * N_RESULTS; i++) y[i / N_RESULTS][i % N_RESULTS] = floats_of(N);
    int failed = 0;
    for (int round = 0; round < n_rounds; round++) {
        int n = 1 + (int)(next() % N), dim = 16 * (1 + (int)(next() % 8)), n_queries = 1 + (int)(next() % EN_MAX_QUERIES);
        const int sizes[N_RESULTS] = {n, n, n_queries * dim, n_queries};
        int32_t limits[EN_MAX_QUERIES];
        for (int i = 0; i < 2 * N; i++) a[i] = 20.0f * uniform();
        for (int i = 0; i < N; i++) b[i] = uniform(), c[i] = uniform();
        for (int i = 0; i < n_queries; i++) limits[i] = (int32_t)(next() % (EN_KV_BLOCK + 1));
        for (int at = 0; at < en_isa_count(); at++) {
            const en_isa *isa = en_isa_at(at);
            if (!isa->usable()) continue;
            float **out = y[at > 0];
            isa->rms_norm(a, b, n, 1e-5f, out[NORM]);
            memcpy(out[SILU], a, n * sizeof *a);
            isa->silu_mul(out[SILU], b, n);
            for (int i = 0; i < N_RESULTS; i++)
                if (i >= OUT) memset(out[i], 0, N * sizeof(float));
            for (int i = 0; i < n_queries; i++) peak[i] = -INFINITY;
            for (int block = 0; block < 2; block++)
                isa->attend(b, n_queries, limits, a + block * N, c, dim, out[OUT], peak, out[TOTAL], scratch);
            for (int i = 0; i < N_RESULTS; i++) {
                float apart = (i == SILU ? relative_distance : distance)(y[0][i], out[i], sizes[i]);
                if (apart > tolerances[i]) printf("%s: %s is off by %g\n", isa->name, names[i], (double)apart);
                failed |= apart > tolerances[i];
            }
        }
    }
    free(a), free(b), free(c), free(scratch);
    for (int i = 0; i < 2 * N_RESULTS; i++) free(y[i / N_RESULTS][i % N_RESULTS]);
    return failed;
}

enum { N_VOCAB = 77, N_TENSORS = EN_FIRST_LAYER + 3 * EN_PER_LAYER };

/* Steps of a context in many ways; logits takes those of the first 45 tokens. */
static int run_steps(en_context *c, int n_rounds, const int32_t *ids, float *logits) {
    int failed = 0;
    float *again = malloc(sizeof(float) * N_VOCAB * 128);
    for (int round = 0; round < n_rounds && !failed; round++) {
        en_rows first = {0, 0, 45, 2, ids}, more[] = {{0, 45, 1, 1, ids + 45}, {1, 33, 20, 2, ids + 33}};
        failed |= en_decode(c, &first, 1, logits) != EN_OK || en_seq_copy(c, 0, 1, 33) != EN_OK;
        failed |= en_decode(c, more, 2, again) != EN_OK;
        /* the same tokens, another way */
        failed |= memcmp(logits + 33 * N_VOCAB, again + N_VOCAB, sizeof(float) * N_VOCAB * 12) != 0;
        en_rows flood = {2, 0, 100, 0, ids}, wrong = {3, 1, 1, 1, ids};
        failed |= en_decode(c, &flood, 1, again) != EN_NO_CELLS || en_decode(c, &wrong, 1, again) != EN_BAD_ROWS;
        uint64_t n_bytes = en_seq_bytes(c, 1);
        void *saved = malloc(n_bytes);
        failed |= en_seq_save(c, 1, saved) != EN_OK;
        for (int seq = 0; seq < 4; seq++) en_seq_trim(c, seq, 0);
        failed |= en_free_blocks(c) != 4 || en_seq_load(c, 3, 53, saved, n_bytes) != EN_OK;
        en_rows last = {3, 53, 1, 1, ids + 53};
        failed |= en_decode(c, &last, 1, again) != EN_OK || en_seq_length(c, 3) != 54;
        en_seq_trim(c, 3, 0);
        failed |= en_set_threads(c, 1 + round % 4) != EN_OK;
        free(saved);
    }
    free(again);
    return failed;
}

/* More tokens than attention takes in one part: the same bits whether one thread computes all parts or three share them. */
static int long_steps(const en_model *model, int kv_type) {
    enum { N = 1100 };
    char error[256];
    int32_t ids[N];
    float logits[2][N_VOCAB];
    int failed = 0;
    for (int i = 0; i < N; i++) ids[i] = i * i % N_VOCAB;
    for (int shared = 0; shared < 2; shared++) {
        en_context *c = en_context_new(model, N, 1, shared ? 1 : 70, shared ? 3 : 1, kv_type, error, sizeof error);
        if (!c) return printf("%s\n", error), 1;
        int at = N - (shared ? 20 : 1); /* the last tokens one by one */
        en_rows start = {0, 0, at, 0, ids};
        failed |= en_decode(c, &start, 1, NULL) != EN_OK;
        for (; at < N; at++) {
            en_rows rows = {0, at, 1, 1, ids + at};
            failed |= en_decode(c, &rows, 1, logits[shared]) != EN_OK;
        }
        en_context_free(c);
    }
    return failed | (memcmp(logits[0], logits[1], sizeof(float) * N_VOCAB) != 0);
}

/* The products of an external model, by the kernels: user is the tensors. */
static int linear(void *user, int32_t matrix, const float *x, int32_t m, int32_t k, float *y, int32_t n) {
    static const int parts[EN_PER_LAYER_LINEAR][3] = {
        {EN_ATTN_Q, EN_ATTN_K, EN_ATTN_V}, {EN_ATTN_OUT, -1, -1}, {EN_FFN_GATE, EN_FFN_UP, -1}, {EN_FFN_DOWN, -1, -1}};
    const en_tensor *tensors = user, *layer = tensors + EN_FIRST_LAYER + matrix / EN_PER_LAYER_LINEAR * EN_PER_LAYER;
    int at = 0, is_output = EN_FIRST_LAYER + matrix / EN_PER_LAYER_LINEAR * EN_PER_LAYER >= N_TENSORS;
    for (int i = 0; i < 3; i++) {
        int part = parts[matrix % EN_PER_LAYER_LINEAR][i];
        if (is_output ? i > 0 : part < 0 || !layer[part].data) continue;
        const en_tensor *w = is_output ? &tensors[EN_TOKEN_EMBD] : &layer[part];
        float *own = malloc(sizeof *own * m * w->n_rows);
        if (w->n_cols != k || en_matmul(0, w, x, m, own, 0) != EN_OK) return free(own), 1;
        for (int t = 0; t < m; t++) memcpy(y + (size_t)t * n + at, own + (size_t)t * w->n_rows, w->n_rows * sizeof *y);
        at += (int)w->n_rows;
        free(own);
    }
    return at != n;
}

/* A draft on the context's states: the same guesses alone and in company; nothing where a state is gone; the model's own
 * logits as they were. */
static int draft_steps(en_context *c, int which, const int32_t *ids) {
    enum { N_FF = 64, N_MAX = 3 };
    enum { N_KNOWN = 35 };
    static const int32_t unfit[][2] = {{2, 1}, {0, N_VOCAB}, {-1, 0}};
    int32_t vocabulary[N_KNOWN];
    for (int i = 0; i < N_KNOWN; i++) vocabulary[i] = 2 * i;
    char error[256];
    en_tensor t[EN_N_DRAFT];
    for (int i = 0; i < EN_N_DRAFT; i++)
        t[i] = i < EN_DRAFT_STATE ? tensor(0, 64, 1, RANDOM) : tensor(which, i == EN_DRAFT_FFN_DOWN ? N_FF : 64, i == EN_DRAFT_FFN_GATE || i == EN_DRAFT_FFN_UP ? N_FF : i == EN_DRAFT_OUTPUT ? N_KNOWN : 64, RANDOM);
    float *before = malloc(sizeof(float) * N_VOCAB * 40), *after = malloc(sizeof(float) * N_VOCAB * 40), chances[2][N_MAX], alone[N_MAX];
    en_rows rows[] = {{0, 0, 20, 2, ids}, {1, 0, 20, 2, ids + 20}};
    int32_t tokens[2][N_MAX], own[N_MAX], n[2];
    int failed = en_decode(c, rows, 2, before) != EN_OK;
    const en_asked asked[] = {{0, ids[3], N_MAX, 0.0f}, {1, ids[4], 2, 0.0f}}, sure = {0, ids[3], N_MAX, 1.1f}, wrong = {0, N_VOCAB, 1, 0.0f};
    failed |= en_draft(c, asked, 2, N_MAX, tokens[0], chances[0], n) != EN_BAD_ROWS || en_can_draft(c, 0);
    for (int i = 0; i < 3; i++) failed |= en_draft_load(c, t, N_FF, unfit[i], 2, error, sizeof error) != EN_BAD_ROWS;
    failed |= en_draft_load(c, t, N_FF + 32, vocabulary, N_KNOWN, error, sizeof error) != EN_BAD_ROWS;
    for (int round = 0; round < 2; round++) failed |= en_draft_load(c, t, N_FF, vocabulary, N_KNOWN, error, sizeof error) != EN_OK;
    failed |= en_draft(c, asked, 2, N_MAX, tokens[0], chances[0], n) != EN_OK || n[0] || n[1] || !en_draft_bytes(c);
    for (int seq = 0; seq < 2; seq++) en_seq_trim(c, seq, 0);
    failed |= en_decode(c, rows, 2, after) != EN_OK || memcmp(before, after, sizeof(float) * N_VOCAB * 40) || !en_can_draft(c, 1);
    failed |= en_draft(c, asked, 2, N_MAX, tokens[0], chances[0], n) != EN_OK || n[0] != N_MAX || n[1] != 2;
    for (int i = 0; i < 2; i++) {
        int32_t n_own;
        failed |= en_set_threads(c, 1 + 2 * i) != EN_OK || en_draft(c, &asked[i], 1, N_MAX, own, alone, &n_own) != EN_OK || n_own != n[i];
        failed |= memcmp(own, tokens[i], n[i] * sizeof *own) || memcmp(alone, chances[i], n[i] * sizeof *alone);
        for (int j = 0; j < n[i]; j++) failed |= own[j] < 0 || own[j] > 68 || own[j] % 2 || !(alone[j] > 0.0f && alone[j] <= 1.0f);
    }
    failed |= en_draft(c, &sure, 1, N_MAX, own, alone, n) != EN_OK || n[0] || en_draft(c, &wrong, 1, N_MAX, own, alone, n) != EN_BAD_ROWS;
    float states[2][64];
    failed |= en_seq_state(c, 0, 11, states[0]) != EN_OK || en_seq_trim(c, 0, 12) != EN_OK || !en_can_draft(c, 0);
    failed |= en_seq_state(c, 0, 11, states[1]) != EN_OK || memcmp(states[0], states[1], sizeof states[0]) || en_seq_state(c, 0, 12, states[1]) != EN_BAD_ROWS;
    en_rows unwanted = {0, 12, 3, 0, ids};
    failed |= en_decode(c, &unwanted, 1, NULL) != EN_OK || en_can_draft(c, 0) || en_seq_copy(c, 1, 2, 20) != EN_OK || en_can_draft(c, 2);
    for (int seq = 0; seq < 4; seq++) en_seq_trim(c, seq, 0);
    failed |= en_can_draft(c, 1) || en_can_draft(c, -1) || en_can_draft(c, 4);
    for (int i = 0; i < EN_N_DRAFT; i++) free((void *)t[i].data);
    free(before), free(after);
    return failed;
}

/* isa -1 is an external model. */
static int steps_of(int isa, int kv_type, int n_rounds, const en_config *g, const en_tensor *t, const int32_t *ids, float *logits) {
    char error[256];
    int is_external = isa < 0;
    if (is_external) isa = 0;
    en_model *model = is_external ? en_model_external(g, t, N_TENSORS, isa, error, sizeof error)
                                  : en_model_new(g, t, N_TENSORS, isa, NULL, 0, error, sizeof error);
    if (!model) return printf("%s\n", error), 1;
    en_context *c = en_context_new(model, 128, 4, 24, 3, kv_type, error, sizeof error);
    if (!c) return printf("%s\n", error), 1;
    if (is_external) en_set_linear(c, linear, (void *)t);
    int format = 0;
    while (types[format].type != t[EN_FIRST_LAYER + 1].type) format++;
    int failed = run_steps(c, n_rounds, ids, logits) || (!is_external && draft_steps(c, format, ids)) ||
                 (!is_external && t[EN_FIRST_LAYER + 1].type == EN_F16 && long_steps(model, kv_type));
    if (failed) printf("%s: steps with weights of type %d went wrong\n", en_isa_name(isa), t[EN_FIRST_LAYER + 1].type);
    en_context_free(c);
    en_model_free(model);
    return failed;
}

/* Attention and feed-forward; a matrix in place of attention; attention alone, with all that a layer may have. */
static const en_layer_config layer_configs[] = {{4, 2, 96, 0, 1}, {4, 0, 96, 0, 0}, {4, 1, 0, 20, 1}};
static const int sizes[][EN_PER_LAYER][2] = {
    {[EN_ATTN_NORM] = {64, 1}, [EN_ATTN_Q] = {64, 64}, [EN_ATTN_K] = {64, 32}, [EN_ATTN_V] = {64, 32},
     [EN_ATTN_OUT] = {64, 64}, [EN_FFN_NORM] = {64, 1}, [EN_FFN_GATE] = {64, 96}, [EN_FFN_UP] = {64, 96},
     [EN_FFN_DOWN] = {96, 64}},
    {[EN_ATTN_NORM] = {64, 1}, [EN_ATTN_OUT] = {64, 64}, [EN_FFN_NORM] = {64, 1}, [EN_FFN_GATE] = {64, 96},
     [EN_FFN_UP] = {64, 96}, [EN_FFN_DOWN] = {96, 64}, [EN_FFN_GATE_BIAS] = {96, 1}, [EN_FFN_UP_BIAS] = {96, 1},
     [EN_FFN_DOWN_BIAS] = {64, 1}},
    {[EN_ATTN_NORM] = {64, 1}, [EN_ATTN_Q] = {64, 64}, [EN_ATTN_K] = {64, 16}, [EN_ATTN_V] = {64, 16},
     [EN_ATTN_OUT] = {64, 64}, [EN_ATTN_Q_NORM] = {16, 1}, [EN_ATTN_K_NORM] = {16, 1}, [EN_ATTN_Q_BIAS] = {64, 1},
     [EN_ATTN_K_BIAS] = {16, 1}, [EN_ATTN_V_BIAS] = {16, 1}, [EN_ATTN_OUT_BIAS] = {64, 1}},
};

static int steps(int which, int kv_type, int n_rounds) {
    const double frequencies[8] = {1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003};
    en_config g = {.n_layers = 3, .n_embd = 64, .head_dim = 16, .n_vocab = N_VOCAB, .n_rot = 16, .pairs_halves = 1,
                   .temperature_length = 8, .temperature_scale = 0.1f, .norm_eps = 1e-5f, .attention_factor = 1.1f,
                   .layers = layer_configs, .frequencies = frequencies};
    en_tensor t[N_TENSORS] = {[EN_TOKEN_EMBD] = tensor(4, 64, N_VOCAB, RANDOM), [EN_OUTPUT_NORM] = tensor(0, 64, 1, RANDOM),
                              [EN_OUTPUT_BIAS] = tensor(0, N_VOCAB, 1, RANDOM)};
    for (int i = 0; i < 3 * EN_PER_LAYER; i++) {
        const int *size = sizes[i / EN_PER_LAYER][i % EN_PER_LAYER];
        if (size[0] > 0) t[EN_FIRST_LAYER + i] = tensor(size[1] == 1 ? 0 : which, size[0], size[1], RANDOM);
    }
    int32_t ids[128];
    for (int i = 0; i < 128; i++) ids[i] = (int32_t)(next() % N_VOCAB);
    float *expected = malloc(sizeof(float) * N_VOCAB * 128), *logits = malloc(sizeof(float) * N_VOCAB * 128);
    int failed = steps_of(0, kv_type, n_rounds, &g, t, ids, expected);
    for (int isa = -1; isa < en_isa_count(); isa++) {
        if (isa == 0 || (isa > 0 && !en_isa_usable(isa))) continue;
        failed |= steps_of(isa, kv_type, n_rounds, &g, t, ids, logits);
        float apart = distance(expected, logits, 45 * N_VOCAB);
        if (apart > 0.02f) { /* sums and exponentials in another order may turn the rounding of an activation */
            printf("%s: logits with weights of type %d are off by %g\n", isa < 0 ? "external" : en_isa_name(isa), types[which].type, (double)apart);
            failed = 1;
        }
    }
    free(expected), free(logits);
    for (int i = 0; i < N_TENSORS; i++) free((void *)t[i].data);
    return failed;
}

/* Vectors for an FPGA's engine, in memory of just their size; sums of zeros are right for a matrix of zeros only. */
static int fpga(int n_rounds) {
    int failed = 0;
    for (int round = 0; round < n_rounds; round++) {
        int m = 1 + (int)(next() % 5), k = 32 * (1 + (int)(next() % 9)), n = 1 + (int)(next() % 20), stride = (k + k / 8 + 255) / 256 * 256;
        float *x = malloc(sizeof *x * m * k), *sums = calloc((size_t)n * m, sizeof *sums), *y = calloc((size_t)n * m, sizeof *y);
        double *units = malloc(sizeof *units * m), *rows = malloc(sizeof *rows * n), *columns = calloc(k, sizeof *columns);
        uint8_t *vectors = malloc((size_t)m * stride);
        for (int i = 0; i < m * k; i++) x[i] = uniform() * (round % 3 ? 1.0f : 1e-37f);
        for (int r = 0; r < n; r++) rows[r] = 1;
        failed |= en_fpga_encode(x, m, k, vectors, stride, units);
        en_fpga_task task = {sums, rows, columns, 1e-7, 0, n, m, m, 0, 0, 0};
        failed |= !en_fpga_finish(&task, 1, vectors, stride, k, units, y, n);
        sums[next() % (unsigned)(n * m)] = round % 2 ? INFINITY : -INFINITY;
        failed |= en_fpga_finish(&task, 1, vectors, stride, k, units, y, n);
        memset(sums, 0, sizeof *sums * (size_t)n * (size_t)m);
        columns[next() % k] = 1e6;
        failed |= round % 3 && en_fpga_finish(&task, 1, vectors, stride, k, units, y, n);
        x[next() % (m * k)] = NAN;
        failed |= !en_fpga_encode(x, m, k, vectors, stride, units);
        free(x), free(sums), free(y), free(units), free(rows), free(columns), free(vectors);
    }
    if (failed) puts("vectors for an FPGA went wrong");
    return failed;
}

int main(int argc, char **argv) {
    int n_rounds = argc > 1 ? atoi(argv[1]) : 20;
    if (n_rounds < 1) return puts("check [rounds]: at least 1"), 2;
    for (int isa = 0; isa < en_isa_count(); isa++)
        printf("%s: %s\n", en_isa_name(isa), en_isa_usable(isa) ? "usable" : "not on this CPU");
    printf("best: %s\n", en_isa_best()->name);
    int failed = products(12 + n_rounds) | quantized(n_rounds) | conversions() | floats(n_rounds) | fpga(10 * n_rounds);
    for (int which = 0; which < N_TYPES; which++)
        if (types[which].cols <= 32) failed |= steps(which, EN_F16, n_rounds) | steps(which, EN_Q8_0, n_rounds);
    puts(failed ? "failed" : "all good");
    return failed;
}
