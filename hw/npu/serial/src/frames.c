#include "frames.h"

#include <string.h>

enum { ACK_OVERHEAD = 9, MAX_RANGES_BYTES = 6 * FRAME_MAX_RANGES, SURE_BYTES = 2 };
static const uint32_t SOUND = 0xDEBB20E3u; /* the register behind a frame and its check, whatever it holds */

static uint32_t steps[256];
static uint8_t backs[256];

/* The table of CRC-32's steps, and where in it the one with a given upper byte is. */
static void make_tables(void) {
    if (steps[1]) return;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        steps[i] = c;
        backs[c >> 24] = (uint8_t)i;
    }
}

static uint32_t stepped(uint32_t before, uint8_t byte) { return steps[(before ^ byte) & 0xFF] ^ (before >> 8); }

uint32_t crc32_of(const void *data, size_t n_bytes, uint32_t before) {
    make_tables();
    const uint8_t *bytes = data;
    uint32_t crc = ~before;
    for (size_t i = 0; i < n_bytes; i++) crc = stepped(crc, bytes[i]);
    return ~crc;
}

uint32_t frame_payload(uint32_t size) {
    if (size < FRAME_MAX_SHORT + FRAME_STEP) return size < FRAME_MAX_SHORT ? size : FRAME_MAX_SHORT;
    size -= (size - FRAME_MAX_SHORT) % FRAME_STEP;
    return size < FRAME_MAX_PAYLOAD ? size : FRAME_MAX_PAYLOAD;
}

uint32_t frame_bytes(uint32_t payload) {
    return payload + (payload <= FRAME_MAX_SHORT ? FRAME_SHORT_OVERHEAD : FRAME_LONG_OVERHEAD);
}

int frame_size(const uint8_t *bytes, size_t n, int has_epoch) {
    switch (bytes[0]) {
    case FRAME_CONTROL: return FRAME_CONTROL_BYTES;
    case FRAME_SHORT:
    case FRAME_LONG:
    case FRAME_ACK: break;
    default: return -1;
    }
    if (!has_epoch) return -1;
    if (n < 2) return 0;
    if (bytes[0] == FRAME_SHORT)
        return bytes[1] >= 1 && bytes[1] <= FRAME_MAX_SHORT ? bytes[1] + FRAME_SHORT_OVERHEAD : -1;
    if (bytes[0] == FRAME_ACK) return (bytes[1] & 0x7F) <= MAX_RANGES_BYTES ? ACK_OVERHEAD + (bytes[1] & 0x7F) : -1;
    if (bytes[1] < 1 || bytes[1] > 63) return -1;
    if (n < 5) return 0;
    if ((crc32_of(bytes, 4, 0) & 0xFF) != bytes[4]) return -1;
    return FRAME_MAX_SHORT + FRAME_STEP * bytes[1] + FRAME_LONG_OVERHEAD;
}

int frame_is_sound(const uint8_t *frame, size_t n, uint32_t epoch) {
    uint32_t edges[2 * FRAME_MAX_RANGES];
    if (frame[0] == FRAME_CONTROL) {
        uint32_t check = crc32_of(frame, n - 3, 0);
        return (check & 0xFFFF) == get16(frame + n - 3) && ((check >> 16) & 0xFF) == frame[n - 1];
    }
    if (crc32_of(frame, n - 4, epoch) != get32(frame + n - 4)) return 0;
    return frame[0] != FRAME_ACK || frame_read_edges(frame, edges) >= 0;
}

