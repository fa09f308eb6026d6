/* The layers. Each output is an exact integer function of the inputs, the same as edge_rt/backends/npu/serial_golden.py:
 *   q = clamp(zero + floor((sum * multiplier + 2^(shift - 1)) / 2^shift), low, high) */
#include "model.h"

#include <string.h>

typedef struct {
    const model *graph;
    int8_t *arena;
    int (*tick)(void *);
    void *owner;
} context;

static int8_t column[MODEL_MAX_COLUMN + MODEL_SLACK] __attribute__((aligned(16)));
static int32_t sums[MODEL_MAX_CHANNELS];
static int8_t tap[MODEL_MAX_CHANNELS + MODEL_SLACK];

static int8_t clamp(int64_t value, const model_op *op) {
    return (int8_t)(value < op->low ? op->low : value > op->high ? op->high : value);
}

static int8_t requantise(int32_t sum, int32_t multiplier, int shift, int8_t zero, const model_op *op) {
    int64_t scaled = (int64_t)sum * multiplier + ((int64_t)1 << (shift - 1));
    return clamp((scaled >> shift) + zero, op);
}

typedef struct {
    const int32_t *bias, *multiplier;
    const uint8_t *shifts;
} channels;

static channels channels_of(const context *run, const model_op *op) {
    const uint8_t *file = run->graph->file;
    channels found = {(const int32_t *)(const void *)(file + op->bias),
                      (const int32_t *)(const void *)(file + op->multiplier), file + op->shifts};
    return found;
}

/* Copies what the kernel sees of the input at one place into column; what lies outside is the zero point. */
static void gather(const model_op *op, const model_tensor *in, const int8_t *values, int32_t top, int32_t left) {
    int8_t *to = column;
    int32_t first = left < 0 ? -left : 0, last = op->kernel_w;
    if (first > last) first = last;
    if (left + last > in->w) last = in->w - left > first ? in->w - left : first;
    size_t c = in->c;
    for (int32_t ky = 0; ky < op->kernel_h; ky++, to += op->kernel_w * c) {
        int32_t y = top + ky;
        if (y < 0 || y >= in->h || first == last) {
            memset(to, in->zero, op->kernel_w * c);
            continue;
        }
        memset(to, in->zero, (size_t)first * c);
        memcpy(to + (size_t)first * c, values + ((size_t)y * in->w + (size_t)(left + first)) * c, (size_t)(last - first) * c);
        memset(to + (size_t)last * c, in->zero, (size_t)(op->kernel_w - last) * c);
    }
}

static int conv(const context *run, const model_op *op) {
    const model_tensor *in = &run->graph->tensors[op->in0], *out = &run->graph->tensors[op->out];
    const int8_t *values = run->arena + in->offset;
    const int8_t *weights = (const int8_t *)run->graph->file + op->weights;
    int8_t *to = run->arena + out->offset;
    channels per = channels_of(run, op);
    uint32_t n = (uint32_t)op->kernel_h * op->kernel_w * in->c;
    n = op->weight_bits == 8 ? (n + 15) / 16 * 16 : (n + 31) / 32 * 32;
    for (int32_t y = 0; y < out->h; y++) {
        for (int32_t x = 0; x < out->w; x++) {
            gather(op, in, values, y * op->stride_h - op->pad_top, x * op->stride_w - op->pad_left);
            const int8_t *rows = weights;
            uint32_t c = 0;
            for (; c + 4 <= out->c; c += 4, rows += 4 * op->row_bytes) {
                int32_t four[4];
                if (op->weight_bits == 8) dot4_int8(column, rows, op->row_bytes, n, four);
                else dot4_int4(column, rows, op->row_bytes, n, four);
                for (uint32_t i = 0; i < 4; i++)
                    *to++ = requantise(four[i] + per.bias[c + i], per.multiplier[c + i], per.shifts[c + i], out->zero, op);
            }
            for (; c < out->c; c++, rows += op->row_bytes) {
                int32_t sum = op->weight_bits == 8 ? dot_int8(column, rows, n) : dot_int4(column, rows, n);
                *to++ = requantise(sum + per.bias[c], per.multiplier[c], per.shifts[c], out->zero, op);
            }
            if (run->tick(run->owner)) return 1;
        }
    }
    return 0;
}

/* The part of the input that a kernel sees at one place. */
typedef struct {
    int32_t y0, y1, x0, x1, top, left;
} window;

static window window_at(const model_op *op, const model_tensor *in, int32_t y, int32_t x) {
    window seen;
    seen.top = y * op->stride_h - op->pad_top;
    seen.left = x * op->stride_w - op->pad_left;
    seen.y0 = seen.top < 0 ? 0 : seen.top;
    seen.x0 = seen.left < 0 ? 0 : seen.left;
    seen.y1 = seen.top + op->kernel_h < in->h ? seen.top + op->kernel_h : in->h;
    seen.x1 = seen.left + op->kernel_w < in->w ? seen.left + op->kernel_w : in->w;
    return seen;
}

