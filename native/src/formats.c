/* GGUF's block formats (ggml-org/ggml, src/ggml-common.h): what they hold, as floats and as tiles of 16 rows. */
#include "engine.h"

#include <string.h>

/* A block spread out: weight c is d * scales[c / group] * levels[c] + m, or less dmin * mins for the K forms. */
typedef struct block {
    uint16_t d, m; /* halves; m is dmin for the K forms */
    uint8_t levels[256];
    uint8_t scales[16], mins[8];
} block;

typedef void read_fn(const uint8_t *from, block *to);
typedef void tile_fn(const block *from, int row, void *tile);
typedef void untile_fn(const void *tile, int row, block *to);

typedef struct layout {
    int type, cols, bytes;
    size_t tile_bytes;
    int offset, group; /* of the levels; columns for one of scales */
    read_fn *read;
    tile_fn *put;
    untile_fn *get; /* undoes put */
} layout;

static uint16_t half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return h;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/* Byte i of 16 holds columns i and 16 + i. */
static void read_nibbles(const uint8_t *q, uint8_t *levels) {
    for (int i = 0; i < 16; i++) levels[i] = q[i] & 15, levels[16 + i] = q[i] >> 4;
}

static void add_fifth_bits(const uint8_t *h, uint8_t *levels) {
    for (int c = 0; c < EN_BLOCK; c++) levels[c] |= (uint8_t)((h[c / 8] >> c % 8 & 1) << 4);
}

static void read_q4_0(const uint8_t *from, block *to) {
    to->d = half_at(from);
    read_nibbles(from + 2, to->levels);
}

static void read_q4_1(const uint8_t *from, block *to) {
    to->d = half_at(from);
    to->m = half_at(from + 2);
    read_nibbles(from + 4, to->levels);
}

static void read_q5_0(const uint8_t *from, block *to) {
    to->d = half_at(from);
    read_nibbles(from + 6, to->levels);
    add_fifth_bits(from + 2, to->levels);
}

static void read_q5_1(const uint8_t *from, block *to) {
    to->d = half_at(from);
    to->m = half_at(from + 2);
    read_nibbles(from + 8, to->levels);
    add_fifth_bits(from + 4, to->levels);
}

static void read_q8_0(const uint8_t *from, block *to) {
    to->d = half_at(from);
    memcpy(to->levels, from + 2, EN_BLOCK);
}

/* Eight scales and eight minima of six bits in twelve bytes. */
static void read_six_bits(const uint8_t *from, block *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i] = from[i] & 63;
        to->mins[i] = from[4 + i] & 63;
        to->scales[4 + i] = (uint8_t)((from[8 + i] & 15) | from[i] >> 6 << 4);
        to->mins[4 + i] = (uint8_t)(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
    }
}

/* Byte i of each 32 holds columns i and 32 + i of 64. */
static void read_k_nibbles(const uint8_t *q, uint8_t *levels) {
    for (int c = 0; c < 256; c++) levels[c] = q[c / 64 * 32 + c % 32] >> (c % 64 < 32 ? 0 : 4) & 15;
}

static void read_q4_k(const uint8_t *from, block *to) {
    to->d = half_at(from);
    to->m = half_at(from + 2);
    read_six_bits(from + 4, to);
    read_k_nibbles(from + 16, to->levels);
}

static void read_q5_k(const uint8_t *from, block *to) {
    to->d = half_at(from);
    to->m = half_at(from + 2);
    read_six_bits(from + 4, to);
    read_k_nibbles(from + 48, to->levels);
    for (int c = 0; c < 256; c++) to->levels[c] |= (uint8_t)((from[16 + c % 32] >> c / 32 & 1) << 4);
}

static void read_q6_k(const uint8_t *from, block *to) {
    const uint8_t *low = from, *high = from + 128;
    for (int c = 0; c < 256; c++) {
        int part = c / 128, i = c % 128;
        int nibble = low[64 * part + i % 64] >> (i < 64 ? 0 : 4) & 15;
        int bits = high[32 * part + i % 32] >> 2 * (i / 32) & 3;
        to->levels[c] = (uint8_t)(nibble | bits << 4);
    }
    memcpy(to->scales, from + 192, 16);
    to->d = half_at(from + 208);
}

