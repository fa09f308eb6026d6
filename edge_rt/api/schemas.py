"""The wire: what requests may hold and how answers look, in OpenAI's shape with llama-server's extras.

Every struct forbids unknown fields. Decoding is typed, so nothing is built from what a request may not hold, however
deep it nests or long it is. OpenAI's fields that edge_rt cannot honour are declared Raw: their neutral values (the ones
that ask for nothing) pass, all others are refused as unsupported by refuse_unsupported.

Sampling defaults are llama-server's, not OpenAI's: a small INT4 model at temperature 1 over its whole vocabulary
writes nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from edge_rt.api import fields
from edge_rt.api.fields import ABSENT as _ABSENT
from edge_rt.api.fields import decode_with
from edge_rt.api.formats import Formatted
from edge_rt.api.tools import AnsweredCall, CallDelta, WireCall, WireTool, WireToolChoice
from edge_rt.tensor_types import NodePlacement
from edge_rt.types import Energy, FinishReason, Priority

T = TypeVar("T")


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body or a part of one."""


class CacheOptions(_Request, kw_only=True):
    """edge_rt's own: sampled keeps an answer drawn without a seed; tags name answers to remove together."""

    sampled: bool = False
    tags: list[Annotated[str, Meta(min_length=1, max_length=100)]] = []


class WireAdapter(_Request, kw_only=True):
    id: int | str
    scale: float = 1.0


class StreamOptions(_Request, kw_only=True):
    include_usage: bool = False
    include_obfuscation: Raw = _ABSENT


class ContentPart(_Request, kw_only=True):
    type: str
    text: str | None = None
    image_url: Raw = _ABSENT
    input_audio: Raw = _ABSENT
    file: Raw = _ABSENT
    refusal: Raw = _ABSENT


