/* One step: rows of many sequences through the layers. */
#include "engine.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_CHUNK_BYTES = 32 * 1024, SERIAL_ROWS = 4 };

/* Where a row of the step belongs. */
typedef struct row_place {
    int32_t seq, position, token, wants;
} row_place;

/* Rows of one sequence that attention takes at once, by one of its KV heads. */
typedef struct attend_task {
    int32_t first_row, n_rows;
} attend_task;

typedef struct thread_memory {
    uint8_t *kernel;  /* EN_SCRATCH_BYTES */
    float *attend;    /* of the attend kernel */
    float *q, *out;   /* EN_MAX_QUERIES by head_dim */
    float *partial;   /* n_ubatch by EN_TILE, for a last tile that is not full */
} thread_memory;

struct en_context {
    const en_model *model;
    en_pool *pool;
    en_kv kv;
    int n_ctx, n_ubatch, qkv_dim, q_dim, kv_dim;
    row_place *places;
    attend_task *tasks;
    int n_tasks;
    float *x, *qkv, *attended, *gate, *up, *turns; /* of n_ubatch rows */
    float *normed;                                 /* as wide as the widest input of a product */
    int8_t *q8;
    float *q8_d, *q8_ds;
    int32_t *q8_sums;
    double *frequencies;
    uint8_t *memory;
    uint8_t *thread_block;
    thread_memory threads[EN_MAX_THREADS];
};

/* -- set up -------------------------------------------------------------------------------------------------------- */

static size_t aligned(size_t n) { return (n + 63) / 64 * 64; }

static void *cut(uint8_t **next, size_t n_bytes) {
    uint8_t *at = *next;
    *next += aligned(n_bytes);
    return at;
}

static int max_width(const en_context *c) {
    int width = c->model->config.n_embd;
    width = c->q_dim > width ? c->q_dim : width;
    return c->model->config.n_ff > width ? c->model->config.n_ff : width;
}

/* Lay the scratch out; with next NULL only count. */
static size_t lay_out(en_context *c, uint8_t *memory) {
    const en_config *g = &c->model->config;
    size_t n = (size_t)c->n_ubatch, width = (size_t)max_width(c);
    uint8_t *next = memory;
    c->places = cut(&next, n * sizeof *c->places);
    c->tasks = cut(&next, n * sizeof *c->tasks);
    c->x = cut(&next, n * g->n_embd * sizeof(float));
    c->qkv = cut(&next, n * c->qkv_dim * sizeof(float));
    c->attended = cut(&next, n * c->q_dim * sizeof(float));
    c->gate = cut(&next, n * g->n_ff * sizeof(float));
    c->up = cut(&next, n * g->n_ff * sizeof(float));
    c->turns = cut(&next, n * g->n_rot * sizeof(float));
    c->normed = cut(&next, n * g->n_embd * sizeof(float));
    c->q8 = cut(&next, n * width);
    c->q8_d = cut(&next, n * width / EN_BLOCK * sizeof(float));
    c->q8_ds = cut(&next, n * width / EN_BLOCK * sizeof(float));
    c->q8_sums = cut(&next, n * width / EN_BLOCK * sizeof(int32_t));
    c->frequencies = cut(&next, (size_t)g->n_rot / 2 * sizeof(double));
    return (size_t)(next - memory);
}

static int lay_out_threads(en_context *c, int n_threads) {
    size_t head = (size_t)c->model->config.head_dim;
    size_t kernel = EN_SCRATCH_BYTES, attend = aligned(en_attend_floats((int)head) * sizeof(float));
    size_t queries = aligned(EN_MAX_QUERIES * head * sizeof(float));
    size_t partial = aligned((size_t)c->n_ubatch * EN_TILE * sizeof(float)), each = kernel + attend + 2 * queries + partial;
    uint8_t *memory = aligned_alloc(64, each * n_threads);
    if (!memory) return EN_NO_MEMORY;
    free(c->thread_block);
    c->thread_block = memory;
    for (int i = 0; i < n_threads; i++) {
        uint8_t *next = memory + each * i;
        c->threads[i].kernel = cut(&next, kernel);
        c->threads[i].attend = cut(&next, attend);
        c->threads[i].q = cut(&next, queries);
        c->threads[i].out = cut(&next, queries);
        c->threads[i].partial = cut(&next, partial);
    }
    return EN_OK;
}

