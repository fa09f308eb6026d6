#include "link.h"

#include <string.h>

enum { RESET = 1, ACCEPT = 2, NO_SESSION = 3, CLOSE = 4 };
enum { ACK_BYTES_GAPS = 512, ACK_BYTES = 3072, MAX_TIMEOUTS = 6, PROBES = 4, MAX_COPIES = 4, FIRST_WINDOW = 4096 };
enum { STALE_US = 150000, ACK_DELAY_US = 5000, ACK_LAST_US = 100000, ACK_AGAIN_US = 10000, ACK_AGAIN_LAST_US = 160000 };
static const uint32_t LAST_OFFSET = 0xE0000000u; /* of a session: the host begins another long before */
enum { FIRST_RTO_US = 200000, RTO_US = 30000, RTO_LAST_US = 2000000, MAX_SILENT_US = 3000000, NO_SESSION_US = 100000 };

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Sessions */

static void begin(link *self, uint32_t epoch, uint32_t max_segment, uint32_t window) {
    quality_begin(&self->quality, max_segment);
    self->epoch = epoch;
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
    self->n_mended = self->told_mended = 0;
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
    begin(self, 0, QUALITY_MAX_SEGMENT, LINK_WINDOW);
}

void link_say_no_session(link *self, int64_t now_us) {
    if (self->said_no_session_us >= 0 && now_us - self->said_no_session_us < NO_SESSION_US) return;
    self->said_no_session_us = now_us;
    frame_put_control(self->control, NO_SESSION, 0, LINK_VERSION, QUALITY_MAX_SEGMENT, LINK_WINDOW);
    self->has_control = 1;
}

