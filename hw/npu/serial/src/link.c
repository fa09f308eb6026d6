#include "link.h"

#include <string.h>

enum { SHORT = 0xA5, LONG = 0xC3, ACK = 0x5A, CONTROL = 0x3C };
enum { RESET = 1, ACCEPT = 2, NO_SESSION = 3, CLOSE = 4 };
enum { MAX_SHORT = 192, STEP = 64, SHORT_OVERHEAD = 7, LONG_OVERHEAD = 8, MAX_RANGES = 16, MAX_RANGES_BYTES = 6 * MAX_RANGES, CONTROL_BYTES = 13 };
enum { MIN_SEGMENT = 16, ACK_BYTES_GAPS = 512, ACK_BYTES = 3072, MAX_TIMEOUTS = 8, PROBES = 4 };
enum { MEMORY_BYTES = 8192, UNKNOWN_ERRORS = 32, UNKNOWN_BYTES = 1024, FIRST_WINDOW = 4096 };
enum { STALE_US = 150000, ACK_DELAY_US = 5000, ACK_LAST_US = 100000, ACK_AGAIN_US = 10000, ACK_AGAIN_LAST_US = 160000 };
static const uint32_t LAST_OFFSET = 0xE0000000u; /* of a session: the host begins another long before */
enum { FIRST_RTO_US = 200000, RTO_US = 30000, RTO_LAST_US = 2000000, MAX_SILENT_US = 3000000, NO_SESSION_US = 100000 };

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

