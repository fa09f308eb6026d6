#include "device.h"
#include "sha256.h"

#include <string.h>

enum { HEADER_BYTES = 8, REPLY = 0x80, PROTOCOL = LINK_VERSION };

/* Ends the session: the host must begin another. */
static void give_up(device *self) {
    self->link.state = LINK_LOST;
    self->link.said_no_session_us = -1;
    link_say_no_session(&self->link, self->board->now_us());
}

static void say(device *self, int op, int status, uint32_t id, const void *head, uint32_t n_head, const void *body,
                uint32_t n_body) {
    uint8_t header[HEADER_BYTES] = {(uint8_t)(op | REPLY), (uint8_t)status}, check[4];
    put16(header + 2, id);
    put32(header + 4, n_head + n_body);
    uint32_t crc = crc32_of(header, HEADER_BYTES, 0);
    crc = crc32_of(head, n_head, crc);
    put32(check, crc32_of(body, n_body, crc));
    if (link_room(&self->link) < HEADER_BYTES + n_head + n_body + 4) {
        give_up(self); /* somebody asks and asks, and takes no answer */
        return;
    }
    link_send(&self->link, header, HEADER_BYTES);
    link_send(&self->link, head, n_head);
    link_send(&self->link, body, n_body);
    link_send(&self->link, check, 4);
}

static void answer(device *self, int op, int status, uint32_t id, const void *body, uint32_t n_body) {
    say(self, op, status, id, "", 0, body, n_body);
}

static void refuse(device *self, int op, int status, uint32_t id, const char *reason) {
    answer(self, op, status, id, reason, (uint32_t)strlen(reason));
}

static void hello(device *self, uint32_t id, const uint8_t *body, uint32_t n_body) {
    if (n_body != 2 || body[0] > PROTOCOL || body[1] < PROTOCOL) {
        refuse(self, OP_HELLO, STATUS_BAD_REQUEST, id, "speaks version 2 of the protocol only");
        return;
    }
    const device_board *board = self->board;
    const char *kernels = kernels_name();
    uint8_t reply[96] = {PROTOCOL};
    reply[1] = (uint8_t)(board->is_emulated ? 1 : 0);
    put16(reply + 2, DEVICE_MAX_CHUNK);
    put32(reply + 4, board->max_model_bytes);
    put32(reply + 8, board->arena_bytes - MODEL_SLACK);
    put16(reply + 12, MODEL_MAX_COLUMN);
    put16(reply + 14, MODEL_MAX_CHANNELS);
    put16(reply + 16, 8 | 4 << 8); /* bits of weights */
    put32(reply + 18, 1u << OP_CONV | 1u << OP_DEPTHWISE | 1u << OP_MAXPOOL | 1u << OP_AVGPOOL | 1u << OP_ADD |
                          1u << OP_RESCALE | 1u << OP_RESIZE);
    strncpy((char *)reply + 24, kernels, 15);
    strncpy((char *)reply + 40, board->chip, 31);
    answer(self, OP_HELLO, STATUS_OK, id, reply, 72);
}

static void ask_for(device *self, enum device_task task, uint32_t id) {
    self->wanted = task;
    self->is_cancelled = 0;
    self->task_id = (uint16_t)id;
}

static void tell_received(device *self, uint32_t id) {
    uint8_t reply[4];
    put32(reply, self->n_received);
    answer(self, OP_MODEL_BEGIN, STATUS_OK, id, reply, sizeof reply);
}

static void model_begin(device *self, uint32_t id, const uint8_t *body, uint32_t n_body) {
    if (n_body != 36) {
        refuse(self, OP_MODEL_BEGIN, STATUS_BAD_REQUEST, id, "36 bytes are a hash and a size");
        return;
    }
    uint32_t n_bytes = get32(body + 32);
    if (n_bytes == 0 || n_bytes > self->board->max_model_bytes) {
        refuse(self, OP_MODEL_BEGIN, STATUS_BAD_MODEL, id, "larger than the memory for a model");
        return;
    }
    /* What another session has brought of it is not brought again; the hash will show whether it is sound. */
    if (n_bytes != self->model_bytes || memcmp(self->sha256, body, 32) != 0) {
        memcpy(self->sha256, body, 32);
        self->model_bytes = n_bytes;
        self->n_received = 0;
        self->is_loaded = 0;
        if (model_is_likely(self->board->model, n_bytes)) {
            ask_for(self, TASK_FIND_MODEL, id);
            return;
        }
    }
    tell_received(self, id);
}

