"""The library's front door: load a model into this process and stream its answers.

    import edge_rt

    with edge_rt.load("smollm2-135m-instruct") as model:
        for text in model.generate("What is gravity?", max_tokens=64):
            print(text, end="", flush=True)

Several threads may generate on one model at the same time: their requests share steps, as in the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import msgspec

from edge_rt import config
from edge_rt.catalog.part import Progress
from edge_rt.chain_library import ChainModel
from edge_rt.devices import cpu
from edge_rt.devices.idle import IdleMeter
from edge_rt.engine.start import start_engine
from edge_rt.engine.tokens import TokenEngine
from edge_rt.errors import (
    BackendStepError,
    EdgeRtError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from edge_rt.guard.limits import check_request
from edge_rt.library_engine import Running
from edge_rt.library_models import find_chain, find_draft, find_model
from edge_rt.power.monitor import Measured, Unmeasured
from edge_rt.scheduler.forms import load_message
from edge_rt.tensor_library import TensorModel, start_model
from edge_rt.types import (
    CHAT_SAMPLING,
    Beams,
    Chunk,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Hypothesis,
    Message,
    ModelInfo,
    ResponseFormat,
    Sampling,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from edge_rt.worker.channel import Load
from edge_rt.worker.draft import load_draft, resolve_draft
from edge_rt.worker.tokens import engine_settings, load_session

_log = logging.getLogger(__name__)

Conversation = str | Sequence[Message | Mapping[str, str]]

_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def load(
    model: str | Path = "",
    *,
    settings: config.Loaded | None = None,
    pull: bool = False,
    progress: Progress = lambda _: None,
    force: bool = False,
) -> Model | TensorModel | ChainModel:
    """Load a model: a Model for a language model, a TensorModel for one that takes tensors, a ChainModel for a chain.

    model     MODEL[:VARIANT] of the catalog, or the path of a GGUF or an ONNX file: a Path, or text with a / or with
              .gguf or .onnx at its end; "" is the configured default model
    settings  config.load()'s answer; None loads it
    pull      fetch the model first if it is not in the store
    force     load also where the memory looks too small

    Raises ConfigError, ModelError (not in the catalog, not pulled, broken, too large) and BackendError.
    """
    settings = settings or config.load()
    options: dict[str, Any] = {"settings": settings, "pull": pull, "progress": progress, "force": force}
    if (chain := find_chain(model, settings.config)) is not None:
        for part in chain.parts:
            _load_message(part, **options)  # what is missing is missed now
        return ChainModel(chain, lambda part: load_tensors(part, **options))
    message, loaded = _load_message(model, **options)
    return _start(message, loaded) if message.tensor is None else start_model(message, loaded)


def load_text(model: str | Path = "", **options: Any) -> Model:
    """Load a language model, as load does. Raises UnsupportedFeatureError for one that takes tensors."""
    _refuse_chain(model, "text from", options)
    message, loaded = _load_message(model, **options)
    if message.tensor is not None:
        raise UnsupportedFeatureError(feature=f"text from {message.model}", remedy="it is a tensor model")
    return _start(message, loaded)


def load_tensors(model: str | Path, **options: Any) -> TensorModel:
    """Load a model that takes tensors, as load does. Raises UnsupportedFeatureError for any other."""
    _refuse_chain(model, "tensors for", options)
    message, loaded = _load_message(model, **options)
    if message.tensor is None:
        raise UnsupportedFeatureError(feature=f"tensors for {message.model}", remedy="it is a language model")
    return start_model(message, loaded)


def _refuse_chain(model: str | Path, feature: str, options: Mapping[str, Any]) -> None:
    if find_chain(model, (options.get("settings") or config.load()).config) is not None:
        remedy = "it is a chain of models that takes files: edge_rt.load(...).look(file)"
        raise UnsupportedFeatureError(feature=f"{feature} {model}", remedy=remedy)


def _load_message(
    model: str | Path,
    *,
    settings: config.Loaded | None = None,
    pull: bool = False,
    progress: Progress = lambda _: None,
    force: bool = False,
) -> tuple[Load, config.Config]:
    loaded = (settings or config.load()).config
    placement = find_model(model, loaded, pull=pull, progress=progress)
    message = load_message(placement, loaded, force=force)
    draft = find_draft(message.model, loaded, pull=pull, progress=progress) if message.tensor is None else None
    return msgspec.structs.replace(message, draft=draft), loaded


def _start(message: Load, settings: config.Config) -> Model:
    idle_cores = IdleMeter(cpu.usable().cpus)
    idle_cores()  # it measures from here
    draft = resolve_draft(message)
    session = load_session(message, draft)
    try:
        engine = start_engine(
            session,
            engine_settings(message),
            n_threads=message.n_threads,
            idle_cores=idle_cores,
            draft_model=load_draft(message, session, draft),  # the engine closes it when it is stopped
        )
        return Model(session.info, engine, settings, session.close)
    except BaseException:
        session.close()
        raise


class Model(Running):
    """A loaded language model, as Running says."""

    def __init__(
        self, info: ModelInfo, engine: TokenEngine, settings: config.Config, close_session: Callable[[], None]
    ) -> None:
        self.info = info
        super().__init__(info.model, engine.stop, close_session, settings.power)
        self._engine = engine
        self._limits = settings.limits
        self._ids = count(1)
        self._open: set[_Answer] = set()
        self._failure: EdgeRtError | None = None
        self._begin()

    def generate(
        self,
        prompt: Conversation,
        *,
        raw: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        max_draft: int | None = None,
        response_format: ResponseFormat | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: Literal["auto", "none", "required"] = "auto",
        tool_name: str = "",
        parallel_tool_calls: bool = True,
        **sampling: Any,
    ) -> Generation:
        """Begin an answer and stream its text.

        prompt    a question, or the whole conversation as messages with role and content
        raw       continue the text as it stands, without the model's chat template
        max_draft tokens that may be guessed and checked in one step, at most engine.max_draft; 0 guesses none
        response_format  what the answer must look like; tools that the model may call: see types.GenerateRequest
        sampling  fields of edge_rt.Sampling; temperature=0 is greedy. The defaults are the daemon's

        Raises InvalidRequestError at once; errors of the engine, such as ContextLengthError, come from the iterator.
        """
        if unknown := sampling.keys() - _SAMPLING_FIELDS:
            problem = f"has no field {min(unknown)!r}; there are {', '.join(_SAMPLING_FIELDS)}"
            raise InvalidRequestError(param="sampling", problem=problem)
        request = GenerateRequest(
            id=str(next(self._ids)),
            model=self.info.model,
            prompt=prompt if raw and isinstance(prompt, str) else None,
            messages=None if raw and isinstance(prompt, str) else _messages(prompt),
            max_tokens=max_tokens,
            stop=tuple(stop),
            top_logprobs=top_logprobs,
            max_draft=max_draft,
            response_format=response_format,
            tools=tuple(tools),
            tool_choice=tool_choice,
            tool_name=tool_name,
            parallel_tool_calls=parallel_tool_calls,
            sampling=replace(CHAT_SAMPLING, **sampling),
        )
        return Generation(self.stream(request))

    def beam_search(
        self,
        prompt: Conversation,
        *,
        raw: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        **beams: Any,
    ) -> tuple[Hypothesis, ...]:
        """Find the likeliest answers as wholes, the best first.

        beams  fields of types.Beams: n_beams, n_best, length_penalty, early_stopping

        Raises InvalidRequestError, and what the engine raises.
        """
        is_text = raw and isinstance(prompt, str)
        request = GenerateRequest(
            id=str(next(self._ids)),
            model=self.info.model,
            prompt=str(prompt) if is_text else None,
            messages=None if is_text else _messages(prompt),
            max_tokens=max_tokens,
            stop=tuple(stop),
            top_logprobs=top_logprobs,
            beams=Beams(**beams),
        )
        *_, last = self.stream(request)
        return last.hypotheses

    def stream(self, request: GenerateRequest) -> ChunkStream:
        """Submit a request as it is and give its chunks. Its id must be unique among the model's open requests."""
        check_request(request, self._limits)
        answer = _Answer(self._energy.computing(self._engine_name, n_threads=self.info.n_threads))

        def let_go(is_over: bool) -> None:
            self._open.discard(answer)
            answer.end()
            if not is_over:
                self._engine.cancel(request.id)

        with self._using():
            self._open.add(answer)
            if self._failure is not None:
                self._open.discard(answer)
                answer.end()
                raise self._failure
            self._engine.submit(request, answer)
        return ChunkStream(answer, let_go)

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        with self._using():
            return self._engine.tokenize(text, special=special, add_bos=add_bos)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        with self._using():
            return self._engine.detokenize(token_ids)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _run(self) -> None:
        try:
            self._engine.warm_up()
            self._engine.run()
        except Exception as exc:  # noqa: BLE001 - a defect must not leave readers waiting for ever
            _log.exception("the engine of %s ended", self.info.model)
            self._failure = BackendStepError(reason=f"the engine ended: {type(exc).__name__}: {exc}")
            for answer in list(self._open):
                answer.failed(self._failure)


