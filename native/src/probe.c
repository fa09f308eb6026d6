/* Single kernels behind the public interface, for tests that compare instruction sets. */
#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int can_run(int isa) { return en_isa_at(isa) && en_isa_at(isa)->usable(); }

static void *take(size_t n_bytes) { return aligned_alloc(64, (n_bytes + 64) / 64 * 64); }

int en_matmul(int isa, const en_tensor *w, const float *x, int m, float *y, int accumulate) {
    int cols, bytes;
    if (!can_run(isa) || !en_type_layout(w->type, &cols, &bytes) || m < 1 || w->n_cols % cols) return EN_BAD_ROWS;
    size_t k = (size_t)w->n_cols, n_blocks = k / EN_BLOCK, n_tiles = ((size_t)w->n_rows + EN_TILE - 1) / EN_TILE;
    size_t ldy = n_tiles * EN_TILE;
    void *packed = take(en_packed_bytes(w)), *scratch = take(EN_SCRATCH_BYTES);
    int8_t *q = take(m * k);
    float *d = take(m * n_blocks * 4), *ds = take(m * n_blocks * 4), *out = take(m * ldy * 4);
    int32_t *sums = take(m * n_blocks * 4);
    int16_t *half_sums = take(m * n_blocks * 4);
    int status = packed && scratch && q && d && ds && out && sums && half_sums ? EN_OK : EN_NO_MEMORY;
    if (status == EN_OK) {
        en_pack(w, packed);
        en_matrix matrix = en_matrix_of(en_isa_at(isa), w, packed);
        if (cols >= EN_BLOCK)
            for (int t = 0; t < m; t++)
                en_isa_at(isa)->quantize(x + t * k, (int)k, q + t * k, d + t * n_blocks, sums + t * n_blocks, ds + t * n_blocks,
                                         half_sums + 2 * t * n_blocks);
        memset(out, 0, m * ldy * 4);
        for (int t = 0; t < m; t++) memcpy(out + t * ldy, y + t * w->n_rows, (size_t)w->n_rows * 4);
        en_acts acts = {x, q, d, sums, ds, half_sums};
        matrix.matmul(packed, (int)n_tiles, (int)k, &acts, m, out, ldy, accumulate, scratch);
        for (int t = 0; t < m; t++) memcpy(y + t * w->n_rows, out + t * ldy, (size_t)w->n_rows * 4);
    }
    free(packed), free(scratch), free(q), free(d), free(ds), free(out), free(sums), free(half_sums);
    return status;
}

int en_quantize(int isa, const float *x, int n, int8_t *q, float *d, int32_t *sums, int16_t *half_sums) {
    if (!can_run(isa) || n % EN_BLOCK) return EN_BAD_ROWS;
    float *ds = take((size_t)n / EN_BLOCK * 4);
    if (!ds) return EN_NO_MEMORY;
    en_isa_at(isa)->quantize(x, n, q, d, sums, ds, half_sums);
    free(ds);
    return EN_OK;
}

int en_dequantize(const en_tensor *tensor, int64_t row, float *out) {
    if (en_format_of(tensor->type) < 0 || row < 0 || row >= tensor->n_rows) return EN_BAD_ROWS;
    en_row_to_float(tensor, row, out);
    return EN_OK;
}

int en_dequantize_packed(const en_tensor *tensor, int64_t row, float *out) {
    if (en_format_of(tensor->type) < 0 || row < 0 || row >= tensor->n_rows) return EN_BAD_ROWS;
    void *packed = take(en_packed_bytes(tensor));
    if (!packed) return EN_NO_MEMORY;
    en_pack(tensor, packed);
    en_matrix matrix = en_matrix_of(&en_isa_portable, tensor, packed);
    en_packed_row_to_float(&matrix, row, out);
    free(packed);
    return EN_OK;
}

int en_keep_and_spread(int isa, int kv_type, const float *k, const float *v, int n_tokens, int head_dim, float *k_back,
                       float *v_back) {
    if (!can_run(isa) || (kv_type != EN_F16 && kv_type != EN_Q8_0)) return EN_BAD_ROWS;
    if (n_tokens < 0 || n_tokens > EN_KV_BLOCK || head_dim < 16 || head_dim % 16 || head_dim > EN_MAX_HEAD_DIM)
        return EN_BAD_ROWS;
    size_t n = (size_t)EN_KV_BLOCK * head_dim, n_bytes = en_kv_head_bytes(kv_type, head_dim);
    void *head = take(n_bytes);
    float *floats = take(2 * n * sizeof(float));
    int status = head && floats ? EN_OK : EN_NO_MEMORY;
    if (status == EN_OK) {
        memset(head, 0, n_bytes);
        for (int j = 0; j < n_tokens; j++)
            en_kv_keep(en_isa_at(isa), kv_type, head, head_dim, j, k + (size_t)j * head_dim, v + (size_t)j * head_dim);
        en_kv_spread(en_isa_at(isa), kv_type, head, head_dim, floats, floats + n);
        memcpy(k_back, floats, n * sizeof(float));
        memcpy(v_back, floats + n, n * sizeof(float));
    }
    free(head), free(floats);
    return status;
}

int en_softmax_attention(int isa, const float *q, int n_queries, const int32_t *limits, const float *k, const float *v,
                         int n_blocks, int head_dim, float *out) {
    if (!can_run(isa) || n_queries < 1 || n_queries > EN_MAX_QUERIES || head_dim % 16) return EN_BAD_ROWS;
    float peak[EN_MAX_QUERIES], total[EN_MAX_QUERIES];
    int32_t here[EN_MAX_QUERIES];
    size_t step = (size_t)EN_KV_BLOCK * head_dim;
    float *scratch = take((EN_ATTEND_FLOATS + 2 * step) * sizeof(float)), *block = scratch + EN_ATTEND_FLOATS;
    if (!scratch) return EN_NO_MEMORY;
    memset(out, 0, sizeof(float) * n_queries * head_dim);
    for (int i = 0; i < n_queries; i++) peak[i] = -INFINITY, total[i] = 0.0f;
    for (int b = 0; b < n_blocks; b++) {
        for (int i = 0; i < n_queries; i++) {
            int visible = limits[i] - b * EN_KV_BLOCK;
            here[i] = visible < 0 ? 0 : visible > EN_KV_BLOCK ? EN_KV_BLOCK : visible;
        }
        memcpy(block, k + b * step, step * sizeof(float)); /* the caller's are not aligned */
        memcpy(block + step, v + b * step, step * sizeof(float));
        en_isa_at(isa)->attend(q, n_queries, here, block, block + step, head_dim, out, peak, total, scratch);
    }
    for (int i = 0; i < n_queries; i++)
        for (int c = 0; c < head_dim; c++) out[i * head_dim + c] /= total[i];
    free(scratch);
    return EN_OK;
}
