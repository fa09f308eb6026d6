"""A request as an OpenAI-compatible endpoint wants it, and what its errors say."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from edge_rt.cloud.credential import Key
from edge_rt.cloud.events import error_text
from edge_rt.config import CloudEndpoint
from edge_rt.errors import UnsupportedFeatureError
from edge_rt.types import CLOUD_FORMATS, GenerateRequest, Message, ResponseFormat

MAX_ERROR_BYTES: Final = 64 * 2**10  # of an error's body that are read
_MAX_MESSAGE: Final = 200  # characters of it that are shown
PROBE_PROMPT_TOKENS: Final = 10  # of what probe writes, with a chat template's own
_BYTES_A_TOKEN: Final = 4  # of English, by which prompts are estimated where a server counts nothing


def device_only(request: GenerateRequest) -> str:
    """Name what of a request means something to this device's model alone; "" if nothing does.

    Token ids are one vocabulary's, and so are biases and log probabilities of them.
    """
    if request.prompt_token_ids is not None:
        return "token ids as prompt"
    if request.sampling.logit_bias:
        return "logit_bias"
    if request.top_logprobs is not None or request.prompt_logprobs is not None:
        return "logprobs"
    form = request.response_format
    if form is not None and form.kind not in CLOUD_FORMATS:
        return f"an answer held to a {form.kind}"
    if request.beams is not None:
        return "beam search"
    if request.adapters:
        return "lora"
    if request.continues:  # each endpoint does something else with it
        return "an answer that goes on with the assistant's own words"
    return "ignore_eos" if request.ignore_eos else ""


def path(request: GenerateRequest) -> str:
    return "/completions" if request.messages is None else "/chat/completions"


def body(request: GenerateRequest, endpoint: CloudEndpoint) -> bytes:
    """Write a request's body. Raises UnsupportedFeatureError for what only the device can do.

    Who asks, the request's id and the device's draft settings are not sent.
    """
    if feature := device_only(request):
        raise UnsupportedFeatureError(feature=f"{feature} in the cloud", remedy="ask with route local")
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
    }
    if request.messages is None:
        fields["prompt"] = request.prompt or ""
    else:
        fields["messages"] = [_message(message) for message in request.messages]
        fields |= _tools(request)
    if request.max_tokens is not None:
        fields[endpoint.max_tokens_field if request.messages is not None else "max_tokens"] = request.max_tokens
    if request.stop:
        fields["stop"] = list(request.stop)
    optional: dict[str, tuple[float, float]] = {
        "top_p": (sampling.top_p, 1.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
    }
    if endpoint.full_sampling:
        optional |= {
            "top_k": (sampling.top_k, 0),
            "min_p": (sampling.min_p, 0.0),
            "repeat_penalty": (sampling.repeat_penalty, 1.0),
        }
    # Neutral values are left out: some models refuse a field whatever its value.
    fields |= {name: value for name, (value, neutral) in optional.items() if value != neutral}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if request.response_format is not None:
        fields["response_format"] = _response_format(request.response_format)
    return msgspec.json.encode(fields)


def _message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _tools(request: GenerateRequest) -> dict[str, Any]:
    if not request.tools:
        return {}
    named = {"type": "function", "function": {"name": request.tool_name}}
    tools: dict[str, Any] = {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": msgspec.Raw(tool.parameters.encode()),
                },
            }
            for tool in request.tools
        ],
        "tool_choice": named if request.tool_name else request.tool_choice,
    }
    if not request.parallel_tool_calls:
        tools["parallel_tool_calls"] = False
    return tools


def _response_format(form: ResponseFormat) -> dict[str, Any]:
    if form.kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": msgspec.Raw(form.text.encode())}}


def probe(endpoint: CloudEndpoint) -> bytes:
    """Write the smallest request that shows whether an endpoint answers again."""
    return msgspec.json.encode(
        {
            "model": endpoint.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            endpoint.max_tokens_field: 1,
            "messages": [{"role": "user", "content": "Hi"}],
        }
    )


def estimated_tokens(request: GenerateRequest) -> int:
    """Estimate a prompt's length by its bytes."""
    messages = request.messages or ()
    texts = [request.prompt or ""] if request.messages is None else [message.content for message in messages]
    texts += [call.arguments for message in messages for call in message.tool_calls]
    texts += [tool.description + tool.parameters for tool in request.tools]
    return sum(len(text.encode()) // _BYTES_A_TOKEN + 1 for text in texts)


def message(raw: bytes, key: Key | None) -> str:
    """Find an error body's words: one line, shortened, without the key that some servers repeat."""
    try:
        found = msgspec.json.decode(raw)
        text = error_text(found.get("error", found)) if isinstance(found, dict) else "without a message"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = raw[: 4 * _MAX_MESSAGE].decode(errors="replace")
    return shown(text, key)


def shown(text: str, key: Key | None) -> str:
    """Make a server's text fit for a log: one line of printable characters, shortened, without the key."""
    text = " ".join(re.findall(r"\S+", text[: 16 * _MAX_MESSAGE]))
    text = "".join(char if char.isprintable() else "?" for char in text)
    if key is not None:
        text = key.censored(text)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"
