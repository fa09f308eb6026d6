/* How many errors a line makes, and so how long a segment should be: edge_rt/devices/serial_npu_quality.py in C. */
#ifndef EDGE_RT_QUALITY_H
#define EDGE_RT_QUALITY_H

#include <stdint.h>

enum { QUALITY_MAX_SEGMENT = 2048, QUALITY_MIN_SEGMENT = 16 };

typedef struct {
    uint32_t max_segment, errors, bytes; /* errors × 256 */
} line_quality;

void quality_begin(line_quality *self, uint32_t max_segment);
void quality_arrived(line_quality *self, uint32_t n_bytes);
void quality_mended(line_quality *self, uint32_t n_frames);
void quality_lost(line_quality *self, uint32_t n_bytes);
/* How many of n_bytes the next frame takes. */
uint32_t quality_cut(const line_quality *self, uint32_t n_bytes);

#endif