static void hear_control(link *self, const uint8_t *frame, int64_t now_us) {
    uint32_t epoch = get32(frame + 2);
    if (frame[1] == CLOSE && self->state == LINK_OPEN && epoch == self->epoch) {
        self->state = LINK_CLOSED;
        return;
    }
    if (frame[1] != RESET) return;
    if (self->state != LINK_OPEN || epoch != self->epoch) {
        uint32_t max_segment = min_u32(64u * frame[7], QUALITY_MAX_SEGMENT);
        uint32_t window = min_u32(64 * get16(frame + 8), LINK_WINDOW);
        if (epoch == 0 || max_segment < QUALITY_MIN_SEGMENT || window < max_segment) return;
        begin(self, epoch, max_segment, window);
        self->has_epoch = 1;
        self->state = LINK_OPEN;
        self->n_sessions++;
        self->progress_us = self->heard_us = now_us;
        self->begun(self->owner);
    }
    frame_put_control(self->control, ACCEPT, self->epoch, LINK_VERSION, self->quality.max_segment, self->window);
    self->has_control = 1;
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
    self->unacked_bytes += frame_bytes(n);
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

static void hear_ack(link *self, const uint8_t *frame, int64_t now_us) {
    uint32_t edges[2 * FRAME_MAX_RANGES];
    int n_ranges = frame_read_edges(frame, edges) / 2, is_tail = frame[1] >> 7;
    uint32_t n_known = (get16(frame + 2) - self->una) & 0xFFFF;
    if (n_known > self->n_kept) return;
    uint32_t upto = self->una + n_known, ranges[FRAME_MAX_RANGES][2];
    for (int i = 0; i < n_ranges; i++)
        for (int side = 0; side < 2; side++) ranges[i][side] = upto + edges[2 * i + side];
    uint32_t told_from = is_tail && n_ranges ? ranges[0][0] : upto, told_to = n_ranges ? ranges[n_ranges - 1][1] : upto;
    quality_mended(&self->quality, (frame[4] - self->told_mended) & 0xFF);
    self->told_mended = frame[4];
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
        if (!segment.is_lost) quality_arrived(&self->quality, frame_bytes(segment.end - segment.start));
        int64_t order = segment.is_guess ? -1 : (int64_t)segment.order;
        if (!has_newest || order > (newest.is_guess ? -1 : (int64_t)newest.order)) newest = segment, has_newest = 1;
    }
    self->n_in_flight = n_left;
    for (int i = 0; i < n_left; i++) {
        link_segment *segment = &self->in_flight[i];
        int is_told = segment->start < upto || (told_from <= segment->start && segment->start < told_to);
        if (is_told && !segment->is_lost && segment->order < self->acked_order) {
            segment->is_lost = 1;
            quality_lost(&self->quality, frame_bytes(segment->end - segment->start));
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

static void hear(link *self, const uint8_t *frame, size_t n, int64_t now_us) {
    if (frame[0] == FRAME_CONTROL) {
        hear_control(self, frame, now_us);
        return;
    }
    if (self->state != LINK_OPEN) {
        link_say_no_session(self, now_us);
        return;
    }
    self->n_timeouts = 0;
    self->heard_us = now_us;
    if (frame[0] == FRAME_ACK) hear_ack(self, frame, now_us);
    else if (frame[0] == FRAME_SHORT)
        hear_data(self, get16(frame + 2), frame + 4, (uint32_t)n - FRAME_SHORT_OVERHEAD, now_us);
    else hear_data(self, get16(frame + 2), frame + 5, (uint32_t)n - FRAME_LONG_OVERHEAD, now_us);
}

/* Hears a short frame that can be mended; gives how many bytes it takes, 0 where none can. */
static size_t mend(link *self, const uint8_t *frame, size_t size, int64_t now_us) {
    uint8_t mended[FRAME_MAX_SHORT + FRAME_SHORT_OVERHEAD];
    size_t n = frame[0] == FRAME_SHORT ? frame_mend(frame, size, self->epoch, mended) : 0;
    if (n == 0) return 0;
    self->n_mended++;
    hear(self, mended, size, now_us);
    return n;
}

/* Passes over a byte that is part of no frame; what was begun and does not go on is none, unless only a byte is missing. */
static void give_up_frame(link *self, int64_t now_us) {
    int size = frame_size(self->frame, self->n_frame, self->has_epoch);
    size_t n = 0;
    if (size == (int)self->n_frame + 1) {
        self->frame[self->n_frame] = 0;
        n = mend(self, self->frame, (size_t)size, now_us);
        if (n > self->n_frame) n = self->n_frame;
    }
    if (n == 0) self->n_bad_bytes += (uint32_t)(n = 1);
    self->n_frame -= n;
    memmove(self->frame, self->frame + n, self->n_frame);
}

/* Takes the frames that the buffer begins with, and what is none. */
static void parse(link *self, int64_t now_us) {
    size_t at = 0;
    while (at < self->n_frame) {
        const uint8_t *frame = self->frame + at;
        int size = frame_size(frame, self->n_frame - at, self->has_epoch);
        size_t n_mended;
        if (size == 0 || (size > 0 && (size_t)size > self->n_frame - at)) break;
        if (size > 0 && frame_is_sound(frame, (size_t)size, self->epoch)) {
            hear(self, frame, (size_t)size, now_us);
            at += (size_t)size;
        } else if (size > 0 && (n_mended = mend(self, frame, (size_t)size, now_us))) {
            at += n_mended;
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
    if (self->n_frame && now_us - self->fed_us >= STALE_US) give_up_frame(self, now_us);
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
                self->said_no_session_us = -1;
                link_say_no_session(self, now_us);
                return;
            }
            for (int n = self->n_stalls++; n > 0; n--)
                quality_lost(&self->quality, frame_bytes(segment->end - segment->start));
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
    int n = self->n_gaps - first < FRAME_MAX_RANGES ? self->n_gaps - first : FRAME_MAX_RANGES;
    size_t size = frame_put_ack(out, self->next, self->n_mended, self->gaps + first, n, first > 0, self->epoch);
    self->cursor = first + FRAME_MAX_RANGES < self->n_gaps ? first + FRAME_MAX_RANGES - 1 : 0;
    self->unacked_bytes = 0;
    self->ack_at_us = -1;
    if (self->n_gaps) {
        self->ack_at_us = self->ack_last_us = now_us + self->ack_again_us;
        self->ack_again_us = min_i64(2 * self->ack_again_us, ACK_AGAIN_LAST_US);
    }
    return size;
}

static size_t put_data(link *self, uint32_t start, uint32_t size, int64_t now_us, uint8_t *out) {
    uint32_t first = start % LINK_RING, n = min_u32(size, LINK_RING - first);
    self->order++;
    self->progress_us = now_us;
    return frame_put_data(out, start, self->ring + first, n, self->ring, size - n, self->epoch);
}

/* How often to send what timers call lost again and again: a bad line is idle meanwhile. Copies are no longer than one
 * of the longest frames. */
static int n_copies(const link *self, uint32_t size) {
    if (self->n_stalls < 1 || size > FRAME_MAX_SHORT) return 1;
    return self->n_stalls < MAX_COPIES ? self->n_stalls : MAX_COPIES;
}

static size_t send_again(link *self, int64_t now_us, uint8_t *out, size_t n_out, size_t max_bytes) {
    for (int at = 0; at < self->n_in_flight; at++) {
        link_segment segment = self->in_flight[at];
        if (!segment.is_lost) continue;
        uint32_t size = quality_cut(&self->quality, segment.end - segment.start);
        int is_cut = segment.start + size < segment.end;
        if (n_out >= max_bytes || (is_cut && self->n_in_flight == LINK_MAX_IN_FLIGHT)) return n_out;
        for (int n = segment.is_guess ? n_copies(self, size) : 1; n > 0; n--)
            n_out += put_data(self, segment.start, size, now_us, out + n_out);
        uint32_t order = self->order - 1;
        link_segment again = {segment.start, segment.start + size, order, order, now_us, 1, 0, 0};
        if (segment.is_guess) again.known_order = segment.known_order;
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
        memcpy(out, self->control, FRAME_CONTROL_BYTES);
        n_out = FRAME_CONTROL_BYTES;
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
        uint32_t size = quality_cut(&self->quality, min_u32(self->n_unsent, self->allowed - self->n_kept));
        uint32_t start = self->una + self->n_kept;
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
