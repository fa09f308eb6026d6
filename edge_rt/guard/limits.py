"""Check one request's ranges and sizes. Pure; the daemon and the library refuse the same things with the same words.

What needs the model (ids outside the vocabulary, the context length) is the engine's to check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge_rt.config import Limits
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.tensor_types import ITEM_BYTES, MediaRequest, TensorRequest
from edge_rt.types import Beams, GenerateRequest, Message, Sampling, Tool

_MAX_INT = 2**31 - 1  # what the back ends' C interfaces hold
_MAX_SEED = 2**63 - 1
_PENALTY = (0.01, 100.0)  # beyond these a float32 logit overflows
_TEMPERATURE = (0.001, 100.0)
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 2**40
_MAX_REGIONS = 1000
_MAX_BEAMS = 256
_MAX_ADAPTERS = 8
_MAX_TEXT_IDS = 65_536  # what a pipeline of texts may take at most
_LENGTH_BYTES = 4  # before each element of BYTES


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Raise InvalidRequestError naming the first field that is out of its range; None when all is well."""
    _check_input(request, limits)
    if request.max_tokens is not None:
        _integer("max_tokens", request.max_tokens, int(request.prompt_logprobs is None), _MAX_INT)
    _check_stop(request.stop, limits)
    _check_sampling(request.sampling, limits)
    _check_tools(request.tools, limits)
    if request.continues:
        _check_continued(request)
    if request.response_format is not None:
        check_text("response_format", request.response_format.text, limits.max_prompt_bytes)
    if request.top_logprobs is not None:
        _integer("top_logprobs", request.top_logprobs, 0, limits.max_top_logprobs)
    if request.prompt_logprobs is not None:
        _integer("prompt_logprobs", request.prompt_logprobs, 0, limits.max_top_logprobs)
    if len(request.adapters) > _MAX_ADAPTERS or len({a.name for a in request.adapters}) < len(request.adapters):
        raise InvalidRequestError(param="lora", problem=f"must name at most {_MAX_ADAPTERS} adapters, each once")
    for i, adapter in enumerate(request.adapters):
        _number(f"lora[{i}].scale", adapter.scale, -100.0, 100.0)
    if request.beams is not None:
        _check_beams(request, request.beams)
    if request.max_draft is not None:
        _integer("speculative.n_max", request.max_draft, 0, _MAX_INT)
    if request.deadline_s is not None:
        _number("deadline_s", request.deadline_s, 0.0, math.inf, open_low=True)


def _check_beams(request: GenerateRequest, beams: Beams) -> None:
    _integer("num_beams", beams.n_beams, 1, _MAX_BEAMS)
    _integer("n", beams.n_best, 1, beams.n_beams)
    _number("length_penalty", beams.length_penalty, -10.0, 10.0)
    if request.sampling != Sampling(seed=request.sampling.seed):
        raise InvalidRequestError(param="num_beams", problem="goes with no sampling: nothing is drawn in a beam search")
    if request.prompt_logprobs is not None:
        raise InvalidRequestError(param="num_beams", problem="does not go with the prompt's logprobs")
    if request.response_format is not None or request.tools:
        raise UnsupportedFeatureError(
            feature="num_beams with response_format or tools", remedy="ask for n answers instead"
        )


def _check_continued(request: GenerateRequest) -> None:
    """Refuse to go on with what is no text of the assistant's, or where the whole answer has a form."""
    messages = request.messages or ()
    place = f"messages[{len(messages) - 1}]"
    if not messages or messages[-1].role != "assistant":
        problem = "needs a last message of the assistant's; so does add_generation_prompt: false"
        raise InvalidRequestError(param="continue_final_message", problem=problem)
    if len(messages) == 1:
        raise InvalidRequestError(param="messages", problem="hold the answer's beginning alone; there is no question")
    if messages[-1].tool_calls:
        raise InvalidRequestError(param=f"{place}.tool_calls", problem="cannot be gone on with; send their results")
    if request.response_format is not None or request.tool_name or request.tool_choice == "required":
        raise UnsupportedFeatureError(
            feature="an answer of a given form that goes on with the assistant's own words",
            remedy="end with a user's message",
        )


