/* edge_rt's own inference engine: the whole interface that Python calls, coarse enough that a step is one call.
 *
 * A model is the packed weights; a context is the KV pool, the scratch memory and the threads that work on it. One
 * thread at a time may call the functions of a context. Functions that can fail give 0 for success or an en_status,
 * or NULL with the reason in error. */
#ifndef EDGE_NATIVE_H
#define EDGE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define EN_API __attribute__((visibility("default")))
#define EN_ABI 5

/* The numbers of ggml_type. */
enum en_type {
    EN_F32 = 0,
    EN_F16 = 1,
    EN_Q4_0 = 2,
    EN_Q4_1 = 3,
    EN_Q5_0 = 6,
    EN_Q5_1 = 7,
    EN_Q8_0 = 8,
    EN_Q4_K = 12,
    EN_Q5_K = 13,
    EN_Q6_K = 14
};

enum en_status { EN_OK = 0, EN_NO_CELLS = 1, EN_BAD_ROWS = 2, EN_BAD_SEQ = 3, EN_NO_MEMORY = 4, EN_BAD_CPUS = 5, EN_LINEAR_FAILED = 6 };

typedef struct en_tensor {
    const void *data; /* NULL: the file has none */
    uint64_t n_bytes;
    int64_t n_cols; /* length of a row */
    int64_t n_rows;
    int32_t type;
    int32_t pad;
} en_tensor;

typedef struct en_layer_config {
    int32_t n_heads, n_kv_heads; /* no heads: no attention; heads but no KV heads: one matrix in place of it */
    int32_t n_ff;                /* 0: no feed-forward part */
    int32_t window;              /* tokens that a query sees, itself included; 0: all */
    int32_t uses_rope;
} en_layer_config;

typedef struct en_config {
    int32_t n_layers, n_embd, head_dim, n_vocab, n_rot;
    int32_t pairs_halves;                /* RoPE turns elements i and i + n_rot / 2 together, not 2i and 2i + 1 */
    int32_t temperature_length;          /* q of position p is multiplied with 1 + scale * ln(1 + p / length) */
    float temperature_scale;             /* 0: it is not */
    float norm_eps, attention_factor;    /* the factor of what RoPE turned */
    const en_layer_config *layers;       /* of n_layers; this and the frequencies may go after en_model_new */
    const double *frequencies;           /* of n_rot / 2; times a position they are the angles of RoPE */
} en_config;

/* Order of the tensors given to en_model_new: these, then EN_PER_LAYER for each layer. */
enum { EN_TOKEN_EMBD, EN_OUTPUT_NORM, EN_OUTPUT, EN_OUTPUT_BIAS, EN_FIRST_LAYER };
enum {
    EN_ATTN_NORM, EN_ATTN_Q, EN_ATTN_K, EN_ATTN_V, EN_ATTN_OUT, EN_FFN_NORM, EN_FFN_GATE, EN_FFN_UP, EN_FFN_DOWN,
    EN_ATTN_Q_NORM, EN_ATTN_K_NORM, EN_ATTN_Q_BIAS, EN_ATTN_K_BIAS, EN_ATTN_V_BIAS, EN_ATTN_OUT_BIAS, EN_FFN_GATE_BIAS,
    EN_FFN_UP_BIAS, EN_FFN_DOWN_BIAS, EN_PER_LAYER
};

/* Rows of one sequence; want: 0 no logits, 1 after the last row, 2 after each. */
typedef struct en_rows {
    int32_t seq_id, start, n, want;
    const int32_t *token_ids;
} en_rows;

typedef struct en_model en_model;
typedef struct en_context en_context;

EN_API int en_abi(void);
/* The instruction sets compiled in, best last; en_isa_usable says whether this CPU has them. */
EN_API int en_isa_count(void);
EN_API const char *en_isa_name(int isa);
EN_API int en_isa_usable(int isa);

/* What packed weights look like: memory packed by a library of another layout is of no use. */
#define EN_LAYOUT "16x4-1"
EN_API const char *en_layout(void);

/* Pack the weights into memory, 64-aligned, of as many bytes as a first call with NULL gives; -1 with the reason in error. */
EN_API int64_t en_pack_model(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, void *memory,
                             char *error, size_t error_size);

