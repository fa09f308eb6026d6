/* Attention: RoPE, what a token keeps, and the blocks each query sees. */
#include "context.h"

#include <limits.h>
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

/* -- parts ---------------------------------------------------------------------------------------------------------
 * The blocks that a query sees are cut into parts of PART_TOKENS. Each part has a running softmax of its own, and the
 * parts are added up in order, whoever computed them: the cut depends on positions alone, so neither the threads nor
 * the rest of the batch change a bit. */

enum { PART_BLOCKS = 16, PART_TOKENS = PART_BLOCKS * EN_KV_BLOCK, TASKS_PER_THREAD = 8 };

int en_max_parts(int n_ctx) { return (n_ctx - 1) / PART_TOKENS + 1; }

/* The first position that the query at this one sees. */
static int first_seen(const step *s, int position) {
    int window = s->layer->config.window;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

static int first_part(const step *s, int position) { return first_seen(s, position) / PART_TOKENS; }

/* Add a part to the sum of those before it; a query that sees nothing of a part has a total of 0 there. */
static void add_part(const float *part, float part_peak, float part_total, int n, float *sum, float *peak, float *total) {
    if (part_total == 0.0f) return;
    if (*total == 0.0f) {
        memcpy(sum, part, n * sizeof *sum);
        *peak = part_peak;
        *total = part_total;
        return;
    }
    float top = part_peak > *peak ? part_peak : *peak, keep = expf(*peak - top), take = expf(part_peak - top);
    for (int i = 0; i < n; i++) sum[i] = sum[i] * keep + part[i] * take;
    *peak = top;
    *total = *total * keep + part_total * take;
}

static void write_head(const step *s, int row, int head, const float *sum, float total) {
    int head_dim = s->c->model->config.head_dim;
    float *to = s->c->attended + (size_t)row * en_q_dim(s) + head * head_dim, scale = 1.0f / total;
    for (int i = 0; i < head_dim; i++) to[i] = sum[i] * scale;
}

/* Where a part of a row leaves a head's sum, peak and total. */
static float *slot_of(const step *s, int row, int part, int head) {
    size_t at = (size_t)(s->c->slots[row] + part) * s->layer->config.n_heads + head;
    return s->c->parts + at * (s->c->model->config.head_dim + 2);
}

/* Add up the parts of a row that several tasks computed. */
static void add_parts(step *s, int row) {
    int head_dim = s->c->model->config.head_dim, position = s->c->places[row].position;
    if (s->c->slots[row] == EN_WHOLE) return;
    for (int head = 0; head < s->layer->config.n_heads; head++) {
        float sum[EN_MAX_HEAD_DIM], peak = -INFINITY, total = 0.0f;
        for (int part = first_part(s, position); part <= position / PART_TOKENS; part++) {
            const float *at = slot_of(s, row, part, head);
            add_part(at, at[head_dim], at[head_dim + 1], head_dim, sum, &peak, &total);
        }
        write_head(s, row, head, sum, total);
    }
}

/* -- tasks --------------------------------------------------------------------------------------------------------- */

/* The queries of a task by one KV head: its rows times the heads that share it. The kernel takes those of n_each rows at
 * once, so many that q, out and a block of KV stay in a 32 KiB cache; more rows in a task share the spreading of KV. */
typedef struct queries {
    const step *s;
    thread_memory *memory;
    const row_place *places; /* of the rows */
    int first_row, n_rows, n_each, group, head;
    float peak[EN_TASK_QUERIES], total[EN_TASK_QUERIES];         /* of the part under way, which is in memory->out */
    float sum_peak[EN_TASK_QUERIES], sum_total[EN_TASK_QUERIES]; /* of the parts before it, in memory->sum */
} queries;

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
    int32_t limits[EN_TASK_QUERIES];
    int start = block * EN_KV_BLOCK;
    for (int row = 0; row < a->n_rows; row++) {
        int n_visible = a->places[row].position + 1 - start, n_hidden = first_seen(a->s, a->places[row].position) - start;
        n_visible = n_visible < 0 ? 0 : n_visible > EN_KV_BLOCK ? EN_KV_BLOCK : n_visible;
        int is_cut = n_hidden > 0;
        if (is_cut && n_hidden < n_visible) attend_rest_of_block(a, row, n_hidden, n_visible);
        for (int i = 0; i < a->group; i++) limits[row * a->group + i] = is_cut ? 0 : n_visible;
    }
    for (int row = 0; row < a->n_rows; row += a->n_each) {
        int n = a->n_rows - row < a->n_each ? a->n_rows - row : a->n_each, at = row * a->group;
        attend_some(a, at, n * a->group, limits + at, m->k, m->v);
    }
}

/* The part's running softmax goes through its blocks, then the part goes to where it is added up. */
static void attend_part(queries *a, int part) {
    const step *s = a->s;
    int head_dim = s->c->model->config.head_dim, n = a->n_rows * a->group;
    for (int i = 0; i < n; i++) a->peak[i] = -INFINITY, a->total[i] = 0.0f;
    memset(a->memory->out, 0, (size_t)n * head_dim * sizeof(float));
    int first = first_seen(s, a->places[0].position) / EN_KV_BLOCK, last = a->places[a->n_rows - 1].position / EN_KV_BLOCK;
    first = first > part * PART_BLOCKS ? first : part * PART_BLOCKS;
    for (int block = first; block <= last && block < (part + 1) * PART_BLOCKS; block++) attend_block(a, block);
    for (int i = 0; i < n; i++) {
        int row = a->first_row + i / a->group, position = a->places[i / a->group].position;
        const float *out = a->memory->out + i * head_dim;
        if (s->c->slots[row] == EN_WHOLE) {
            float *sum = a->memory->sum + i * head_dim;
            add_part(out, a->peak[i], a->total[i], head_dim, sum, a->sum_peak + i, a->sum_total + i);
        } else if (part >= first_part(s, position) && part <= position / PART_TOKENS) {
            float *to = slot_of(s, row, part, a->head * a->group + i % a->group);
            memcpy(to, out, head_dim * sizeof *to);
            to[head_dim] = a->peak[i];
            to[head_dim + 1] = a->total[i];
        }
    }
}

