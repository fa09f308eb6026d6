"""A LoRA adapter on the real model: answers change, and its logits are those of the weights it is merged into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import EdgeRtError
from edge_rt.types import Adapter, AdapterFile, GenerateRequest, Message
from tests.lora_files import ALPHA, RANK, Pair, write_adapter
from tests.unit.engine.null_engine import Answer
from tools.gguf_copy import copy_gguf

pytestmark = pytest.mark.model

TARGETS = ("blk.4.attn_q.weight", "blk.12.ffn_down.weight", "blk.20.attn_output.weight")
STRENGTH = 0.06
MAX_KL = 0.02  # what 8-bit activations make of the other order of the same sums; test_soak.py has more of them
POEMS = Adapter(name="poems")
QUESTIONS = ("What is gravity?", "Name three colours.", "Who wrote Hamlet?", "How do bees make honey?")
Weights = Mapping[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def floats(model_store: Path) -> Weights:
    """The matrices that the adapter changes, as floats [n_out, n_in]."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(model_store).tensors if tensor.name in TARGETS}
    return {name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for name, tensor in found.items()}


@pytest.fixture(scope="module")
def pairs(floats: Weights) -> dict[str, Pair]:
    random = np.random.default_rng(4)
    found: dict[str, Pair] = {}
    for name, weights in floats.items():
        n_out, n_in = weights.shape
        a = random.standard_normal((RANK, n_in)).astype(np.float32) / np.float32(np.sqrt(n_in))
        found[name] = (a, (STRENGTH * np.sqrt(n_in) * random.standard_normal((n_out, RANK))).astype(np.float32))
    return found


def load(path: Path, *adapters: AdapterFile) -> TokenSession:
    backend = registry.get("llama_cpu")
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    options = LoadOptions(n_ctx=512, n_seq_max=4, n_batch=128, n_threads=1, adapters=adapters)
    return backend.load(ModelFile(model="m", variant="", path=path, quant=""), options)


@pytest.fixture(scope="module")
def adapter(pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> AdapterFile:
    path = write_adapter(tmp_path_factory.mktemp("lora") / "poems.gguf", pairs)
    return AdapterFile(name="poems", path=str(path))


@pytest.fixture(scope="module")
def session(model_store: Path, adapter: AdapterFile) -> Iterator[TokenSession]:
    loaded = load(model_store, adapter)
    yield loaded
    loaded.close()


def distributions(session: TokenSession) -> NDArray[np.float64]:
    """Give the log probabilities after each token of a text."""
    ids = session.tokenize("The sun rises in the east and sets in the west. Water boils at", special=False)
    (rows,) = session.decode([SeqRows(0, 0, ids, want_logits=True, want_all=True)])
    session.seq_trim(0, 0)
    logits = rows.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def mean_kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def test_an_adapter_is_as_good_as_merged(
    session: TokenSession, model_store: Path, floats: Weights, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    merged = {name: floats[name] + ALPHA / RANK * (b @ a) for name, (a, b) in pairs.items()}
    other = load(copy_gguf(model_store, tmp_path / "merged.gguf", floats=merged))
    expected = distributions(other)
    other.close()
    plain = distributions(session)
    session.set_adapters([POEMS])  # type: ignore[attr-defined]
    adapted = distributions(session)
    session.set_adapters([])  # type: ignore[attr-defined]
    assert np.array_equal(distributions(session), plain)
    effect, error = mean_kl(expected, plain), mean_kl(expected, adapted)
    print(f"mean KL of the merged model's: {error:.4f} with the adapter, {effect:.3f} without")
    assert error < MAX_KL
    assert effect > 10 * MAX_KL


def asked(number: int, *adapters: Adapter, question: str, max_tokens: int = 24) -> GenerateRequest:
    system = Message(role="system", content="You are a careful assistant. " * 12)  # long enough to be kept
    return GenerateRequest(
        id=str(number),
        model="m",
        messages=(system, Message(role="user", content=question)),
        max_tokens=max_tokens,
        ignore_eos=True,
        adapters=adapters,
        top_logprobs=0,
    )


def run(engine: TokenEngine, *answers: Answer) -> None:
    for _ in range(5000):
        if all(answer.is_over for answer in answers):
            return
        engine.step()
    pytest.fail("the engine did not finish")


def first_logprob(answer: Answer) -> float:
    return next(token.logprob for chunk in answer.chunks for token in chunk.logprobs)


def text_of(answer: Answer) -> str:
    return "".join(chunk.text for chunk in answer.chunks)


def test_answers_change_and_no_prefix_is_taken_from_another_set(session: TokenSession) -> None:
    engine = TokenEngine(session, EngineSettings(max_draft=0), ThreadChoice((1,)))
    engine.warm_up()
    sets = ((), (POEMS,), (Adapter(name="poems", scale=0.5),))
    alone: dict[tuple[str, int], Answer] = {}
    number = 0
    for question in QUESTIONS:
        for i, each in enumerate(sets):  # one set after the other over the same system prompt: a mix would show
            answer = alone[question, i] = Answer()
            engine.submit(asked(number, *each, question=question), answer)
            run(engine, answer)
            number += 1
    for question in QUESTIONS:
        assert len({text_of(alone[question, i]) for i in range(len(sets))}) == len(sets)
    usages = [alone[QUESTIONS[0], i].last.usage for i in range(len(sets))]
    assert [usage.cached_tokens for usage in usages if usage is not None] == [0, 0, 0]
    again = [alone[QUESTIONS[1], i].last.usage for i in range(len(sets))]
    assert all(usage is not None and usage.cached_tokens > 50 for usage in again)  # each set's own
    together: dict[tuple[str, int], Answer] = {}
    for question in QUESTIONS[:2]:
        for i, each in enumerate(sets):
            answer = together[question, i] = Answer()
            engine.submit(asked(number, *each, question=question), answer)
            number += 1
    run(engine, *together.values())
    for key, answer in together.items():
        assert first_logprob(answer) == pytest.approx(first_logprob(alone[key]), abs=0.8)
    engine.stop(0.0)
    engine.run()


def test_a_model_is_unloaded_while_adapters_are_in_use(model_store: Path, adapter: AdapterFile) -> None:
    loaded = load(model_store, adapter)
    engine = TokenEngine(loaded, EngineSettings(max_draft=0), ThreadChoice((1,)))
    answers = [Answer() for _ in range(3)]
    for number, answer in enumerate(answers):
        sets = (POEMS,) if number % 2 else ()
        engine.submit(asked(number, *sets, question=QUESTIONS[number], max_tokens=200), answer)
    for _ in range(6):
        engine.step()
    engine.stop(0.0)
    engine.run()
    assert all(answer.is_over for answer in answers)
    assert all(isinstance(answer.error, EdgeRtError) for answer in answers)
    loaded.close()
    with pytest.raises(EdgeRtError):
        loaded.set_adapters([POEMS])  # type: ignore[attr-defined]