/* Open a model of packed weights, which stay the caller's, or with NULL pack into memory of its own. The data of
 * EN_TOKEN_EMBD must stay readable while the model lives if there is an EN_OUTPUT; the rest may go. isa -1 takes the best usable. */
EN_API en_model *en_model_new(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, const void *packed,
                              uint64_t packed_bytes, char *error, size_t error_size);
/* Open a model whose matrices another device multiplies, by en_set_linear's function: of their tensors nothing is read but
 * the rows of EN_TOKEN_EMBD, whose data must stay readable while the model lives. */
EN_API en_model *en_model_external(const en_config *config, const en_tensor *tensors, int n_tensors, int isa, char *error,
                                   size_t error_size);
EN_API void en_model_free(en_model *model);
EN_API uint64_t en_model_bytes(const en_model *model);
EN_API const char *en_model_isa(const en_model *model);

/* n_ctx cells of KV are shared by n_seq_max sequences; n_ubatch rows are computed at once. kv_type is EN_F16, or EN_Q8_0
 * for int8 with one scale for each token and head. */
EN_API en_context *en_context_new(const en_model *model, int n_ctx, int n_seq_max, int n_ubatch, int n_threads,
                                  int kv_type, char *error, size_t error_size);
EN_API void en_context_free(en_context *context);
EN_API int en_set_threads(en_context *context, int n_threads);
/* Let the context's threads run on these CPUs only, and the thread that calls en_decode while it is in there; n 0: on
 * those that the program may use. EN_BAD_CPUS if there is none among them that the kernel allows. */
EN_API int en_set_cpus(en_context *context, const int32_t *cpus, int n);

/* The matrices of an external model by number: layer i has 4 * i for Q, K and V under each other, 4 * i + 1 for what follows
 * attention, 4 * i + 2 for gate and up under each other, 4 * i + 3 for down; 4 * n_layers is the output's. */
enum { EN_LINEAR_QKV, EN_LINEAR_OUT, EN_LINEAR_GATE_UP, EN_LINEAR_DOWN, EN_PER_LAYER_LINEAR };
/* Write y[m][n] = x[m][k] by a matrix of n rows; 0, or what else ends the step with EN_LINEAR_FAILED. */
typedef int en_linear_fn(void *user, int32_t matrix, const float *x, int32_t m, int32_t k, float *y, int32_t n);
EN_API void en_set_linear(en_context *context, en_linear_fn *linear, void *user);

/* Compute rows of many sequences; logits takes n_vocab floats for each row that asks for them, in order. After
 * EN_NO_CELLS, EN_BAD_ROWS and EN_BAD_SEQ nothing has changed. */
EN_API int en_decode(en_context *context, const en_rows *rows, int n_rows, float *logits);

EN_API int en_seq_length(const en_context *context, int seq_id);
EN_API int en_seq_copy(en_context *context, int src, int dst, int n_tokens);
EN_API int en_seq_trim(en_context *context, int seq_id, int n_tokens);
EN_API uint64_t en_seq_bytes(const en_context *context, int seq_id);
EN_API int en_seq_save(const en_context *context, int seq_id, void *state);
EN_API int en_seq_load(en_context *context, int seq_id, int n_tokens, const void *state, uint64_t n_bytes);
/* The same of a part: n_blocks blocks of 32 tokens from block first on, and n_tokens behind the whole blocks that the
 * sequence holds. */
EN_API int en_seq_save_blocks(const en_context *context, int seq_id, int first, int n_blocks, void *state);
EN_API int en_seq_append(en_context *context, int seq_id, int n_tokens, const void *state, uint64_t n_bytes);
/* Keep the hidden states of each sequence's last rows whose logits were wanted, at most n_each (up to 32), from now on; none
 * at first. en_seq_state gives one, of n_embd floats before the output norm, or EN_BAD_ROWS where it is not kept. */
EN_API int en_keep_states(en_context *context, int n_each);
EN_API int en_seq_state(const en_context *context, int seq_id, int position, float *state);

