"""A client of the daemon for the command line and tests: errors come back as the daemon raised them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import quote, urlencode

import httpx2
import msgspec

from edge_rt.api import infer_client
from edge_rt.api.infer_client import Array, InferResult
from edge_rt.api.kserve_wire import RegionPart
from edge_rt.api.plain_http import ConnectingError, PlainHttp, Reply
from edge_rt.api.shm_client import SharedTensor
from edge_rt.api.status import rebuild
from edge_rt.errors import DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.tensor_types import Box, Data, Label, MediaAnswer, MediaRequest, Span, Tensor, TensorTimings
from edge_rt.types import Energy, FinishReason, Message, Usage

_CONNECT_TIMEOUT_S: Final = 5.0
_HEADER_LENGTH: Final = infer_client.HEADER_LENGTH.lower()
_DATA: Final = "data: "
_LOOK_PATHS: Final = {
    "classify": "/v1/vision/classify",
    "detect": "/v1/vision/detect",
    "detect-text": "/v1/vision/read",
    "read-text": "/v1/vision/read",
    "ocr": "/v1/vision/read",
    "vad": "/v1/audio/vad",
}


def no_authorities() -> ssl.SSLContext:
    """Give transports of Unix sockets, where nobody speaks TLS, what spares them to read all authorities' certificates.

    That takes 20 ms of each client. A server that spoke TLS all the same would be trusted by nobody.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a streamed answer; the last has finish_reason, usage and the timings under llama-server's names."""

    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: dict[str, float | None] | None = None


