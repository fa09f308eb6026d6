/* Hostile bytes, frames, messages and model files for the firmware as a host program, under sanitizers: fuzz ROUNDS [SEED],
 * or, built with -DGUIDED and clang's libFuzzer, by what reaches new code (make fuzz). Half of what it sends is sound down to
 * the message, since noise alone never gets past a check. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MODEL = 1 << 16, ARENA = 1 << 16 };

static int64_t clock_us = 1000000;
static device self;
static uint32_t state;
static int n_ticks, n_loaded, n_runs, n_refused;

static uint32_t noise(void) { return state = state * 1664525u + 1013904223u, state >> 8; }

#ifdef GUIDED
static const uint8_t *choices;
static size_t n_choices;

static uint32_t choice(void) { return n_choices ? n_choices--, *choices++ : 0; }
static uint32_t next(void) { return choice() | choice() << 8 | choice() << 16; }
static uint32_t below(uint32_t n) { return (n <= 256 ? choice() : next()) % n; }
#else
static uint32_t next(void) { return noise(); }
static uint32_t below(uint32_t n) { return next() % n; }
#endif

static int64_t now_us(void) { return clock_us; }

static void move(void) {
    if (++n_ticks > 2000) self.is_cancelled = 1; /* a hostile graph may be large */
}

static uint32_t send_at; /* offset of the host's stream */
static uint8_t frame[FRAME_MAX + 64];

static size_t check(uint8_t *bytes, size_t n, uint32_t seed) {
    put32(bytes + n, crc32_of(bytes, n, seed));
    return n + 4;
}

static void drain(void) {
    static uint8_t out[8192 + FRAME_MAX];
    while (device_transmit(&self, out, 8192)) {}
    /* everything is acknowledged, else nothing more would go */
    uint8_t ack[9];
    size_t n = frame_put_ack(ack, self.link.una + self.link.n_kept, 0, NULL, 0, 0, self.link.epoch);
    device_receive(&self, ack, n);
}

static void reset(void) {
    uint8_t control[FRAME_CONTROL_BYTES];
    device_receive(&self, control, frame_put_control(control, 1, next() | 1, LINK_VERSION, 1024, 24576));
    send_at = 0;
}

static void work(void) {
    n_ticks = 0;
    device_work(&self);
    drain();
}

static void stream(const uint8_t *data, size_t n) {
    while (n) {
        uint32_t size = frame_payload(n < 1024 ? (uint32_t)n : 1024);
        device_receive(&self, frame, frame_put_data(frame, send_at, data, size, data, 0, self.link.epoch));
        send_at += size, data += size, n -= size;
    }
    drain();
}

static void message(int op, const uint8_t *body, uint32_t n) {
    static uint8_t whole[8 + DEVICE_MAX_BODY + 4];
    whole[0] = (uint8_t)op, whole[1] = 0;
    put16(whole + 2, below(4));
    put32(whole + 4, n);
    memcpy(whole + 8, body, n);
    put32(whole + 8 + n, crc32_of(whole, 8 + n, 0));
    stream(whole, 12 + n);
    if (op != OP_RUN) work();
}

#include "sha256.h"

/* A file with one layer of each kind now and then, then some of its fields set to anything. */
static uint32_t make_model(uint8_t *file) {
    uint32_t n_tensors = 2 + below(4), n_ops = 1 + below(4), n_in = 1 + below(2), n_out = 1 + below(2);
    uint32_t at = 32 + 16 * n_tensors + 64 * n_ops + 2 * (n_in + n_out), data = (at + 63) / 16 * 16, n = data + 8192;
    memset(file, 0, n);
    for (uint32_t i = data; i < n; i++) file[i] = (uint8_t)noise();
    for (uint32_t i = data; i < data + 4096; i += 4) file[i + 3] = (uint8_t)(noise() % 32); /* biases and multipliers */
    memset(file + data + 4096, 31, 256);                                             /* shifts */
    memcpy(file, "ERN1", 4);
    put16(file + 4, 1), put16(file + 6, n_tensors), put16(file + 8, n_ops);
    file[10] = (uint8_t)n_in, file[11] = (uint8_t)n_out;
    put32(file + 12, ARENA - MODEL_SLACK), put32(file + 16, n);
    uint32_t h = 1 + below(9), w = 1 + below(9), c = 1 + below(70);
    for (uint32_t i = 0; i < n_tensors; i++) {
        uint8_t *tensor = file + 32 + 16 * i;
        put16(tensor, h), put16(tensor + 2, w), put16(tensor + 4, c);
        tensor[6] = (uint8_t)next();
        put32(tensor + 8, below(4) * 8192);
    }
    for (uint32_t i = 0; i < n_ops; i++) {
        uint8_t *op = file + 32 + 16 * n_tensors + 64 * i;
        op[0] = (uint8_t)(1 + below(7)), op[1] = below(2) ? 4 : 8, op[2] = 0x80, op[3] = 0x7F;
        put16(op + 4, below(n_tensors)), put16(op + 6, below(n_tensors)), put16(op + 8, below(n_tensors));
        put16(op + 10, 1 + below(4)), put16(op + 12, 1 + below(4));
        op[14] = (uint8_t)(1 + below(3)), op[15] = (uint8_t)(1 + below(3)), op[16] = (uint8_t)below(4);
        op[17] = (uint8_t)below(4), op[18] = (uint8_t)(1 + below(40));
        put32(op + 24, data), put32(op + 28, (1 + below(4)) * 16 * (1 + below(8)));
        put32(op + 32, data), put32(op + 36, data + 512), put32(op + 40, data + 4096);
        put32(op + 44, next() << 6 & 0x7FFFFFFF), put32(op + 48, next() << 6);
    }
    for (uint32_t i = 0; i < n_in + n_out; i++) put16(file + at - 2 * (i + 1), below(n_tensors));
    for (uint32_t i = below(3) ? 0 : 1 + below(6); i; i--) file[below(at)] = (uint8_t)next();
    return below(20) ? n : below(n + 1);
}