static void model_data(device *self, uint32_t id, const uint8_t *body, uint32_t n_body) {
    if (n_body < 4 || self->is_loaded || get32(body) != self->n_received ||
        n_body - 4 > self->model_bytes - self->n_received) {
        refuse(self, OP_MODEL_DATA, STATUS_BAD_REQUEST, id, "not the model's next bytes");
        return;
    }
    memcpy(self->board->model + self->n_received, body + 4, n_body - 4);
    self->n_received += n_body - 4;
}

static void model_end(device *self, uint32_t id) {
    if (self->is_loaded) answer(self, OP_MODEL_END, STATUS_OK, id, "", 0);
    else if (self->model_bytes == 0 || self->n_received != self->model_bytes)
        refuse(self, OP_MODEL_END, STATUS_BAD_REQUEST, id, "the model has not come whole");
    else ask_for(self, TASK_CHECK_MODEL, id);
}

static void input(device *self, uint32_t id, const uint8_t *body, uint32_t n_body) {
    if (!self->is_loaded || n_body < 8 || body[0] >= self->graph.n_inputs) {
        refuse(self, OP_INPUT, STATUS_BAD_REQUEST, id, "no such input");
        return;
    }
    const model_tensor *tensor = &self->graph.tensors[self->graph.inputs[body[0]]];
    uint32_t offset = get32(body + 4), n_bytes = tensor_bytes(tensor);
    if (offset > n_bytes || n_body - 8 > n_bytes - offset) {
        refuse(self, OP_INPUT, STATUS_BAD_REQUEST, id, "beyond the input's end");
        return;
    }
    memcpy(self->board->arena + tensor->offset + offset, body + 8, n_body - 8);
}

static void handle(device *self, int op, uint32_t id, const uint8_t *body, uint32_t n_body) {
    int is_busy = self->is_working || self->wanted != TASK_NONE || self->is_answering;
    if (is_busy && op >= OP_MODEL_BEGIN && op <= OP_RUN) {
        refuse(self, op, STATUS_BUSY, id, "a run or check is under way");
        return;
    }
    switch (op) {
    case OP_HELLO: hello(self, id, body, n_body); break;
    case OP_MODEL_BEGIN: model_begin(self, id, body, n_body); break;
    case OP_MODEL_DATA: model_data(self, id, body, n_body); break;
    case OP_MODEL_END: model_end(self, id); break;
    case OP_INPUT: input(self, id, body, n_body); break;
    case OP_RUN:
        if (!self->is_loaded) refuse(self, OP_RUN, STATUS_BAD_REQUEST, id, "no model is loaded");
        else ask_for(self, TASK_RUN, id);
        break;
    case OP_CANCEL:
        if (n_body == 2 && is_busy && get16(body) == self->task_id) self->is_cancelled = 1;
        answer(self, OP_CANCEL, STATUS_OK, id, "", 0);
        break;
    case OP_ECHO: answer(self, OP_ECHO, STATUS_OK, id, body, n_body); break;
    case OP_STATUS: {
        uint8_t reply[12];
        put32(reply, self->n_runs);
        put32(reply + 4, self->link.n_bad_bytes);
        put32(reply + 8, self->link.n_sessions);
        answer(self, OP_STATUS, STATUS_OK, id, reply, sizeof reply);
        break;
    }
    default: refuse(self, op, STATUS_UNKNOWN, id, "an unknown request");
    }
}

static void deliver(void *owner, const uint8_t *data, size_t n_bytes) {
    device *self = owner;
    while (n_bytes && self->link.state == LINK_OPEN) {
        uint32_t n_wanted = HEADER_BYTES;
        if (self->n_message >= HEADER_BYTES) {
            uint32_t n_body = get32(self->message + 4);
            if (n_body > DEVICE_MAX_BODY) {
                give_up(self);
                return;
            }
            n_wanted = HEADER_BYTES + n_body + 4;
        }
        uint32_t n = n_wanted - self->n_message;
        if (n > n_bytes) n = (uint32_t)n_bytes;
        memcpy(self->message + self->n_message, data, n);
        self->n_message += n;
        data += n;
        n_bytes -= n;
        if (n_wanted == HEADER_BYTES || self->n_message < n_wanted) continue;
        self->n_message = 0;
        if (crc32_of(self->message, n_wanted - 4, 0) != get32(self->message + n_wanted - 4)) {
            give_up(self);
            return;
        }
        handle(self, self->message[0], get16(self->message + 2), self->message + HEADER_BYTES, n_wanted - HEADER_BYTES - 4);
    }
}