class Client:
    """Talk to a daemon over its Unix socket, or over TCP with base_url and api_key.

    timeout_s is the longest silence. Raises DaemonUnreachableError, and what the daemon answers as typed errors.
    """

    def __init__(
        self, socket: Path | None = None, *, base_url: str = "", api_key: str = "", timeout_s: float = 300.0
    ) -> None:
        if (socket is None) == (not base_url):
            raise ValueError("give either a socket or a base_url")
        self.address = str(socket) if socket is not None else base_url
        self._http = httpx2.Client(
            base_url=base_url or "http://edge_rt",
            transport=httpx2.HTTPTransport(uds=str(socket), verify=no_authorities()) if socket is not None else None,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        )
        self._plain = (
            PlainHttp(socket, connect_timeout_s=_CONNECT_TIMEOUT_S, timeout_s=timeout_s) if socket is not None else None
        )

    def close(self) -> None:
        self._http.close()
        if self._plain is not None:
            self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat(self, messages: Sequence[Message], **options: Any) -> Iterator[Piece]:
        """Stream the answer to a conversation; options are fields of the request. Closing the iterator hangs up."""
        return self._stream("/v1/chat/completions", {"messages": [_wire_message(m) for m in messages], **options})

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Piece]:
        """Stream the continuation of a text or of token ids."""
        return self._stream(
            "/v1/completions", {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}
        )

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array | Tensor | SharedTensor],
        *,
        outputs: Sequence[str] = (),
        regions: Mapping[str, RegionPart] | None = None,
        **parameters: Any,
    ) -> InferResult:
        """Run a tensor model by the Open Inference Protocol with binary tensors.

        inputs      by name: numpy arrays, tensors, or parts of shared memory
        outputs     names of those wanted, () is all
        regions     where outputs shall be put in shared memory, by name; with them only those named come back
        parameters  of the request, as sequence_id or timeout
        """
        headers, body = infer_client.write(inputs, outputs, regions or {}, parameters)
        reply = self._post(_infer_target(model), headers, body)
        if reply.status >= 400:
            raise rebuild(reply.status, reply.body)
        return infer_client.read(self.address, reply.header(_HEADER_LENGTH), reply.body)

    def models(self) -> list[dict[str, Any]]:
        """List the models that have been pulled, as /v1/models shows them."""
        listed: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        return listed

    def model(self, model_id: str) -> dict[str, Any]:
        """Describe one model, as /v1/models/{id} shows it."""
        return self._json("GET", f"/v1/models/{quote(model_id)}")

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tell where a chat request would be answered, as /v1/route/explain does."""
        return self._json("POST", "/v1/route/explain", body)

    def pins(self, model: str) -> list[dict[str, Any]]:
        """List the beginnings of prompts that stay, as /v1/prefixes does; the model is loaded for it."""
        found: list[dict[str, Any]] = self._json("GET", f"/v1/prefixes?{urlencode({'model': model})}")["pinned"]
        return found

    def pin(self, model: str, name: str, system: str) -> list[dict[str, Any]]:
        """Let the talks' beginning with this system prompt stay; list what does."""
        body = {"model": model, "name": name, "system": system}
        found: list[dict[str, Any]] = self._json("POST", "/v1/prefixes", body)["pinned"]
        return found

    def unpin(self, model: str, name: str) -> list[dict[str, Any]]:
        """Let a pinned beginning go when its turn comes; list what stays."""
        path = f"/v1/prefixes/{quote(name, safe='')}?{urlencode({'model': model})}"
        found: list[dict[str, Any]] = self._json("DELETE", path)["pinned"]
        return found

    def cache_stats(self) -> dict[str, Any]:
        """Tell how full the answer cache is and what it saved, as /v1/cache does."""
        return self._json("GET", "/v1/cache")

    def cache_entries(self, *, model: str = "", tag: str = "", limit: int = 100) -> list[dict[str, Any]]:
        """List stored entries, those given most often first."""
        query = urlencode({"model": model, "tag": tag, "limit": limit})
        found: list[dict[str, Any]] = self._json("GET", f"/v1/cache/entries?{query}")["entries"]
        return found

    def cache_entry(self, key: str) -> dict[str, Any]:
        """Show one stored entry; the first digits of its key do."""
        return self._json("GET", f"/v1/cache/entries/{quote(key, safe='')}")

    def cache_correct(self, key: str, text: str) -> dict[str, Any]:
        """Set the text of a stored answer."""
        return self._json("PUT", f"/v1/cache/entries/{quote(key, safe='')}", {"text": text})

    def cache_remove(self, key: str) -> int:
        """Remove one entry; give how many there were."""
        return int(self._json("DELETE", f"/v1/cache/entries/{quote(key, safe='')}")["removed"])

    def cache_remove_all(self, *, model: str = "", tag: str = "") -> int:
        """Remove the entries of a model or with a tag; give how many there were."""
        query = urlencode({"model": model, "tag": tag})
        return int(self._json("DELETE", f"/v1/cache/entries?{query}")["removed"])

    def cache_clear(self) -> int:
        """Remove all entries that the caller may see; give how many there were."""
        return int(self._json("DELETE", "/v1/cache")["removed"])

    def placement(self, model_id: str) -> dict[str, Any]:
        """Tell where a tensor model's requests go, as /v1/placement/{id} shows it."""
        return self._json("GET", f"/v1/placement/{quote(model_id)}")

    def tokenize(self, text: str, *, model: str | None = None, add_special: bool = False) -> list[int]:
        body = {"content": text, "model": model, "add_special": add_special}
        token_ids: list[int] = self._json("POST", "/tokenize", body)["tokens"]
        return token_ids

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        text: str = self._json("POST", "/detokenize", {"tokens": list(token_ids), "model": model})["content"]
        return text

    def look(self, task: str, request: MediaRequest) -> MediaAnswer:
        """Let a model whose task this is look at a file. The request's id, tenant and deadline are the daemon's."""
        if task == "embed":
            try:
                text = request.data.decode()
            except UnicodeDecodeError as exc:
                raise InvalidRequestError(param="data", problem=f"is no UTF-8 text: {exc.reason}") from exc
            answer = self._json("POST", "/v1/embeddings", {"model": request.model, "input": text})
            (one,), n_tokens = answer["data"], answer["usage"]["prompt_tokens"]
            return MediaAnswer(task=task, embedding=tuple(one["embedding"]), n_tokens=n_tokens)
        files = {"file": ("file", request.data)}
        if request.reference:
            files["reference"] = ("reference", request.reference)
        fields = {"model": request.model, "top_k": request.top_k, "min_score": request.min_score}
        form = {name: str(value) for name, value in fields.items() if value is not None}
        if request.regions:
            sides = ("x", "y", "width", "height", "turn_deg")
            regions = [{side: getattr(region, side) for side in sides} for region in request.regions]
            form["regions"] = msgspec.json.encode(regions).decode()
        with self._reached():
            response = self._http.post(_LOOK_PATHS[task], data=form, files=files)
        if response.is_error:
            raise rebuild(response.status_code, response.content)
        return msgspec.json.decode(response.content, type=_Found).answer(task)

    def embed(self, texts: Sequence[str], *, model: str) -> list[list[float]]:
        """Embed texts with one request."""
        answer = self._json("POST", "/v1/embeddings", {"model": model, "input": list(texts)})
        return [item["embedding"] for item in answer["data"]]

    def is_ready(self) -> bool:
        """Ask whether requests are taken now."""
        with self._reached():
            return self._http.get("/health/ready").status_code == 200

    def metrics_text(self) -> str:
        """Give the metrics in Prometheus' text format."""
        with self._reached():
            response = self._http.get("/metrics")
        if response.is_error:
            raise rebuild(response.status_code, response.content)
        return response.text

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with self._reached():
            response = self._http.request(method, path, json=body)
        if response.is_error:
            raise rebuild(response.status_code, response.content)
        return msgspec.json.decode(response.content, type=dict[str, Any])

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._reached(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                raise rebuild(response.status_code, response.read())
            finish_reason: FinishReason | None = None
            for line in response.iter_lines():
                if not line.startswith(_DATA):
                    continue
                data = line[len(_DATA) :].encode()
                if data == b"[DONE]":
                    return
                event = msgspec.json.decode(data, type=_Event)
                if event.error is not msgspec.UNSET:
                    raise rebuild(500, data)
                if event.usage is not None:
                    yield Piece(text="", finish_reason=finish_reason, usage=event.usage.usage(), timings=event.timings)
                for choice in event.choices:
                    finish_reason = choice.finish_reason or finish_reason
                    if text := choice.text or choice.delta.content or "":
                        yield Piece(text=text)
        raise DaemonLostError(address=self.address, reason="it closed the connection")

    def _post(self, target: str, headers: Mapping[str, str], body: Sequence[Data]) -> Reply:
        if self._plain is None:
            with self._reached():
                response = self._http.post(target, content=b"".join(body), headers=dict(headers))
            lines = (b"\r\n%b: %b" % header for header in response.headers.raw)
            return Reply(response.status_code, b"".join((*lines, b"\r\n")), response.content)
        try:
            return self._plain.post(target, headers, body)
        except ConnectingError as exc:
            raise unreachable(self.address, exc) from exc
        except (BlockingIOError, TimeoutError) as exc:
            raise DaemonLostError(address=self.address, reason="it has been silent for too long") from exc
        except OSError as exc:
            raise DaemonLostError(address=self.address, reason=exc.strerror or str(exc)) from exc

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
            raise unreachable(self.address, exc) from exc
        except httpx2.TimeoutException as exc:
            raise DaemonLostError(address=self.address, reason="it has been silent for too long") from exc
        except httpx2.HTTPError as exc:
            raise DaemonLostError(address=self.address, reason=str(exc) or type(exc).__name__) from exc


@lru_cache(maxsize=64)
def _infer_target(model: str) -> str:
    return f"/v2/models/{quote(model)}/infer"


def unreachable(address: str, exc: httpx2.HTTPError | ConnectingError) -> DaemonUnreachableError:
    """Say why a connection could not be made, in the system's words where it has some."""
    cause: BaseException | None = exc
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, PermissionError):
        remedy = "join the group that owns the socket (server.socket_group)"
        return DaemonUnreachableError(address=address, reason="no right to use it", remedy=remedy)
    reason = (cause.strerror if isinstance(cause, OSError) else None) or str(exc) or type(exc).__name__
    return DaemonUnreachableError(address=address, reason=reason)