en_context *en_context_new(const en_model *model, int n_ctx, int n_seq_max, int n_ubatch, int n_threads, char *error,
                           size_t error_size) {
    const en_config *g = &model->config;
    if (n_ctx < 1 || n_ctx > 1 << 24 || n_seq_max < 1 || n_seq_max > 1 << 16 || n_ubatch < 1 || n_ubatch > 1 << 16) {
        snprintf(error, error_size, "context, sequences or rows are out of range");
        return NULL;
    }
    en_context *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->model = model;
    c->n_ctx = n_ctx;
    c->n_ubatch = n_ubatch;
    c->q_dim = g->n_heads * g->head_dim;
    c->kv_dim = g->n_kv_heads * g->head_dim;
    c->qkv_dim = c->q_dim + 2 * c->kv_dim;
    size_t n_bytes = lay_out(c, NULL);
    c->memory = aligned_alloc(64, aligned(n_bytes));
    if (c->memory) lay_out(c, c->memory);
    int failed = !c->memory || en_kv_init(&c->kv, g, n_ctx, n_seq_max) != EN_OK || en_set_threads(c, n_threads) != EN_OK;
    if (failed) {
        snprintf(error, error_size, "no memory or no threads for the context");
        en_context_free(c);
        return NULL;
    }
    for (int i = 0; i < g->n_rot / 2; i++) c->frequencies[i] = pow((double)g->rope_freq_base, -2.0 * i / g->n_rot);
    return c;
}

void en_context_free(en_context *context) {
    if (!context) return;
    en_pool_free(context->pool);
    en_kv_drop(&context->kv);
    free(context->memory);
    free(context->thread_block);
    free(context);
}

