/* Attention: RoPE, what a token keeps, and the blocks each query sees. */
#include "context.h"

#include <math.h>
#include <string.h>

/* Pairs of an element and the one half a rotation on, or of neighbours. */
static void rotate(float *v, const float *turn, int n_rot, int pairs_halves) {
    float *half = v + n_rot / 2;
    for (int i = 0; pairs_halves && i < n_rot / 2; i++) {
        float a = v[i], b = half[i];
        v[i] = a * turn[2 * i] - b * turn[2 * i + 1];
        half[i] = a * turn[2 * i + 1] + b * turn[2 * i];
    }
    for (int i = 0; !pairs_halves && i < n_rot; i += 2) {
        float a = v[i], b = v[i + 1];
        v[i] = a * turn[i] - b * turn[i + 1];
        v[i + 1] = a * turn[i + 1] + b * turn[i];
    }
}

static void turn_heads(const step *s, int row, float *heads, int n_heads, const float *norm) {
    const en_model *model = s->c->model;
    const en_config *g = &model->config;
    const float *turn = s->c->turns + (size_t)row * g->n_rot;
    for (int h = 0; h < n_heads; h++) {
        float *v = heads + (size_t)h * g->head_dim;
        if (norm) model->isa->rms_norm(v, norm, g->head_dim, g->norm_eps, v);
        if (s->layer->config.uses_rope) rotate(v, turn, g->n_rot, g->pairs_halves);
    }
}

void en_rotate_and_keep(step *s, int row) {
    en_context *c = s->c;
    const en_config *g = &c->model->config;
    const en_layer *w = s->layer;
    const row_place *place = &c->places[row];
    int head_dim = g->head_dim, block = place->position / EN_KV_BLOCK, slot = place->position % EN_KV_BLOCK;
    int q_dim = en_q_dim(s), kv_dim = en_kv_dim(s);
    float *q = c->qkv + (size_t)row * (q_dim + 2 * kv_dim), *k = q + q_dim, *v = k + kv_dim;
    float scale = 1.0f / sqrtf((float)head_dim);
    if (g->temperature_scale != 0.0f)
        scale *= (float)(1.0 + g->temperature_scale * log(1.0 + place->position / g->temperature_length));
    turn_heads(s, row, q, w->config.n_heads, w->q_norm);
    for (int i = 0; i < q_dim; i++) q[i] *= scale;
    turn_heads(s, row, k, w->config.n_kv_heads, w->k_norm);
    for (int h = 0; h < w->config.n_kv_heads; h++) {
        void *head = en_kv_head(&c->kv, place->seq, block, s->layer_number, h);
        en_kv_keep(c->model->isa, c->kv.type, head, head_dim, slot, k + h * head_dim, v + h * head_dim);
    }
}

/* The queries of a task by one KV head: its rows times the heads that share it. */
typedef struct queries {
    const step *s;
    thread_memory *memory;
    const row_place *places; /* of the rows */
    int n_rows, group, head;
    float peak[EN_MAX_QUERIES], total[EN_MAX_QUERIES];
} queries;

/* The first position that a row sees. */
static int first_seen(const queries *a, int row) {
    int window = a->s->layer->config.window, first = a->places[row].position - window + 1;
    return window > 0 && first > 0 ? first : 0;
}

/* Queries from..from + n into the running softmax. */
static void attend_some(queries *a, int from, int n, const int32_t *limits, const float *k, const float *v) {
    int head_dim = a->s->c->model->config.head_dim;
    a->s->c->model->isa->attend(a->memory->q + from * head_dim, n, limits, k, v, head_dim, a->memory->out + from * head_dim,
                                a->peak + from, a->total + from, a->memory->attend);
}

/* A row whose window begins inside the block sees a copy of it that begins there. */
static void attend_rest_of_block(queries *a, int row, int n_hidden, int n_visible) {
    thread_memory *m = a->memory;
    int head_dim = a->s->c->model->config.head_dim, n = n_visible - n_hidden;
    size_t row_bytes = EN_KV_BLOCK * sizeof(float);
    for (int i = 0; i < head_dim; i++) {
        memset(m->k_cut + i * EN_KV_BLOCK, 0, row_bytes);
        memcpy(m->k_cut + i * EN_KV_BLOCK, m->k + i * EN_KV_BLOCK + n_hidden, n * sizeof(float));
    }
    memset(m->v_cut, 0, head_dim * row_bytes);
    memcpy(m->v_cut, m->v + n_hidden * head_dim, (size_t)n * head_dim * sizeof(float));
    int32_t limits[EN_MAX_QUERIES];
    for (int i = 0; i < a->group; i++) limits[i] = n;
    attend_some(a, row * a->group, a->group, limits, m->k_cut, m->v_cut);
}

