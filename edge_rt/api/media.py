"""Files in, findings out: pictures and recordings for tensor models with a pipeline, and texts to embed.

    POST /v1/vision/classify   labels
    POST /v1/vision/detect     boxes
    POST /v1/vision/read       lines of text with their boxes
    POST /v1/audio/vad         spans of speech

A request is multipart/form-data with a part `file` and fields, or the file itself as the body with the fields in the
query string. docs/media.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt import logs
from edge_rt.api import media_wire as wire
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.multipart import media_type, parse
from edge_rt.api.schemas import encode
from edge_rt.api.sse import StopOnHangUp
from edge_rt.api.status import HttpError
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.tensor_types import Box, MediaAnswer, MediaRequest

_FORM: Final = "multipart/form-data"
_ANY: Final = "application/octet-stream"
_PICTURES: Final = frozenset({"image/jpeg", "image/png", "image/jpg", _ANY})
_RECORDINGS: Final = frozenset({"audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", _ANY})
_OPTIONS: Final = ("model", "top_k", "min_score", "regions", "deadline_s")
_FILES: Final = ("file", "reference")


@dataclass(frozen=True, slots=True)
class _Kind:
    """One endpoint: the tasks it answers and the files it takes."""

    path: str
    tasks: tuple[str, ...]
    content_types: frozenset[str]
    answer: Callable[[str, MediaAnswer], Any]


KINDS: Final = (
    _Kind("/v1/vision/classify", ("classify",), _PICTURES, wire.classification),
    _Kind("/v1/vision/detect", ("detect",), _PICTURES, wire.detection),
    _Kind("/v1/vision/read", ("detect-text", "read-text", "ocr"), _PICTURES, wire.reading),
    _Kind("/v1/audio/vad", ("vad",), _RECORDINGS, wire.speech),
)


def routes(api: Api) -> list[Route]:
    def endpoint(kind: _Kind) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def handle(request: Request) -> ASGIApp:
            files, options = await _read(request, api, kind)
            asked = _media_request(api, kind, files, options, request.state.tenant)
            return Looking(api, asked, lambda answer: kind.answer(asked.model, answer))

        return handle

    return [Route(kind.path, Endpoint(endpoint(kind)), methods=["POST"]) for kind in KINDS]


class Looking:
    """Run one file through a pipeline and answer: an ASGI app."""

    def __init__(self, api: Api, request: MediaRequest, write: Callable[[MediaAnswer], Any]) -> None:
        self._api = api
        self._request = request
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with StopOnHangUp(receive):
            answer = await self._api.runtime.look(self._request)
        await Response(encode(self._write(answer)), media_type="application/json")(scope, receive, send)


def check_task(api: Api, model: str | None, tasks: tuple[str, ...]) -> str:
    """Give the model that is asked. Raises InvalidRequestError where none is named, and for one of another task."""
    if not model:
        known = ", ".join(name for name, task in api.runtime.tasks().items() if task in tasks)
        problem = f"is required; {f'there are {known}' if known else 'no model of the catalog can do this'}"
        raise InvalidRequestError(param="model", problem=problem)
    task = api.runtime.tasks().get(model, "")
    if not task:
        api.runtime.models()  # whose manifests may be new
        task = api.runtime.tasks().get(model, "")
    if not task:
        api.runtime.model(model)  # says so if it does not exist
    if task not in tasks:
        path = next((kind.path for kind in KINDS if task in kind.tasks), "/v1/embeddings" if task == "embed" else "")
        what = f"its task is {task}: POST {path}" if task else "it has no pipeline"
        raise UnsupportedFeatureError(feature=f"{' or '.join(tasks)} with {model}", remedy=what)
    return model


async def _read(request: Request, api: Api, kind: _Kind) -> tuple[dict[str, bytes], dict[str, str]]:
    """Read the files and the fields of a request."""
    content_type, parameters = media_type(request.headers.get("content-type", ""))
    query = _query(request)
    if content_type != _FORM and content_type not in kind.content_types:
        known = ", ".join(sorted((_FORM, *kind.content_types)))
        raise HttpError(415, f"Content-Type {content_type[:80]!r} is not read here; send one of {known}")
    body = await read_body(request, api, max_bytes=api.config.server.max_file_bytes)
    if content_type != _FORM:
        return {"file": body}, query
    files: dict[str, bytes] = {}
    options = query
    for part in parse(body, parameters.get("boundary", "")):
        if part.name not in (*_OPTIONS, *_FILES):
            raise InvalidRequestError(
                param=part.name[:80], problem=f"is not known; there are {', '.join((*_FILES, *_OPTIONS))}"
            )
        if part.name in files or part.name in options:
            raise InvalidRequestError(param=part.name, problem="is there twice")
        if part.name in _FILES:
            files[part.name] = bytes(part.data)
        else:
            options[part.name] = part.text()
    return files, options


def _query(request: Request) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in _OPTIONS:
            raise InvalidRequestError(param=name[:80], problem=f"is not known; there are {', '.join(_OPTIONS)}")
        if name in options:
            raise InvalidRequestError(param=name, problem="is there twice")
        options[name] = value
    return options


def _media_request(
    api: Api, kind: _Kind, files: Mapping[str, bytes], options: Mapping[str, str], tenant: str
) -> MediaRequest:
    model = check_task(api, options.get("model"), kind.tasks)
    if not files.get("file"):
        problem = (
            "is missing: send it as a part of multipart/form-data, or as the body"
            if "file" not in files
            else "is empty"
        )
        raise InvalidRequestError(param="file", problem=problem)
    return MediaRequest(
        id=logs.request_id.get(),
        model=model,
        data=files["file"],
        reference=files.get("reference", b""),
        regions=_regions(options["regions"]) if "regions" in options else (),
        top_k=_number(options, "top_k", int),
        min_score=_number(options, "min_score", float),
        tenant=tenant,
        deadline_s=_number(options, "deadline_s", float),
    )


def _number(options: Mapping[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    if name not in options:
        return None
    try:
        value = kind(options[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequestError(param=name, problem=f"must be a number, got {options[name][:40]!r}")
    return value


def _regions(text: str) -> tuple[Box, ...]:
    try:
        regions = msgspec.json.decode(text, type=list[wire.Region])
    except msgspec.DecodeError as exc:
        example = '[{"x": 10, "y": 20, "width": 100, "height": 30}]'
        raise InvalidRequestError(param="regions", problem=f"must be JSON such as {example}: {exc}") from exc
    return tuple(Box(x=r.x, y=r.y, width=r.width, height=r.height, turn_deg=r.turn_deg) for r in regions)
