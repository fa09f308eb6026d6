/* From rows of GGUF's blocks to tiles of 16 rows. */
#include "engine.h"

#include <string.h>

static size_t row_bytes_of_tile(const en_tensor *tensor) {
    int cols = 1, bytes;
    en_type_layout(tensor->type, &cols, &bytes);
    return en_tile_bytes(en_format_of(tensor->type)) * (size_t)(tensor->n_cols / cols);
}

static size_t n_tiles_of(const en_tensor *tensor) { return ((size_t)tensor->n_rows + EN_TILE - 1) / EN_TILE; }

size_t en_packed_bytes(const en_tensor *tensor) { return (row_bytes_of_tile(tensor) * n_tiles_of(tensor) + 63) / 64 * 64; }

en_matrix en_matrix_of(const en_isa *isa, const en_tensor *tensor, void *tiles) {
    int format = en_format_of(tensor->type);
    return (en_matrix){
        .tiles = tiles,
        .tile_bytes = row_bytes_of_tile(tensor),
        .n_rows = (int)tensor->n_rows,
        .n_cols = (int)tensor->n_cols,
        .n_tiles = (int)n_tiles_of(tensor),
        .type = tensor->type,
        .matmul = isa->matmul[format] ? isa->matmul[format] : en_isa_portable.matmul[format],
    };
}

void en_pack(const en_tensor *tensor, void *memory) {
    int cols = 1, bytes = 4, format = en_format_of(tensor->type);
    en_type_layout(tensor->type, &cols, &bytes);
    size_t n_blocks = (size_t)tensor->n_cols / cols, step = en_tile_bytes(format), tile_bytes = row_bytes_of_tile(tensor);
    for (size_t i = 0; i < n_tiles_of(tensor); i++) {
        uint8_t *tile = (uint8_t *)memory + i * tile_bytes;
        int64_t n = tensor->n_rows - (int64_t)i * EN_TILE;
        if (n < EN_TILE) memset(tile, 0, tile_bytes);
        for (int r = 0; r < EN_TILE && r < n; r++) {
            const uint8_t *row = (const uint8_t *)tensor->data + (i * EN_TILE + r) * n_blocks * bytes;
            for (size_t b = 0; b < n_blocks; b++) en_pack_block(format, row + b * bytes, r, tile + b * step);
        }
    }
}
