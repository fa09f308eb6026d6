/* One end of the link of PROTOCOL.md, the device's: edge_rt/devices/serial_npu_link.py in C, decision for decision.
 * Bytes and the time in microseconds go in; the stream's bytes go to deliver, bytes for the line come from link_transmit. */
#ifndef EDGE_RT_LINK_H
#define EDGE_RT_LINK_H

#include "frames.h"
#include "quality.h"

enum {
    LINK_VERSION = 2,
    LINK_WINDOW = 24576,
    LINK_MAX_WINDOW = 32512,
    LINK_MAX_IN_FLIGHT = 2048,
    LINK_MAX_GAPS = 1024,
    LINK_RING = 65536, /* holds a window on its way and one that waits; offsets wrap as it does */
};

enum link_state { LINK_CLOSED, LINK_OPEN, LINK_LOST };

typedef struct {
    uint32_t start, end, order, known_order;
    int64_t sent_us;
    uint8_t is_again, is_lost, is_guess; /* is_guess: a timer, not an ACK, said that it is lost */
} link_segment;

typedef struct {
    enum link_state state;
    uint32_t n_sessions, n_bad_bytes;
    void (*deliver)(void *owner, const uint8_t *data, size_t n_bytes); /* what continues the stream */
    void (*begun)(void *owner);                                       /* a session: forget the stream before it */
    void *owner;

    uint32_t epoch, window;
    line_quality quality;
    /* sending: ring[una .. una + n_kept) is on its way, n_unsent bytes wait behind it */
    uint8_t ring[LINK_RING];
    uint32_t una, n_kept, n_unsent, allowed, order, acked_order;
    link_segment in_flight[LINK_MAX_IN_FLIGHT];
    int n_in_flight, n_timeouts, n_stalls; /* timeouts in a row, without a frame; without an ACK that tells something */
    int64_t srtt_us, rttvar_us, rto_us, progress_us, heard_us;
    /* receiving: early holds what came before its turn, modulo the window */
    uint32_t next, unacked_bytes;
    uint8_t early[LINK_MAX_WINDOW];
    uint32_t gaps[LINK_MAX_GAPS][2];
    int n_gaps, cursor;
    int64_t ack_at_us, ack_last_us, ack_again_us; /* ack_at_us -1: none is due */
    /* frames */
    uint8_t has_epoch;
    uint8_t frame[FRAME_MAX];
    uint32_t n_mended, told_mended; /* here, and by the other end */
    size_t n_frame;
    int64_t fed_us;
    uint8_t control[FRAME_CONTROL_BYTES];
    uint8_t has_control;
    int64_t said_no_session_us; /* -1: never */
} link;

void link_init(link *self, void *owner, void (*deliver)(void *, const uint8_t *, size_t), void (*begun)(void *));
void link_receive(link *self, const uint8_t *data, size_t n_bytes, int64_t now_us);
/* Puts whole frames into out until there are max_bytes or more; out has room for max_bytes + FRAME_MAX. */
size_t link_transmit(link *self, int64_t now_us, uint8_t *out, size_t max_bytes);
size_t link_room(const link *self);
/* n_bytes at most link_room. */
void link_send(link *self, const void *data, size_t n_bytes);
void link_say_no_session(link *self, int64_t now_us);
/* When to call link_receive and link_transmit though nothing came; -1 for never. */
int64_t link_wake_at_us(const link *self);

#endif
