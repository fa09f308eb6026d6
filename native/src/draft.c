/* The draft: a head on the model's last hidden states that guesses the tokens after the next one. One guess is
 *     x = state * norm(x) + token * norm(embedding of the token before),  then a feed-forward part as a layer has it,
 * and the likeliest of some tokens by rows of the model's output matrix. The next guess goes on from x. */
#include "context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FF = 1 << 16 };

struct en_draft_head {
    en_layer layer; /* its feed-forward part */
    en_matrix state, token, output;
    const float *state_norm, *token_norm, *output_norm;
    int32_t *vocabulary; /* the token of each row of output */
    float *logits;       /* of n_seqs rows */
    uint8_t *arena;
    size_t arena_bytes;
};

void en_draft_drop(en_draft_head *head) {
    if (!head) return;
    free(head->vocabulary);
    free(head->logits);
    free(head->arena);
    free(head);
}

/* -- loading -------------------------------------------------------------------------------------------------------- */

typedef struct part {
    const char *name;
    int64_t n_cols, n_rows; /* n_rows 0: floats */
} part;

static const char *unfit(const en_context *c, const en_tensor *tensors, const part *parts, int n_ff, const int32_t *vocabulary,
                         int n_tokens, const char **name) {
    const en_model *model = c->model;
    *name = "the draft";
    if (model->is_external) return "needs a model whose matrices are packed here";
    if (n_ff < 32 || n_ff % 32 || n_ff > MAX_FF) return "has a feed-forward length that is no multiple of 32, or above 65536";
    if (n_ff > c->max_ff) return "has a longer feed-forward part than its model";
    if (n_tokens < 1 || n_tokens > model->config.n_vocab) return "knows no token, or more than there are";
    for (int i = 0; i < n_tokens; i++)
        if (vocabulary[i] < (i ? vocabulary[i - 1] + 1 : 0) || vocabulary[i] >= model->config.n_vocab)
            return "has tokens that do not rise, or lie outside the vocabulary";
    for (int i = 0; i < EN_N_DRAFT; i++) {
        const en_tensor *t = &tensors[i];
        int cols = 1, bytes = 0;
        *name = parts[i].name;
        if (!t->data) return "is missing";
        if (!en_type_layout(t->type, &cols, &bytes)) return "has a type without kernels";
        if (parts[i].n_rows == 0 && t->type != EN_F32) return "is not F32";
        if (t->n_cols != parts[i].n_cols || t->n_rows != (parts[i].n_rows ? parts[i].n_rows : 1)) return "has another shape than its model needs";
        if (t->n_cols % cols || t->n_bytes != (uint64_t)(t->n_cols / cols * bytes * t->n_rows)) return "has too few or too many bytes";
    }
    return NULL;
}

static const float *floats_at(uint8_t **next, const en_tensor *t) {
    float *at = (float *)*next;
    memcpy(at, t->data, (size_t)t->n_cols * sizeof *at);
    *next += ((size_t)t->n_cols * sizeof *at + 63) / 64 * 64;
    return at;
}

static en_matrix matrix_at(uint8_t **next, const en_isa *isa, const en_tensor *t) {
    void *tiles = *next;
    en_pack(t, tiles);
    *next += en_packed_bytes(t);
    return en_matrix_of(isa, t, tiles);
}

