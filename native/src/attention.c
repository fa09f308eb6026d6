/* Attention: RoPE, what a token keeps, and the blocks each query sees. */
#include "context.h"

#include <math.h>
#include <string.h>

static void rotate(float *v, const float *turn, int n_rot) {
    for (int i = 0; i < n_rot; i += 2) {
        float a = v[i], b = v[i + 1];
        v[i] = a * turn[i] - b * turn[i + 1];
        v[i + 1] = a * turn[i + 1] + b * turn[i];
    }
}

void en_rotate_and_keep(step *s, int row) {
    en_context *c = s->c;
    const en_config *g = &c->model->config;
    const row_place *place = &c->places[row];
    int head_dim = g->head_dim, block = place->position / EN_KV_BLOCK, slot = place->position % EN_KV_BLOCK;
    const float *turn = c->turns + (size_t)row * g->n_rot;
    float *q = c->qkv + (size_t)row * c->qkv_dim, *k = q + c->q_dim, *v = k + c->kv_dim;
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int h = 0; h < g->n_heads; h++) rotate(q + h * head_dim, turn, g->n_rot);
    for (int i = 0; i < c->q_dim; i++) q[i] *= scale;
    for (int h = 0; h < g->n_kv_heads; h++) {
        rotate(k + h * head_dim, turn, g->n_rot);
        void *head = en_kv_head(&c->kv, place->seq, block, s->layer_number, h);
        en_kv_keep(c->model->isa, c->kv.type, head, head_dim, slot, k + h * head_dim, v + h * head_dim);
    }
}

/* Queries: the rows of the task times the heads that share the KV head. */
static void attend_chunk(void *argument, int chunk, int thread) {
    step *s = argument;
    en_context *c = s->c;
    const en_config *g = &c->model->config;
    const en_isa *isa = c->model->isa;
    thread_memory *memory = &c->threads[thread];
    /* The last rows of a prompt see most: they come first, so that no thread ends with the longest task. */
    const attend_task *task = &c->tasks[c->n_tasks - 1 - chunk / g->n_kv_heads];
    int head = chunk % g->n_kv_heads, group = g->n_heads / g->n_kv_heads, head_dim = g->head_dim;
    int n_queries = task->n_rows * group;
    const row_place *places = c->places + task->first_row;
    float peak[EN_MAX_QUERIES], total[EN_MAX_QUERIES];
    int32_t limits[EN_MAX_QUERIES];
    size_t head_bytes = head_dim * sizeof(float);
    for (int i = 0; i < n_queries; i++) {
        size_t row = task->first_row + i / group;
        memcpy(memory->q + i * head_dim, c->qkv + row * c->qkv_dim + (head * group + i % group) * head_dim, head_bytes);
        peak[i] = -INFINITY;
        total[i] = 0.0f;
    }
    memset(memory->out, 0, n_queries * head_bytes);
    int last = places[task->n_rows - 1].position;
    for (int block = 0; block <= last / EN_KV_BLOCK; block++) {
        for (int i = 0; i < n_queries; i++) {
            int visible = places[i / group].position + 1 - block * EN_KV_BLOCK;
            limits[i] = visible < 0 ? 0 : visible > EN_KV_BLOCK ? EN_KV_BLOCK : visible;
        }
        const void *kept = en_kv_head(&c->kv, places->seq, block, s->layer_number, head);
        en_kv_spread(isa, c->kv.type, kept, head_dim, memory->k, memory->v);
        isa->attend(memory->q, n_queries, limits, memory->k, memory->v, head_dim, memory->out, peak, total, memory->attend);
    }
    for (int i = 0; i < n_queries; i++) {
        size_t row = task->first_row + i / group;
        float *to = c->attended + row * c->q_dim + (head * group + i % group) * head_dim, scale = 1.0f / total[i];
        for (int j = 0; j < head_dim; j++) to[j] = memory->out[i * head_dim + j] * scale;
    }
}

void en_cut_tasks(en_context *c, int n_rows) {
    int group = c->model->config.n_heads / c->model->config.n_kv_heads, most = EN_MAX_QUERIES / group;
    if (most * group > 24 && 24 / group > 0) most = 24 / group; /* q, out and a block of KV in a 32 KiB cache */
    c->n_tasks = 0;
    for (int row = 0; row < n_rows;) {
        int n = 1;
        while (n < most && row + n < n_rows && c->places[row + n].seq == c->places[row].seq &&
               c->places[row + n].position == c->places[row].position + n)
            n++;
        c->tasks[c->n_tasks++] = (attend_task){row, n};
        row += n;
    }
}

void en_attend(step *s) {
    en_pool_run(s->c->pool, attend_chunk, s, s->c->n_tasks * s->c->model->config.n_kv_heads);
}