/* A draft guesses the tokens after the next one from the states of its model: matrices of n_embd columns (EN_DRAFT_FFN_DOWN
 * of n_ff) and the tokens that it chooses among, rising, whose rows of the model's output matrix are EN_DRAFT_OUTPUT. All may
 * go after the load. Another load replaces it, and begins anew with what en_keep_states keeps. */
enum {
    EN_DRAFT_STATE_NORM, EN_DRAFT_TOKEN_NORM, EN_DRAFT_FFN_NORM, EN_DRAFT_OUTPUT_NORM, EN_DRAFT_STATE, EN_DRAFT_TOKEN,
    EN_DRAFT_FFN_GATE, EN_DRAFT_FFN_UP, EN_DRAFT_FFN_DOWN, EN_DRAFT_OUTPUT, EN_N_DRAFT
};
EN_API int en_draft_load(en_context *context, const en_tensor *tensors, int n_ff, const int32_t *vocabulary,
                         int n_tokens, char *error, size_t error_size);
EN_API uint64_t en_draft_bytes(const en_context *context);
/* Whether the state of a sequence's last row is there. */
EN_API int en_can_draft(const en_context *context, int seq_id);
/* For each sequence asked for: at most n_max guesses behind token_id, which follows what the sequence holds, and the chance
 * of each among the draft's tokens; a guess below min_chance ends them. tokens and chances have n_max places for each, of
 * which n_guessed are filled. */
typedef struct en_asked {
    int32_t seq_id, token_id, n_max;
    float min_chance;
} en_asked;
EN_API int en_draft(en_context *context, const en_asked *asked, int n_asked, int n_max, int32_t *tokens, float *chances,
                    int32_t *n_guessed);

EN_API int en_free_blocks(const en_context *context);

/* Round m vectors of k floats to the numbers of the INT4 engine, each with its records in stride bytes of out, and its unit
 * in units; 1 if one of them is not finite. */
EN_API int en_fpga_encode(const float *x, int m, int k, uint8_t *out, int64_t stride, double *units);
/* What an engine has computed for a product: sums[n_rows][n_places] of rows from first_row on and m vectors from first on;
 * columns are the sums of the matrix' rows, share and unit_share how far right totals may be apart. */
typedef struct en_fpga_task {
    const float *sums;
    const double *row_units, *columns;
    double share, unit_share;
    int32_t n_rows, n_places, m, first, first_row, pad;
} en_fpga_task;
/* Add all tasks' products to y's rows of ldy floats, a row for each vector; 0 if a vector's do not add up. */
EN_API int en_fpga_finish(const en_fpga_task *tasks, int n_tasks, const uint8_t *vectors, int64_t stride, int k,
                          const double *units, float *y, int64_t ldy);

/* For tests and benchmarks: one product y[m][n_rows] (+)= x[m][n_cols] by w, through the kernels of an ISA. */
EN_API int en_matmul(int isa, const en_tensor *w, const float *x, int m, float *y, int accumulate);
EN_API int en_quantize(int isa, const float *x, int n, int8_t *q, float *d, int32_t *sums, int16_t *half_sums);
/* A row of a tensor as floats. */
EN_API int en_dequantize(const en_tensor *tensor, int64_t row, float *out);
EN_API int en_dequantize_packed(const en_tensor *tensor, int64_t row, float *out); /* packs it first */
/* What n_tokens (at most 32) tokens' k and v, row after row, are kept as and read back: k[head_dim][32], v[32][head_dim]. */
EN_API int en_keep_and_spread(int isa, int kv_type, const float *k, const float *v, int n_tokens, int head_dim,
                              float *k_back, float *v_back);
/* Blocks of k[head_dim][32] and v[32][head_dim]. */
EN_API int en_softmax_attention(int isa, const float *q, int n_queries, const int32_t *limits, const float *k,
                                const float *v, int n_blocks, int head_dim, float *out);
/* For roofline figures: do rounds of the dot instruction of an ISA and give the operations done, 0 where none is known or
 * this CPU lacks it; and read memory through, giving the sum. */
EN_API uint64_t en_peak_dots(int isa, uint64_t n_rounds);
EN_API uint64_t en_peak_read(const uint64_t *memory, uint64_t n_words);

#endif
