/* One step: rows of many sequences through the layers. */
#include "context.h"

#include <math.h>
#include <string.h>

void en_embed_token(const en_model *model, int token, float *x) {
    if (model->token_embd.data)
        en_row_to_float(&model->token_embd, token, x);
    else
        en_packed_row_to_float(&model->output, token, x);
}

static void embed(step *s, int row) {
    en_context *c = s->c;
    en_embed_token(c->model, c->places[row].token, c->x + row * (size_t)c->model->config.n_embd);
    int n_rot = c->model->config.n_rot;
    float *turn = c->turns + (size_t)row * n_rot, factor = c->model->config.attention_factor;
    for (int i = 0; i < n_rot / 2; i++) {
        double angle = c->places[row].position * c->model->frequencies[i];
        turn[2 * i] = (float)cos(angle) * factor;
        turn[2 * i + 1] = (float)sin(angle) * factor;
    }
}

void en_norm_row(const step *s, int row, const float *weight) {
    en_context *c = s->c;
    int n_embd = c->model->config.n_embd;
    size_t at = (size_t)row * n_embd;
    c->model->isa->rms_norm(c->x + at, weight, n_embd, c->model->config.norm_eps, c->normed + at);
    en_quantize_row(c, c->normed, n_embd, row);
}

static void norm_attention(step *s, int row) { en_norm_row(s, row, s->layer->attn_norm); }
static void norm_ffn(step *s, int row) { en_norm_row(s, row, s->layer->ffn_norm); }
static void norm_output(step *s, int row) { en_norm_row(s, row, s->c->model->output_norm); }

static void quantize_attended(step *s, int row) { en_quantize_row(s->c, s->c->attended, en_q_dim(s), row); }

static void activate(step *s, int row) {
    en_context *c = s->c;
    size_t n_ff = s->layer->config.n_ff;
    c->model->isa->silu_mul(c->gate + row * n_ff, c->up + row * n_ff, (int)n_ff);
    en_quantize_row(c, c->gate, (int)n_ff, row);
}

/* Move the rows whose logits are wanted to the front; no others go beyond the last layer's attention. */
static void keep_wanted(step *s) {
    en_context *c = s->c;
    size_t n_embd = c->model->config.n_embd, q_dim = en_q_dim(s);
    int n = 0;
    for (int row = 0; row < s->n_rows; row++)
        if (c->places[row].wants) {
            memmove(c->x + n * n_embd, c->x + row * n_embd, n_embd * sizeof(float));
            memmove(c->attended + n * q_dim, c->attended + row * q_dim, q_dim * sizeof(float));
            n++;
        }
    s->n_rows = n;
}

static int linear_number(const step *s, int place) { return s->layer_number * EN_PER_LAYER_LINEAR + place; }

static void attend(step *s) {
    en_context *c = s->c;
    const en_layer *w = s->layer;
    size_t q_dim = en_q_dim(s), kv_dim = en_kv_dim(s), width = q_dim + 2 * kv_dim;
    en_for_rows(s, norm_attention);
    product_job qkv = {.c = c, .acts = en_acts_of(c, c->normed), .n_rows = s->n_rows, .n_products = 3,
                       .matrix = linear_number(s, EN_LINEAR_QKV),
                       .products = {{&w->q, c->qkv, width}, {&w->k, c->qkv + q_dim, width}, {&w->v, c->qkv + q_dim + kv_dim, width}}};
    en_multiply(&qkv);
    en_for_rows(s, en_rotate_and_keep);
    en_attend(s);
}

/* x += w * (acts of y) */
static void add_product(step *s, const en_matrix *w, int place, const float *y) {
    product_job job = {.c = s->c, .acts = en_acts_of(s->c, y), .n_rows = s->n_rows, .n_products = 1, .accumulate = 1,
                       .matrix = linear_number(s, place),
                       .products = {{w, s->c->x, s->c->model->config.n_embd}}};
    en_multiply(&job);
}

