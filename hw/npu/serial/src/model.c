#include "model.h"
#include "frames.h"

#include <string.h>

_Static_assert(sizeof(model_tensor) == 16 && sizeof(model_op) == 64, "the file's structs");

enum { HEADER_BYTES = 32 };

/* Whether n values of size bytes at offset lie inside the file, aligned to align. */
static int is_inside(const model *self, uint32_t offset, uint64_t n, uint32_t size, uint32_t align) {
    return offset % align == 0 && offset >= HEADER_BYTES && offset + n * size <= self->file_bytes;
}

static uint32_t round_up(uint32_t value, uint32_t step) { return (value + step - 1) / step * step; }

static const char *check_channels(const model *self, const model_op *op, uint32_t n_channels) {
    if (!is_inside(self, op->bias, n_channels, 4, 4)) return "bias lies outside the file";
    if (!is_inside(self, op->multiplier, n_channels, 4, 4)) return "multipliers lie outside the file";
    if (!is_inside(self, op->shifts, n_channels, 1, 1)) return "shifts lie outside the file";
    const int32_t *bias = (const int32_t *)(const void *)(self->file + op->bias);
    const int32_t *multiplier = (const int32_t *)(const void *)(self->file + op->multiplier);
    for (uint32_t c = 0; c < n_channels; c++) {
        if (bias[c] > 1 << 30 || bias[c] < -(1 << 30)) return "a bias is beyond 2^30";
        if (multiplier[c] < 0) return "a multiplier is below 0";
        if (self->file[op->shifts + c] < 1 || self->file[op->shifts + c] > 62) return "a shift is not 1 to 62";
    }
    return NULL;
}

static const char *check_weights(const model *self, const model_op *op, uint32_t n_rows, uint32_t n_columns) {
    if (op->weight_bits != 4 && op->weight_bits != 8) return "weights have neither 4 nor 8 bits";
    uint32_t least = op->weight_bits == 8 ? round_up(n_columns, 16) : round_up(n_columns, 32) / 2;
    if (op->row_bytes < least || op->row_bytes % 16) return "rows of weights are too short";
    if (!is_inside(self, op->weights, n_rows, op->row_bytes, 16)) return "weights lie outside the file";
    return NULL;
}

static const char *check_op(const model *self, const model_op *op) {
    if (op->in0 >= self->n_tensors || op->out >= self->n_tensors) return "a layer's tensor does not exist";
    const model_tensor *in = &self->tensors[op->in0], *out = &self->tensors[op->out];
    if (op->low > op->high) return "a layer's range is empty";
    if (op->kind >= OP_CONV && op->kind <= OP_AVGPOOL) {
        if (!op->kernel_h || !op->kernel_w || !op->stride_h || !op->stride_w) return "a kernel or stride is 0";
        if ((uint32_t)op->kernel_h * op->kernel_w > 65536) return "a kernel has more than 65536 places";
    }
    switch (op->kind) {
    case OP_CONV: {
        uint64_t column = (uint64_t)op->kernel_h * op->kernel_w * in->c;
        if (column > MODEL_MAX_COLUMN) return "an output sums over too many inputs";
        const char *problem = check_weights(self, op, out->c, (uint32_t)column);
        return problem ? problem : check_channels(self, op, out->c);
    }
    case OP_DEPTHWISE: {
        if (in->c != out->c) return "a depthwise layer changes the number of channels";
        if ((uint32_t)op->kernel_h * op->kernel_w > MODEL_MAX_COLUMN) return "an output sums over too many inputs";
        const char *problem = check_weights(self, op, (uint32_t)op->kernel_h * op->kernel_w, in->c);
        return problem ? problem : check_channels(self, op, out->c);
    }
    case OP_AVGPOOL:
        if (op->multiplier0 < 0 || op->shift < 1 || op->shift > 40) return "a pool's scale is out of range";
        __attribute__((fallthrough));
    case OP_MAXPOOL:
        return in->c == out->c ? NULL : "a pool changes the number of channels";
    case OP_ADD:
        if (op->in1 >= self->n_tensors) return "a layer's tensor does not exist";
        if (tensor_bytes(in) != tensor_bytes(out) || tensor_bytes(&self->tensors[op->in1]) != tensor_bytes(out))
            return "a sum's tensors differ in size";
        if (op->shift < 1 || op->shift > 62) return "a shift is not 1 to 62";
        return NULL;
    case OP_RESCALE:
        if (in->h != out->h || in->w != out->w || (uint32_t)op->channel + in->c > out->c)
            return "a rescaled tensor does not fit";
        if (op->shift < 1 || op->shift > 62) return "a shift is not 1 to 62";
        return NULL;
    case OP_RESIZE:
        if (in->c != out->c || out->h % in->h || out->w % in->w) return "a resize has no whole factor";
        return NULL;
    default:
        return "a layer of unknown kind";
    }
}

static const char *check_ports(const model *self, uint16_t *ports, int n, uint32_t at) {
    for (int i = 0; i < n; i++) {
        ports[i] = (uint16_t)get16(self->file + at + 2 * (uint32_t)i);
        if (ports[i] >= self->n_tensors) return "an input or output does not exist";
    }
    return NULL;
}

int model_is_likely(const uint8_t *memory, uint32_t file_bytes) {
    return file_bytes >= HEADER_BYTES && memcmp(memory, "ERN1", 4) == 0 && get32(memory + 16) == file_bytes;
}

const char *model_check(model *self, const uint8_t *file, uint32_t file_bytes, uint32_t max_arena) {
    if (file_bytes < HEADER_BYTES || memcmp(file, "ERN1", 4)) return "no model file";
    if (get16(file + 4) != 1) return "another version of the model file";
    self->file = file;
    self->file_bytes = file_bytes;
    self->n_tensors = (int)get16(file + 6);
    self->n_ops = (int)get16(file + 8);
    self->n_inputs = file[10];
    self->n_outputs = file[11];
    self->arena_bytes = get32(file + 12);
    if (get32(file + 16) != file_bytes) return "not as long as it says";
    if (!self->n_tensors || self->n_tensors > MODEL_MAX_TENSORS || self->n_ops > MODEL_MAX_OPS) return "too many layers";
    if (!self->n_inputs || self->n_inputs > MODEL_MAX_PORTS || !self->n_outputs || self->n_outputs > MODEL_MAX_PORTS)
        return "too many inputs or outputs";
    if (self->arena_bytes > max_arena) return "needs more memory than there is";
    uint32_t tensors = HEADER_BYTES, ops = tensors + 16 * (uint32_t)self->n_tensors;
    uint32_t ports = ops + 64 * (uint32_t)self->n_ops;
    if (ports + 2 * (uint32_t)(self->n_inputs + self->n_outputs) > file_bytes) return "too short for its layers";
    self->tensors = (const model_tensor *)(const void *)(file + tensors);
    self->ops = (const model_op *)(const void *)(file + ops);
    for (int i = 0; i < self->n_tensors; i++) {
        const model_tensor *tensor = &self->tensors[i];
        if (!tensor->h || !tensor->w || !tensor->c || tensor->c > MODEL_MAX_CHANNELS) return "a tensor's shape";
        if ((uint64_t)tensor->h * tensor->w * tensor->c + tensor->offset > self->arena_bytes)
            return "a tensor lies outside the memory";
    }
    const char *problem = check_ports(self, self->inputs, self->n_inputs, ports);
    if (!problem) problem = check_ports(self, self->outputs, self->n_outputs, ports + 2 * (uint32_t)self->n_inputs);
    for (int i = 0; i < self->n_ops && !problem; i++) problem = check_op(self, &self->ops[i]);
    return problem;
}