static int rows_at_once(const step *s) {
    int group = s->layer->config.n_heads / s->layer->config.n_kv_heads;
    return group <= 24 ? 24 / group : EN_MAX_QUERIES / group;
}

static void run_task(step *s, const attend_task *task, int kv_head, thread_memory *memory) {
    en_context *c = s->c;
    int group = s->layer->config.n_heads / s->layer->config.n_kv_heads, head_dim = c->model->config.head_dim;
    int n = task->n_rows * group, width = en_q_dim(s) + 2 * en_kv_dim(s);
    queries a = {.s = s, .memory = memory, .places = c->places + task->first_row, .first_row = task->first_row,
                 .n_rows = task->n_rows, .n_each = rows_at_once(s), .group = group, .head = kv_head};
    for (int i = 0; i < n; i++) {
        const float *q = c->qkv + (size_t)(task->first_row + i / group) * width + (kv_head * group + i % group) * head_dim;
        memcpy(memory->q + i * head_dim, q, head_dim * sizeof *q);
        a.sum_total[i] = 0.0f;
    }
    for (int part = task->first_part; part < task->end_part; part++) attend_part(&a, part);
    if (c->slots[task->first_row] != EN_WHOLE) return;
    for (int i = 0; i < n; i++)
        write_head(s, task->first_row + i / group, kv_head * group + i % group, memory->sum + i * head_dim, a.sum_total[i]);
}

/* How many rows from here on one task of at most so many takes: of one sequence, with ascending positions. */
static int n_together(const step *s, int row, int most) {
    const row_place *at = s->c->places + row;
    int n = 1;
    while (n < most && row + n < s->n_rows && at[n].seq == at->seq && at[n].position == at->position + n) n++;
    return n;
}

/* The parts that rows row..row + n see. */
static int n_parts_of(const step *s, int row, int n) {
    return s->c->places[row + n - 1].position / PART_TOKENS + 1 - first_part(s, s->c->places[row].position);
}

/* Cut the rows into tasks, and one with so many parts that other threads would wait for it into several; where the memory
 * for parts ends, the rest stays whole. */
static void cut_tasks(step *s) {
    en_context *c = s->c;
    int n_threads = en_pool_threads(c->pool), n_heads = s->layer->config.n_kv_heads, n_slots = 0;
    /* Rows that share the spreading of KV, but enough tasks for all threads. */
    int n_times = s->n_rows / rows_at_once(s) * n_heads / (TASKS_PER_THREAD * n_threads);
    n_times = n_times < 1 ? 1 : n_times > EN_TASK_TIMES ? EN_TASK_TIMES : n_times;
    int max_rows = n_times * rows_at_once(s);
    int64_t n_parts = 0;
    for (int row = 0, n; row < s->n_rows; row += n) n_parts += n_parts_of(s, row, n = n_together(s, row, max_rows));
    int64_t share = n_parts * n_heads / (TASKS_PER_THREAD * n_threads);
    int most = n_threads == 1 || share > INT_MAX ? INT_MAX : share < 1 ? 1 : (int)share;
    c->n_tasks = c->is_split = 0;
    for (int row = 0, n; row < s->n_rows; row += n) {
        n = n_together(s, row, max_rows);
        int parts = n_parts_of(s, row, n), first = first_part(s, c->places[row].position);
        int splits = parts > most && n_slots + n * parts <= c->max_slots, each = splits ? most : parts;
        for (int i = 0; i < n; i++) c->slots[row + i] = splits ? n_slots + i * parts - first : EN_WHOLE;
        for (int at = 0; at < parts; at += each)
            c->tasks[c->n_tasks++] = (attend_task){row, n, first + at, first + (at + each < parts ? at + each : parts)};
        n_slots += splits ? n * parts : 0;
        c->is_split |= splits;
    }
}

static int tasks_per_chunk(const step *s) {
    return (s->c->n_tasks * s->layer->config.n_kv_heads + EN_MAX_CHUNKS - 1) / EN_MAX_CHUNKS;
}

static void attend_chunk(void *argument, int chunk, int thread) {
    step *s = argument;
    en_context *c = s->c;
    int n_heads = s->layer->config.n_kv_heads, n_each = tasks_per_chunk(s);
    for (int i = chunk * n_each; i < (chunk + 1) * n_each && i < c->n_tasks * n_heads; i++)
        /* The last rows of a prompt see most: they come first, so that no thread ends with the longest task. */
        run_task(s, &c->tasks[c->n_tasks - 1 - i / n_heads], i % n_heads, &c->threads[thread]);
}

void en_attend(step *s) {
    cut_tasks(s); /* for the heads that share a KV head in this layer */
    int n = s->c->n_tasks * s->layer->config.n_kv_heads, n_each = tasks_per_chunk(s);
    en_pool_run(s->c->pool, attend_chunk, s, (n + n_each - 1) / n_each);
    if (s->c->is_split) en_for_rows(s, add_parts);
}
