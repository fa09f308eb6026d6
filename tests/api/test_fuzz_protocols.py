"""No body makes another protocol's endpoint fail: it is answered, or refused below 500 in that protocol's shape."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from edge_rt.api import anthropic_wire, ollama_wire, responses_wire
from tests.api.asgi import FakeRuntime, Reply, ask, whole
from tests.api.test_fuzz import bodies, numbers, scalars, values

MODEL = st.just("default")
USER = [{"role": "user", "content": "x"}]
BYTES_PATHS = (
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def parts(cls: Any, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Parts of a body: its own fields, known ones of the right kind more often than not."""
    fields = {name: known.get(name, scalars | values) for name in cls.__struct_encode_fields__}
    return st.fixed_dictionaries({}, optional=fields)


def check(reply: Reply, path: str) -> None:
    assert reply.status == 200 or 400 <= reply.status < 500, reply.body
    assert reply.whole
    if reply.status == 200:
        return
    if path.startswith("/api"):
        assert set(reply.json) == {"error"}
        message = reply.json["error"]
    else:
        message = reply.error["message"]
        assert set(reply.error) >= {"type", "message"}
    assert isinstance(message, str)
    assert len(message) < 1000


def send(path: str, body: Any) -> None:
    check(ask(FakeRuntime(whole("a", "b")), "POST", path, body), path)


call = parts(ollama_wire.WireToolCall, function=parts(ollama_wire.CalledFunction, name=st.text(max_size=4)) | values)
ollama_messages = st.lists(
    parts(
        ollama_wire.WireMessage,
        role=st.sampled_from(["system", "user", "assistant", "tool", "x"]),
        content=st.text(max_size=4) | values,
        tool_calls=st.lists(call, max_size=2) | values,
    ),
    max_size=3,
)
options = parts(ollama_wire.Options, **dict.fromkeys(ollama_wire.Options.__struct_encode_fields__, numbers))
ollama_tools = st.lists(
    parts(ollama_wire.WireTool, function=parts(ollama_wire.Function, parameters=values) | values), max_size=2
)


@given(
    bodies(
        ollama_wire.ChatRequest,
        model=MODEL,
        messages=ollama_messages,
        options=options | values,
        tools=ollama_tools | values,
        keep_alive=numbers | st.text("0123456789.mhsn-", max_size=8),
    )
)
@example(
    {"model": "default", "messages": [{"role": "user", "content": "x"}], "options": {}, "tools": [], "keep_alive": 0}
)
@example({"model": "default", "messages": [], "options": None, "tools": None, "keep_alive": 1e308})
def test_ollama_chat(body: dict[str, Any]) -> None:
    send("/api/chat", body)


@given(bodies(ollama_wire.GenerateRequest, model=MODEL, prompt=st.text(max_size=4) | values, options=options | values))
def test_ollama_generate(body: dict[str, Any]) -> None:
    send("/api/generate", body)


@given(bodies(ollama_wire.EmbedRequest, model=MODEL, input=values), bodies(ollama_wire.ShowRequest, model=st.text()))
def test_ollama_embed_and_show(embed: dict[str, Any], show: dict[str, Any]) -> None:
    send("/api/embed", embed)
    send("/api/show", show)


input_parts = st.lists(
    parts(responses_wire.Part, type=st.sampled_from(["input_text", "output_text", "input_image"]), text=scalars),
    max_size=2,
)
items = st.lists(
    parts(
        responses_wire.Item,
        type=st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "x"]),
        role=st.sampled_from(["user", "assistant", "system", "developer", "x"]),
        content=st.text(max_size=4) | input_parts | values,
        output=st.text(max_size=4) | input_parts | values,
    ),
    max_size=3,
)
function_tools = st.lists(
    parts(responses_wire.FunctionTool, type=st.sampled_from(["function", "web_search"]), parameters=values), max_size=2
)


@given(
    bodies(
        responses_wire.ResponsesRequest,
        model=MODEL,
        input=st.text(max_size=4) | items | values,
        tools=function_tools | values,
        text=parts(responses_wire.Text, format=parts(responses_wire.TextFormat) | values) | values,
    )
)
@example({"model": "default", "input": "x", "tools": [], "text": {}})
def test_responses(body: dict[str, Any]) -> None:
    send("/v1/responses", body)
    send("/v1/responses/input_tokens", body)


blocks = st.lists(
    parts(
        anthropic_wire.Block,
        type=st.sampled_from(["text", "tool_use", "tool_result", "image"]),
        text=st.text(max_size=4) | scalars,
        input=values,
        content=st.text(max_size=4) | values,
    ),
    max_size=2,
)
anthropic_messages = st.lists(
    parts(
        anthropic_wire.WireMessage,
        role=st.sampled_from(["user", "assistant", "system", "x"]),
        content=st.text(max_size=4) | blocks | values,
    ),
    max_size=3,
)


@given(
    bodies(
        anthropic_wire.MessagesRequest,
        model=MODEL,
        max_tokens=st.integers(-1, 9) | numbers,
        messages=anthropic_messages,
        system=st.text(max_size=4) | blocks | values,
        tools=st.lists(parts(anthropic_wire.WireTool, name=st.text(max_size=3), input_schema=values), max_size=2),
    )
)
@example(
    {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "system": "", "tools": []}
)
def test_messages(body: dict[str, Any]) -> None:
    send("/v1/messages", body)
    send("/v1/messages/count_tokens", {name: value for name, value in body.items() if name != "max_tokens"})


@given(st.binary(max_size=80), st.sampled_from(BYTES_PATHS))
@example(b"[" * 100_000, "/v1/messages")
@example(b'{"model":"default","max_tokens":1,"messages":[],"tools":' + b"[" * 9000, "/v1/messages")
@example(b'{"model":"default","format":{"a":' + b"[" * 9000, "/api/chat")
def test_bytes(body: bytes, path: str) -> None:
    send(path, body)


@given(st.integers(0, 300), st.binary(min_size=1, max_size=3), st.sampled_from(BYTES_PATHS))
def test_a_good_body_with_some_bytes_changed(place: int, change: bytes, path: str) -> None:
    good: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "héllo \U0001f600"}]}
    if path.startswith("/v1/responses"):
        good = {"model": "default", "input": [{"role": "user", "content": "héllo"}], "metadata": {"a": "b"}}
    elif path == "/v1/messages":
        good["max_tokens"] = 5
    elif path == "/api/generate":
        good = {"model": "default", "prompt": "héllo", "options": {"stop": ["a"], "top_k": 5}, "keep_alive": "5m"}
    elif path in ("/api/embed", "/api/embeddings", "/api/show"):
        good = {"model": "default"}
    if path in ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate"):
        good["stream"] = True
    body = json.dumps(good).encode()
    place %= len(body)
    send(path, body[:place] + change + body[place + 1 :])
