/* The last hidden states of each sequence, as the output norm takes them: what a draft goes on from. */
#include "context.h"

#include <stdlib.h>
#include <string.h>

static float *state_at(const en_context *c, int seq, int position) {
    size_t place = (size_t)seq * c->states.n_each + position % c->states.n_each;
    return c->states.x + place * c->model->config.n_embd;
}

int en_keep_states(en_context *c, int n_each) {
    if (n_each < 0 || n_each > EN_MAX_STATES) return EN_BAD_ROWS;
    en_states kept = {.n_each = n_each};
    size_t n_seqs = c->kv.n_seqs;
    if (n_each > 0) {
        kept.x = malloc(n_seqs * n_each * c->model->config.n_embd * sizeof(float));
        kept.first = calloc(n_seqs, sizeof(int32_t));
        kept.end = calloc(n_seqs, sizeof(int32_t));
    }
    if (n_each > 0 && (!kept.x || !kept.first || !kept.end)) {
        en_states_drop(&kept);
        return EN_NO_MEMORY;
    }
    en_states_drop(&c->states);
    c->states = kept;
    return EN_OK;
}

void en_states_drop(en_states *states) {
    free(states->x);
    free(states->first);
    free(states->end);
    *states = (en_states){0};
}

/* x has the wanted rows of the step, in order. A row that does not follow those kept begins anew. */
void en_states_take(en_context *c, int n_places) {
    en_states *s = &c->states;
    const float *x = c->x;
    size_t n_embd = c->model->config.n_embd;
    for (int i = 0; i < n_places && s->n_each > 0; i++) {
        const row_place *place = &c->places[i];
        if (!place->wants) continue;
        if (s->end[place->seq] != place->position) s->first[place->seq] = place->position;
        s->end[place->seq] = place->position + 1;
        if (s->end[place->seq] - s->first[place->seq] > s->n_each) s->first[place->seq]++;
        memcpy(state_at(c, place->seq, place->position), x, n_embd * sizeof(float));
        x += n_embd;
    }
}

void en_states_trim(en_context *c, int seq, int n_tokens) {
    en_states *s = &c->states;
    if (s->n_each == 0 || n_tokens >= s->end[seq]) return;
    s->end[seq] = n_tokens;
    if (s->first[seq] > n_tokens) s->first[seq] = n_tokens;
}

const float *en_states_at(const en_context *c, int seq, int position) {
    const en_states *s = &c->states;
    if (s->n_each == 0 || position < s->first[seq] || position >= s->end[seq]) return NULL;
    return state_at(c, seq, position);
}

int en_seq_state(const en_context *c, int seq_id, int position, float *state) {
    if (seq_id < 0 || seq_id >= c->kv.n_seqs) return EN_BAD_SEQ;
    const float *x = en_states_at(c, seq_id, position);
    if (!x) return EN_BAD_ROWS;
    memcpy(state, x, c->model->config.n_embd * sizeof(float));
    return EN_OK;
}