class _Line(msgspec.Struct):
    index: int
    text: str
    score: float


class _Found(msgspec.Struct):
    """What the endpoints of media answer; each has some of it."""

    labels: tuple[Label, ...] = ()
    boxes: tuple[Box, ...] = ()
    lines: tuple[_Line, ...] = ()
    spans: tuple[Span, ...] = ()
    width: int = 0
    height: int = 0
    duration_s: float = 0.0
    stage: str = ""
    place: str = ""
    variant: str = ""
    timings: TensorTimings | None = None
    energy: _Energy | None = None

    def answer(self, task: str) -> MediaAnswer:
        fields = msgspec.structs.asdict(self)
        fields["energy"] = None if self.energy is None else self.energy.energy()
        lines: tuple[_Line, ...] = fields.pop("lines")
        texts = tuple(Label(index=line.index, label=line.text, score=line.score) for line in lines)
        return MediaAnswer(task=task, texts=texts, **fields)


def _wire_message(message: Message) -> dict[str, Any]:
    """Write a turn in OpenAI's shape, without the fields that it does not use."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    wire |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
    return wire


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Energy(msgspec.Struct):
    total_j: float
    boundary: Literal["soc", "board", "rail"]
    quality: Literal["measured", "derived", "modelled"]
    source: str
    coverage: float
    above_idle_j: float | None = None

    def energy(self) -> Energy:
        return Energy(**msgspec.structs.asdict(self))


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)
    energy: _Energy | None = None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.prompt_tokens_details.cached_tokens,
            energy=None if self.energy is None else self.energy.energy(),
        )


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: FinishReason | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: dict[str, float | None] | None = None
    error: Any = msgspec.UNSET
