/* The firmware without a board, as a library for tests: the link alone, and the whole device with a clock from outside. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_MODEL = 8 << 20, ARENA = 24 << 20 };

static int64_t clock_us;

static int64_t now_us(void) { return clock_us; }

static void move(void) {}

typedef struct {
    device device;
    device_board board;
} host;

host *host_new(int is_emulated) {
    host *self = calloc(1, sizeof *self);
    self->board.chip = "host build";
    self->board.is_emulated = is_emulated;
    self->board.model = aligned_alloc(64, MAX_MODEL);
    memset(self->board.model, 0, MAX_MODEL);
    self->board.max_model_bytes = MAX_MODEL;
    self->board.arena = malloc(ARENA);
    self->board.arena_bytes = ARENA;
    self->board.now_us = now_us;
    self->board.move = move;
    device_init(&self->device, &self->board);
    return self;
}

void host_free(host *self) {
    free(self->board.model);
    free(self->board.arena);
    free(self);
}

/* As a reset does, which leaves the memory for a model as it is. */
void host_reset(host *self) { device_init(&self->device, &self->board); }

void host_spoil(host *self, size_t at) { self->board.model[at] ^= 1; }

void host_receive(host *self, const uint8_t *data, size_t n, int64_t at_us) {
    clock_us = at_us;
    device_receive(&self->device, data, n);
}

size_t host_transmit(host *self, int64_t at_us, uint8_t *out, size_t max_bytes) {
    clock_us = at_us;
    return device_transmit(&self->device, out, max_bytes);
}

int host_is_wanted(host *self) { return self->device.wanted != TASK_NONE; }

void host_work(host *self) { device_work(&self->device); }

int64_t host_wake_at_us(host *self) { return link_wake_at_us(&self->device.link); }

/* The link alone; the stream's bytes are kept until the next call. */
typedef struct {
    link link;
    uint8_t stream[1 << 20];
    size_t n_stream;
} lone_link;

static void keep(void *owner, const uint8_t *data, size_t n) {
    lone_link *self = owner;
    if (n > sizeof self->stream - self->n_stream) abort();
    memcpy(self->stream + self->n_stream, data, n);
    self->n_stream += n;
}

static void forget(void *owner) { ((lone_link *)owner)->n_stream = 0; }

lone_link *lone_new(void) {
    lone_link *self = calloc(1, sizeof *self);
    link_init(&self->link, self, keep, forget);
    return self;
}

void lone_free(lone_link *self) { free(self); }

const uint8_t *lone_receive(lone_link *self, const uint8_t *data, size_t n, int64_t at_us, size_t *n_stream) {
    self->n_stream = 0;
    link_receive(&self->link, data, n, at_us);
    *n_stream = self->n_stream;
    return self->stream;
}

size_t lone_transmit(lone_link *self, int64_t at_us, uint8_t *out, size_t max_bytes) {
    return link_transmit(&self->link, at_us, out, max_bytes);
}

int64_t lone_wake_at_us(lone_link *self) { return link_wake_at_us(&self->link); }
size_t lone_room(lone_link *self) { return link_room(&self->link); }
void lone_send(lone_link *self, const uint8_t *data, size_t n) { link_send(&self->link, data, n); }
uint32_t lone_sessions(lone_link *self) { return self->link.n_sessions; }
int lone_state(lone_link *self) { return self->link.state; }