def check_tensors(request: TensorRequest, limits: Limits) -> None:
    """Raise InvalidRequestError unless each tensor's bytes are what its shape and datatype say, and not too many."""
    if not request.inputs:
        raise InvalidRequestError(param="inputs", problem="must hold at least one tensor")
    room_bytes = limits.max_tensor_bytes
    names: set[str] = set()
    for tensor in request.inputs:
        param = f"inputs.{tensor.name[:80]}"
        if tensor.name in names:
            raise InvalidRequestError(param=param, problem="is there twice")
        names.add(tensor.name)
        check_shape(param, tensor.shape)
        item_bytes = ITEM_BYTES[tensor.datatype]
        size_bytes = math.prod(tensor.shape) * item_bytes
        if item_bytes and size_bytes != tensor.size_bytes:
            shape = "x".join(map(str, tensor.shape))
            raise InvalidRequestError(
                param=param, problem=f"{tensor.datatype} {shape} takes {size_bytes} bytes, got {tensor.size_bytes}"
            )
        if not item_bytes and math.prod(tensor.shape) * _LENGTH_BYTES > tensor.size_bytes:
            problem = (
                f"{math.prod(tensor.shape)} elements have as many lengths of 4 bytes, got {tensor.size_bytes} bytes"
            )
            raise InvalidRequestError(param=param, problem=problem)
        room_bytes -= tensor.size_bytes
    if room_bytes < 0:
        size_bytes = limits.max_tensor_bytes - room_bytes
        problem = f"hold {size_bytes} bytes, the limit is {limits.max_tensor_bytes} (limits.max_tensor_bytes)"
        raise InvalidRequestError(param="inputs", problem=problem)
    if request.deadline_s is not None:
        _number("deadline_s", request.deadline_s, 0.0, math.inf, open_low=True)


def check_shape(param: str, shape: Sequence[int]) -> None:
    """Raise InvalidRequestError unless a shape has at most 8 dimensions from 0 to 2^31 - 1 and 2^40 elements."""
    if len(shape) > _MAX_DIMENSIONS:
        raise InvalidRequestError(param=param, problem=f"has {len(shape)} dimensions, the limit is {_MAX_DIMENSIONS}")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_INT:
            _integer(f"{param}.shape", size, 0, _MAX_INT)
    if math.prod(shape) > _MAX_ELEMENTS:
        raise InvalidRequestError(param=f"{param}.shape", problem="has more than 2^40 elements")


def check_size(param: str, datatype: str, shape: Sequence[int], room_bytes: int) -> None:
    """Raise InvalidRequestError where a tensor of so many elements cannot fit in what its request may still hold."""
    size_bytes = math.prod(shape) * (ITEM_BYTES[datatype] or _LENGTH_BYTES)
    if size_bytes > room_bytes:
        sizes = "x".join(map(str, shape))
        problem = f"{datatype} {sizes} takes {size_bytes} bytes, {room_bytes} are left of limits.max_tensor_bytes"
        raise InvalidRequestError(param=param, problem=problem)


def check_media(request: MediaRequest) -> None:
    """Raise InvalidRequestError for an empty file or options out of range."""
    if not (request.data or request.token_ids):
        raise InvalidRequestError(param="data", problem="must not be empty")
    if request.token_ids:
        if request.data:
            raise InvalidRequestError(param="token_ids", problem="stands in place of a text, and there is one too")
        if len(request.token_ids) > _MAX_TEXT_IDS:
            problem = f"holds {len(request.token_ids)} token ids, the limit is {_MAX_TEXT_IDS}"
            raise InvalidRequestError(param="token_ids", problem=problem)
        for i, token_id in enumerate(request.token_ids):
            if type(token_id) is not int or not 0 <= token_id <= _MAX_INT:
                _integer(f"token_ids[{i}]", token_id, 0, _MAX_INT)
    if request.dimensions is not None:
        _integer("dimensions", request.dimensions, 1, _MAX_INT)
    if request.top_k is not None:
        _integer("top_k", request.top_k, 1, 1000)
    if request.min_score is not None:
        _number("min_score", request.min_score, 0.0, 1.0)
    if len(request.regions) > _MAX_REGIONS:
        raise InvalidRequestError(
            param="regions", problem=f"holds {len(request.regions)} regions, the limit is {_MAX_REGIONS}"
        )
    if request.deadline_s is not None:
        _number("deadline_s", request.deadline_s, 0.0, math.inf, open_low=True)


def _check_input(request: GenerateRequest, limits: Limits) -> None:
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "none is given"
        raise InvalidRequestError(param="prompt", problem=f"give one of prompt, prompt_token_ids and messages; {found}")
    if request.messages is not None:
        _check_messages(request.messages, limits)
    elif request.prompt is not None:
        if not request.prompt:
            raise InvalidRequestError(param="prompt", problem="must not be empty")
        check_text("prompt", request.prompt, limits.max_prompt_bytes)
    elif request.prompt_token_ids is not None:
        check_token_ids("prompt", request.prompt_token_ids, limits)


