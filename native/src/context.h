/* A context and a step of it, for the files that compute a step. */
#ifndef EDGE_NATIVE_CONTEXT_H
#define EDGE_NATIVE_CONTEXT_H

#include "engine.h"

/* Where a row of the step belongs. */
typedef struct row_place {
    int32_t seq, position, token, wants;
} row_place;

/* Hidden states of the last rows whose logits were wanted, n_each of each sequence at most: those of positions first to end. */
typedef struct en_states {
    int n_each;
    float *x; /* of n_seqs by n_each; position p is at p % n_each */
    int32_t *first, *end;
} en_states;

typedef struct en_draft_head en_draft_head;

/* Rows of one sequence that attention takes at once, by one of its KV heads, and the parts of the sequence it computes. */
typedef struct attend_task {
    int32_t first_row, n_rows, first_part, end_part;
} attend_task;

enum { EN_WHOLE = INT32_MIN, EN_TASK_TIMES = 4, EN_TASK_QUERIES = EN_TASK_TIMES * EN_MAX_QUERIES };

typedef struct thread_memory {
    uint8_t *kernel;  /* EN_SCRATCH_BYTES */
    float *attend;    /* EN_ATTEND_FLOATS */
    float *k, *v;     /* a block of one KV head, spread out */
    float *k_cut, *v_cut; /* what a window leaves of it */
    float *q, *out, *sum; /* EN_TASK_QUERIES by head_dim */
    float *partial;   /* n_ubatch by EN_TILE, for a last tile that is not full */
} thread_memory;

struct en_context {
    const en_model *model;
    en_pool *pool;
    en_kv kv;
    en_states states;
    en_draft_head *draft; /* NULL: none */
    int n_ctx, n_ubatch;
    int max_q_dim, max_qkv_dim, max_ff; /* of all layers */
    row_place *places;
    attend_task *tasks;
    int n_tasks, is_split;
    int32_t *slots; /* of each row, its part 0 in parts if several tasks compute it, else EN_WHOLE */
    float *parts;   /* max_slots by heads by sum, peak and total */
    int max_slots;
    float *x, *qkv, *attended, *gate, *up, *turns; /* of n_ubatch rows */
    float *normed;                                 /* as wide as the widest input of a product */
    en_linear_fn *linear;                          /* of an external model */
    void *linear_user;
    float *products; /* of n_ubatch rows, as wide as the widest output in a layer */
    int has_failed;  /* linear has, in this step */
    int8_t *q8;
    float *q8_d, *q8_ds;
    int32_t *q8_sums;
    int16_t *q8_half_sums;
    uint8_t *memory;
    uint8_t *thread_block;
    thread_memory threads[EN_MAX_THREADS];
    int is_pinned;
    cpu_set_t cpus; /* if pinned */
};

/* Where a thread could run before a step moved it. */
typedef struct en_home {
    int was_moved;
    cpu_set_t cpus;
} en_home;

typedef struct step {
    en_context *c;
    const en_layer *layer;
    int layer_number, n_rows;
} step;

static inline int en_q_dim(const step *s) { return s->layer->config.n_heads * s->c->model->config.head_dim; }
static inline int en_kv_dim(const step *s) { return s->layer->config.n_kv_heads * s->c->model->config.head_dim; }

typedef void row_fn(step *s, int row);

typedef struct product {
    const en_matrix *w;
    float *y;
    size_t ldy;
} product;

typedef struct product_job {
    en_context *c;
    en_acts acts;
    product products[3];
    int matrix; /* its number for en_linear_fn */
    int n_products, n_rows, n_tiles, accumulate;
    int n_each, n_rows_each; /* tiles and rows of a chunk, set by en_multiply */
} product_job;

/* products.c */
/* Call fn for each row of the step. */
void en_for_rows(step *s, row_fn *fn);
/* Quantize one row of a matrix of rows of this width into the context's int8 activations. */
void en_quantize_row(const en_context *c, const float *x, int width, int row);
/* The context's int8 activations, with the floats they were made of. */
en_acts en_acts_of(const en_context *c, const float *x);
/* Multiply the same activations with all matrices of the job, in one run of the pool. */
void en_multiply(product_job *job);

/* states.c */
enum { EN_MAX_STATES = 32 };
void en_states_drop(en_states *states);
/* Keep the states of the step's rows, whose places these are; those wanted are at the front of x. */
void en_states_take(en_context *c, int n_places);
void en_states_trim(en_context *c, int seq, int n_tokens);
/* NULL where it is not kept. */
const float *en_states_at(const en_context *c, int seq, int position);

/* draft.c */
void en_draft_drop(en_draft_head *head);

/* step.c */
/* Write the embedding of a token. */
void en_embed_token(const en_model *model, int token, float *x);
/* Normalise a row of x into normed, and quantize it. */
void en_norm_row(const step *s, int row, const float *weight);
/* x += the feed-forward part of the step's layer. */
void en_feed_forward(step *s);

/* affinity.c */
/* Move the calling thread to the context's CPUs, and back. */
void en_enter_cpus(const en_context *c, en_home *home);
void en_leave_cpus(const en_home *home);

/* attention.c */
/* Normalise and turn q and k, scale q for the softmax, and put k and v into the KV. */
void en_rotate_and_keep(step *s, int row);
/* Parts that attention cuts a sequence of n_ctx tokens into. */
int en_max_parts(int n_ctx);
/* Write the heads' outputs of all rows into attended. */
void en_attend(step *s);

#endif
