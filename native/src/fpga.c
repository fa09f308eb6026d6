/* What the host does for an INT4 engine in an FPGA at each product: vectors in the engine's numbers and places
 * (edge_rt/backends/fpga_numbers.py and fpga_layout.py say which), and its sums as products. */
#include "engine.h"

#include <math.h>
#include <string.h>

enum { GROUP = 32, F_ONE = 16, CODE_BITS = 5, CODE_MAX = (2 * F_ONE - 1) << 7, LANES = 8 };

static const double TINY = 1e-30; /* the inverse of smaller steps leaves float */

/* Round 32 numbers to whole steps; gives the sum of the squared rests. The order of adding is part of the format: it
 * decides between two codes, the same on all CPUs. */
static float round_group(const float *x, float per_step, float *q) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to even */
    float rests[LANES] = {0}, sum = 0;
    for (int i = 0; i < GROUP; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float scaled = x[i + j] * per_step, whole = (scaled + magic) - magic, rest = scaled - whole;
            q[i + j] = whole;
            rests[j] += rest * rest;
        }
    for (int j = 0; j < LANES; j++) sum += rests[j];
    return sum;
}

static double round_tiny_group(const float *x, double per_step, float *q) {
    double sum = 0;
    for (int i = 0; i < GROUP; i++) {
        double scaled = x[i] * per_step, whole = rint(scaled);
        q[i] = (float)whole;
        sum += (scaled - whole) * (scaled - whole);
    }
    return sum;
}

/* What a code's last bit is worth: codes have CODE_BITS of them. */
static double code_step(double code) {
    int exponent;
    frexp(code, &exponent);
    return ldexp(1.0, exponent - CODE_BITS);
}

static void put_group(const float *q, double code, uint8_t *to, uint8_t *record) {
    int exponent, minus = 0;
    double fraction = frexp(code, &exponent);
    for (int i = 0; i < GROUP; i++) {
        int whole = (int)q[i];
        to[i] = (uint8_t)whole;
        minus -= whole;
    }
    record[0] = (uint8_t)minus;
    record[1] = (uint8_t)(minus >> 8);
    record[2] = (uint8_t)(exponent - CODE_BITS);
    record[3] = (uint8_t)(fraction * (2 * F_ONE) - F_ONE);
}

static float largest_of(const float *x, int n) {
    float largest = 0;
    for (int i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* One vector; gives its unit. */
static double encode(const float *x, int k, uint8_t *out, int64_t stride) {
    double top = largest_of(x, k);
    if (top == 0) top = 1;
    double unit = top / (127 * CODE_MAX), per_code = (1 - 1e-12) * CODE_MAX / top;
    for (int g = 0; g < k / GROUP; g++) {
        const float *from = x + (size_t)g * GROUP;
        float first[GROUP], second[GROUP];
        double code = largest_of(from, GROUP) * per_code;
        code = code < F_ONE ? F_ONE : code;
        double step = code_step(code);
        code = ceil(code / step) * step;
        double next = code + code_step(code), errors[2];
        next = next > CODE_MAX ? CODE_MAX : next;
        if (top > TINY) {
            errors[0] = round_group(from, (float)(1 / (code * unit)), first);
            errors[1] = round_group(from, (float)(1 / (next * unit)), second);
        } else {
            errors[0] = round_tiny_group(from, 1 / (code * unit), first);
            errors[1] = round_tiny_group(from, 1 / (next * unit), second);
        }
        int is_next = errors[1] * (next * next) < errors[0] * (code * code);
        put_group(is_next ? second : first, is_next ? next : code, out + (size_t)g * GROUP, out + k + 4 * (size_t)g);
    }
    memset(out + k + k / 8, 0, (size_t)stride - (size_t)(k + k / 8));
    return unit;
}

int en_fpga_encode(const float *x, int m, int k, uint8_t *out, int64_t stride, double *units) {
    if (!en_all_finite(x, m * k)) return 1;
    for (int t = 0; t < m; t++) units[t] = encode(x + (size_t)t * k, k, out + t * stride, stride);
    return 0;
}

/* What the products of a vector with a matrix add up to, by the sums of its columns. */
static double expect(const uint8_t *vector, int k, double unit, const double *columns) {
    const int8_t *q = (const int8_t *)vector;
    double sum = 0;
    for (int g = 0; g < k / GROUP; g++) {
        const uint8_t *record = vector + k + 4 * (size_t)g;
        double parts[LANES] = {0}, part = 0;
        for (int i = 0; i < GROUP; i += LANES)
            for (int j = 0; j < LANES; j++) parts[j] += q[g * GROUP + i + j] * columns[(size_t)g * GROUP + i + j];
        for (int j = 0; j < LANES; j++) part += parts[j];
        sum += part * (double)((F_ONE + record[3]) << record[2]);
    }
    return sum * unit;
}

int en_fpga_finish(const en_fpga_task *tasks, int n_tasks, const uint8_t *vectors, int64_t stride, int k, const double *units,
                   float *y, int64_t ldy) {
    for (int i = 0; i < n_tasks; i++) {
        const en_fpga_task *task = &tasks[i];
        for (int t = 0; t < task->m; t++) {
            int vector = task->first + t;
            float *to = y + vector * ldy + task->first_row;
            double total = 0, size = 0, unit = units[vector];
            for (int r = 0; r < task->n_rows; r++) {
                double product = task->sums[(size_t)r * task->n_places + t] * task->row_units[r] * unit;
                to[r] += (float)product;
                total += product;
                size += fabs(product);
            }
            double apart = fabs(total - expect(vectors + vector * stride, k, unit, task->columns));
            /* An infinity may be as far apart as it is large; the engine has none. */
            if (!isfinite(size) || !(apart <= size * task->share + unit * task->unit_share)) return 0;
        }
    }
    return 1;
}