class ChunkStream(Iterator[Chunk]):
    """One answer's chunks. Closing it early, or letting go of it, stops the engine within one token."""

    def __init__(self, answer: _Answer, let_go: Callable[[bool], None]) -> None:
        self._answer = answer
        self._let_go = let_go
        self._is_over = False

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        item = self._answer.items.get()
        if item is None:
            raise StopIteration
        if isinstance(item, EdgeRtError):
            self._end(is_over=True)
            raise item
        if item.finish_reason is not None:
            self._end(is_over=True)
        return item

    def close(self) -> None:
        """Give the answer up; another thread that waits for its next chunk hears its end."""
        if not self._is_over:
            self._end(is_over=False)
            self._answer.items.put(None)

    __del__ = close

    def _end(self, *, is_over: bool) -> None:
        self._is_over = True
        self._let_go(is_over)


class Generation(Iterator[str]):
    """One answer's text as it comes. usage, timings, finish_reason and tool_calls are there once it is whole."""

    def __init__(self, chunks: ChunkStream) -> None:
        self._chunks = chunks
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self._calls: list[ToolCall] = []

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls)

    def __next__(self) -> str:
        while True:
            chunk = next(self._chunks)
            for delta in chunk.tool_calls:
                if delta.index == len(self._calls):
                    self._calls.append(ToolCall(id=delta.id, name=delta.name, arguments=delta.arguments))
                else:
                    begun = self._calls[delta.index]
                    self._calls[delta.index] = replace(begun, arguments=begun.arguments + delta.arguments)
            self.logprobs += chunk.logprobs
            self.finish_reason, self.usage, self.timings = chunk.finish_reason, chunk.usage, chunk.timings
            if chunk.text:
                return chunk.text

    def text(self) -> str:
        """Wait for the rest of the answer and give it as one string."""
        return "".join(self)

    def close(self) -> None:
        """Stop the answer; the engine goes on with the others."""
        self._chunks.close()


class _Answer:
    """Carries one request's answer from the engine's thread to its reader; its last chunk says what it took."""

    def __init__(self, measured: Measured | Unmeasured) -> None:
        self.items: SimpleQueue[Chunk | EdgeRtError | None] = SimpleQueue()  # None: its reader gave it up
        self._measured: Measured | Unmeasured | None = measured

    def chunk(self, chunk: Chunk) -> None:
        if chunk.usage is not None and chunk.timings is not None and (measured := self._measured) is not None:
            chunk = replace(chunk, usage=replace(chunk.usage, energy=measured.energy(chunk.timings)))
            self.end()
        self.items.put(chunk)

    def failed(self, error: EdgeRtError) -> None:
        self.end()
        self.items.put(error)

    def end(self) -> None:
        """Count no energy for it any more."""
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.end()


def _messages(prompt: Conversation) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    return tuple(m if isinstance(m, Message) else _message(i, m) for i, m in enumerate(prompt))


def _message(number: int, fields: Mapping[str, str]) -> Message:
    try:
        return msgspec.convert(fields, Message, strict=True)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(param=f"messages[{number}]", problem=str(exc)) from exc