static void attend_block(queries *a, int block) {
    const en_context *c = a->s->c;
    thread_memory *m = a->memory;
    const void *kept = en_kv_head(&c->kv, a->places->seq, block, a->s->layer_number, a->head);
    en_kv_spread(c->model->isa, c->kv.type, kept, c->model->config.head_dim, m->k, m->v);
    int32_t limits[EN_MAX_QUERIES];
    int start = block * EN_KV_BLOCK, sees_whole = 0;
    for (int row = 0; row < a->n_rows; row++) {
        int n_visible = a->places[row].position + 1 - start, n_hidden = first_seen(a, row) - start;
        n_visible = n_visible < 0 ? 0 : n_visible > EN_KV_BLOCK ? EN_KV_BLOCK : n_visible;
        int is_cut = n_hidden > 0;
        if (is_cut && n_hidden < n_visible) attend_rest_of_block(a, row, n_hidden, n_visible);
        for (int i = 0; i < a->group; i++) limits[row * a->group + i] = is_cut ? 0 : n_visible;
        sees_whole |= !is_cut;
    }
    if (sees_whole) attend_some(a, 0, a->n_rows * a->group, limits, m->k, m->v);
}

static void attend_chunk(void *argument, int chunk, int thread) {
    step *s = argument;
    en_context *c = s->c;
    const en_layer_config *w = &s->layer->config;
    int n_heads = w->n_kv_heads, group = w->n_heads / n_heads, head = chunk % n_heads, head_dim = c->model->config.head_dim;
    size_t q_dim = en_q_dim(s), width = q_dim + 2 * en_kv_dim(s), head_bytes = head_dim * sizeof(float);
    thread_memory *memory = &c->threads[thread];
    /* The last rows of a prompt see most: they come first, so that no thread ends with the longest task. */
    const attend_task *task = &c->tasks[c->n_tasks - 1 - chunk / n_heads];
    queries a = {.s = s, .memory = memory, .places = c->places + task->first_row, .n_rows = task->n_rows, .group = group, .head = head};
    int n_queries = task->n_rows * group;
    for (int i = 0; i < n_queries; i++) {
        size_t row = task->first_row + i / group;
        memcpy(memory->q + i * head_dim, c->qkv + row * width + (head * group + i % group) * head_dim, head_bytes);
        a.peak[i] = -INFINITY;
    }
    memset(memory->out, 0, n_queries * head_bytes);
    int first = first_seen(&a, 0), last = a.places[task->n_rows - 1].position;
    for (int block = first / EN_KV_BLOCK; block <= last / EN_KV_BLOCK; block++) attend_block(&a, block);
    for (int i = 0; i < n_queries; i++) {
        size_t row = task->first_row + i / group;
        float *to = c->attended + row * q_dim + (head * group + i % group) * head_dim, scale = 1.0f / a.total[i];
        for (int j = 0; j < head_dim; j++) to[j] = memory->out[i * head_dim + j] * scale;
    }
}

/* Cut the rows into tasks of one sequence and ascending positions. */
static void cut_tasks(step *s) {
    en_context *c = s->c;
    int group = s->layer->config.n_heads / s->layer->config.n_kv_heads, most = EN_MAX_QUERIES / group;
    if (most * group > 24 && 24 / group > 0) most = 24 / group; /* q, out and a block of KV in a 32 KiB cache */
    c->n_tasks = 0;
    for (int row = 0; row < s->n_rows;) {
        int n = 1;
        while (n < most && row + n < s->n_rows && c->places[row + n].seq == c->places[row].seq &&
               c->places[row + n].position == c->places[row].position + n)
            n++;
        c->tasks[c->n_tasks++] = (attend_task){row, n};
        row += n;
    }
}

void en_attend(step *s) {
    cut_tasks(s); /* for the heads that share a KV head in this layer */
    en_pool_run(s->c->pool, attend_chunk, s, s->c->n_tasks * s->layer->config.n_kv_heads);
}
