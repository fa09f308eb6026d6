/* Jobs for the pool: a function for each row, and products of matrices. */
#include "context.h"

#include <string.h>

enum { MIN_CHUNK_BYTES = 32 * 1024, SERIAL_ROWS = 4 };

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

void en_multiply(product_job *job) {
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

en_acts en_acts_of(const en_context *c, const float *x) {
    return (en_acts){.x = x, .q = c->q8, .d = c->q8_d, .sums = c->q8_sums, .ds = c->q8_ds, .half_sums = c->q8_half_sums};
}

void en_quantize_row(const en_context *c, const float *x, int width, int row) {
    size_t at = (size_t)row * width, block = at / EN_BLOCK;
    c->model->isa->quantize(x + at, width, c->q8 + at, c->q8_d + block, c->q8_sums + block, c->q8_ds + block,
                             c->q8_half_sums + 2 * block);
}