static void load(void) {
    static uint8_t file[1 << 15] __attribute__((aligned(16)));
    uint8_t begin[36], body[DEVICE_MAX_BODY];
    uint32_t n = make_model(file);
    sha256(file, n, begin, NULL, NULL);
    put32(begin + 32, n);
    message(OP_MODEL_BEGIN, begin, 36);
    if (below(8) == 0) reset(); /* in mid upload */
    for (uint32_t at = self.n_received; at < n;) {
        uint32_t size = n - at < DEVICE_MAX_CHUNK ? n - at : DEVICE_MAX_CHUNK;
        put32(body, at);
        memcpy(body + 4, file + at, size);
        message(OP_MODEL_DATA, body, 4 + size);
        at += size;
    }
    message(OP_MODEL_END, body, 0);
    if (self.is_loaded) n_loaded++;
    else n_refused++;
}

static void random_message(void) {
    uint8_t body[256];
    uint32_t n = below(sizeof body + 1);
    for (uint32_t i = 0; i < n; i++) body[i] = (uint8_t)(below(3) ? 0 : next());
    message(below(8) ? 1 + (int)below(11) : (int)below(256), body, n);
}

static void random_frames(void) {
    for (uint32_t i = below(30); i; i--) {
        static const uint8_t kinds[] = {0xA5, 0xC3, 0x5A, 0x3C};
        size_t n = 4 + below(200);
        for (size_t j = 0; j < n; j++) frame[j] = (uint8_t)next();
        if (below(4)) {
            frame[0] = kinds[below(4)];
            if (frame[0] == 0xA5) frame[1] = (uint8_t)(n = 1 + below(192)), n += 4;
            else if (frame[0] == 0x5A) {
                n = 5 + ((frame[1] &= 0x9F) & 0x7F);
                for (size_t j = 5; j < n; j++) frame[j] = (uint8_t)(below(8) ? 1 + below(100) : next());
            }
            else if (frame[0] == 0x3C) n = 10;
            if (below(2)) put16(frame + 2, self.link.next + below(64));
            n = check(frame, n, frame[0] == 0x3C ? 0 : self.link.epoch);
            if (frame[0] == 0x3C) n--;                                     /* 24 bits are enough for it */
            else if (below(2)) frame[2 + below((uint32_t)n - 2)] ^= 1 + below(255); /* to be mended */
        }
        device_receive(&self, frame, n);
        clock_us += below(50000);
        if (below(4) == 0) drain();
    }
}

static void random_bytes(void) {
    size_t n = below(200);
    for (size_t i = 0; i < n; i++) frame[i] = (uint8_t)next();
    device_receive(&self, frame, n);
}

static void session(void) {
    clock_us += 1000;
    reset();
    for (uint32_t i = 1 + below(6); i; i--) switch (below(5)) {
        case 0: load(); __attribute__((fallthrough));
        case 1:
            message(OP_RUN, (const uint8_t *)"", 0);
            if (self.wanted == TASK_RUN) n_runs++;
            work();
            break;
        case 2: random_message(); break;
        case 3: random_bytes(); break;
        default: random_frames();
        }
}

static uint8_t memory[MAX_MODEL] __attribute__((aligned(16)));
static device_board board = {"fuzzed", 1, memory, MAX_MODEL, NULL, ARENA, now_us, move};

#ifdef GUIDED
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (!board.arena) board.arena = malloc(ARENA);
    memset(board.arena, 0, ARENA);
    memset(memory, 0, sizeof memory);
    choices = data, n_choices = n_bytes, state = 1;
    device_init(&self, &board);
    while (n_choices) {
        session();
        if (below(4) == 0) device_init(&self, &board); /* a reset, which leaves the memory as it is */
    }
    return 0;
}
#else
int main(int n_arguments, char **arguments) {
    int n_rounds = n_arguments > 1 ? atoi(arguments[1]) : 2000;
    board.arena = malloc(ARENA);
    memset(board.arena, 0, ARENA);
    for (int round = 0; round < n_rounds; round++) {
        state = (uint32_t)round * 7919u + (n_arguments > 2 ? (uint32_t)atoi(arguments[2]) : 0);
        if (round % 50 == 0) device_init(&self, &board);
        session();
    }
    free(board.arena);
    printf("%d rounds: %d models loaded, %d refused, %d runs\n", n_rounds, n_loaded, n_refused, n_runs);
    return n_loaded == 0 || n_refused == 0 || n_runs == 0; /* else it has not got that far */
}
#endif
