"""What a draft head learns from: prompts, draws, and answers with the states that belong to their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import SeqRows
from edge_rt.backends.native import NativeSession
from tools.draft_data import answers, drawn, prompts, subjects

N_VOCAB, END = 50, 49


class Session:
    """Says token after token one more than the last, and ends behind 48; a state holds its token and its position."""

    vocab = SimpleNamespace(eog_ids=frozenset({END}))

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        assert special
        return [len(text) % 40, 20 + len(text) % 20]

    def seq_length(self, seq_id: int) -> int:
        return len(self.held.get(seq_id, []))

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        del self.held[seq_id][n_tokens:]

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        found = []
        for rows in batch:
            assert rows.start == self.seq_length(rows.seq_id)
            self.held.setdefault(rows.seq_id, []).extend(rows.token_ids)
            logits = np.zeros(N_VOCAB, np.float32)
            logits[rows.token_ids[-1] + 1] = 20
            found.append(logits)
        return found

    def state(self, seq_id: int, position: int) -> NDArray[np.float32]:
        assert position == len(self.held[seq_id]) - 1
        return np.array([self.held[seq_id][position], position], np.float32)


def test_each_token_but_the_last_has_its_state() -> None:
    session = Session()
    found = answers(cast("NativeSession", cast("Any", session)), [], 3, 70)
    assert len(found) == 70
    assert {answer.drawn for answer in found} == {False, True}
    for answer in found:
        assert answer.ids[-1] == END
        states = np.stack(answer.states)
        assert list(states[:, 0]) == answer.ids[answer.n_prompt - 1 : -1]
        assert list(states[:, 1]) == list(range(answer.n_prompt - 1, len(answer.ids) - 1))
    assert not any(session.held.values())


def test_prompts_repeat_by_seed_and_the_same_question_is_held_out_in_any_form() -> None:
    first = list(islice(prompts(["Why?", "Who?"], 5), 400))
    assert first == list(islice(prompts(["Why?", "Who?"], 5), 400))
    assert first != list(islice(prompts(["Why?", "Who?"], 6), 400))
    assert len({held for text, held in first if "Why?" in text}) == 1
    n_held = sum(held for _, held in islice(prompts([], 5), 2000))
    assert 40 < n_held < 180
    assert sum("<|im_start|>user" in text for text, _ in first) > 200


def test_subjects_are_things_and_everyday_ones() -> None:
    found = subjects()
    assert {"gravity", "a goldfish", "an axolotl"} <= set(found)


def test_draws_are_of_the_likely_tokens_only() -> None:
    logits = np.full(N_VOCAB, -9, np.float32)
    logits[[7, 8, 9]] = 5, 4.5, 0.5
    rng = np.random.default_rng(0)
    assert {drawn(logits, rng) for _ in range(300)} == {7, 8}