def _check_messages(messages: Sequence[Message], limits: Limits) -> None:
    if not messages:
        raise InvalidRequestError(param="messages", problem="must hold at least one message")
    if len(messages) > limits.max_messages:
        raise InvalidRequestError(
            param="messages", problem=f"holds {len(messages)} messages, the limit is {limits.max_messages}"
        )
    room_bytes = limits.max_prompt_bytes
    for i, message in enumerate(messages):
        room_bytes -= check_text(f"messages[{i}].content", message.content, limits.max_prompt_bytes)
        for n, call in enumerate(message.tool_calls):
            place = f"messages[{i}].tool_calls[{n}].function"
            room_bytes -= check_text(f"{place}.name", call.name, limits.max_prompt_bytes)
            room_bytes -= check_text(f"{place}.arguments", call.arguments, limits.max_prompt_bytes)
    if room_bytes < 0:
        size_bytes = limits.max_prompt_bytes - room_bytes
        raise InvalidRequestError(
            param="messages", problem=f"hold {size_bytes} bytes of text, the limit is {limits.max_prompt_bytes}"
        )


def _check_tools(tools: Sequence[Tool], limits: Limits) -> None:
    room_bytes = limits.max_prompt_bytes
    for i, tool in enumerate(tools):
        for name in ("name", "description", "parameters"):
            text = getattr(tool, name)
            room_bytes -= check_text(f"tools[{i}].function.{name}", text, limits.max_prompt_bytes)
    if room_bytes < 0:
        size_bytes = limits.max_prompt_bytes - room_bytes
        raise InvalidRequestError(
            param="tools", problem=f"hold {size_bytes} bytes of text, the limit is {limits.max_prompt_bytes}"
        )


def _check_stop(stop: Sequence[str], limits: Limits) -> None:
    if len(stop) > limits.max_stop:
        raise InvalidRequestError(param="stop", problem=f"holds {len(stop)} strings, the limit is {limits.max_stop}")
    for i, text in enumerate(stop):
        if not text:
            raise InvalidRequestError(param=f"stop[{i}]", problem="must not be empty")
        check_text(f"stop[{i}]", text, limits.max_stop_bytes)


def _check_sampling(sampling: Sampling, limits: Limits) -> None:
    if sampling.temperature != 0 or isinstance(sampling.temperature, bool):
        _number("temperature", sampling.temperature, *_TEMPERATURE, hint=" or 0 for greedy")
    _integer("top_k", sampling.top_k, 0, _MAX_INT)
    _number("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _number("repeat_penalty", sampling.repeat_penalty, *_PENALTY)
    _integer("repeat_last_n", sampling.repeat_last_n, 0, _MAX_INT)
    _number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.seed is not None:
        _integer("seed", sampling.seed, 0, _MAX_SEED)
    if len(sampling.logit_bias) > limits.max_logit_bias:
        raise InvalidRequestError(
            param="logit_bias",
            problem=f"holds {len(sampling.logit_bias)} tokens, the limit is {limits.max_logit_bias}",
        )
    for token_id, bias in sampling.logit_bias.items():
        _integer("logit_bias", token_id, 0, _MAX_INT)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def check_text(param: str, text: str, max_bytes: int) -> int:
    """Give the UTF-8 size of a text. Raises InvalidRequestError when it is too long or has none (lone surrogates)."""
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            param=param, problem=f"has a lone surrogate U+{ord(text[exc.start]):04X} at character {exc.start}"
        ) from exc
    if size_bytes > max_bytes:
        raise InvalidRequestError(param=param, problem=f"is {size_bytes} bytes long, the limit is {max_bytes}")
    return size_bytes


def check_token_ids(param: str, token_ids: Sequence[int], limits: Limits) -> None:
    """Raise InvalidRequestError unless there are token ids, and no more than max_prompt_bytes at 4 bytes each."""
    if not token_ids:
        raise InvalidRequestError(param=param, problem="must not be empty")
    max_ids = max(1, limits.max_prompt_bytes // 4)
    if len(token_ids) > max_ids:
        raise InvalidRequestError(param=param, problem=f"holds {len(token_ids)} token ids, the limit is {max_ids}")
    for i, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id <= _MAX_INT:
            _integer(f"{param}[{i}]", token_id, 0, _MAX_INT)


def _integer(param: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:  # bool is an int to isinstance
        raise InvalidRequestError(param=param, problem=f"must be an integer, got {value!r:.40}")
    if not low <= value <= high:
        # repr of an int of more than 4300 digits raises
        shown = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise InvalidRequestError(param=param, problem=f"must be from {low} to {high}, got {shown}")


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(param=param, problem=f"must be a number, got {value!r:.40}")
    if not low <= value <= high or (open_low and value <= low) or value == math.inf:
        bounds = f"{'above' if open_low else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else "")
        shown = f"{value:g}" if isinstance(value, float) or value.bit_length() < 128 else "a huge integer"
        raise InvalidRequestError(param=param, problem=f"must be {bounds}{hint}, got {shown}")
