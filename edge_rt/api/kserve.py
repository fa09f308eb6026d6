"""The Open Inference Protocol (KServe v2) over HTTP, with its binary tensors, sequences and model repository."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt import telemetry
from edge_rt.api import kserve_models as models
from edge_rt.api import kserve_wire as wire
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.schemas import decode_with, encode
from edge_rt.api.sse import StopOnHangUp
from edge_rt.api.status import HttpError, open_inference_body
from edge_rt.api.tensor_json import MAX_JSON_BYTES, from_json, to_json
from edge_rt.errors import InvalidRequestError
from edge_rt.guard.limits import check_shape, check_size
from edge_rt.types import Tensor, TensorAnswer, TensorRequest

_JSON: Final = b"application/json"
_BINARY: Final = b"application/octet-stream"
_HEADER_LENGTH: Final = "inference-header-content-length"
_INLINE_BYTES: Final = 16 * 1024  # of JSON data that is converted on the event loop: less than a millisecond
_JOINED_BYTES: Final = 64 * 1024  # answers up to here leave in one write


@dataclass(frozen=True, slots=True)
class Converter:
    """Runs conversions of long JSON data on a thread, one at a time: together they would hold much memory."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, n_bytes: int, convert: Callable[[], bytes]) -> bytes:
        if n_bytes <= _INLINE_BYTES:
            return convert()
        async with self._turn:
            return await asyncio.to_thread(convert)


def routes(api: Api) -> list[Route]:
    """Give the endpoints. All of them, and unknown paths below /v2, answer errors in the protocol's form."""
    convert = Converter()

    async def server(_: Request) -> ASGIApp:
        return _answer(models.server_metadata())

    async def live(_: Request) -> ASGIApp:
        return _answer({"live": True})

    async def ready(_: Request) -> ASGIApp:
        is_ready = api.runtime.ready()
        return _answer({"ready": is_ready}, 200 if is_ready else 400)  # the protocol's "no" is a 4xx

    async def model_ready(request: Request) -> ASGIApp:
        model, version = _named(request)
        is_ready = models.is_ready(api, model, version)
        return _answer({"name": model, "ready": is_ready}, 200 if is_ready else 400)

    async def metadata(request: Request) -> ASGIApp:
        return _answer(await models.metadata(api, *_named(request)))

    async def infer(request: Request) -> ASGIApp:
        model, version = _named(request)
        body = await read_body(request, api)
        status = models.find(api, model, version)
        head, tensors = _split(request.headers.get(_HEADER_LENGTH), body)
        asked = decode_with(head, wire.DECODERS[wire.InferRequest])
        tensor_request = await _tensor_request(api, asked, tensors, model, request.state.tenant, convert)
        return _Inference(api, asked, tensor_request, status.variant, convert)

    async def index(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api) or b"{}", wire.DECODERS[wire.IndexRequest])
        return _answer(models.index(api, only_ready=asked.ready))

    async def load(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api) or b"{}", wire.DECODERS[wire.LoadRequest])
        models.refuse_load_parameters(asked.parameters)
        await api.runtime.load(models.find(api, request.path_params["model"]).id)
        return Response(status_code=200)

    async def unload(request: Request) -> ASGIApp:
        await read_body(request, api)
        await api.runtime.unload(models.find(api, request.path_params["model"]).id)
        return Response(status_code=200)

    async def unknown(request: Request) -> ASGIApp:
        raise HttpError(404, f"not found: {request.method} {request.url.path[:200]}")

    def route(path: str, handler: Callable[[Request], Awaitable[ASGIApp]], *methods: str) -> Route:
        return Route(path, Endpoint(handler, error_body=open_inference_body), methods=methods or None)

    of_models = [
        route(f"/v2/models/{{model}}{version}{path}", handler, method)
        for version in ("", "/versions/{version}")
        for path, handler, method in (("", metadata, "GET"), ("/ready", model_ready, "GET"), ("/infer", infer, "POST"))
    ]
    return [
        route("/v2", server, "GET"),
        route("/v2/health/live", live, "GET"),
        route("/v2/health/ready", ready, "GET"),
        *of_models,
        route("/v2/repository/index", index, "POST"),
        route("/v2/repository/models/{model}/load", load, "POST"),
        route("/v2/repository/models/{model}/unload", unload, "POST"),
        route("/v2/{path:path}", unknown),
    ]


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


