"""A fake runtime, and calls into the ASGI app without a socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp, Message

from edge_rt.api.app import build_app
from edge_rt.api.callers import ApiKeys, Peer
from edge_rt.api.context import Api
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.config import Catalog, Config, Limits, Server
from edge_rt.errors import (
    EdgeRtError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    WorkerLostError,
)
from edge_rt.guard.limits import check_media, check_request, check_tensors
from edge_rt.router.decide import Decision
from edge_rt.scheduler.direct import OnEnd
from edge_rt.scheduler.placed_model import DispatchStatus
from edge_rt.scheduler.placement import Refused
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import (
    MediaAnswer,
    MediaRequest,
    Tensor,
    TensorAnswer,
    TensorModelInfo,
    TensorRequest,
    TensorSpec,
    TensorTimings,
)
from edge_rt.types import Capabilities, Chunk, GenerateRequest, ModelInfo, Timings, Usage
from edge_rt.worker.borrowed import Borrowed
from edge_rt.worker.channel import SentReply, SentTensor

PEER = Peer(pid=4, uid=1000, gid=100)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
TIMINGS = Timings(queue_s=0.0, prefill_s=0.5, prefill_tokens=5, decode_s=0.2, decode_tokens=2, ttft_s=0.5)
INFO = ModelInfo(
    model="loaded",
    variant="q4_0",
    backend="fake",
    backend_reason="the first cannot",
    device="cpu",
    arch="llama",
    quant="Q4_0",
    n_params=10,
    size_bytes=20,
    n_ctx_train=2048,
    caps=Capabilities(n_ctx=64, n_seq_max=2, n_vocab=300, n_batch=8, can_trim=True, can_copy=True, can_save=False),
    n_threads=1,
    has_chat_template=True,
    bos_text="<s>",
)

EYES = Manifest(
    id="eyes",
    name="Eyes",
    license="MIT",
    kind="tensor",
    n_params=1,
    variants=(
        Variant(id="int8", quant="INT8", file="eyes-int8.onnx"),
        Variant(id="fp32", quant="FP32", file="eyes.onnx"),
    ),
)
TEXT = Manifest(
    id="text",
    name="Text",
    license="MIT",
    kind="text",
    arch="llama",
    n_ctx=64,
    n_ctx_train=64,
    n_params=1,
    variants=(Variant(id="q4_0", quant="Q4_0", file="text.gguf"),),
)
EYES_INFO = TensorModelInfo(
    model="eyes",
    variant="int8",
    backend="fake",
    device="cpu",
    quant="INT8",
    size_bytes=20,
    inputs=(TensorSpec(name="image", datatype="UINT8", shape=(-1, 4)),),
    outputs=(TensorSpec(name="image", datatype="UINT8", shape=(-1, 4)),),
    n_threads=1,
)


@dataclass
class FakeStatus:
    id: str
    pulled: bool = True
    info: ModelInfo | None = None
    tensor: TensorModelInfo | None = None
    manifest: Manifest | None = None
    variant: str = ""
    n_ctx: int = 64
    idle_s: float | None = None
    keep_alive_s: float = 300.0
    path: str | None = None
    error: str = ""
    versions: tuple[str, ...] = ()


class FakeWriter:
    """Writes answers as a worker does, on descriptors of its own. It gives them back unless gives_back is unset."""

    def __init__(self) -> None:
        self.lent: list[TensorRequest] = []
        self.n_written = 0  # bytes of all answers
        self.gives_back = True
        self._borrowed = Borrowed()
        self._numbers: dict[int, int] = {}
        self._told: dict[str, TensorAnswer] = {}

    def borrow(self, request: TensorRequest) -> None:
        if request.reply is None:
            return
        loan = request.reply.loan
        if id(loan) not in self._numbers:
            self._numbers[id(loan)] = number = len(self._numbers)
            connection, permit = map(os.dup, loan.fds())
            self._borrowed.add(number, (connection, permit))
            loan.lent_to(self, lambda loan: self._end(id(loan)))
        loan.permit()
        self.lent.append(request)

    def _end(self, loan: int) -> None:
        if self.gives_back:
            self._borrowed.give_back(self._numbers.pop(loan))

    def close(self) -> None:
        for number in self._numbers.values():
            self._borrowed.give_back(number)

    def write(self, request: TensorRequest, answer: TensorAnswer) -> TensorAnswer:
        """Write what the socket takes, unless that was done; give what the front process is told."""
        if (reply := request.reply) is None:
            return answer
        if (told := self._told.pop(request.id, None)) is not None:
            return told
        sent = SentReply(
            self._numbers[id(reply.loan)], reply.head, tuple(SentTensor(*output) for output in reply.outputs)
        )
        data = [tensor.data for tensor in answer.outputs]
        n_written = self._borrowed.write(sent, tuple(map(SentTensor.of, answer.outputs)), data)
        self.n_written += n_written
        is_whole = n_written == len(reply.head) + sum(map(len, data))
        return replace(answer, n_written=n_written, outputs=() if is_whole else answer.outputs)

    def write_before_it_is_told(self, request: TensorRequest) -> None:
        """Answer with the inputs, of which the front process hears when the answer is due."""
        timings = TensorTimings(queue_s=0.0, compute_s=0.001, batch_size=1)
        self._told[request.id] = self.write(request, TensorAnswer(outputs=request.inputs, timings=timings))


@dataclass
class FakeRuntime:
    """Answers with its chunks, or raises what stands among them; checks requests as the real one does."""

    chunks: Sequence[Chunk | BaseException] = ()
    is_ready: bool = True
    hold: asyncio.Event | None = None  # waited for before each chunk but the first
    hold_first: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    n_closed: int = 0
    inferences: list[TensorRequest] = field(default_factory=list)
    is_direct: bool = False  # answers inferences of one model without a task
    worker: FakeWriter | None = None  # which then writes them, as far as it does
    outputs: Sequence[Tensor] | BaseException = ()  # of an inference; () gives the inputs back
    looks: list[MediaRequest] = field(default_factory=list)
    findings: dict[str, MediaAnswer | BaseException] = field(default_factory=dict)  # by model
    opinions: list[tuple[str, bool]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)  # "-" before those unloaded
    kept: list[tuple[str, float]] = field(default_factory=list)  # how long after a request
    direct: tuple[str, ...] = ("eyes",)  # asked without a task where is_direct

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        check_request(request, Limits())
        self.model(request.model)
        self.requests.append(request)
        self.arrived.set()
        try:
            for i, chunk in enumerate(self.chunks):
                if self.hold is not None and (i or self.hold_first):
                    await self.hold.wait()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
        finally:
            self.n_closed += 1

    def explain(self, request: GenerateRequest) -> Decision:
        self.requests.append(request)
        return Decision(where="local", reason="easy", may_go=True, lines=("judged",), threshold=0.1)

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        if request_id != "known":
            raise InvalidRequestError(param="id", problem="not remembered")
        self.opinions.append((tenant, is_good))

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        check_tensors(request, Limits())
        status = self.model(request.model)
        if status.manifest is not None and status.manifest.kind == "text":
            raise UnsupportedFeatureError(feature="tensors", remedy=f"{status.id} is a language model")
        # Its inputs' memory is used again behind the answer.
        kept = tuple(replace(tensor, data=bytes(tensor.data)) for tensor in request.inputs)
        self.inferences.append(replace(request, inputs=kept))
        self.arrived.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.n_closed += 1
        if isinstance(self.outputs, BaseException):
            raise self.outputs
        outputs = tuple(t for t in self.outputs or request.inputs if not request.outputs or t.name in request.outputs)
        timings = TensorTimings(queue_s=0.0, compute_s=0.001, batch_size=1)
        return TensorAnswer(outputs=outputs, timings=timings, variant=status.variant)

    def infer_now(
        self, request: TensorRequest, on_end: OnEnd, *, is_checked: bool = False
    ) -> Callable[[], None] | None:
        if not self.is_direct or request.model not in self.direct or request.stream:
            return None
        check_tensors(request, Limits())
        if self.worker is not None:
            self.worker.borrow(request)
        asked = asyncio.get_running_loop().create_task(self.infer(request))
        is_dropped = False

        def ended(done: asyncio.Task[TensorAnswer]) -> None:
            if is_dropped or done.cancelled():
                return
            error = done.exception()
            if isinstance(error, WorkerLostError):
                self.outputs = ()
                on_end(replace(request, is_suspect=True))
            elif error is not None:
                assert isinstance(error, EdgeRtError)
                on_end(error)
            else:
                on_end(done.result() if self.worker is None else self.worker.write(request, done.result()))

        asked.add_done_callback(ended)

        def drop() -> None:
            nonlocal is_dropped
            is_dropped = True
            asked.cancel()

        return drop

    async def look(self, request: MediaRequest) -> MediaAnswer:
        check_media(request)
        self.looks.append(request)
        self.arrived.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.n_closed += 1
        answer = self.findings.get(request.model, MediaAnswer(task=""))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def tasks(self) -> dict[str, str]:
        return {}

    def chains(self) -> Sequence[Chain]:
        return ()

    async def load(self, model: str, *, tensors: bool = False, variant: str = "") -> None:
        self.loads.append(model)

    async def unload(self, model: str) -> None:
        self.loads.append(f"-{model}")

    def keep(self, model: str, keep_alive_s: float) -> None:
        self.kept.append((model, keep_alive_s))

    async def placement(self, model: str) -> DispatchStatus:
        if model != "eyes":
            raise ModelNotFoundError(model=model)
        return DispatchStatus(policy="balanced", places=(), refused=(Refused(what="int8 on npu", reason="no driver"),))

    async def tokenize(self, model: str, text: str, *, special: bool, add_bos: bool) -> list[int]:
        self.model(model)
        return [*([1] if add_bos else []), *text.encode(), *([2] if special else [])]

    async def count_prompt(self, request: GenerateRequest) -> int:
        check_request(request, Limits())
        self.model(request.model)
        self.requests.append(request)
        return sum(len(message.content) for message in request.messages or ())

    async def detokenize(self, model: str, token_ids: list[int]) -> str:
        self.model(model)
        if max(token_ids) > 255:
            raise InvalidRequestError(param="tokens", problem="not in the vocabulary")
        return bytes(token_ids).decode(errors="replace")

    def models(self) -> list[FakeStatus]:
        return [FakeStatus("default"), FakeStatus("loaded", info=INFO), FakeStatus("absent", pulled=False)]

    def model(self, model_id: str, variant: str = "") -> FakeStatus:
        for status in self.models():
            if status.id == model_id:
                return status
        raise ModelNotFoundError(model=model_id, known=("default", "loaded"))

    def ready(self) -> bool:
        return self.is_ready


class FakeTensorRuntime(FakeRuntime):
    """Has tensor models beside the others."""

    def models(self) -> list[FakeStatus]:
        return [
            *super().models(),
            FakeStatus(
                "eyes",
                manifest=EYES,
                variant="int8",
                tensor=EYES_INFO if "eyes" in self.loads else None,
                versions=("int8",),
            ),
            FakeStatus("far", manifest=EYES, variant="int8", pulled=False),
            FakeStatus("sick", manifest=EYES, variant="int8", error="cannot load"),
            FakeStatus("text", manifest=TEXT, variant="q4_0"),
        ]


def whole(*texts: str, finish_reason: Any = "stop") -> list[Chunk]:
    """Give the chunks of an answer, one a text; the last also ends it."""
    *first, last = texts
    end = Chunk(text=last, finish_reason=finish_reason, usage=USAGE, timings=TIMINGS)
    return [*(Chunk(text=text) for text in first), end]


def app_of(
    runtime: FakeRuntime,
    *,
    api_keys: ApiKeys | None = None,
    telemetry: Telemetry | None = None,
    max_body_bytes: int = 10_000,
    api: Api | None = None,
) -> ASGIApp:
    config = Config(server=Server(max_body_bytes=max_body_bytes), catalog=Catalog(default_model="default"))
    return build_app(runtime, config, telemetry or Telemetry(), api_keys=api_keys, api=api)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    parts: list[bytes]
    whole: bool

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, decoded; [DONE] as "DONE"."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return ["DONE" if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


class Call:
    """One request into an ASGI app, step by step; hang_up disconnects it."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        *,
        headers: dict[str, str] | None = None,
        peer: Peer | None = PEER,
        body_ends: bool = True,
    ) -> None:
        self._app = app
        path, _, query = path.partition("?")
        parts = [body] if isinstance(body, bytes) else list(body)
        self._messages: list[Message] = [
            {"type": "http.request", "body": part, "more_body": not body_ends or i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        self.n_received = 0
        self.sent: list[Message] = []
        self.answered = asyncio.Event()  # the response has started
        self._gone = asyncio.Event()
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": None,
            "server": None,
            "state": {"peer": peer} if peer is not None else {},
        }
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Call:
        self.task = asyncio.get_running_loop().create_task(self._app(self._scope, self._receive, self._send))  # type: ignore[arg-type]
        return self

    def hang_up(self) -> None:
        self._gone.set()

    async def reply(self) -> Reply:
        if self.task is None:
            self.start()
        assert self.task is not None
        await self.task
        starts = [m for m in self.sent if m["type"] == "http.response.start"]
        bodies = [m for m in self.sent if m["type"] == "http.response.body"]
        assert len(starts) <= 1
        assert all(m["more_body"] for m in bodies[:-1] if "more_body" in m)
        headers = {n.decode(): v.decode() for n, v in starts[0]["headers"]} if starts else {}
        is_whole = bool(bodies) and not bodies[-1].get("more_body", False)
        return Reply(starts[0]["status"] if starts else 0, headers, [m["body"] for m in bodies], is_whole)

    async def _receive(self) -> Message:
        if self.n_received < len(self._messages):
            self.n_received += 1
            return self._messages[self.n_received - 1]
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.answered.set()


def ask(
    runtime: FakeRuntime, method: str, path: str, body: Any = b"", *, app: ASGIApp | None = None, **kw: Any
) -> Reply:
    """Send one request and wait for its whole answer."""
    raw = body if isinstance(body, bytes | list) else json.dumps(body).encode()
    return asyncio.run(Call(app or app_of(runtime), method, path, raw, **kw).reply())


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}
