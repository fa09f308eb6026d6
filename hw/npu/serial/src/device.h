/* The messages of PROTOCOL.md, answered: capabilities, a model, its inputs, runs, its outputs. Nothing here knows a board. */
#ifndef EDGE_RT_DEVICE_H
#define EDGE_RT_DEVICE_H

#include "link.h"
#include "model.h"

enum { DEVICE_MAX_CHUNK = 4096, DEVICE_MAX_BODY = DEVICE_MAX_CHUNK + 64 };

enum device_op {
    OP_HELLO = 1,
    OP_MODEL_BEGIN,
    OP_MODEL_DATA,
    OP_MODEL_END,
    OP_INPUT,
    OP_RUN,
    OP_OUTPUT,
    OP_CANCEL,
    OP_ECHO,
    OP_STATUS,
};

enum device_status { STATUS_OK, STATUS_BAD_REQUEST, STATUS_BUSY, STATUS_BAD_MODEL, STATUS_CANCELLED, STATUS_UNKNOWN };

/* What takes longer than a message may, and is done between them. */
enum device_task { TASK_NONE, TASK_RUN, TASK_FIND_MODEL, TASK_CHECK_MODEL };

/* What the board gives. */
typedef struct {
    const char *chip;
    int is_emulated;
    uint8_t *model; /* 16-aligned; what it holds when the device starts may be a model from before a reset */
    uint32_t max_model_bytes;
    int8_t *arena;
    uint32_t arena_bytes; /* with MODEL_SLACK */
    int64_t (*now_us)(void);
    /* Moves bytes between the line and the link; called often while a model runs. */
    void (*move)(void);
} device_board;

typedef struct {
    const device_board *board;
    link link;
    /* the message that comes */
    uint8_t message[8 + DEVICE_MAX_BODY + 4];
    uint32_t n_message;
    /* the model */
    uint8_t sha256[32];
    uint32_t model_bytes, n_received;
    int is_loaded;
    model graph;
    /* a run, and its outputs that still have to go */
    enum device_task wanted;
    int is_working, is_cancelled, is_answering;
    uint16_t task_id; /* of the message that asked for it */
    int n_outputs_sent;
    uint32_t n_output_bytes;
    uint32_t n_runs;
} device;

void device_init(device *self, const device_board *board);
/* Takes what came and puts what goes, as link_receive and link_transmit do. */
void device_receive(device *self, const uint8_t *data, size_t n_bytes);
size_t device_transmit(device *self, uint8_t *out, size_t max_bytes);
/* Does the task that is asked for, if one is. */
void device_work(device *self);

#endif
