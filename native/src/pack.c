/* From GGUF's blocks to tiles of 16 rows. */
#include "engine.h"

#include <string.h>

/* GGUF's blocks: ggml-org/ggml, src/ggml-common.h. Element j of a Q4 block is the low nibble of byte j, element j + 16
 * the high one. */
enum { Q4_0_BYTES = 18, Q4_1_BYTES = 20, Q8_0_BYTES = 34 };

int en_type_layout(int type, int *block_cols, int *block_bytes) {
    static const struct { int type, cols, bytes; } known[] = {
        {EN_F32, 1, 4}, {EN_F16, 1, 2}, {EN_Q4_0, 32, Q4_0_BYTES}, {EN_Q4_1, 32, Q4_1_BYTES}, {EN_Q8_0, 32, Q8_0_BYTES},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].type == type) {
            *block_cols = known[i].cols;
            *block_bytes = known[i].bytes;
            return 1;
        }
    return 0;
}

static size_t block_tile_bytes(int type) {
    switch (type) {
    case EN_Q4_0: return sizeof(en_tile_q4_0);
    case EN_Q4_1: return sizeof(en_tile_q4_1);
    case EN_Q8_0: return sizeof(en_tile_q8_0);
    case EN_F16: return EN_TILE * sizeof(uint16_t);
    default: return EN_TILE * sizeof(float);
    }
}

static size_t tile_bytes(const en_tensor *tensor) {
    int cols = 1, bytes;
    en_type_layout(tensor->type, &cols, &bytes);
    return block_tile_bytes(tensor->type) * (size_t)(tensor->n_cols / cols);
}

static size_t n_tiles_of(const en_tensor *tensor) { return ((size_t)tensor->n_rows + EN_TILE - 1) / EN_TILE; }

size_t en_packed_bytes(const en_tensor *tensor) { return (tile_bytes(tensor) * n_tiles_of(tensor) + 63) / 64 * 64; }

static void pack_nibbles(const uint8_t *qs, int row, uint8_t q[4][64]) {
    for (int c = 0; c < EN_BLOCK; c++) {
        uint8_t value = c < 16 ? qs[c] & 15 : qs[c - 16] >> 4;
        uint8_t *byte = &q[c / 8][4 * row + c % 4];
        *byte = c % 8 < 4 ? (uint8_t)((*byte & 0xf0) | value) : (uint8_t)((*byte & 0x0f) | value << 4);
    }
}

static void pack_block(int type, const uint8_t *from, int row, uint8_t *tile) {
    switch (type) {
    case EN_Q4_0: {
        en_tile_q4_0 *to = (en_tile_q4_0 *)tile;
        memcpy(&to->d[row], from, 2);
        pack_nibbles(from + 2, row, to->q);
        break;
    }
    case EN_Q4_1: {
        en_tile_q4_1 *to = (en_tile_q4_1 *)tile;
        memcpy(&to->d[row], from, 2);
        memcpy(&to->m[row], from + 2, 2);
        pack_nibbles(from + 4, row, to->q);
        break;
    }
    case EN_Q8_0: {
        en_tile_q8_0 *to = (en_tile_q8_0 *)tile;
        memcpy(&to->d[row], from, 2);
        for (int c = 0; c < EN_BLOCK; c++) to->q[c / 4][4 * row + c % 4] = (int8_t)from[2 + c];
        break;
    }
    case EN_F16: memcpy(tile + 2 * row, from, 2); break;
    default: memcpy(tile + 4 * row, from, 4); break;
    }
}

void en_pack(const en_isa *isa, const en_tensor *tensor, void *memory, en_matrix *matrix) {
    int cols = 1, bytes = 4;
    en_type_layout(tensor->type, &cols, &bytes);
    size_t n_blocks = (size_t)tensor->n_cols / cols, step = block_tile_bytes(tensor->type);
    *matrix = (en_matrix){
        .tiles = memory,
        .tile_bytes = tile_bytes(tensor),
        .n_rows = (int)tensor->n_rows,
        .n_cols = (int)tensor->n_cols,
        .n_tiles = (int)n_tiles_of(tensor),
        .type = tensor->type,
        .matmul = tensor->type == EN_Q4_0   ? isa->matmul_q4_0
                  : tensor->type == EN_Q4_1 ? isa->matmul_q4_1
                  : tensor->type == EN_Q8_0 ? isa->matmul_q8_0
                  : tensor->type == EN_F16  ? isa->matmul_f16
                                            : isa->matmul_f32,
    };
    for (int i = 0; i < matrix->n_tiles; i++) {
        uint8_t *tile = (uint8_t *)memory + (size_t)i * matrix->tile_bytes;
        int64_t n = tensor->n_rows - (int64_t)i * EN_TILE;
        if (n < EN_TILE) memset(tile, 0, matrix->tile_bytes);
        for (int r = 0; r < EN_TILE && r < n; r++) {
            const uint8_t *row = (const uint8_t *)tensor->data + ((size_t)i * EN_TILE + r) * n_blocks * bytes;
            for (size_t b = 0; b < n_blocks; b++) pack_block(tensor->type, row + b * bytes, r, tile + b * step);
        }
    }
}

static float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return en_half_to_float(h);
}

void en_row_to_float(const en_tensor *tensor, int64_t row, float *out) {
    int cols = 1, bytes = 4;
    en_type_layout(tensor->type, &cols, &bytes);
    size_t n_blocks = (size_t)tensor->n_cols / cols;
    const uint8_t *from = (const uint8_t *)tensor->data + (size_t)row * n_blocks * bytes;
    for (size_t b = 0; b < n_blocks; b++, from += bytes, out += cols) {
        switch (tensor->type) {
        case EN_F32: memcpy(out, from, sizeof *out); break;
        case EN_F16: *out = half_at(from); break;
        case EN_Q8_0:
            for (int c = 0; c < EN_BLOCK; c++) out[c] = half_at(from) * (int8_t)from[2 + c];
            break;
        case EN_Q4_0:
            for (int c = 0; c < 16; c++) {
                out[c] = half_at(from) * ((from[2 + c] & 15) - 8);
                out[c + 16] = half_at(from) * ((from[2 + c] >> 4) - 8);
            }
            break;
        default: /* EN_Q4_1 */
            for (int c = 0; c < 16; c++) {
                out[c] = half_at(from) * (from[4 + c] & 15) + half_at(from + 2);
                out[c + 16] = half_at(from) * (from[4 + c] >> 4) + half_at(from + 2);
            }
        }
    }
}