static void begun(void *owner) {
    device *self = owner;
    self->n_message = 0;
    self->is_cancelled = 1; /* what another session has asked for */
    self->wanted = TASK_NONE;
    self->is_answering = 0;
}

void device_init(device *self, const device_board *board) {
    memset(self, 0, sizeof *self);
    self->board = board;
    link_init(&self->link, self, deliver, begun);
    link_say_no_session(&self->link, board->now_us());
}

void device_receive(device *self, const uint8_t *data, size_t n_bytes) {
    link_receive(&self->link, data, n_bytes, self->board->now_us());
}

/* Gives the stream the outputs' next chunks, as long as it has room. */
static void send_outputs(device *self) {
    while (self->is_answering) {
        if (link_room(&self->link) < DEVICE_MAX_BODY + 12) return;
        const model_tensor *tensor = &self->graph.tensors[self->graph.outputs[self->n_outputs_sent]];
        uint32_t n = tensor_bytes(tensor) - self->n_output_bytes;
        uint8_t head[8] = {(uint8_t)self->n_outputs_sent};
        if (n > DEVICE_MAX_CHUNK) n = DEVICE_MAX_CHUNK;
        put32(head + 4, self->n_output_bytes);
        say(self, OP_OUTPUT, STATUS_OK, self->task_id, head, 8,
            self->board->arena + tensor->offset + self->n_output_bytes, n);
        self->n_output_bytes += n;
        if (self->n_output_bytes == tensor_bytes(tensor)) {
            self->n_output_bytes = 0;
            self->n_outputs_sent++;
            self->is_answering = self->n_outputs_sent < self->graph.n_outputs;
        }
    }
}

size_t device_transmit(device *self, uint8_t *out, size_t max_bytes) {
    if (self->link.state == LINK_OPEN) send_outputs(self);
    return link_transmit(&self->link, self->board->now_us(), out, max_bytes);
}

static int tick(void *owner) {
    device *self = owner;
    self->board->move();
    return self->is_cancelled;
}

/* Hashes and checks the model's bytes, which are all there; gives NULL, or what is wrong with them. */
static const char *check_model(device *self) {
    uint8_t digest[32];
    if (!sha256(self->board->model, self->model_bytes, digest, tick, self)) return "cancelled";
    if (memcmp(digest, self->sha256, 32)) return "the model has another hash";
    return model_check(&self->graph, self->board->model, self->model_bytes, self->board->arena_bytes - MODEL_SLACK);
}

static void told_model(device *self, enum device_task task, const char *problem) {
    self->is_loaded = problem == NULL;
    self->n_received = problem ? 0 : self->model_bytes;
    if (task == TASK_FIND_MODEL) tell_received(self, self->task_id);
    else if (problem)
        refuse(self, OP_MODEL_END, self->is_cancelled ? STATUS_CANCELLED : STATUS_BAD_MODEL, self->task_id, problem);
    else answer(self, OP_MODEL_END, STATUS_OK, self->task_id, "", 0);
}

static void told_run(device *self, enum run_result result, int64_t took_us) {
    uint8_t reply[8];
    put32(reply, (uint32_t)took_us);
    put32(reply + 4, (uint32_t)(took_us >> 32));
    self->n_runs++;
    self->n_output_bytes = 0;
    self->n_outputs_sent = 0;
    self->is_answering = result == RUN_DONE;
    answer(self, OP_RUN, result == RUN_DONE ? STATUS_OK : STATUS_CANCELLED, self->task_id, reply, 8);
}

void device_work(device *self) {
    enum device_task task = self->wanted;
    uint32_t session = self->link.n_sessions;
    int64_t began_us = self->board->now_us();
    enum run_result result = RUN_DONE;
    const char *problem = NULL;
    if (task == TASK_NONE) return;
    self->wanted = TASK_NONE;
    self->is_working = 1;
    if (task == TASK_RUN) result = model_run(&self->graph, self->board->arena, tick, self);
    else problem = check_model(self);
    self->is_working = 0;
    if (session != self->link.n_sessions) { /* whoever asked has gone */
        if (task == TASK_FIND_MODEL) self->model_bytes = 0; /* it is looked for again */
        return;
    }
    if (task == TASK_RUN) told_run(self, result, self->board->now_us() - began_us);
    else told_model(self, task, problem);
}
