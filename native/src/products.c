/* Jobs for the pool: a function for each row, and products of matrices. */
#include "context.h"

#include <math.h>
#include <string.h>

enum {
    MIN_CHUNK_BYTES = 32 * 1024,
    MAX_ACTS_BYTES = 256 * 1024, /* of the rows multiplied with one tile after another: they stay in a cache of 512 KiB */
    SERIAL_ROWS = 4,
    PANEL_ROWS = 16,  /* from so many rows on a kernel prepares something for all tiles of a call … */
    PANEL_TILES = 16, /* … which pays by so many */
    CHUNKS_EACH = 8,  /* chunks that a thread has at least then, so that others can help it */
};

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
void en_for_rows(step *s, row_fn *fn) {
    int n = s->n_rows, n_threads = n < SERIAL_ROWS ? 1 : en_pool_threads(s->c->pool);
    int n_each = n_threads == 1 ? n : (n + 4 * n_threads - 1) / (4 * n_threads);
    row_job job = {s, fn, n, n_each};
    if (n > 0) en_pool_run(s->c->pool, run_rows, &job, (n + n_each - 1) / n_each);
}

static void multiply_tiles(const product_job *job, const product *p, int first, int n_tiles, thread_memory *memory) {
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

static void multiply(const product_job *job, const product *p, int first, int n_tiles, thread_memory *memory) {
    multiply_tiles(job, p, first, n_tiles, memory);
    if (!p->w->bias) return;
    int end = (first + n_tiles) * EN_TILE, start = first * EN_TILE;
    end = end < p->w->n_rows ? end : p->w->n_rows;
    for (int t = 0; t < job->n_rows; t++)
        for (int r = start; r < end; r++) p->y[(size_t)t * p->ldy + r] += p->w->bias[r];
}

/* The job for n rows from first on. */
static product_job cut_rows(const product_job *job, int first, int n) {
    product_job part = *job;
    size_t width = (size_t)job->products[0].w->n_cols, at = first * width, block = at / EN_BLOCK;
    part.acts = (en_acts){job->acts.x + at,         job->acts.q + at,     job->acts.d + block,
                          job->acts.sums + block, job->acts.ds + block, job->acts.half_sums + 2 * block};
    for (int i = 0; i < job->n_products; i++) part.products[i].y += first * job->products[i].ldy;
    part.n_rows = job->n_rows - first < n ? job->n_rows - first : n;
    return part;
}

/* Chunks are those of the tiles by the first rows, then those by the next rows. */
static void run_products(void *argument, int chunk, int thread) {
    const product_job *job = argument;
    int n_tile_chunks = (job->n_tiles + job->n_each - 1) / job->n_each;
    product_job part = cut_rows(job, chunk / n_tile_chunks * job->n_rows_each, job->n_rows_each);
    int first = chunk % n_tile_chunks * job->n_each, left = job->n_tiles - first;
    left = left < job->n_each ? left : job->n_each;
    for (int i = 0; i < job->n_products && left > 0; i++) {
        int here = job->products[i].w->n_tiles - first;
        if (here <= 0) {
            first = -here;
            continue;
        }
        here = here < left ? here : left;
        multiply(&part, &part.products[i], first, here, &job->c->threads[thread]);
        left -= here;
        first = 0;
    }
}

/* Rows in even parts that fit the cache, of whole panels of 16. */
static int rows_each(const product_job *job) {
    const en_matrix *w = job->products[0].w;
    /* A float each, or an int8 and its share of scales and sums. */
    size_t row_bytes = (size_t)w->n_cols * (w->type == EN_F32 || w->type == EN_F16 ? 4 : 2);
    int n_parts = (int)((job->n_rows * row_bytes + MAX_ACTS_BYTES - 1) / MAX_ACTS_BYTES);
    return ((job->n_rows + n_parts - 1) / n_parts + 15) / 16 * 16;
}

/* Have the context's function multiply, and put its products where the job wants them. */
static void multiply_elsewhere(product_job *job) {
    en_context *c = job->c;
    const product *first = &job->products[0];
    int n = 0, is_direct = job->n_products == 1 && !job->accumulate && !first->w->bias && first->ldy == (size_t)first->w->n_rows;
    for (int i = 0; i < job->n_products; i++) n += job->products[i].w->n_rows;
    float *from = is_direct ? first->y : c->products;
    c->has_failed |= c->linear(c->linear_user, job->matrix, job->acts.x, job->n_rows, first->w->n_cols, from, n) != 0;
    if (is_direct || c->has_failed) return;
    for (int t = 0; t < job->n_rows; t++)
        for (int i = 0; i < job->n_products; i++) {
            const product *p = &job->products[i];
            float *y = p->y + (size_t)t * p->ldy;
            for (int r = 0; r < p->w->n_rows; r++)
                y[r] = (job->accumulate ? y[r] : 0) + (from[r] + (p->w->bias ? p->w->bias[r] : 0));
            from += p->w->n_rows;
        }
}

void en_multiply(product_job *job) {
    if (job->n_rows == 0 || job->c->has_failed) return;
    if (job->c->model->is_external) {
        multiply_elsewhere(job);
        return;
    }
    size_t tile_bytes = job->products[0].w->tile_bytes;
    job->n_tiles = 0;
    for (int i = 0; i < job->n_products; i++) job->n_tiles += job->products[i].w->n_tiles;
    job->n_rows_each = rows_each(job);
    int n_parts = (job->n_rows + job->n_rows_each - 1) / job->n_rows_each, n_rows = job->n_rows / n_parts;
    /* A chunk is what makes taking it worth while: more rows, fewer tiles. */
    size_t work = tile_bytes * (size_t)(n_rows < 16 ? 1 : n_rows / 8);
    job->n_each = (int)((MIN_CHUNK_BYTES + work - 1) / work);
    int n_threads = en_pool_threads(job->c->pool);
    if (n_rows >= PANEL_ROWS) {
        int fair = job->n_tiles * n_parts / (CHUNKS_EACH * n_threads), most = fair < PANEL_TILES ? fair : PANEL_TILES;
        job->n_each = job->n_each < most ? most : job->n_each;
    }
    if (n_threads == 1) job->n_each = job->n_tiles;
    int least = (job->n_tiles + EN_MAX_CHUNKS / n_parts - 1) / (EN_MAX_CHUNKS / n_parts);
    job->n_each = job->n_each < least ? least : job->n_each;
    en_pool_run(job->c->pool, run_products, job, n_parts * ((job->n_tiles + job->n_each - 1) / job->n_each));
}

en_acts en_acts_of(const en_context *c, const float *x) {
    return (en_acts){.x = x, .q = c->q8, .d = c->q8_d, .sums = c->q8_sums, .ds = c->q8_ds, .half_sums = c->q8_half_sums};
}

void en_quantize_row(const en_context *c, const float *x, int width, int row) {
    if (c->model->is_external) return;
    size_t at = (size_t)row * width, block = at / EN_BLOCK;
    c->model->isa->quantize(x + at, width, c->q8 + at, c->q8_d + block, c->q8_sums + block, c->q8_ds + block,
                             c->q8_half_sums + 2 * block);
    if (en_all_finite(x + at, width)) return;
    /* What is no number becomes some integer or other; the scales keep it in sight. */
    for (int i = 0; i < width / EN_BLOCK; i++) c->q8_d[block + i] = c->q8_ds[block + i] = NAN;
}
