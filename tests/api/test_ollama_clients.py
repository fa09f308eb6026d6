"""Ollama's own client and langchain's on a real daemon, over the Unix socket and over TCP with a key."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import pydantic
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_ollama import ChatOllama

from edge_rt.api.client import no_authorities
from tests import patience
from tests.api.daemon import Daemon

TEXT = "grüße, 😀 and a line\nbreak"
RUNNING = 'edge_rt_requests_running{model="null-slow"}'


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Graz"}}\n</tool_call>'


def look_up(word: str) -> str:
    """Find a word.

    Args:
        word: what is looked for
    """
    return word


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel, extra="forbid"):  # or a small model goes on with other names
    colour: Colour
    glossy: bool


def async_client(daemon: Daemon, **settings: Any) -> ollama.AsyncClient:
    return ollama.AsyncClient(
        host="http://edge_rt",
        transport=httpx.AsyncHTTPTransport(uds=str(daemon.socket), verify=no_authorities()),
        **settings,
    )


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat(ollama_sdk: ollama.Client) -> None:
    answer = ollama_sdk.chat(model="null", messages=user(TEXT), options={"temperature": 0, "num_thread": 2})
    assert answer.message.content == TEXT
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len(TEXT.encode()) + 1
    assert answer.total_duration is not None
    assert answer.eval_duration is not None
    assert answer.total_duration >= answer.eval_duration > 0


def test_a_stream_of_chat(ollama_sdk: ollama.Client) -> None:
    *pieces, last = ollama_sdk.chat(model="null:latest", messages=user(TEXT), stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == TEXT
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.done_reason) == (True, "stop")


def test_generate(ollama_sdk: ollama.Client) -> None:
    asked: Any = {"model": "null", "prompt": "once", "raw": True, "options": {"num_predict": 12, "temperature": 0}}
    answer = ollama_sdk.generate(**asked, logprobs=True, top_logprobs=2)
    assert answer.done_reason == "length"
    assert answer.logprobs is not None
    assert "".join(token.token for token in answer.logprobs) == answer.response
    assert "".join(piece.response or "" for piece in ollama_sdk.generate(**asked, stream=True)) == answer.response
    assert ollama_sdk.generate(model="null", system="be kind", prompt="echo").response == "echo"


def test_answers_of_a_form(ollama_sdk: ollama.Client) -> None:
    schema = Paint.model_json_schema()
    for seed in range(3):
        answer = ollama_sdk.chat(model="null", messages=user("x"), format=schema, options={"seed": seed})
        Paint.model_validate_json(answer.message.content or "")
    pieces = ollama_sdk.generate(model="null", prompt="x", format=schema, stream=True)
    Paint.model_validate_json("".join(piece.response or "" for piece in pieces))
    whole = ollama_sdk.generate(model="null", prompt="x", format="json", options={"temperature": 0, "num_predict": 300})
    if whole.done_reason == "stop":
        assert isinstance(json.loads(whole.response), dict)
    with pytest.raises(ollama.ResponseError, match="format#/not is not supported"):
        ollama_sdk.chat(model="null", messages=user("x"), format={"type": "object", "not": {}})


def test_a_call_goes_out_and_its_result_comes_back(ollama_sdk: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": f"So: {CALL}\n{CALL}"}]
    answer = ollama_sdk.chat(model="null", messages=messages, tools=[look_up], options={"temperature": 0})
    assert answer.message.content == "So: "
    assert answer.done_reason == "stop"
    assert [dict(call.function) for call in answer.message.tool_calls or ()] == [
        {"name": "look_up", "arguments": {"word": "Graz"}}
    ] * 2
    results = [{"role": "tool", "tool_name": "look_up", "content": text} for text in ("a town", "again")]
    then = ollama_sdk.chat(model="null", messages=[*messages, answer.message, *results], tools=[look_up])
    assert "again" in (then.message.content or "")
    streamed = list(ollama_sdk.chat(model="null", messages=messages, tools=[look_up], options={"seed": 1}, stream=True))
    calls = [call for piece in streamed for call in piece.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"word": "Graz"}] * 2
    assert "".join(piece.message.content or "" for piece in streamed) == "So: "
    wrong = {"type": "function", "function": {"name": "two words", "parameters": {"type": "object"}}}
    with pytest.raises(ollama.ResponseError, match=r"tools\[0\]\.function\.name"):
        ollama_sdk.chat(model="null", messages=user("x"), tools=[wrong])


def test_models(ollama_sdk: ollama.Client) -> None:
    assert {"null:latest", "null-slow:latest"} <= {model.model for model in ollama_sdk.list().models}
    shown = ollama_sdk.show("null")
    assert shown.capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError) as missing:
        ollama_sdk.show("nope")
    assert missing.value.status_code == 404


def test_a_tag_may_name_an_adapter(ollama_sdk: ollama.Client) -> None:
    asked: Any = {"prompt": "once", "raw": True, "options": {"num_predict": 12, "temperature": 0}}
    plain, named = (
        ollama_sdk.generate(model=model, **asked).response for model in ("null-lora:latest", "null-lora:poems")
    )
    assert plain != named
    with pytest.raises(ollama.ResponseError, match="null-lora:prose"):
        ollama_sdk.generate(model="null-lora:prose", **asked)


def test_a_model_stays_in_memory_as_long_as_a_request_asks(ollama_sdk: ollama.Client) -> None:
    assert ollama_sdk.generate(model="null", keep_alive=-1).done_reason == "load"
    (kept,) = (model for model in ollama_sdk.ps().models if model.model == "null:latest")
    assert kept.expires_at is not None
    assert kept.expires_at.year > 2100
    ollama_sdk.chat(model="null", messages=user("x"), keep_alive="5m")
    (kept,) = (model for model in ollama_sdk.ps().models if model.model == "null:latest")
    assert kept.expires_at is not None
    assert kept.expires_at.year < 2100
    assert ollama_sdk.generate(model="null", keep_alive=0).done_reason == "unload"
    assert "null:latest" not in [model.model for model in ollama_sdk.ps().models]
    ollama_sdk.chat(model="null", messages=user("x"), keep_alive=0)
    patience.until(lambda: "null:latest" not in [model.model for model in ollama_sdk.ps().models])


def test_errors(ollama_sdk: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="501"):
        ollama_sdk.pull("llama3.2")
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat is not supported"):
        ollama_sdk.chat(model="null", messages=user("x"), options={"mirostat": 2})
    with pytest.raises(ollama.ResponseError, match="context is 4096") as too_long:
        list(ollama_sdk.chat(model="null", messages=user("x" * 5000), stream=True))
    assert too_long.value.status_code == 400


def test_a_worker_killed_in_mid_stream_is_told_of_on_the_last_line(socket_dir: Path) -> None:
    with (
        Daemon(socket_dir, extra="[engine]\nstream_interval_s = 0.0\n") as own,
        ollama.Client(
            host="http://edge_rt", transport=httpx.HTTPTransport(uds=str(own.socket), verify=no_authorities())
        ) as client,
    ):
        stream = client.chat(model="null-slow", messages=user("x" * 2000), stream=True)
        pieces = [next(stream) for _ in range(5)]
        own.worker.kill()
        with pytest.raises(ollama.ResponseError, match="worker"):
            pieces.extend(stream)
        assert {piece.message.content for piece in pieces} == {"x"}


def test_a_client_that_gives_up_stops_the_work(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with async_client(daemon, timeout=60.0) as client:
            stream = await client.chat(model="null-slow", messages=user("y" * 3000), stream=True)
            await anext(aiter(stream))
        async with async_client(daemon, timeout=0.2) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await hasty.chat(model="null-slow", messages=user("z" * 3000))

    asyncio.run(scenario())
    patience.until(lambda: daemon.metric(RUNNING) == 0)


def test_many_at_once_each_get_their_own(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with async_client(daemon) as client:
            texts = [f"text {i}" for i in range(16)]
            answers = await asyncio.gather(*(client.chat(model="null", messages=user(text)) for text in texts))
        assert [answer.message.content for answer in answers] == texts

    asyncio.run(scenario())


def test_over_tcp_with_a_key(socket_dir: Path) -> None:
    keys = socket_dir / "keys"
    keys.write_text("the-key\n")
    with Daemon(socket_dir, args=("--tcp", "127.0.0.1:0", "--api-keys-file", str(keys))) as daemon:
        host = next(line for line in daemon.lines if "listens" in line).rpartition(" ")[2]
        with ollama.Client(host) as stranger:
            with pytest.raises(ollama.ResponseError) as refused:
                stranger.list()
            assert refused.value.status_code == 401
        with ollama.Client(host, headers={"Authorization": "Bearer the-key"}) as client:
            assert client.chat(model="null", messages=user("hi")).message.content == "hi"


@contextmanager
def langchain(daemon: Daemon, **settings: Any) -> Iterator[ChatOllama]:
    """Give langchain's model, which leaves it to its transports to be closed."""
    path = str(daemon.socket)
    with httpx.HTTPTransport(uds=path, verify=no_authorities()) as transport:
        yield ChatOllama(
            model="null",
            base_url="http://edge_rt",
            sync_client_kwargs={"transport": transport},
            **settings,
        )


