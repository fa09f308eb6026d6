/* Frames of the link, to bytes and back: edge_rt/devices/serial_npu_frames.py and serial_npu_mending.py in C. */
#ifndef EDGE_RT_FRAMES_H
#define EDGE_RT_FRAMES_H

#include <stddef.h>
#include <stdint.h>

enum { FRAME_SHORT = 0xA5, FRAME_LONG = 0xC3, FRAME_ACK = 0x5A, FRAME_CONTROL = 0x3C };
enum {
    FRAME_MAX_SHORT = 192,
    FRAME_STEP = 64, /* a long payload is 192 and a multiple of this */
    FRAME_MAX_PAYLOAD = FRAME_MAX_SHORT + 63 * FRAME_STEP,
    FRAME_SHORT_OVERHEAD = 8,
    FRAME_LONG_OVERHEAD = 9,
    FRAME_CONTROL_BYTES = 13,
    FRAME_MAX_RANGES = 16,
    FRAME_MAX = FRAME_MAX_PAYLOAD + FRAME_LONG_OVERHEAD,
};

/* The largest payload of at most size bytes that a frame can have, and what a frame with it takes on the wire. */
uint32_t frame_payload(uint32_t size);
uint32_t frame_bytes(uint32_t payload);

/* The size of the frame that n bytes begin, 0 where that is too few to tell, -1 where none begins. */
int frame_size(const uint8_t *bytes, size_t n, int has_epoch);
int frame_is_sound(const uint8_t *frame, size_t n, uint32_t epoch);
/* Looks for one byte that makes size bytes a sound short frame, in place of one or between two, and puts that frame into
 * mended, of size bytes. Gives how many of the bytes it takes, size or one less; 0 where no single byte does. */
size_t frame_mend(const uint8_t *bytes, size_t size, uint32_t epoch, uint8_t *mended);

/* Each puts a frame and gives its size. Payloads come as two pieces, since they lie in a ring. */
size_t frame_put_data(uint8_t *out, uint32_t offset, const uint8_t *data, size_t n, const uint8_t *more, size_t n_more,
                      uint32_t epoch);
size_t frame_put_control(uint8_t *out, int what, uint32_t epoch, int version, uint32_t max_segment, uint32_t window);
/* gaps: ranges' first and last + 1, counted as next is. */
size_t frame_put_ack(uint8_t *out, uint32_t next, uint32_t n_mended, const uint32_t (*gaps)[2], int n, int is_tail,
                     uint32_t epoch);
/* Reads an ACK's gaps and lengths as edges counted from its next on; gives their number, -1 where they are none. */
int frame_read_edges(const uint8_t *ack, uint32_t edges[2 * FRAME_MAX_RANGES]);

uint32_t crc32_of(const void *data, size_t n_bytes, uint32_t before);

static inline uint32_t get16(const uint8_t *from) { return from[0] | (uint32_t)from[1] << 8; }
static inline uint32_t get32(const uint8_t *from) { return get16(from) | get16(from + 2) << 16; }

static inline void put16(uint8_t *to, uint32_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

static inline void put32(uint8_t *to, uint32_t value) {
    put16(to, value);
    put16(to + 2, value >> 16);
}

#endif