/* -- packing ------------------------------------------------------------------------------------------------------- */

static int place(int row, int c) { return 32 * (row / 8) + 4 * (row % 8) + c % 4; }

static void put_nibbles(const uint8_t *levels, int row, en_nibbles q) {
    for (int c = 0; c < EN_BLOCK; c++) {
        uint8_t *byte = &q[c / 8][place(row, c)], value = levels[c] & 15;
        *byte = c % 8 < 4 ? (uint8_t)((*byte & 0xf0) | value) : (uint8_t)((*byte & 0x0f) | value << 4);
    }
}

static void put_fifth_bits(const uint8_t *levels, int row, en_fifth_bits h) {
    for (int e = 0; e < 4; e++) {
        uint8_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (uint8_t)((levels[4 * g + e] >> 4 & 1) << g);
        h[place(row, e)] = bits;
    }
}

static void put_sixth_bits(const uint8_t *levels, int row, en_sixth_bits h) {
    for (int p = 0; p < 2; p++)
        for (int e = 0; e < 4; e++) {
            uint8_t bits = 0;
            for (int i = 0; i < 4; i++) bits |= (uint8_t)((levels[16 * p + 4 * i + e] >> 4 & 3) << 2 * i);
            h[p][place(row, e)] = bits;
        }
}

static void put_q4_0(const block *from, int row, void *tile) {
    en_tile_q4_0 *to = tile;
    to->d[row] = from->d;
    put_nibbles(from->levels, row, to->q);
}

static void put_q4_1(const block *from, int row, void *tile) {
    en_tile_q4_1 *to = tile;
    to->d[row] = from->d;
    to->m[row] = from->m;
    put_nibbles(from->levels, row, to->q);
}

static void put_q5_0(const block *from, int row, void *tile) {
    en_tile_q5_0 *to = tile;
    to->d[row] = from->d;
    put_nibbles(from->levels, row, to->q);
    put_fifth_bits(from->levels, row, to->h);
}

static void put_q5_1(const block *from, int row, void *tile) {
    en_tile_q5_1 *to = tile;
    to->d[row] = from->d;
    to->m[row] = from->m;
    put_nibbles(from->levels, row, to->q);
    put_fifth_bits(from->levels, row, to->h);
}

static void put_q8_0(const block *from, int row, void *tile) {
    en_tile_q8_0 *to = tile;
    to->d[row] = from->d;
    for (int c = 0; c < EN_BLOCK; c++) to->q[c / 4][place(row, c)] = (int8_t)from->levels[c];
}

static void put_q4_k(const block *from, int row, void *tile) {
    en_tile_q4_k *to = tile;
    to->d[row] = from->d;
    to->dmin[row] = from->m;
    for (int b = 0; b < 8; b++) {
        to->scales[b][row] = from->scales[b];
        to->mins[b][row] = from->mins[b];
        put_nibbles(from->levels + EN_BLOCK * b, row, to->q[b]);
    }
}

static void put_q5_k(const block *from, int row, void *tile) {
    en_tile_q5_k *to = tile;
    to->d[row] = from->d;
    to->dmin[row] = from->m;
    for (int b = 0; b < 8; b++) {
        to->scales[b][row] = from->scales[b];
        to->mins[b][row] = from->mins[b];
        put_nibbles(from->levels + EN_BLOCK * b, row, to->q[b]);
        put_fifth_bits(from->levels + EN_BLOCK * b, row, to->h[b]);
    }
}

static void put_q6_k(const block *from, int row, void *tile) {
    en_tile_q6_k *to = tile;
    to->d[row] = from->d;
    for (int s = 0; s < 16; s++) to->scales[s][row] = (int8_t)from->scales[s];
    for (int b = 0; b < 8; b++) {
        put_nibbles(from->levels + EN_BLOCK * b, row, to->q[b]);
        put_sixth_bits(from->levels + EN_BLOCK * b, row, to->h[b]);
    }
}

/* -- unpacking ----------------------------------------------------------------------------------------------------- */

static void get_nibbles(const uint8_t (*q)[64], int row, uint8_t *levels) {
    for (int c = 0; c < EN_BLOCK; c++) levels[c] = q[c / 8][place(row, c)] >> (c % 8 < 4 ? 0 : 4) & 15;
}