int en_draft_load(en_context *c, const en_tensor *tensors, int n_ff, const int32_t *vocabulary, int n_tokens, char *error,
                  size_t error_size) {
    int64_t n_embd = c->model->config.n_embd;
    const part parts[EN_N_DRAFT] = {
        {"state_norm", n_embd, 0}, {"token_norm", n_embd, 0}, {"ffn_norm", n_embd, 0}, {"output_norm", n_embd, 0},
        {"state", n_embd, n_embd}, {"token", n_embd, n_embd}, {"ffn_gate", n_embd, n_ff}, {"ffn_up", n_embd, n_ff},
        {"ffn_down", n_ff, n_embd}, {"output", n_embd, n_tokens},
    };
    const char *name, *problem = unfit(c, tensors, parts, n_ff, vocabulary, n_tokens, &name);
    if (problem) {
        snprintf(error, error_size, "%s %s", name, problem);
        return EN_BAD_ROWS;
    }
    size_t n_bytes = 0;
    for (int i = 0; i < EN_N_DRAFT; i++)
        n_bytes += parts[i].n_rows ? en_packed_bytes(&tensors[i]) : ((size_t)n_embd * sizeof(float) + 63) / 64 * 64;
    en_draft_head *head = calloc(1, sizeof *head);
    if (head) {
        head->arena_bytes = n_bytes;
        head->vocabulary = malloc(n_tokens * sizeof *vocabulary);
        head->logits = malloc((size_t)c->kv.n_seqs * n_tokens * sizeof(float));
        head->arena = aligned_alloc(64, n_bytes);
    }
    if (!head || !head->vocabulary || !head->logits || !head->arena || en_keep_states(c, EN_MAX_STATES) != EN_OK) {
        en_draft_drop(head);
        snprintf(error, error_size, "no memory for the draft");
        return EN_NO_MEMORY;
    }
    const en_isa *isa = c->model->isa;
    uint8_t *next = head->arena;
    memcpy(head->vocabulary, vocabulary, n_tokens * sizeof *vocabulary);
    head->layer.config.n_ff = n_ff;
    head->state_norm = floats_at(&next, &tensors[EN_DRAFT_STATE_NORM]);
    head->token_norm = floats_at(&next, &tensors[EN_DRAFT_TOKEN_NORM]);
    head->layer.ffn_norm = floats_at(&next, &tensors[EN_DRAFT_FFN_NORM]);
    head->output_norm = floats_at(&next, &tensors[EN_DRAFT_OUTPUT_NORM]);
    head->state = matrix_at(&next, isa, &tensors[EN_DRAFT_STATE]);
    head->token = matrix_at(&next, isa, &tensors[EN_DRAFT_TOKEN]);
    head->layer.gate = matrix_at(&next, isa, &tensors[EN_DRAFT_FFN_GATE]);
    head->layer.up = matrix_at(&next, isa, &tensors[EN_DRAFT_FFN_UP]);
    head->layer.down = matrix_at(&next, isa, &tensors[EN_DRAFT_FFN_DOWN]);
    head->output = matrix_at(&next, isa, &tensors[EN_DRAFT_OUTPUT]);
    en_draft_drop(c->draft);
    c->draft = head;
    return EN_OK;
}

/* -- guessing ------------------------------------------------------------------------------------------------------- */

static void norm_state(step *s, int row) { en_norm_row(s, row, s->c->draft->state_norm); }
static void norm_guess(step *s, int row) { en_norm_row(s, row, s->c->draft->output_norm); }

static void norm_token(step *s, int row) {
    en_context *c = s->c;
    int n_embd = c->model->config.n_embd;
    float *to = c->normed + (size_t)row * n_embd;
    en_embed_token(c->model, c->places[row].token, to);
    c->model->isa->rms_norm(to, c->draft->token_norm, n_embd, c->model->config.norm_eps, to);
    en_quantize_row(c, c->normed, n_embd, row);
}

static void multiply(step *s, const en_matrix *w, float *y, int accumulate) {
    en_context *c = s->c;
    product_job job = {.c = c, .acts = en_acts_of(c, c->normed), .n_rows = s->n_rows, .n_products = 1, .accumulate = accumulate,
                       .products = {{w, y, w->n_rows}}};
    en_multiply(&job);
}

/* The likeliest token by a row's logits and its share of all; what is no number has no chance. */
static int32_t likeliest(const en_draft_head *head, int row, float *chance) {
    const float *y = head->logits + (size_t)row * head->output.n_rows;
    int n = head->output.n_rows, best = 0;
    for (int i = 1; i < n; i++) best = y[i] > y[best] ? i : best;
    float total = 0.0f, least = y[best] - 20.0f;
    for (int i = 0; i < n; i++)
        if (y[i] > least) total += expf(y[i] - y[best]);
    *chance = total > 0.0f && isfinite(total) ? 1.0f / total : 0.0f;
    return head->vocabulary[best];
}

