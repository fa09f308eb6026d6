/* The model file of MODEL.md: a graph of layers with integers only. model_check reads every field before anything runs. */
#ifndef EDGE_RT_MODEL_H
#define EDGE_RT_MODEL_H

#include <stddef.h>
#include <stdint.h>

enum {
    MODEL_MAX_TENSORS = 1024,
    MODEL_MAX_OPS = 1024,
    MODEL_MAX_PORTS = 32,
    MODEL_MAX_COLUMN = 16384, /* inputs that one output value may sum over */
    MODEL_MAX_CHANNELS = 8192,
    MODEL_SLACK = 32, /* bytes that kernels read beyond a tensor, and do not use */
};

enum op_kind { OP_CONV = 1, OP_DEPTHWISE, OP_MAXPOOL, OP_AVGPOOL, OP_ADD, OP_RESCALE, OP_RESIZE };

/* Values are int8, channels last: value (y, x, c) is at offset + (y * w + x) * c_max + c of the arena. */
typedef struct {
    uint16_t h, w, c;
    int8_t zero;
    uint8_t reserved;
    uint32_t offset, reserved2;
} model_tensor;

typedef struct {
    uint8_t kind, weight_bits;
    int8_t low, high;
    uint16_t in0, in1, out, kernel_h, kernel_w;
    uint8_t stride_h, stride_w, pad_top, pad_left, shift, reserved;
    uint16_t channel, reserved2;
    uint32_t weights, row_bytes, bias, multiplier, shifts; /* offsets in the file; row_bytes from one row to the next */
    int32_t multiplier0, multiplier1;
    uint32_t reserved3[3];
} model_op;

typedef struct {
    const uint8_t *file;
    uint32_t file_bytes, arena_bytes;
    int n_tensors, n_ops, n_inputs, n_outputs;
    const model_tensor *tensors;
    const model_op *ops;
    uint16_t inputs[MODEL_MAX_PORTS], outputs[MODEL_MAX_PORTS];
} model;

/* Whether memory begins as a file of so many bytes does: worth its hash. */
int model_is_likely(const uint8_t *memory, uint32_t file_bytes);
/* Reads and checks a file, 16-aligned; gives NULL, or what is wrong with it. max_arena without the slack. */
const char *model_check(model *self, const uint8_t *file, uint32_t file_bytes, uint32_t max_arena);

static inline uint32_t tensor_bytes(const model_tensor *tensor) { return (uint32_t)tensor->h * tensor->w * tensor->c; }

enum run_result { RUN_DONE, RUN_CANCELLED };

/* Runs the graph in arena, of arena_bytes + MODEL_SLACK. tick is called now and then, and stops the run with 1. */
enum run_result model_run(const model *self, int8_t *arena, int (*tick)(void *owner), void *owner);

/* Says which kernels were compiled in. */
const char *kernels_name(void);

/* Sums x times each of 4 rows of weights; n is a multiple of 32 for 4 bits, of 16 for 8. */
void dot4_int8(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]);
void dot4_int4(const int8_t *x, const int8_t *rows, uint32_t row_bytes, uint32_t n, int32_t sums[4]);
int32_t dot_int8(const int8_t *x, const int8_t *row, uint32_t n);
int32_t dot_int4(const int8_t *x, const int8_t *row, uint32_t n);
/* Adds x times weights to the sums of n channels. */
void multiply_add(const int8_t *x, const int8_t *weights, uint32_t n, int32_t *sums);
/* 4 bits to 8, in blocks of 32: byte j of 16 holds values j and, in its upper half, j + 16. */
void unpack_int4(const int8_t *packed, uint32_t n, int8_t *out);

#endif