def test_langchain(daemon: Daemon) -> None:
    with langchain(daemon, temperature=0, num_ctx=2048, num_predict=100) as model:
        answer = model.invoke([SystemMessage("be kind"), HumanMessage(TEXT)])
        assert answer.content == TEXT
        assert answer.response_metadata["done_reason"] == "stop"
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == len(TEXT.encode()) + 1
        assert "".join(str(piece.content) for piece in model.stream(TEXT)) == TEXT
        assert isinstance(model.with_structured_output(Paint, method="json_schema").invoke("x"), Paint)
        answer = model.bind_tools([look_up]).invoke(CALL)
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("look_up", {"word": "Graz"})]
    with langchain(daemon, num_ctx=100_000) as model, pytest.raises(ollama.ResponseError, match=r"options\.num_ctx"):
        model.invoke("x")


def test_langchain_async(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with httpx.AsyncHTTPTransport(uds=str(daemon.socket), verify=no_authorities()) as transport:
            settings: Any = {"async_client_kwargs": {"transport": transport}}
            model = ChatOllama(model="null", base_url="http://edge_rt", **settings)
            assert (await model.ainvoke("later")).content == "later"
            assert "".join([str(piece.content) async for piece in model.astream(TEXT)]) == TEXT

    asyncio.run(scenario())


def test_nothing_unexpected_was_logged(daemon: Daemon) -> None:
    assert "failed unexpectedly" not in daemon.log
    assert "Traceback" not in daemon.log
