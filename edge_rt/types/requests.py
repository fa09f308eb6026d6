"""What is asked of a language model, and how it is to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Route = Literal["auto", "local", "cloud"]
# Who waits for an answer: a person who watches it come, a program, or nobody.
Priority = Literal["interactive", "normal", "background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that the model asks its client to run. arguments is a JSON object's text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat turn; content parts have been joined to plain text by then.

    tool_calls    an assistant's
    tool_call_id  a tool's result names the call that it answers; name is the tool's, where its client says it
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


def goes_on(messages: Sequence[Message]) -> bool:
    """Tell whether an answer goes on with the last message where nothing says: an assistant's that calls no tool."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters is a JSON Schema's text."""

    name: str
    description: str = ""
    parameters: str = '{"type":"object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """What an answer must look like, whatever the model would rather say.

    json_object  any JSON object; text is ""
    json_schema  the schema's JSON text
    grammar      GBNF, llama.cpp's notation, from its rule root
    regex        a regular expression that matches the whole answer
    choice       a JSON array of the texts that it may be
    """

    kind: Literal["json_object", "json_schema", "grammar", "regex", "choice"]
    text: str = ""


# Those that OpenAI-compatible endpoints know.
CLOUD_FORMATS = frozenset({"json_object", "json_schema"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is added to the model's weights, times scale. name is what the configuration calls it."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the defaults mean greedy.

    temperature        >= 0; 0 is greedy (argmax, lowest id wins a tie)
    top_k              0 is off, else keep the k most likely
    top_p, min_p       1.0 and 0.0 are off
    repeat_penalty     > 0; 1.0 is off; over the last repeat_last_n tokens of prompt and answer
    presence_penalty,
    frequency_penalty  -2..2; over the answer's tokens only, as OpenAI defines them
    seed               None draws one; the same seed on the same machine gives the same answer
    logit_bias         token id -> -100..100, added to the raw logit
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


# What a request without sampling fields gets from the API, the library and the command line: llama-server's defaults.
# A small INT4 model at temperature 1 over its whole vocabulary, which is OpenAI's default, writes nonsense.
CHAT_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWishes:
    """What a request's Cache-Control asks of the answer cache (RFC 9111).

    no_cache        compute anew; the answer is stored
    no_store        leave nothing of request and answer behind
    only_if_cached  fail with NotCachedError rather than compute
    max_age_s       no answer older than this
    sampled         an answer that was drawn without a seed may be stored and given again
    tags            names under which the answer can be removed
    """

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: float | None = None
    sampled: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """Beam search: the likeliest answers as wholes are looked for, and nothing is drawn.

    n_beams         beginnings that are gone on with at each step
    n_best          answers that are given, at most n_beams
    length_penalty  an answer's score is its log probability over its number of tokens to this power; 0 compares sums
    early_stopping  when n_beams answers have ended, the search is over at once (first), when no beam would be better if
                    it ended now (likely), or when none can get better (never)
    """

    n_beams: int
    n_best: int = 1
    length_penalty: float = 1.0
    early_stopping: Literal["first", "likely", "never"] = "likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation. Exactly one of prompt, prompt_token_ids and messages is set.

    max_tokens   None: until the model stops or the context is full
    stop         strings that end the answer; they are not part of it
    ignore_eos   keep going past the end-of-generation token (benchmarks)
    stream       False lets the engine send the whole answer as one chunk
    top_logprobs None: no logprobs; n >= 0: the chosen token's and the n most likely ones'
    max_draft    tokens that may be guessed and checked in one step, at most the engine's own limit, which is also what
                 None means; 0 guesses none
    tenant       who asks, a quota key; the peer's uid on a Unix socket
    deadline_s   seconds from submission after which the request may be dropped unanswered
    route        where it is answered: on the device, by a cloud model, or as the router decides
    cache        what it asks of the answer cache
    max_signals  how many tokens of the answer, from its first on, come with a TokenSignal
    priority     who is computed first, and who makes room where it gets scarce
    response_format  what the answer must look like; None leaves it to the model
    tools        that the model may call; messages only
    tool_choice  none: it answers in text; required: it calls at least one; auto leaves it to the model
    tool_name    the only tool that it may call, and must; "" leaves it to tool_choice
    parallel_tool_calls  one answer may hold several calls
    adapters     that the answer is computed with
    continues    the last message is the assistant's, and the answer goes on with its text
    prompt_logprobs  None: none; n >= 0: the prompt's tokens come with their logprobs and the n most likely ones at each
                     place. All of the prompt is computed then, kept or not, and max_tokens may be 0
    beams        answers come from a beam search, all on the last chunk; sampling stays greedy
    tells_start  an engine says how many of the prompt's tokens it computes when it begins: a chunk of usage alone
    """

    id: str
    model: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    stream: bool = True
    top_logprobs: int | None = None
    max_draft: int | None = None
    tenant: str = ""
    deadline_s: float | None = None
    route: Route = "auto"
    cache: CacheWishes = field(default_factory=CacheWishes)
    max_signals: int = 0
    tells_start: bool = False
    priority: Priority = "normal"
    response_format: ResponseFormat | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    adapters: tuple[Adapter, ...] = ()
    continues: bool = False
    prompt_logprobs: int | None = None
    beams: Beams | None = None

    @property
    def n_rows(self) -> int:
        """Rows of a step that it takes once its prompt is computed: one for each beam."""
        return self.beams.n_beams if self.beams is not None else 1

    @property
    def question(self) -> str:
        """What was asked: the last user message, else the prompt; "" for token ids."""
        if self.messages:
            return next((m.content for m in reversed(self.messages) if m.role == "user"), "")
        return self.prompt or ""