static void get_fifth_bits(const uint8_t *h, int row, uint8_t *levels) {
    for (int c = 0; c < EN_BLOCK; c++) levels[c] |= (uint8_t)((h[place(row, c)] >> c / 4 & 1) << 4);
}

static void get_sixth_bits(const uint8_t (*h)[64], int row, uint8_t *levels) {
    for (int c = 0; c < EN_BLOCK; c++) levels[c] |= (uint8_t)((h[c / 16][place(row, c)] >> 2 * (c % 16 / 4) & 3) << 4);
}

static void get_q4_0(const void *tile, int row, block *to) {
    const en_tile_q4_0 *from = tile;
    to->d = from->d[row];
    get_nibbles(from->q, row, to->levels);
}

static void get_q4_1(const void *tile, int row, block *to) {
    const en_tile_q4_1 *from = tile;
    to->d = from->d[row];
    to->m = from->m[row];
    get_nibbles(from->q, row, to->levels);
}

static void get_q5_0(const void *tile, int row, block *to) {
    const en_tile_q5_0 *from = tile;
    to->d = from->d[row];
    get_nibbles(from->q, row, to->levels);
    get_fifth_bits(from->h, row, to->levels);
}

static void get_q5_1(const void *tile, int row, block *to) {
    const en_tile_q5_1 *from = tile;
    to->d = from->d[row];
    to->m = from->m[row];
    get_nibbles(from->q, row, to->levels);
    get_fifth_bits(from->h, row, to->levels);
}

static void get_q8_0(const void *tile, int row, block *to) {
    const en_tile_q8_0 *from = tile;
    to->d = from->d[row];
    for (int c = 0; c < EN_BLOCK; c++) to->levels[c] = (uint8_t)from->q[c / 4][place(row, c)];
}

static void get_q4_k(const void *tile, int row, block *to) {
    const en_tile_q4_k *from = tile;
    to->d = from->d[row];
    to->m = from->dmin[row];
    for (int b = 0; b < 8; b++) {
        to->scales[b] = from->scales[b][row];
        to->mins[b] = from->mins[b][row];
        get_nibbles(from->q[b], row, to->levels + EN_BLOCK * b);
    }
}

static void get_q5_k(const void *tile, int row, block *to) {
    const en_tile_q5_k *from = tile;
    to->d = from->d[row];
    to->m = from->dmin[row];
    for (int b = 0; b < 8; b++) {
        to->scales[b] = from->scales[b][row];
        to->mins[b] = from->mins[b][row];
        get_nibbles(from->q[b], row, to->levels + EN_BLOCK * b);
        get_fifth_bits(from->h[b], row, to->levels + EN_BLOCK * b);
    }
}

static void get_q6_k(const void *tile, int row, block *to) {
    const en_tile_q6_k *from = tile;
    to->d = from->d[row];
    for (int s = 0; s < 16; s++) to->scales[s] = (uint8_t)from->scales[s][row];
    for (int b = 0; b < 8; b++) {
        get_nibbles(from->q[b], row, to->levels + EN_BLOCK * b);
        get_sixth_bits(from->h[b], row, to->levels + EN_BLOCK * b);
    }
}

/* -- the table ----------------------------------------------------------------------------------------------------- */