static int depthwise(const context *run, const model_op *op) {
    const model_tensor *in = &run->graph->tensors[op->in0], *out = &run->graph->tensors[op->out];
    const int8_t *weights = (const int8_t *)run->graph->file + op->weights;
    int8_t *to = run->arena + out->offset;
    channels per = channels_of(run, op);
    uint32_t n = in->c;
    for (int32_t y = 0; y < out->h; y++) {
        for (int32_t x = 0; x < out->w; x++) {
            window seen = window_at(op, in, y, x);
            memcpy(sums, per.bias, n * sizeof *sums);
            /* bias holds -zero * (sum of all weights): places outside count as the zero point */
            for (int32_t ky = 0; ky < op->kernel_h; ky++)
                for (int32_t kx = 0; kx < op->kernel_w; kx++) {
                    const int8_t *row = weights + (size_t)(ky * op->kernel_w + kx) * op->row_bytes;
                    int32_t sy = seen.top + ky, sx = seen.left + kx;
                    const int8_t *from = column;
                    if (sy >= 0 && sy < in->h && sx >= 0 && sx < in->w)
                        from = run->arena + in->offset + ((size_t)sy * in->w + (size_t)sx) * n;
                    else memset(column, in->zero, n);
                    if (op->weight_bits == 4) {
                        unpack_int4(row, n, tap);
                        row = tap;
                    }
                    multiply_add(from, row, n, sums);
                }
            for (uint32_t c = 0; c < n; c++)
                *to++ = requantise(sums[c], per.multiplier[c], per.shifts[c], out->zero, op);
            if (run->tick(run->owner)) return 1;
        }
    }
    return 0;
}

/* floor(a / b) for b > 0 */
static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int pool(const context *run, const model_op *op) {
    const model_tensor *in = &run->graph->tensors[op->in0], *out = &run->graph->tensors[op->out];
    const int8_t *values = run->arena + in->offset;
    int8_t *to = run->arena + out->offset;
    int is_max = op->kind == OP_MAXPOOL;
    for (int32_t y = 0; y < out->h; y++) {
        for (int32_t x = 0; x < out->w; x++) {
            window seen = window_at(op, in, y, x);
            int64_t n = seen.y1 > seen.y0 && seen.x1 > seen.x0 ? (int64_t)(seen.y1 - seen.y0) * (seen.x1 - seen.x0) : 0;
            for (uint32_t c = 0; c < in->c; c++) {
                int32_t most = -128, sum = 0;
                for (int32_t sy = seen.y0; n && sy < seen.y1; sy++)
                    for (int32_t sx = seen.x0; sx < seen.x1; sx++) {
                        int32_t value = values[((size_t)sy * in->w + (size_t)sx) * in->c + c];
                        most = value > most ? value : most;
                        sum += value - in->zero;
                    }
                if (is_max) *to++ = clamp(most, op);
                else if (n == 0) *to++ = clamp(out->zero, op);
                else {
                    int64_t half = n << (op->shift - 1);
                    *to++ = clamp(out->zero + floor_div((int64_t)sum * op->multiplier0 + half, n << op->shift), op);
                }
            }
            if (run->tick(run->owner)) return 1;
        }
    }
    return 0;
}

static int add(const context *run, const model_op *op) {
    const model_tensor *left = &run->graph->tensors[op->in0], *right = &run->graph->tensors[op->in1];
    const model_tensor *out = &run->graph->tensors[op->out];
    const int8_t *a = run->arena + left->offset, *b = run->arena + right->offset;
    int8_t *to = run->arena + out->offset;
    int64_t half = (int64_t)1 << (op->shift - 1);
    for (uint32_t i = 0, n = tensor_bytes(out); i < n; i++) {
        int64_t sum = (int64_t)(a[i] - left->zero) * op->multiplier0 + (int64_t)(b[i] - right->zero) * op->multiplier1;
        to[i] = clamp(((sum + half) >> op->shift) + out->zero, op);
        if (i % 4096 == 4095 && run->tick(run->owner)) return 1;
    }
    return run->tick(run->owner);
}

static int rescale(const context *run, const model_op *op) {
    const model_tensor *in = &run->graph->tensors[op->in0], *out = &run->graph->tensors[op->out];
    const int8_t *from = run->arena + in->offset;
    int8_t *to = run->arena + out->offset + op->channel;
    for (uint32_t i = 0, n = (uint32_t)in->h * in->w; i < n; i++, from += in->c, to += out->c) {
        for (uint32_t c = 0; c < in->c; c++)
            to[c] = requantise(from[c] - in->zero, op->multiplier0, op->shift, out->zero, op);
        if (i % 1024 == 1023 && run->tick(run->owner)) return 1;
    }
    return run->tick(run->owner);
}

static int resize(const context *run, const model_op *op) {
    const model_tensor *in = &run->graph->tensors[op->in0], *out = &run->graph->tensors[op->out];
    int32_t by_h = out->h / in->h, by_w = out->w / in->w;
    int8_t *to = run->arena + out->offset;
    for (int32_t y = 0; y < out->h; y++) {
        for (int32_t x = 0; x < out->w; x++, to += in->c)
            memmove(to, run->arena + in->offset + ((size_t)(y / by_h) * in->w + (size_t)(x / by_w)) * in->c, in->c);
        if (run->tick(run->owner)) return 1;
    }
    return 0;
}

enum run_result model_run(const model *self, int8_t *arena, int (*tick)(void *owner), void *owner) {
    const context run = {self, arena, tick, owner};
    for (int i = 0; i < self->n_ops; i++) {
        const model_op *op = &self->ops[i];
        int is_over = 0;
        switch (op->kind) {
        case OP_CONV: is_over = conv(&run, op); break;
        case OP_DEPTHWISE: is_over = depthwise(&run, op); break;
        case OP_MAXPOOL:
        case OP_AVGPOOL: is_over = pool(&run, op); break;
        case OP_ADD: is_over = add(&run, op); break;
        case OP_RESCALE: is_over = rescale(&run, op); break;
        default: is_over = resize(&run, op);
        }
        if (is_over) return RUN_CANCELLED;
    }
    return RUN_DONE;
}