size_t frame_mend(const uint8_t *bytes, size_t size, uint32_t epoch, uint8_t *mended) {
    uint32_t front[FRAME_MAX_SHORT + FRAME_SHORT_OVERHEAD];
    make_tables();
    front[0] = ~epoch;
    for (size_t i = 1; i < size; i++) front[i] = stepped(front[i - 1], bytes[i - 1]);
    for (size_t n_missing = 2; n_missing--;) { /* a missing last byte is also another one, that of the next frame */
        uint32_t behind = SOUND;                /* the byte that is looked for */
        for (size_t at = size - 1; at >= SURE_BYTES; at--) {
            uint32_t before = front[at], wanted = behind ^ (before >> 8);
            uint8_t step = backs[wanted >> 24], back = backs[behind >> 24];
            if (steps[step] == wanted) {
                memcpy(mended, bytes, at);
                mended[at] = (uint8_t)(before ^ step);
                memcpy(mended + at + 1, bytes + at + 1 - n_missing, size - 1 - at);
                return size - n_missing;
            }
            behind = (behind ^ steps[back]) << 8 | (uint8_t)(back ^ bytes[at - n_missing]);
        }
    }
    return 0;
}

/* Puts the check behind a frame of n bytes; gives its whole size. */
static size_t put_check(uint8_t *frame, size_t n, uint32_t epoch) {
    put32(frame + n, crc32_of(frame, n, epoch));
    return n + 4;
}

size_t frame_put_data(uint8_t *out, uint32_t offset, const uint8_t *data, size_t n, const uint8_t *more, size_t n_more,
                      uint32_t epoch) {
    size_t size = n + n_more, at = 4;
    out[0] = size <= FRAME_MAX_SHORT ? FRAME_SHORT : FRAME_LONG;
    out[1] = (uint8_t)(size <= FRAME_MAX_SHORT ? size : (size - FRAME_MAX_SHORT) / FRAME_STEP);
    put16(out + 2, offset);
    if (size > FRAME_MAX_SHORT) out[at++] = (uint8_t)crc32_of(out, 4, 0);
    memcpy(out + at, data, n);
    memcpy(out + at + n, more, n_more);
    return put_check(out, at + size, epoch);
}

size_t frame_put_control(uint8_t *out, int what, uint32_t epoch, int version, uint32_t max_segment, uint32_t window) {
    out[0] = FRAME_CONTROL;
    out[1] = (uint8_t)what;
    put32(out + 2, epoch);
    out[6] = (uint8_t)version;
    out[7] = (uint8_t)(max_segment / 64);
    put16(out + 8, window / 64);
    uint32_t check = crc32_of(out, 10, 0);
    put16(out + 10, check);
    out[12] = (uint8_t)(check >> 16);
    return FRAME_CONTROL_BYTES;
}

static uint8_t *put_number(uint8_t *to, uint32_t value) {
    for (; value > 0x7F; value >>= 7) *to++ = (uint8_t)((value & 0x7F) | 0x80);
    *to++ = (uint8_t)value;
    return to;
}

size_t frame_put_ack(uint8_t *out, uint32_t next, uint32_t n_mended, const uint32_t (*gaps)[2], int n, int is_tail,
                     uint32_t epoch) {
    uint8_t *to = out + 5;
    uint32_t before = next;
    for (int i = 0; i < n; i++) {
        to = put_number(to, gaps[i][0] - before);
        to = put_number(to, gaps[i][1] - gaps[i][0]);
        before = gaps[i][1];
    }
    out[0] = FRAME_ACK;
    out[1] = (uint8_t)((to - out - 5) | (is_tail ? 0x80 : 0));
    put16(out + 2, next);
    out[4] = (uint8_t)n_mended;
    return put_check(out, (size_t)(to - out), epoch);
}

int frame_read_edges(const uint8_t *ack, uint32_t edges[2 * FRAME_MAX_RANGES]) {
    const uint8_t *data = ack + 5;
    uint32_t value = 0, shift = 0, last = 0;
    int n = 0;
    for (int i = 0; i < (ack[1] & 0x7F); i++) {
        value |= (uint32_t)(data[i] & 0x7F) << shift;
        shift += 7;
        if (data[i] & 0x80) {
            if (shift > 14) return -1;
            continue;
        }
        if (value == 0 || n == 2 * FRAME_MAX_RANGES) return -1;
        edges[n++] = last += value;
        value = shift = 0;
    }
    return shift || n % 2 ? -1 : n;
}