void en_feed_forward(step *s) {
    en_context *c = s->c;
    const en_layer *w = s->layer;
    size_t n_ff = w->config.n_ff;
    en_for_rows(s, norm_ffn);
    product_job wide = {.c = c, .acts = en_acts_of(c, c->normed), .n_rows = s->n_rows, .n_products = 2,
                        .matrix = linear_number(s, EN_LINEAR_GATE_UP),
                        .products = {{&w->gate, c->gate, n_ff}, {&w->up, c->up, n_ff}}};
    en_multiply(&wide);
    en_for_rows(s, activate);
    add_product(s, &w->down, EN_LINEAR_DOWN, c->gate);
}

static void run_layer(step *s, int is_last) {
    const en_layer_config *g = &s->layer->config;
    if (g->n_kv_heads > 0) attend(s);
    if (is_last) keep_wanted(s);
    if (g->n_kv_heads > 0) {
        en_for_rows(s, quantize_attended);
        add_product(s, &s->layer->out, EN_LINEAR_OUT, s->c->attended);
    } else if (g->n_heads > 0) {
        en_for_rows(s, norm_attention);
        add_product(s, &s->layer->out, EN_LINEAR_OUT, s->c->normed);
    }
    if (g->n_ff > 0) en_feed_forward(s);
}

/* Compute the rows laid out in places; gives how many logits rows were written. */
static int run_step(en_context *c, int n_rows, float *logits) {
    const en_model *model = c->model;
    step s = {.c = c, .n_rows = n_rows};
    en_for_rows(&s, embed);
    for (int i = 0; i < model->config.n_layers && !c->has_failed; i++) {
        s.layer = &model->layers[i];
        s.layer_number = i;
        run_layer(&s, i == model->config.n_layers - 1);
    }
    en_states_take(c, n_rows);
    en_for_rows(&s, norm_output);
    product_job head = {.c = c, .acts = en_acts_of(c, c->normed), .n_rows = s.n_rows, .n_products = 1,
                        .matrix = model->config.n_layers * EN_PER_LAYER_LINEAR,
                        .products = {{&model->output, logits, model->config.n_vocab}}};
    en_multiply(&head);
    return s.n_rows;
}

/* Check everything before anything changes: ids, positions, and the blocks all rows together take. */
static int check_rows(const en_context *c, const en_rows *rows, int n_rows) {
    int64_t need = 0;
    for (int i = 0; i < n_rows; i++) {
        const en_rows *r = &rows[i];
        if (r->seq_id < 0 || r->seq_id >= c->kv.n_seqs) return EN_BAD_SEQ;
        int length = c->kv.lengths[r->seq_id];
        for (int j = 0; j < i; j++)
            if (rows[j].seq_id == r->seq_id) length += rows[j].n;
        if (r->n < 1 || r->start != length) return EN_BAD_ROWS;
        for (int j = 0; j < r->n; j++)
            if (r->token_ids[j] < 0 || r->token_ids[j] >= c->model->config.n_vocab) return EN_BAD_ROWS;
        if ((int64_t)length + r->n > c->n_ctx) return EN_NO_CELLS;
        need += en_kv_need(&c->kv, r->seq_id, length, r->n);
    }
    return need > c->kv.n_free ? EN_NO_CELLS : EN_OK;
}

int en_decode(en_context *c, const en_rows *rows, int n_rows, float *logits) {
    int status = check_rows(c, rows, n_rows);
    if (status != EN_OK) return status;
    if (c->model->is_external && !c->linear) return EN_LINEAR_FAILED;
    c->has_failed = 0;
    en_home home;
    en_enter_cpus(c, &home);
    int n = 0;
    for (int i = 0; i < n_rows; i++) {
        const en_rows *r = &rows[i];
        en_kv_extend(&c->kv, r->seq_id, r->n);
        for (int j = 0; j < r->n; j++) {
            int wants = r->want == 2 || (r->want == 1 && j == r->n - 1);
            c->places[n++] = (row_place){r->seq_id, r->start + j, r->token_ids[j], wants};
            if (n == c->n_ubatch) {
                logits += (size_t)run_step(c, n, logits) * c->model->config.n_vocab;
                n = 0;
            }
        }
    }
    if (n > 0) run_step(c, n, logits);
    en_leave_cpus(&home);
    return c->has_failed ? EN_LINEAR_FAILED : EN_OK;
}