static void guess(step *s) {
    en_context *c = s->c;
    en_for_rows(s, norm_state);
    multiply(s, &c->draft->state, c->x, 0);
    en_for_rows(s, norm_token);
    multiply(s, &c->draft->token, c->x, 1);
    en_feed_forward(s);
    en_for_rows(s, norm_guess);
    multiply(s, &c->draft->output, c->draft->logits, 0);
}

/* A row that ends leaves its place to the last one. */
static void guess_rows(en_context *c, const en_asked *asked, int n_asked, int n_max, int32_t *tokens, float *chances,
                       int32_t *n_guessed) {
    step s = {.c = c, .layer = &c->draft->layer, .n_rows = 0};
    size_t n_embd = c->model->config.n_embd;
    for (int i = 0; i < n_asked; i++) {
        n_guessed[i] = 0;
        const float *state = en_states_at(c, asked[i].seq_id, c->kv.lengths[asked[i].seq_id] - 1);
        if (!state || asked[i].n_max < 1) continue;
        memcpy(c->x + s.n_rows * n_embd, state, n_embd * sizeof(float));
        c->places[s.n_rows++] = (row_place){.seq = i, .token = asked[i].token_id};
    }
    while (s.n_rows > 0) {
        guess(&s);
        int n = 0;
        for (int row = 0; row < s.n_rows; row++) {
            int i = c->places[row].seq, at = n_guessed[i];
            float chance;
            int32_t token = likeliest(c->draft, row, &chance);
            if (!(chance >= asked[i].min_chance) || chance <= 0.0f) continue;
            tokens[(size_t)i * n_max + at] = token;
            chances[(size_t)i * n_max + at] = chance;
            n_guessed[i]++;
            if (n_guessed[i] == asked[i].n_max) continue;
            if (n < row) memcpy(c->x + n * n_embd, c->x + row * n_embd, n_embd * sizeof(float));
            c->places[n++] = (row_place){.seq = i, .token = token};
        }
        s.n_rows = n;
    }
}

int en_draft(en_context *c, const en_asked *asked, int n_asked, int n_max, int32_t *tokens, float *chances, int32_t *n_guessed) {
    if (!c->draft || n_asked < 0 || n_asked > c->kv.n_seqs || n_max < 1) return EN_BAD_ROWS;
    for (int i = 0; i < n_asked; i++) {
        if (asked[i].seq_id < 0 || asked[i].seq_id >= c->kv.n_seqs) return EN_BAD_SEQ;
        if (asked[i].token_id < 0 || asked[i].token_id >= c->model->config.n_vocab || asked[i].n_max > n_max) return EN_BAD_ROWS;
    }
    en_home home;
    en_enter_cpus(c, &home);
    for (int i = 0; i < n_asked; i += c->n_ubatch) {
        int n = n_asked - i < c->n_ubatch ? n_asked - i : c->n_ubatch;
        size_t at = (size_t)i * n_max;
        guess_rows(c, asked + i, n, n_max, tokens + at, chances + at, n_guessed + i);
    }
    en_leave_cpus(&home);
    return EN_OK;
}

int en_can_draft(const en_context *c, int seq_id) {
    if (!c->draft || seq_id < 0 || seq_id >= c->kv.n_seqs) return 0;
    return en_states_at(c, seq_id, c->kv.lengths[seq_id] - 1) != NULL;
}

uint64_t en_draft_bytes(const en_context *c) {
    if (!c->draft) return 0;
    size_t states = (size_t)c->states.n_each * c->model->config.n_embd, logits = (size_t)c->draft->output.n_rows;
    return (states + logits) * c->kv.n_seqs * sizeof(float) + c->draft->arena_bytes;
}
