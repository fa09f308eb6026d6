#include "quality.h"
#include "frames.h"

enum { MEMORY_BYTES = 8192, UNKNOWN_ERRORS = 32, UNKNOWN_BYTES = 1024 };

/* Errors in 2^20 bytes, and the segment that carries the most up to there, as in serial_npu_quality.py. */
static const uint16_t RATES[] = {48,   1364,  1852,  2428,  3015,  3879,  4816,  5687, 6852,
                                 8472, 10841, 13380, 15719, 18819, 23078, 29204, 38587};
static const uint8_t SEGMENTS[] = {0,  192, 160, 128, 112, 96, 80, 72, 64,
                                   56, 48,  40,  36,  32,  28, 24, 20, QUALITY_MIN_SEGMENT};
enum { N_RATES = sizeof RATES / sizeof RATES[0] };
_Static_assert(sizeof SEGMENTS == N_RATES + 1, "one more");

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static void count(line_quality *self, uint32_t n_bytes, uint32_t errors) {
    self->bytes += n_bytes;
    self->errors += errors;
    if (self->bytes > MEMORY_BYTES) {
        self->bytes /= 2;
        self->errors /= 2;
    }
}

void quality_begin(line_quality *self, uint32_t max_segment) {
    self->max_segment = max_segment;
    self->errors = UNKNOWN_ERRORS;
    self->bytes = UNKNOWN_BYTES;
}

void quality_arrived(line_quality *self, uint32_t n_bytes) { count(self, n_bytes, 0); }

void quality_mended(line_quality *self, uint32_t n_frames) {
    self->errors = min_u32(self->errors + 256 * n_frames, 256 * self->bytes);
}

void quality_lost(line_quality *self, uint32_t n_bytes) {
    uint32_t least = n_bytes <= FRAME_MAX_SHORT + FRAME_SHORT_OVERHEAD ? 512 : 256;
    uint32_t likely = (uint32_t)((uint64_t)self->errors * n_bytes / self->bytes);
    count(self, n_bytes, min_u32(max_u32(least, likely), 16 * n_bytes));
}

static uint32_t root(uint64_t value) {
    uint64_t low = 0, high = 1u << 20;
    while (low < high) {
        uint64_t middle = (low + high + 1) / 2;
        if (middle * middle <= value) low = middle;
        else high = middle - 1;
    }
    return (uint32_t)low;
}

static uint32_t segment(const line_quality *self) {
    if (self->errors == 0) return self->max_segment;
    uint64_t rate = (uint64_t)self->errors * 4096 / self->bytes, h = FRAME_LONG_OVERHEAD;
    int at = 0;
    while (at < N_RATES && RATES[at] < rate) at++;
    uint32_t best = SEGMENTS[at];
    if (best == 0) best = (root(h * h + 4 * h * 256 * self->bytes / self->errors) - (uint32_t)h) / 2;
    return frame_payload(min_u32(best, self->max_segment));
}

uint32_t quality_cut(const line_quality *self, uint32_t n_bytes) {
    uint32_t usual = segment(self);
    return frame_payload(n_bytes <= min_u32(usual + usual / 2, self->max_segment) ? n_bytes : usual);
}