class WireMessage(_Request, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    function_call: Raw = _ABSENT
    refusal: Raw = _ABSENT
    audio: Raw = _ABSENT
    annotations: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT


class _Generation(Formatted, _Request, kw_only=True):
    """What chat and completions share."""

    model: str | None = None  # None: catalog.default_model
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    max_draft: int | None = msgspec.field(default=None, name="speculative.n_max")  # llama-server's name
    deadline_s: float | None = None
    user: str | None = None  # a label of the caller's own; it changes no answer
    route: Literal["auto", "local", "cloud"] | None = None  # edge_rt's own, as is cache
    cache: CacheOptions | None = None
    priority: Priority | None = None  # edge_rt's own: interactive, normal or background
    n: int | None = None
    lora: list[WireAdapter] | None = None  # llama-server's
    use_beam_search: bool | None = None  # vLLM's name; the others are Hugging Face's
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_prompt: Raw = _ABSENT


class ChatRequest(_Generation, kw_only=True):
    messages: list[WireMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    continue_final_message: bool | None = None  # vLLM's names; None: llama-server's way
    add_generation_prompt: bool | None = None
    audio: Raw = _ABSENT
    function_call: Raw = _ABSENT
    functions: Raw = _ABSENT
    modalities: Raw = _ABSENT
    parallel_tool_calls: bool | None = None
    prediction: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    service_tier: Raw = _ABSENT
    store: Raw = _ABSENT
    tool_choice: str | WireToolChoice | None = None
    tools: list[WireTool] | None = None
    verbosity: Raw = _ABSENT
    web_search_options: Raw = _ABSENT


class CompletionRequest(_Generation, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: Raw = _ABSENT


class FeedbackRequest(_Request, kw_only=True):
    """id: of the answer; good: whether it was good enough."""

    id: str
    good: bool


class TokenizeRequest(_Request, kw_only=True):
    """llama-server's, with content, or vLLM's, with prompt; what leaves out whether BOS comes first has its default."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: Raw = _ABSENT
    return_token_strs: Raw = _ABSENT


class DetokenizeRequest(_Request, kw_only=True):
    tokens: list[int]
    model: str | None = None


# The values of Raw fields that ask for nothing; null always does.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "cache_prompt": (True,),  # shared prefixes are always reused
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "return_token_strs": (False,),
    "with_pieces": (False,),
}


def refuse_unsupported(request: msgspec.Struct, place: str = "") -> None:
    """Raise UnsupportedFeatureError for a Raw field whose value asks for something."""
    fields.refuse_unsupported(request, _NEUTRAL, place, read=Formatted.__struct_fields__)


_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    cls: msgspec.json.Decoder(cls)
    for cls in (ChatRequest, CompletionRequest, FeedbackRequest, TokenizeRequest, DetokenizeRequest)
}


def decode(body: bytes, cls: type[T]) -> T:
    """Decode a request body. Raises InvalidRequestError naming the field and what is wrong with it."""
    decoded: T = decode_with(body, _DECODERS[cls])
    return decoded


class _Answer(msgspec.Struct, kw_only=True):
    """A part of an answer; UNSET fields are left out, None is written as null."""


class PromptTokensDetails(_Answer, kw_only=True):
    cached_tokens: int


class WireEnergy(_Answer, kw_only=True):
    """What computing an answer took. Joules per token are of all that was drawn, or beyond idle power."""

    total_j: float
    above_idle_j: float | UnsetType = UNSET
    prefill_j_per_token: float | UnsetType = UNSET
    prefill_above_idle_j_per_token: float | UnsetType = UNSET
    decode_j_per_token: float | UnsetType = UNSET
    decode_above_idle_j_per_token: float | UnsetType = UNSET
    boundary: Literal["soc", "board", "rail"]
    quality: Literal["measured", "derived", "modelled"]
    source: str
    coverage: float


def wire_energy(energy: Energy | None, n_prefill: int = 0, n_decode: int = 0) -> WireEnergy | UnsetType:
    """Write what an answer took; UNSET where that is not known. Phases are told by their tokens, if there are any."""
    if energy is None:
        return UNSET

    def joules(value: float | None, n_tokens: int = 1) -> float | UnsetType:
        return UNSET if value is None or n_tokens <= 0 else round(value / n_tokens, 6)

    return WireEnergy(
        total_j=round(energy.total_j, 6),
        above_idle_j=joules(energy.above_idle_j),
        prefill_j_per_token=joules(energy.prefill_j, n_prefill),
        prefill_above_idle_j_per_token=joules(energy.prefill_above_idle_j, n_prefill),
        decode_j_per_token=joules(energy.decode_j, n_decode),
        decode_above_idle_j_per_token=joules(energy.decode_above_idle_j, n_decode),
        boundary=energy.boundary,
        quality=energy.quality,
        source=energy.source,
        coverage=round(energy.coverage, 4),
    )


class WireUsage(_Answer, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    energy: WireEnergy | UnsetType = UNSET  # edge_rt's own; absent where nothing was measured


class WireTimings(_Answer, kw_only=True):
    """llama-server's names; the rates are null where nothing was computed, draft_n absent where nothing was guessed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class TopLogprob(_Answer, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(_Answer, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Delta(_Answer, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class AnswerMessage(_Answer, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class Choice(_Answer, kw_only=True):
    """One choice of any answer: delta (chat stream), message (chat) or text (completions) is set."""

    index: int = 0
    delta: Delta | UnsetType = UNSET
    message: AnswerMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    cumulative_logprob: float | UnsetType = UNSET  # of an answer of a beam search, as is its score
    score: float | UnsetType = UNSET


class WireOrigin(_Answer, kw_only=True):
    """Where an answer comes from; what the headers say, and what is known at its end only."""

    route: Literal["local", "cloud"]
    reason: str
    endpoint: str | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    cache: str | UnsetType = UNSET


class WireDecision(_Answer, kw_only=True):
    """Where a request would be answered; lines explain it, and hold nothing of its text."""

    where: Literal["local", "cloud", "refused"]
    reason: str
    why: str
    lines: list[str]


class Answer(_Answer, kw_only=True):
    """A unary answer or one event of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: WireUsage | UnsetType | None = UNSET
    timings: WireTimings | UnsetType = UNSET
    origin: WireOrigin | UnsetType = UNSET


class ModelMeta(_Answer, kw_only=True):
    """Facts of a loaded model, as llama-server names them."""

    n_ctx: int | None = None
    n_ctx_train: int | None = None
    n_params: int | None = None
    n_vocab: int | None = None
    size: int | None = None
    quant: str | None = None
    variant: str | UnsetType = UNSET
    backend: str | None = None
    backend_reason: str | UnsetType = UNSET  # why one that comes before it did not take the model
    max_batch: int | UnsetType = UNSET  # rows that requests for a tensor model are joined to
    device: str | UnsetType = UNSET
    adapters: tuple[str, ...] | UnsetType = UNSET  # LoRA adapters that requests may name
    evidence: str | UnsetType = UNSET  # simulator, emulated or stub, where no real device computes it
    placement: tuple[NodePlacement, ...] | UnsetType = UNSET  # who runs how many nodes, and why not the device


class ModelCard(_Answer, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "edge_rt"
    status: Literal["loaded", "unloaded"]
    kind: str | UnsetType = UNSET  # text or tensor; a model of the null back end is both
    task: str | UnsetType = UNSET  # what a model with a pipeline does with a file
    models: tuple[str, ...] | UnsetType = UNSET  # those that a chain asks
    meta: ModelMeta


class ModelList(_Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(_Answer, kw_only=True):
    tokens: list[int]
    count: int | UnsetType = UNSET  # vLLM's, as is the other
    max_model_len: int | UnsetType = UNSET


class Content(_Answer, kw_only=True):
    """The same text twice: llama-server calls it content, vLLM prompt."""

    content: str
    prompt: str


class TokenizerInfo(_Answer, kw_only=True):
    """Of a tokenizer_config.json, as vLLM gives it."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int


encode: Final = msgspec.json.Encoder().encode