int en_set_threads(en_context *c, int n_threads) {
    if (c->pool && en_pool_threads(c->pool) == n_threads) return EN_OK;
    en_pool *pool = en_pool_new(n_threads);
    if (!pool || lay_out_threads(c, n_threads) != EN_OK) {
        en_pool_free(pool);
        return EN_NO_MEMORY;
    }
    en_pool_free(c->pool);
    c->pool = pool;
    return EN_OK;
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

typedef struct step {
    en_context *c;
    const en_layer *layer;
    int layer_number, n_rows;
} step;

typedef void row_fn(step *s, int row);

typedef struct row_job {
    step *s;
    row_fn *fn;
    int n_rows, n_each;
} row_job;

static void run_rows(void *argument, int chunk, int thread) {
    (void)thread;
    row_job *job = argument;
    int end = (chunk + 1) * job->n_each;
    for (int row = chunk * job->n_each; row < end && row < job->n_rows; row++) job->fn(job->s, row);
}

/* Call fn for each row; few rows cost less on this thread than waking others. */
static void for_rows(step *s, row_fn *fn) {
    int n = s->n_rows, n_threads = n < SERIAL_ROWS ? 1 : en_pool_threads(s->c->pool);
    int n_each = n_threads == 1 ? n : (n + 4 * n_threads - 1) / (4 * n_threads);
    row_job job = {s, fn, n, n_each};
    if (n > 0) en_pool_run(s->c->pool, run_rows, &job, (n + n_each - 1) / n_each);
}

typedef struct product {
    const en_matrix *w;
    float *y;
    size_t ldy;
} product;

typedef struct product_job {
    en_context *c;
    en_acts acts;
    product products[3];
    int n_products, n_rows, n_tiles, n_each, accumulate;
} product_job;

static void multiply(const product_job *job, const product *p, int first, int n_tiles, thread_memory *memory) {
    const en_matrix *w = p->w;
    const uint8_t *tiles = (const uint8_t *)w->tiles + (size_t)first * w->tile_bytes;
    int n_full = w->n_rows / EN_TILE - first;
    n_full = n_full < n_tiles ? n_full : n_tiles;
    float *y = p->y + (size_t)first * EN_TILE;
    if (n_full > 0) w->matmul(tiles, n_full, w->n_cols, &job->acts, job->n_rows, y, p->ldy, job->accumulate, memory->kernel);
    if (n_full == n_tiles) return;
    int n_last = w->n_rows % EN_TILE;
    y += (size_t)n_full * EN_TILE;
    if (job->accumulate)
        for (int t = 0; t < job->n_rows; t++)
            for (int r = 0; r < n_last; r++) memory->partial[t * EN_TILE + r] = y[(size_t)t * p->ldy + r];
    w->matmul(tiles + (size_t)n_full * w->tile_bytes, 1, w->n_cols, &job->acts, job->n_rows, memory->partial, EN_TILE,
              job->accumulate, memory->kernel);
    for (int t = 0; t < job->n_rows; t++) memcpy(y + (size_t)t * p->ldy, memory->partial + t * EN_TILE, n_last * sizeof *y);
}

static void run_products(void *argument, int chunk, int thread) {
    product_job *job = argument;
    int first = chunk * job->n_each, left = job->n_tiles - first;
    left = left < job->n_each ? left : job->n_each;
    for (int i = 0; i < job->n_products && left > 0; i++) {
        int here = job->products[i].w->n_tiles - first;
        if (here <= 0) {
            first = -here;
            continue;
        }
        here = here < left ? here : left;
        multiply(job, &job->products[i], first, here, &job->c->threads[thread]);
        left -= here;
        first = 0;
    }
}

static void multiply_all(product_job *job) {
    size_t tile_bytes = job->products[0].w->tile_bytes;
    job->n_tiles = 0;
    for (int i = 0; i < job->n_products; i++) job->n_tiles += job->products[i].w->n_tiles;
    /* A chunk is what makes taking it worth while: more rows, fewer tiles. */
    size_t work = tile_bytes * (size_t)(job->n_rows < 16 ? 1 : job->n_rows / 8);
    job->n_each = (int)((MIN_CHUNK_BYTES + work - 1) / work);
    if (en_pool_threads(job->c->pool) == 1) job->n_each = job->n_tiles;
    int least = (job->n_tiles + EN_MAX_CHUNKS - 1) / EN_MAX_CHUNKS;
    job->n_each = job->n_each < least ? least : job->n_each;
    if (job->n_rows > 0) en_pool_run(job->c->pool, run_products, job, (job->n_tiles + job->n_each - 1) / job->n_each);
}

static en_acts acts_of(const en_context *c, const float *x) {
    return (en_acts){.x = x, .q = c->q8, .d = c->q8_d, .sums = c->q8_sums, .ds = c->q8_ds};
}

static void quantize_row(const en_context *c, const float *x, int width, int row) {
    size_t at = (size_t)row * width, block = at / EN_BLOCK;
    c->model->isa->quantize(x + at, width, c->q8 + at, c->q8_d + block, c->q8_sums + block, c->q8_ds + block);
}

/* -- what happens to a row ----------------------------------------------------------------------------------------- */

static void embed(step *s, int row) {
    en_context *c = s->c;
    size_t n_embd = c->model->config.n_embd;
    en_row_to_float(&c->model->token_embd, c->places[row].token, c->x + row * n_embd);
    int n_rot = c->model->config.n_rot;
    float *turn = c->turns + (size_t)row * n_rot;
    for (int i = 0; i < n_rot / 2; i++) {
        double angle = c->places[row].position * c->frequencies[i];
        turn[2 * i] = (float)cos(angle);
        turn[2 * i + 1] = (float)sin(angle);
    }
}

static void norm_with(const step *s, int row, const float *weight) {
    en_context *c = s->c;
    int n_embd = c->model->config.n_embd;
    size_t at = (size_t)row * n_embd;
    c->model->isa->rms_norm(c->x + at, weight, n_embd, c->model->config.norm_eps, c->normed + at);
    quantize_row(c, c->normed, n_embd, row);
}

static void norm_attention(step *s, int row) { norm_with(s, row, s->layer->attn_norm); }
static void norm_ffn(step *s, int row) { norm_with(s, row, s->layer->ffn_norm); }
static void norm_output(step *s, int row) { norm_with(s, row, s->c->model->output_norm); }

static void rotate(float *v, const float *turn, int n_rot) {
    for (int i = 0; i < n_rot; i += 2) {
        float a = v[i], b = v[i + 1];
        v[i] = a * turn[i] - b * turn[i + 1];
        v[i + 1] = a * turn[i + 1] + b * turn[i];
    }
}

/* Turn q and k, scale q for the softmax, and put k and v into the KV. */
static void rotate_and_keep(step *s, int row) {
    en_context *c = s->c;
    const en_config *g = &c->model->config;
    const row_place *place = &c->places[row];
    int head_dim = g->head_dim, block = place->position / EN_KV_BLOCK, slot = place->position % EN_KV_BLOCK;
    const float *turn = c->turns + (size_t)row * g->n_rot;
    float *q = c->qkv + (size_t)row * c->qkv_dim, *k = q + c->q_dim, *v = k + c->kv_dim;
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int h = 0; h < g->n_heads; h++) rotate(q + h * head_dim, turn, g->n_rot);
    for (int i = 0; i < c->q_dim; i++) q[i] *= scale;
    uint16_t half[512];
    for (int h = 0; h < g->n_kv_heads; h++) {
        rotate(k + h * head_dim, turn, g->n_rot);
        c->model->isa->to_half(k + h * head_dim, head_dim, half);
        uint16_t *keys = en_kv_keys(&c->kv, place->seq, block, s->layer_number, h) + slot;
        for (int i = 0; i < head_dim; i++) keys[i * EN_KV_BLOCK] = half[i];
        uint16_t *values = en_kv_values(&c->kv, place->seq, block, s->layer_number, h);
        c->model->isa->to_half(v + h * head_dim, head_dim, values + slot * head_dim);
    }
}