def _answer(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def _split(header_length: str | None, body: bytes) -> tuple[bytes, memoryview]:
    """Cut a body into its JSON and the binary tensors behind it."""
    if header_length is None:
        head, tensors = body, memoryview(b"")
    else:
        if not (header_length.isascii() and header_length.isdecimal() and int(header_length[:20]) <= len(body)):
            raise InvalidRequestError(
                param="Inference-Header-Content-Length",
                problem=f"must be the length of the JSON, at most the body's {len(body)} bytes, "
                f"got {header_length[:40]!r}",
            )
        n_bytes = int(header_length[:20])
        head, tensors = body[:n_bytes], memoryview(body)[n_bytes:]
    if len(head) > MAX_JSON_BYTES:
        raise InvalidRequestError(
            param="", problem=f"the JSON is {len(head)} bytes long, the limit is {MAX_JSON_BYTES}; send binary tensors"
        )
    return head, tensors


async def _tensor_request(
    api: Api, asked: wire.InferRequest, binary: memoryview, model: str, tenant: str, convert: Converter
) -> TensorRequest:
    options = wire.options(asked.parameters)
    inputs = []
    start = 0
    room_bytes = api.config.limits.max_tensor_bytes
    for i, sent in enumerate(asked.inputs):
        param = f"inputs[{i}]"
        datatype = wire.datatype(param, sent.datatype)
        check_shape(param, sent.shape)
        check_size(param, datatype, sent.shape, room_bytes)
        n_bytes = wire.number(param, sent.parameters, "binary_data_size")
        if (n_bytes is None) == (sent.data is UNSET):
            problem = "give one of data and parameters.binary_data_size"
            raise InvalidRequestError(param=param, problem=problem)
        if n_bytes is not None:
            if start + n_bytes > len(binary):
                problem = f"is {n_bytes}, but {len(binary) - start} bytes are left of the binary tensors"
                raise InvalidRequestError(param=f"{param}.parameters.binary_data_size", problem=problem)
            data = bytes(binary[start : start + n_bytes])
            start += n_bytes
        else:
            data = await _from_json(f"{param}.data", sent, datatype, convert)
        room_bytes -= len(data)
        inputs.append(Tensor(name=sent.name, datatype=datatype, shape=tuple(sent.shape), data=data))
    if start != len(binary):
        raise InvalidRequestError(
            param="", problem=f"{len(binary) - start} bytes behind the JSON belong to no input's binary_data_size"
        )
    for i, output in enumerate(asked.outputs):
        models.check_output_parameters(f"outputs[{i}]", output.parameters)
    return TensorRequest(
        id=telemetry.request_id.get(),
        model=model,
        inputs=tuple(inputs),
        outputs=tuple(output.name for output in asked.outputs),
        tenant=tenant,
        stream=options.stream,
        is_first=options.is_first,
        is_last=options.is_last,
        deadline_s=options.deadline_s,
    )


async def _from_json(param: str, sent: wire.WireInput, datatype: Any, convert: Converter) -> bytes:
    assert isinstance(sent.data, Raw)
    data = bytes(sent.data)
    return await convert(len(data), lambda: from_json(param, datatype, sent.shape, data))


class _Inference:
    """Run one inference and answer: an ASGI app."""

    def __init__(
        self, api: Api, asked: wire.InferRequest, request: TensorRequest, version: str, convert: Converter
    ) -> None:
        self._api = api
        self._asked = asked
        self._request = request
        self._version = version
        self._convert = convert
        default = wire.flag("", asked.parameters, "binary_data_output", False)
        self._is_binary = {
            output.name: wire.flag(f"outputs[{i}]", output.parameters, "binary_data", default)
            for i, output in enumerate(asked.outputs)
        }
        self._default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's signature
        async with StopOnHangUp(receive):
            answer = await self._api.runtime.infer(self._request)
            head, tensors = await self._write(answer)
        headers = [(b"content-type", _JSON)]
        if tensors:
            headers = [(b"content-type", _BINARY), (_HEADER_LENGTH.encode(), b"%d" % len(head))]
        parts = [head, *tensors]
        size_bytes = sum(map(len, parts))
        headers.append((b"content-length", b"%d" % size_bytes))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if size_bytes <= _JOINED_BYTES:
            parts = [b"".join(parts)]
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i < len(parts) - 1})

    async def _write(self, answer: TensorAnswer) -> tuple[bytes, list[bytes]]:
        """Give the JSON and the binary tensors that follow it."""
        outputs, tensors = [], []
        for tensor in answer.outputs:
            written = wire.AnswerTensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if self._is_binary.get(tensor.name, self._default):
                written.parameters = {"binary_data_size": len(tensor.data)}
                tensors.append(tensor.data)
            else:
                written.data = Raw(await self._convert(len(tensor.data), partial(to_json, tensor)))
            outputs.append(written)
        head = wire.InferAnswer(
            model_name=self._request.model,
            model_version=self._version,
            id=self._asked.id,
            parameters=wire.answer_parameters(answer),
            outputs=outputs,
        )
        return encode(head), tensors