static const layout layouts[EN_N_FORMATS] = {
    [EN_PACKED_F32] = {EN_F32, 1, 4, EN_TILE * sizeof(float), 0, 1, NULL, NULL, NULL},
    [EN_PACKED_F16] = {EN_F16, 1, 2, EN_TILE * sizeof(uint16_t), 0, 1, NULL, NULL, NULL},
    [EN_PACKED_Q4_0] = {EN_Q4_0, 32, 18, sizeof(en_tile_q4_0), 8, 32, read_q4_0, put_q4_0, get_q4_0},
    [EN_PACKED_Q4_1] = {EN_Q4_1, 32, 20, sizeof(en_tile_q4_1), 0, 32, read_q4_1, put_q4_1, get_q4_1},
    [EN_PACKED_Q5_0] = {EN_Q5_0, 32, 22, sizeof(en_tile_q5_0), 16, 32, read_q5_0, put_q5_0, get_q5_0},
    [EN_PACKED_Q5_1] = {EN_Q5_1, 32, 24, sizeof(en_tile_q5_1), 0, 32, read_q5_1, put_q5_1, get_q5_1},
    [EN_PACKED_Q8_0] = {EN_Q8_0, 32, 34, sizeof(en_tile_q8_0), 0, 32, read_q8_0, put_q8_0, get_q8_0},
    [EN_PACKED_Q4_K] = {EN_Q4_K, 256, 144, sizeof(en_tile_q4_k), 0, 32, read_q4_k, put_q4_k, get_q4_k},
    [EN_PACKED_Q5_K] = {EN_Q5_K, 256, 176, sizeof(en_tile_q5_k), 0, 32, read_q5_k, put_q5_k, get_q5_k},
    [EN_PACKED_Q6_K] = {EN_Q6_K, 256, 210, sizeof(en_tile_q6_k), 32, 16, read_q6_k, put_q6_k, get_q6_k},
};

int en_format_of(int type) {
    for (int i = 0; i < EN_N_FORMATS; i++)
        if (layouts[i].type == type) return i;
    return -1;
}

int en_type_layout(int type, int *block_cols, int *block_bytes) {
    int format = en_format_of(type);
    if (format < 0) return 0;
    *block_cols = layouts[format].cols;
    *block_bytes = layouts[format].bytes;
    return 1;
}

size_t en_tile_bytes(int format) { return layouts[format].tile_bytes; }

void en_pack_block(int format, const uint8_t *from, int row, uint8_t *tile) {
    const layout *l = &layouts[format];
    if (!l->read) {
        memcpy(tile + (size_t)l->bytes * row, from, l->bytes);
        return;
    }
    block spread;
    l->read(from, &spread);
    l->put(&spread, row, tile);
}

static void spread_to_float(const layout *l, const block *b, float *out) {
    float d = en_half_to_float(b->d), m = en_half_to_float(b->m);
    for (int c = 0; c < l->cols; c++) {
        switch (l->type) {
        case EN_Q8_0: out[c] = d * (int8_t)b->levels[c]; break;
        case EN_Q4_1:
        case EN_Q5_1: out[c] = d * b->levels[c] + m; break;
        case EN_Q4_K:
        case EN_Q5_K: out[c] = d * b->scales[c / 32] * b->levels[c] - m * b->mins[c / 32]; break;
        case EN_Q6_K: out[c] = d * (int8_t)b->scales[c / 16] * (b->levels[c] - l->offset); break;
        default: out[c] = d * (b->levels[c] - l->offset);
        }
    }
}

static void float_at(const layout *l, const uint8_t *from, float *out) {
    if (l->type == EN_F32)
        memcpy(out, from, sizeof *out);
    else
        *out = en_half_to_float(half_at(from));
}

void en_row_to_float(const en_tensor *tensor, int64_t row, float *out) {
    const layout *l = &layouts[en_format_of(tensor->type)];
    size_t n_blocks = (size_t)tensor->n_cols / l->cols;
    const uint8_t *from = (const uint8_t *)tensor->data + (size_t)row * n_blocks * l->bytes;
    for (size_t b = 0; b < n_blocks; b++, from += l->bytes, out += l->cols) {
        block spread = {.m = 0};
        if (!l->read) {
            float_at(l, from, out);
        } else {
            l->read(from, &spread);
            spread_to_float(l, &spread, out);
        }
    }
}

void en_packed_row_to_float(const en_matrix *matrix, int64_t row, float *out) {
    const layout *l = &layouts[en_format_of(matrix->type)];
    const uint8_t *tile = (const uint8_t *)matrix->tiles + row / EN_TILE * matrix->tile_bytes;
    int r = (int)(row % EN_TILE);
    for (int c = 0; c < matrix->n_cols; c += l->cols, tile += l->tile_bytes, out += l->cols) {
        block spread = {.m = 0};
        if (!l->get) {
            float_at(l, tile + (size_t)l->bytes * r, out);
        } else {
            l->get(tile, r, &spread);
            spread_to_float(l, &spread, out);
        }
    }
}