uint32_t crc32_of(const void *data, size_t n_bytes, uint32_t before) {
    static uint32_t table[256];
    if (table[1] == 0)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            table[i] = c;
        }
    const uint8_t *bytes = data;
    uint32_t crc = ~before;
    for (size_t i = 0; i < n_bytes; i++) crc = table[(crc ^ bytes[i]) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

static void put16(uint8_t *to, uint32_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

static uint32_t get16(const uint8_t *from) { return from[0] | (uint32_t)from[1] << 8; }

/* Puts the check behind a frame of n bytes; gives its whole size. */
static size_t put_check(uint8_t *frame, size_t n, uint32_t seed) {
    uint32_t check = crc32_of(frame, n, seed);
    put16(frame + n, check);
    frame[n + 2] = (uint8_t)(check >> 16);
    return n + 3;
}

static uint32_t allowed_size(uint32_t size) {
    if (size < MAX_SHORT + STEP) return min_u32(size, MAX_SHORT);
    return min_u32(size - (size - MAX_SHORT) % STEP, MAX_SHORT + 63 * STEP);
}

static uint32_t wire_bytes(uint32_t size) { return size + (size <= MAX_SHORT ? SHORT_OVERHEAD : LONG_OVERHEAD); }

/* Line quality */

static void count(link *self, uint32_t n_bytes, uint32_t errors) {
    self->bytes += n_bytes;
    self->errors += errors;
    if (self->bytes > MEMORY_BYTES) {
        self->bytes /= 2;
        self->errors /= 2;
    }
}

static void count_lost(link *self, uint32_t n_bytes) {
    uint32_t likely = self->bytes ? (uint32_t)((uint64_t)self->errors * n_bytes / self->bytes) : 0;
    count(self, n_bytes, min_u32(max_u32(256, likely), 16 * n_bytes));
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

static uint32_t segment_size(const link *self) {
    if (self->errors == 0) return self->max_segment;
    uint64_t square = SHORT_OVERHEAD * SHORT_OVERHEAD + (uint64_t)4 * SHORT_OVERHEAD * 256 * self->bytes / self->errors;
    uint32_t best = (root(square) - SHORT_OVERHEAD) / 2;
    return allowed_size(min_u32(max_u32(best, MIN_SEGMENT), self->max_segment));
}

/* Sessions */

static void begin(link *self, uint32_t epoch, uint32_t max_segment, uint32_t window) {
    self->errors = UNKNOWN_ERRORS;
    self->bytes = UNKNOWN_BYTES;
    self->epoch = epoch;
    self->max_segment = max_segment;
    self->window = window;
    self->una = self->n_kept = self->n_unsent = self->order = self->acked_order = 0;
    self->allowed = min_u32(FIRST_WINDOW, window);
    self->n_in_flight = self->n_timeouts = self->n_stalls = 0;
    self->srtt_us = self->rttvar_us = 0;
    self->rto_us = FIRST_RTO_US;
    self->progress_us = self->heard_us = 0;
    self->next = self->unacked_bytes = 0;
    self->n_gaps = self->cursor = 0;
    self->ack_at_us = -1;
    self->ack_last_us = 0;
    self->ack_again_us = ACK_AGAIN_US;
}

void link_init(link *self, void *owner, void (*deliver)(void *, const uint8_t *, size_t), void (*begun)(void *)) {
    self->state = LINK_CLOSED;
    self->n_sessions = self->n_bad_bytes = 0;
    self->owner = owner;
    self->deliver = deliver;
    self->begun = begun;
    self->has_epoch = self->has_control = 0;
    self->n_frame = 0;
    self->fed_us = 0;
    self->said_no_session_us = -1;
    begin(self, 0, LINK_MAX_SEGMENT, LINK_WINDOW);
}

static void say(link *self, int what, uint32_t epoch, uint32_t max_segment, uint32_t window) {
    uint8_t *frame = self->control;
    frame[0] = CONTROL;
    frame[1] = (uint8_t)what;
    put16(frame + 2, epoch);
    put16(frame + 4, epoch >> 16);
    frame[6] = LINK_VERSION;
    frame[7] = (uint8_t)(max_segment / 64);
    put16(frame + 8, window / 64);
    put_check(frame, 10, 0);
    self->has_control = 1;
}

void link_say_no_session(link *self, int64_t now_us) {
    if (self->said_no_session_us >= 0 && now_us - self->said_no_session_us < NO_SESSION_US) return;
    self->said_no_session_us = now_us;
    say(self, NO_SESSION, 0, LINK_MAX_SEGMENT, LINK_WINDOW);
}

static void hear_control(link *self, const uint8_t *frame, int64_t now_us) {
    uint32_t epoch = get16(frame + 2) | get16(frame + 4) << 16;
    if (frame[1] == CLOSE && self->state == LINK_OPEN && epoch == self->epoch) {
        self->state = LINK_CLOSED;
        return;
    }
    if (frame[1] != RESET) return;
    if (self->state != LINK_OPEN || epoch != self->epoch) {
        uint32_t max_segment = min_u32(64u * frame[7], LINK_MAX_SEGMENT);
        uint32_t window = min_u32(64 * get16(frame + 8), LINK_WINDOW);
        if (epoch == 0 || max_segment < MIN_SEGMENT || window < max_segment) return;
        begin(self, epoch, max_segment, window);
        self->has_epoch = 1;
        self->state = LINK_OPEN;
        self->n_sessions++;
        self->progress_us = self->heard_us = now_us;
        self->begun(self->owner);
    }
    say(self, ACCEPT, self->epoch, self->max_segment, self->window);
}

/* What comes */

static void deliver_early(link *self, uint32_t start, uint32_t end) {
    while (start < end) {
        uint32_t first = start % self->window, n = min_u32(end - start, self->window - first);
        self->deliver(self->owner, self->early + first, n);
        start += n;
    }
}

static void keep_early(link *self, uint32_t start, uint32_t end, const uint8_t *payload) {
    int at = 0;
    while (at < self->n_gaps && self->gaps[at][1] < start) at++;
    int touched = at;
    while (touched < self->n_gaps && self->gaps[touched][0] <= end) touched++;
    uint32_t first = start % self->window, n = min_u32(end - start, self->window - first);
    memcpy(self->early + first, payload, n);
    memcpy(self->early, payload + n, end - start - n);
    if (touched > at) {
        start = min_u32(start, self->gaps[at][0]);
        end = max_u32(end, self->gaps[touched - 1][1]);
    }
    memmove(self->gaps[at + 1], self->gaps[touched], (size_t)(self->n_gaps - touched) * sizeof self->gaps[0]);
    self->gaps[at][0] = start;
    self->gaps[at][1] = end;
    self->n_gaps += 1 - (touched - at);
}

static void hear_data(link *self, uint32_t offset, const uint8_t *payload, uint32_t n, int64_t now_us) {
    int64_t start = (int64_t)self->next + ((offset - self->next + 0x8000) & 0xFFFF) - 0x8000, end = start + n;
    if (end > (int64_t)self->next + self->window) return;
    if (self->unacked_bytes == 0) self->ack_last_us = now_us + ACK_LAST_US;
    self->ack_at_us = min_i64(now_us + ACK_DELAY_US, self->ack_last_us);
    self->ack_again_us = ACK_AGAIN_US;
    self->unacked_bytes += wire_bytes(n);
    if (end <= self->next) {
        self->ack_at_us = now_us;
        return;
    }
    if (start > self->next) {
        if (self->n_gaps < LINK_MAX_GAPS) keep_early(self, (uint32_t)start, (uint32_t)end, payload);
        return;
    }
    uint32_t had = (uint32_t)(self->next - start);
    self->next = (uint32_t)end;
    self->deliver(self->owner, payload + had, n - had);
    int n_done = 0;
    while (n_done < self->n_gaps && self->gaps[n_done][0] <= self->next) {
        uint32_t last = self->gaps[n_done++][1];
        if (last > self->next) {
            deliver_early(self, self->next, last);
            self->next = last;
        }
    }
    if (n_done) {
        self->n_gaps -= n_done;
        memmove(self->gaps[0], self->gaps[n_done], (size_t)self->n_gaps * sizeof self->gaps[0]);
    }
}

static void measure(link *self, int64_t rtt_us) {
    if (self->srtt_us == 0) {
        self->srtt_us = rtt_us;
        self->rttvar_us = rtt_us / 2;
        return;
    }
    int64_t off = rtt_us - self->srtt_us;
    self->rttvar_us += ((off < 0 ? -off : off) - self->rttvar_us) >> 2;
    self->srtt_us += off > 0 ? off >> 3 : off >> 1;
}

/* Reads gaps and lengths as edges counted from next on; gives their number, -1 where they are none. */
static int read_edges(const uint8_t *data, int n_bytes, uint32_t edges[2 * MAX_RANGES]) {
    uint32_t value = 0, shift = 0, last = 0;
    int n = 0;
    for (int i = 0; i < n_bytes; i++) {
        value |= (uint32_t)(data[i] & 0x7F) << shift;
        shift += 7;
        if (data[i] & 0x80) {
            if (shift > 14) return -1;
            continue;
        }
        if (value == 0 || n == 2 * MAX_RANGES) return -1;
        edges[n++] = last += value;
        value = shift = 0;
    }
    return shift || n % 2 ? -1 : n;
}

static uint8_t *put_number(uint8_t *to, uint32_t value) {
    for (; value > 0x7F; value >>= 7) *to++ = (uint8_t)((value & 0x7F) | 0x80);
    *to++ = (uint8_t)value;
    return to;
}

static void hear_ack(link *self, const uint8_t *frame, int64_t now_us) {
    uint32_t edges[2 * MAX_RANGES];
    int n_ranges = read_edges(frame + 4, frame[1] & 0x7F, edges) / 2, is_tail = frame[1] >> 7;
    uint32_t n_known = (get16(frame + 2) - self->una) & 0xFFFF;
    if (n_known > self->n_kept) return;
    uint32_t upto = self->una + n_known, ranges[MAX_RANGES][2];
    for (int i = 0; i < n_ranges; i++)
        for (int side = 0; side < 2; side++) ranges[i][side] = upto + edges[2 * i + side];
    uint32_t told_from = is_tail && n_ranges ? ranges[0][0] : upto, told_to = n_ranges ? ranges[n_ranges - 1][1] : upto;
    link_segment newest = {0};
    int has_newest = 0, n_left = 0;
    for (int i = 0; i < self->n_in_flight; i++) {
        link_segment segment = self->in_flight[i];
        int is_acked = segment.end <= upto;
        for (int r = 0; r < n_ranges && !is_acked; r++)
            is_acked = ranges[r][0] <= segment.start && segment.end <= ranges[r][1];
        if (!is_acked) {
            self->in_flight[n_left++] = segment;
            continue;
        }
        self->acked_order = max_u32(self->acked_order, segment.known_order);
        if (!segment.is_lost) count(self, wire_bytes(segment.end - segment.start), 0);
        int64_t order = segment.is_guess ? -1 : (int64_t)segment.order;
        if (!has_newest || order > (newest.is_guess ? -1 : (int64_t)newest.order)) newest = segment, has_newest = 1;
    }
    self->n_in_flight = n_left;
    for (int i = 0; i < n_left; i++) {
        link_segment *segment = &self->in_flight[i];
        int is_told = segment->start < upto || (told_from <= segment->start && segment->start < told_to);
        if (is_told && !segment->is_lost && segment->order < self->acked_order) {
            segment->is_lost = 1;
            count_lost(self, wire_bytes(segment->end - segment->start));
        }
    }
    self->n_kept -= n_known;
    self->una = upto;
    self->allowed = min_u32(self->allowed + n_known, self->window);
    if (!has_newest) return;
    self->progress_us = now_us;
    self->n_stalls = 0;
    if (!newest.is_again) measure(self, now_us - newest.sent_us);
    if (self->srtt_us)
        self->rto_us = min_i64(max_i64(self->srtt_us + 4 * self->rttvar_us + ACK_DELAY_US, RTO_US), RTO_LAST_US);
}

/* Gives the size of the frame that n bytes begin, 0 where that is too few to tell, -1 where none begins. */
static int frame_size(const link *self, const uint8_t *bytes, size_t n) {
    if (bytes[0] == CONTROL) return CONTROL_BYTES;
    if ((bytes[0] != SHORT && bytes[0] != LONG && bytes[0] != ACK) || !self->has_epoch) return -1;
    if (n < 2) return 0;
    if (bytes[0] == SHORT) return bytes[1] >= 1 && bytes[1] <= MAX_SHORT ? bytes[1] + SHORT_OVERHEAD : -1;
    if (bytes[0] == ACK) return (bytes[1] & 0x7F) <= MAX_RANGES_BYTES ? 7 + (bytes[1] & 0x7F) : -1;
    if (bytes[1] < 1 || bytes[1] > 63) return -1;
    if (n < 5) return 0;
    return (crc32_of(bytes, 4, 0) & 0xFF) == bytes[4] ? MAX_SHORT + STEP * bytes[1] + LONG_OVERHEAD : -1;
}

static int is_sound(const link *self, const uint8_t *frame, size_t n) {
    uint32_t check = crc32_of(frame, n - 3, frame[0] == CONTROL ? 0 : self->epoch), edges[2 * MAX_RANGES];
    if (frame[0] == ACK && read_edges(frame + 4, frame[1] & 0x7F, edges) < 0) return 0;
    return (check & 0xFFFF) == get16(frame + n - 3) && ((check >> 16) & 0xFF) == frame[n - 1];
}

static void hear(link *self, const uint8_t *frame, size_t n, int64_t now_us) {
    if (frame[0] == CONTROL) {
        hear_control(self, frame, now_us);
        return;
    }
    if (self->state != LINK_OPEN) {
        link_say_no_session(self, now_us);
        return;
    }
    self->n_timeouts = 0;
    self->heard_us = now_us;
    if (frame[0] == ACK) hear_ack(self, frame, now_us);
    else if (frame[0] == SHORT) hear_data(self, get16(frame + 2), frame + 4, (uint32_t)n - SHORT_OVERHEAD, now_us);
    else hear_data(self, get16(frame + 2), frame + 5, (uint32_t)n - LONG_OVERHEAD, now_us);
}

/* Takes the frames that the buffer begins with, and what is none. */
static void parse(link *self, int64_t now_us) {
    size_t at = 0;
    while (at < self->n_frame) {
        int size = frame_size(self, self->frame + at, self->n_frame - at);
        if (size == 0 || (size > 0 && (size_t)size > self->n_frame - at)) break;
        if (size > 0 && is_sound(self, self->frame + at, (size_t)size)) {
            hear(self, self->frame + at, (size_t)size, now_us);
            at += (size_t)size;
        } else {
            self->n_bad_bytes++;
            at++;
        }
    }
    self->n_frame -= at;
    memmove(self->frame, self->frame + at, self->n_frame);
}

void link_receive(link *self, const uint8_t *data, size_t n_bytes, int64_t now_us) {
    uint32_t bad = self->n_bad_bytes;
    if (self->n_frame && now_us - self->fed_us >= STALE_US) {
        self->n_bad_bytes++;
        memmove(self->frame, self->frame + 1, --self->n_frame);
    }
    if (n_bytes) self->fed_us = now_us;
    parse(self, now_us);
    while (n_bytes) {
        size_t n = sizeof self->frame - self->n_frame;
        if (n > n_bytes) n = n_bytes;
        memcpy(self->frame + self->n_frame, data, n);
        self->n_frame += n;
        data += n;
        n_bytes -= n;
        parse(self, now_us);
    }
    if (self->state != LINK_OPEN && self->n_bad_bytes > bad) link_say_no_session(self, now_us);
}

/* What goes */

size_t link_room(const link *self) { return self->window > self->n_unsent ? self->window - self->n_unsent : 0; }

void link_send(link *self, const void *data, size_t n_bytes) {
    const uint8_t *bytes = data;
    uint32_t at = self->una + self->n_kept + self->n_unsent;
    for (size_t i = 0; i < n_bytes; i++) self->ring[(at + i) % LINK_RING] = bytes[i];
    self->n_unsent += (uint32_t)n_bytes;
}

static void look_at_clock(link *self, int64_t now_us) {
    int n_probes = 0;
    if (now_us - self->progress_us < self->rto_us) return;
    for (int i = 0; i < self->n_in_flight; i++) {
        link_segment *segment = &self->in_flight[i];
        if (segment->is_lost) continue;
        if (n_probes == 0) {
            self->n_timeouts++;
            if (self->n_timeouts > MAX_TIMEOUTS && now_us - self->heard_us > MAX_SILENT_US) {
                self->state = LINK_LOST;
                return;
            }
            if (++self->n_stalls > 1) count_lost(self, wire_bytes(segment->end - segment->start));
        }
        segment->is_lost = segment->is_again = segment->is_guess = 1;
        segment->known_order = min_u32(segment->known_order, segment->order);
        if (++n_probes == PROBES) break;
    }
    if (n_probes == 0) return;
    self->progress_us = now_us;
    if (self->n_timeouts > 1) self->rto_us = min_i64(2 * self->rto_us, RTO_LAST_US);
}

/* Gives when an ACK is due: later while a frame is coming in, which it can tell of too. */
static int64_t ack_due_us(const link *self) { return self->n_frame ? self->ack_last_us : self->ack_at_us; }

static size_t put_ack(link *self, int64_t now_us, uint8_t *out) {
    if (self->ack_at_us < 0) return 0;
    if (now_us < ack_due_us(self) && self->unacked_bytes < (self->n_gaps ? ACK_BYTES_GAPS : ACK_BYTES)) return 0;
    int first = self->cursor < self->n_gaps ? self->cursor : 0;
    int n = self->n_gaps - first < MAX_RANGES ? self->n_gaps - first : MAX_RANGES;
    uint8_t *to = out + 4;
    uint32_t before = self->next;
    for (int i = 0; i < n; i++) {
        to = put_number(to, self->gaps[first + i][0] - before);
        to = put_number(to, self->gaps[first + i][1] - self->gaps[first + i][0]);
        before = self->gaps[first + i][1];
    }
    out[0] = ACK;
    out[1] = (uint8_t)((to - out - 4) | (first > 0 ? 0x80 : 0));
    put16(out + 2, self->next);
    self->cursor = first + MAX_RANGES < self->n_gaps ? first + MAX_RANGES - 1 : 0;
    self->unacked_bytes = 0;
    self->ack_at_us = -1;
    if (self->n_gaps) {
        self->ack_at_us = self->ack_last_us = now_us + self->ack_again_us;
        self->ack_again_us = min_i64(2 * self->ack_again_us, ACK_AGAIN_LAST_US);
    }
    return put_check(out, (size_t)(to - out), self->epoch);
}

static size_t put_data(link *self, uint32_t start, uint32_t size, int64_t now_us, uint8_t *out) {
    size_t n = 4;
    out[0] = size <= MAX_SHORT ? SHORT : LONG;
    out[1] = (uint8_t)(size <= MAX_SHORT ? size : (size - MAX_SHORT) / STEP);
    put16(out + 2, start);
    if (size > MAX_SHORT) out[n++] = (uint8_t)crc32_of(out, 4, 0);
    for (uint32_t i = 0; i < size; i++) out[n++] = self->ring[(start + i) % LINK_RING];
    self->order++;
    self->progress_us = now_us;
    return put_check(out, n, self->epoch);
}

static size_t send_again(link *self, int64_t now_us, uint8_t *out, size_t n_out, size_t max_bytes) {
    for (int at = 0; at < self->n_in_flight; at++) {
        link_segment segment = self->in_flight[at];
        if (!segment.is_lost) continue;
        uint32_t size = allowed_size(min_u32(segment.end - segment.start, segment_size(self)));
        int is_cut = segment.start + size < segment.end;
        if (n_out >= max_bytes || (is_cut && self->n_in_flight == LINK_MAX_IN_FLIGHT)) return n_out;
        link_segment again = {segment.start, segment.start + size, self->order, self->order, now_us, 1, 0, 0};
        if (segment.is_guess) again.known_order = segment.known_order;
        n_out += put_data(self, segment.start, size, now_us, out + n_out);
        if (is_cut) {
            link_segment *rest = &self->in_flight[at + 1];
            memmove(rest, &self->in_flight[at], (size_t)(self->n_in_flight - at) * sizeof *rest);
            rest->start += size;
            self->n_in_flight++;
        }
        self->in_flight[at] = again;
    }
    return n_out;
}

size_t link_transmit(link *self, int64_t now_us, uint8_t *out, size_t max_bytes) {
    size_t n_out = 0;
    if (self->has_control && max_bytes) {
        memcpy(out, self->control, CONTROL_BYTES);
        n_out = CONTROL_BYTES;
        self->has_control = 0;
    }
    if (self->state != LINK_OPEN) return n_out;
    if (self->next > LAST_OFFSET || self->una > LAST_OFFSET) self->state = LINK_LOST;
    look_at_clock(self, now_us);
    if (self->state != LINK_OPEN) return n_out;
    if (n_out < max_bytes) n_out += put_ack(self, now_us, out + n_out);
    n_out = send_again(self, now_us, out, n_out, max_bytes);
    for (int i = 0; i < self->n_in_flight; i++)
        if (self->in_flight[i].is_lost) return n_out; /* no room for it: nothing new before it */
    while (self->n_unsent && self->n_kept < self->allowed && n_out < max_bytes) {
        if (self->n_in_flight == LINK_MAX_IN_FLIGHT) break;
        uint32_t size = min_u32(min_u32(self->n_unsent, segment_size(self)), self->allowed - self->n_kept);
        uint32_t start = self->una + self->n_kept;
        size = allowed_size(size);
        link_segment segment = {start, start + size, self->order, self->order, now_us, 0, 0, 0};
        n_out += put_data(self, start, size, now_us, out + n_out);
        self->n_kept += size;
        self->n_unsent -= size;
        self->in_flight[self->n_in_flight++] = segment;
    }
    return n_out;
}

int64_t link_wake_at_us(const link *self) {
    int64_t at = self->n_frame ? self->fed_us + STALE_US : INT64_MAX;
    if (self->state == LINK_OPEN) {
        if (self->ack_at_us >= 0) at = min_i64(at, ack_due_us(self));
        if (self->n_in_flight) at = min_i64(at, self->progress_us + self->rto_us);
    }
    return at == INT64_MAX ? -1 : at;
}