static void quantize_attended(step *s, int row) { quantize_row(s->c, s->c->attended, s->c->q_dim, row); }

static void activate(step *s, int row) {
    en_context *c = s->c;
    size_t n_ff = c->model->config.n_ff;
    c->model->isa->silu_mul(c->gate + row * n_ff, c->up + row * n_ff, (int)n_ff);
    quantize_row(c, c->gate, (int)n_ff, row);
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

/* Queries: the rows of the task times the heads that share the KV head. */
static void attend_chunk(void *argument, int chunk, int thread) {
    step *s = argument;
    en_context *c = s->c;
    const en_config *g = &c->model->config;
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
        c->model->isa->attend(memory->q, n_queries, limits, en_kv_keys(&c->kv, places->seq, block, s->layer_number, head),
                              en_kv_values(&c->kv, places->seq, block, s->layer_number, head), head_dim, memory->out, peak,
                              total, memory->attend);
    }
    for (int i = 0; i < n_queries; i++) {
        size_t row = task->first_row + i / group;
        float *to = c->attended + row * c->q_dim + (head * group + i % group) * head_dim, scale = 1.0f / total[i];
        for (int j = 0; j < head_dim; j++) to[j] = memory->out[i * head_dim + j] * scale;
    }
}

/* Cut the rows into tasks of one sequence and ascending positions. */
static void cut_tasks(en_context *c, int n_rows) {
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

/* -- the step ------------------------------------------------------------------------------------------------------ */

/* Move the rows whose logits are wanted to the front; the others are done after the last layer's attention. */
static int keep_wanted(en_context *c, int n_rows) {
    size_t n_embd = c->model->config.n_embd, q_dim = c->q_dim;
    int n = 0;
    for (int row = 0; row < n_rows; row++)
        if (c->places[row].wants) {
            memmove(c->x + n * n_embd, c->x + row * n_embd, n_embd * sizeof(float));
            memmove(c->attended + n * q_dim, c->attended + row * q_dim, q_dim * sizeof(float));
            n++;
        }
    return n;
}

static void run_layer(step *s, int is_last) {
    en_context *c = s->c;
    const en_layer *w = s->layer;
    const en_config *g = &c->model->config;
    for_rows(s, norm_attention);
    product_job qkv = {
        .c = c, .acts = acts_of(c, c->normed), .n_rows = s->n_rows, .n_products = 3,
        .products = {{&w->q, c->qkv, c->qkv_dim}, {&w->k, c->qkv + c->q_dim, c->qkv_dim},
                     {&w->v, c->qkv + c->q_dim + c->kv_dim, c->qkv_dim}}};
    multiply_all(&qkv);
    for_rows(s, rotate_and_keep);
    en_pool_run(c->pool, attend_chunk, s, c->n_tasks * g->n_kv_heads);
    if (is_last) s->n_rows = keep_wanted(c, s->n_rows);
    for_rows(s, quantize_attended);
    product_job out = {.c = c, .acts = acts_of(c, c->attended), .n_rows = s->n_rows, .n_products = 1, .accumulate = 1,
                       .products = {{&w->out, c->x, g->n_embd}}};
    multiply_all(&out);
    for_rows(s, norm_ffn);
    product_job wide = {.c = c, .acts = acts_of(c, c->normed), .n_rows = s->n_rows, .n_products = 2,
                        .products = {{&w->gate, c->gate, g->n_ff}, {&w->up, c->up, g->n_ff}}};
    multiply_all(&wide);
    for_rows(s, activate);
    product_job down = {.c = c, .acts = acts_of(c, c->gate), .n_rows = s->n_rows, .n_products = 1, .accumulate = 1,
                        .products = {{&w->down, c->x, g->n_embd}}};
    multiply_all(&down);
}

/* Compute the rows laid out in places; gives how many logits rows were written. */
static int run_step(en_context *c, int n_rows, float *logits) {
    const en_model *model = c->model;
    step s = {.c = c, .n_rows = n_rows};
    cut_tasks(c, n_rows);
    for_rows(&s, embed);
    for (int i = 0; i < model->config.n_layers; i++) {
        s.layer = &model->layers[i];
        s.layer_number = i;
        run_layer(&s, i == model->config.n_layers - 1);
    }
    for_rows(&s, norm_output);
    product_job head = {.c = c, .acts = acts_of(c, c->normed), .n_rows = s.n_rows, .n_products = 1,
                        .products = {{&model->output, logits, model->config.n_vocab}}};
    multiply_all(&head);
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
    return EN_OK;
}

/* -- sequences ----------------------------------------------------------------------------------------------------- */

static int is_seq(const en_context *c, int seq) { return seq >= 0 && seq < c->kv.n_seqs; }

int en_seq_length(const en_context *c, int seq_id) { return is_seq(c, seq_id) ? c->kv.lengths[seq_id] : -1; }

int en_free_blocks(const en_context *c) { return c->kv.n_free; }

int en_seq_copy(en_context *c, int src, int dst, int n_tokens) {
    if (!is_seq(c, src) || !is_seq(c, dst) || src == dst || c->kv.lengths[dst] != 0) return EN_BAD_SEQ;
    if (n_tokens < 0 || n_tokens > c->kv.lengths[src]) return EN_BAD_ROWS;
    en_kv_share(&c->kv, src, dst, n_tokens);
    return EN_OK;
}

int en_seq_trim(en_context *c, int seq_id, int n_tokens) {
    if (!is_seq(c, seq_id) || n_tokens < 0) return EN_BAD_SEQ;
    en_kv_trim(&c->kv, seq_id, n_tokens);
    return EN_OK;
}

static uint64_t blocks_of(int n_tokens) { return ((uint64_t)n_tokens + EN_KV_BLOCK - 1) / EN_KV_BLOCK; }

uint64_t en_seq_bytes(const en_context *c, int seq_id) {
    return is_seq(c, seq_id) ? blocks_of(c->kv.lengths[seq_id]) * c->kv.block_bytes : 0;
}

int en_seq_save(const en_context *c, int seq_id, void *state) {
    if (!is_seq(c, seq_id)) return EN_BAD_SEQ;
    for (uint64_t i = 0; i < blocks_of(c->kv.lengths[seq_id]); i++)
        memcpy((uint8_t *)state + i * c->kv.block_bytes, en_kv_keys(&c->kv, seq_id, (int)i, 0, 0), c->kv.block_bytes);
    return EN_OK;
}

int en_seq_load(en_context *c, int seq_id, int n_tokens, const void *state, uint64_t n_bytes) {
    if (!is_seq(c, seq_id) || c->kv.lengths[seq_id] != 0) return EN_BAD_SEQ;
    if (n_tokens < 0 || n_tokens > c->n_ctx || n_bytes != blocks_of(n_tokens) * c->kv.block_bytes) return EN_BAD_ROWS;
    if (en_kv_need(&c->kv, seq_id, 0, n_tokens) > c->kv.n_free) return EN_NO_CELLS;
    en_kv_extend(&c->kv, seq_id, n_tokens);
    for (uint64_t i = 0; i < blocks_of(n_tokens); i++)
        memcpy(en_kv_keys(&c->kv, seq_id, (int)i, 0, 0), (const uint8_t *)state + i * c->kv.block_bytes, c->kv.block_bytes);
    return EN_OK;
}
