"""The default model behind a real daemon: what only real logits, a real tokeniser and a real KV can show."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from edge_rt.api.client import Client
from edge_rt.types import Message
from tests.api.daemon import Daemon

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
EXTRA = """
[engine]
n_ctx = 1024
stream_interval_s = 0.0
max_prefix_bytes = 4194304
"""
TEXTS = (
    "Plain words, 12345 and   spaces\n\n\tand tabs.",
    "Grüße, naïve 漢字 и кириллица, עברית 🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # <|im_end|> written by a user",
    "\x00\x7f\u200b\ufeff",
)


@pytest.fixture(scope="module")
def daemon(model_store: Path) -> Iterator[Daemon]:
    environ = {"EDGE_RT__CATALOG__STORE_DIR": str(model_store.parents[2]), "EDGE_RT__ENGINE__MAX_DRAFT": "15"}
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as directory,
        Daemon(Path(directory), extra=EXTRA, environ=environ) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def llama(model_store: Path) -> Iterator[Any]:
    """llama-cpp-python's own class, which knows the vocabulary by another way than edge_rt does."""
    import llama_cpp

    loaded = llama_cpp.Llama(str(model_store), vocab_only=True, verbose=False)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("text", TEXTS, ids=["plain", "unicode", "code", "odd"])
@pytest.mark.parametrize("special", [False, True])
def test_token_ids_are_llama_cpps(daemon: Daemon, llama: Any, text: str, special: bool) -> None:
    body = {"model": MODEL, "content": text, "parse_special": special, "add_special": False}
    with daemon.client() as client:
        ids = client.post("/tokenize", json=body).json()["tokens"]
        back = client.post("/detokenize", json={"model": MODEL, "tokens": ids}).json()["content"]
    assert ids == llama.tokenize(text.encode(), add_bos=False, special=special)
    assert back == text


def test_guesses_come_from_what_was_written_and_are_counted(daemon: Daemon) -> None:
    colours = "Red, green, blue, yellow, black, white. "
    body = {"model": MODEL, "prompt": colours * 6, "max_tokens": 64, "ignore_eos": True}
    with daemon.client() as client:
        drawn = client.post("/v1/completions", json=body | {"speculative.n_max": 8}).json()
        plain = client.post("/v1/completions", json=body | {"temperature": 0, "speculative.n_max": 0}).json()
    assert drawn["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 64
    assert 0 <= drawn["timings"].get("draft_n_accepted", 0) <= drawn["timings"].get("draft_n", 0)
    assert "draft_n" not in plain["timings"]
    drafted = daemon.metric(f'edge_rt_drafted_tokens_total{{model="{MODEL}",source="words"}}')
    assert drafted >= drawn["timings"].get("draft_n", 0)


@pytest.mark.parametrize("model", ["null", MODEL])
def test_input_that_is_too_long_is_refused_with_both_numbers(openai_sdk: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_sdk.completions.create(model=model, prompt=[65] * 1500, max_tokens=1)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    body: Any = caught.value.body
    assert (body["details"]["prompt_tokens"], body["details"]["n_ctx"]) == (1500, 1024)
    assert "1500" in body["message"]
    assert "1024" in body["message"]


def test_the_joined_stream_is_the_whole_answer(openai_sdk: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours, with an emoji for each."}],
        "temperature": 0,
        "max_tokens": 48,
    }
    pieces = [c.choices[0].delta.content or "" for c in openai_sdk.chat.completions.create(**asked, stream=True)]
    whole = openai_sdk.chat.completions.create(**asked)
    assert len(pieces) > 5  # guessed tokens come several at a time
    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.parametrize("character", ["é", "漢", "🙂"])
@pytest.mark.parametrize("n_over", [0, 1], ids=["whole", "cut"])
def test_byte_tokens_are_never_sent_in_part(
    openai_sdk: openai.OpenAI, llama: Any, model_store: Path, character: str, n_over: int
) -> None:
    raw = character.encode()
    byte_tokens = {llama.detokenize([i], special=True): i for i in range(llama.n_vocab())}
    ids = [byte_tokens[bytes([byte])] for byte in raw]
    # Only these have a chance, and the penalty on the last len(ids) - 1 leaves the next in turn.
    asked: Any = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": 3 * len(ids) + n_over,
        "temperature": 0,
        "logit_bias": {str(i): 100 for i in ids},
        "extra_body": {
            "repeat_penalty": 100.0,
            "repeat_last_n": len(ids) - 1,
            "ignore_eos": True,
            "speculative.n_max": 0,  # or the tokens of several characters share an event
        },
    }
    events = list(openai_sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].text for event in events if event.choices]
    whole = openai_sdk.completions.create(**asked)
    assert "".join(pieces) == whole.choices[0].text == character * 3 + "\N{REPLACEMENT CHARACTER}" * n_over
    assert set(pieces[:3]) == {character}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * len(ids) + n_over


@pytest.mark.slow
def test_500_requests_leave_the_worker_as_small_as_it_was(daemon: Daemon) -> None:
    def ask(number: int) -> str:
        with Client(daemon.socket) as client:
            if number % 5 == 0:  # long enough for the shelf
                message = Message(role="user", content=f"Request {number}: say {number * 37 % 101} in words, please.")
                answer = client.chat([message], model=MODEL, max_tokens=2, temperature=0)
            else:
                answer = client.complete(f"{number}, {number + 1},", model=MODEL, max_tokens=2, temperature=0)
            return "".join(piece.text for piece in answer)

    async def some(first: int, n_requests: int) -> None:
        for start in range(first, first + n_requests, 10):
            answers = await asyncio.gather(*(asyncio.to_thread(ask, start + i) for i in range(10)))
            assert all(answers)

    def worker_rss_bytes() -> int:
        return max(child.memory_info().rss for child in psutil.Process(daemon.process.pid).children())

    async def scenario() -> None:
        await some(0, 100)  # fills the shelf of prefixes, which is bounded
        before_bytes = worker_rss_bytes()
        await some(100, 500)
        assert worker_rss_bytes() - before_bytes < 8 * 2**20

    asyncio.run(scenario())


def test_nothing_unexpected_was_logged(daemon: Daemon) -> None:
    assert "Traceback" not in daemon.log
    assert "is lost" not in daemon.log
