"""What a draft head learns from: prompts, draws, and answers with the states that belong to their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile, SeqRows, Vocab
from edge_rt.backends.native import NativeSession
from edge_rt.catalog.draft_head import model_sha256
from tests.tiny_models import TinyModel
from tools.draft_data import answers, describe, prompts, subjects
from tools.gguf_copy import copy_gguf

N_VOCAB, END = 50, 49
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


class Session:
    """Says token after token one more than the last, and ends behind 48; a state holds its token and its position.

    rival, rare  the logits of the tokens two and three further on; the next one's is 20
    """

    vocab = Vocab(
        n_vocab=N_VOCAB, bos_id=-1, eos_id=END, eog_ids=frozenset({END}), add_bos=False, chat_template=TEMPLATE
    )
    caps = SimpleNamespace(n_vocab=N_VOCAB)
    info = SimpleNamespace(model="m")

    def __init__(self, *, rival: float = 0, rare: float = 0) -> None:
        self.held: dict[int, list[int]] = {}
        self.rival, self.rare = rival, rare
        self.texts: list[str] = []

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        assert special
        assert add_bos == ("<assistant>" not in text)  # a chat's is the template's to write
        self.texts.append(text)
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
            for further, logit in ((3, self.rare), (2, self.rival), (1, 20.0)):
                logits[min(rows.token_ids[-1] + further, END)] = logit
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
    chats = [text for text in session.texts if text.endswith("<assistant>")]
    assert 35 < len(chats) < len(session.texts)
    assert {text.startswith("<system>") for text in chats} == {False, True}


def test_prompts_repeat_by_seed_and_the_same_question_is_held_out_in_any_form() -> None:
    first = list(islice(prompts(["Why?", "Who?"], 5), 400))
    assert first == list(islice(prompts(["Why?", "Who?"], 5), 400))
    assert first != list(islice(prompts(["Why?", "Who?"], 6), 400))
    assert len({held for request, held in first if request.question == "Why?"}) == 1
    n_held = sum(held for _, held in islice(prompts([], 5), 2000))
    assert 40 < n_held < 180
    assert sum(request.messages is not None for request, _ in first) > 200
    assert {len(request.messages or ()) for request, _ in first} == {0, 1, 2}


def test_subjects_are_things_and_everyday_ones() -> None:
    found = subjects()
    assert {"gravity", "a goldfish", "an axolotl"} <= set(found)


def test_draws_are_of_the_likely_tokens_only_and_repeat_by_seed() -> None:
    def steps(is_drawn: bool, seed: int = 0) -> list[int]:
        session = cast("NativeSession", cast("Any", Session(rival=19.5, rare=15.5)))
        found = [answer for answer in answers(session, [], seed, 100) if answer.drawn == is_drawn]
        pairs = [pair for answer in found for pair in pairwise(answer.ids[answer.n_prompt - 1 :])]
        return [b - a for a, b in pairs if a < END - 3]

    assert set(steps(is_drawn=False)) == {1}
    assert set(steps(is_drawn=True)) == {1, 2}
    assert steps(is_drawn=True) == steps(is_drawn=True) != steps(is_drawn=True, seed=1)


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_training_needs_is_the_models_own(tmp_path: Path, is_tied: bool) -> None:
    model = replace(TinyModel(), is_tied=is_tied)
    header = (plain := model.write(tmp_path / "plain.gguf")).header
    path = copy_gguf(plain.path, tmp_path / "m.gguf", keys={f"{header.arch}.attention.layer_norm_rms_epsilon": 1e-3})
    file = ModelFile(model="m", variant="", path=path, quant="")
    describe(file, tmp_path, ["theirs, CC BY"])
    weights = model.weights()
    last = len(model.layers) - 1
    with np.load(tmp_path / "parent.npz") as found:
        assert ("output" in found.files) == (not is_tied)
        assert np.array_equal(found["embedding"], weights["token_embd.weight"].astype(np.float16))
        if not is_tied:
            assert np.array_equal(found["output"], weights["output.weight"].astype(np.float16))
        for key in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
            assert np.array_equal(found[key], weights[f"blk.{last}.{key}.weight"].astype(np.float32))
        assert np.array_equal(found["output_norm"], weights["output_norm.weight"].astype(np.float32))
        assert found["eps"] == np.float32(1e-3)
    assert model_sha256(file.path, file.header) in (tmp_path / "parent.json").read_text()
    describe(file, tmp_path, [])  # as when it is begun again
    with pytest.raises(SystemExit, match="another model"):
        describe(replace(model, seed=9).write(tmp_path / "other.gguf"), tmp_path, [])


def test_a_model_without_a_feed_forward_part_to_begin_with_is_refused(tmp_path: Path) -> None:
    file = TinyModel().write(tmp_path / "m.gguf")
    last = file.header.n_layers - 1
    path = copy_gguf(file.path, tmp_path / "c.gguf", keeps=lambda name: name != f"blk.{last}.ffn_up.weight")
    with pytest.raises(SystemExit, match=rf"no blk\.{last}\.ffn_up\.weight"):
        describe(ModelFile(model="m", variant="", path=path, quant=""), tmp_path, [])
