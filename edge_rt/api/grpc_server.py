"""The Open Inference Protocol over gRPC, on a Unix socket of its own. Imported only where it is configured.

gRPC does not tell who is at the other end of a Unix socket: its callers are one tenant, and the socket's mode and group
decide who they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from edge_rt import logs
from edge_rt.api import kserve_models as models
from edge_rt.api import kserve_wire as wire
from edge_rt.api import listen
from edge_rt.api.context import Api
from edge_rt.api.grpc_messages import SERVICE, Rpc, load_rpcs
from edge_rt.api.grpc_status import grpc_status
from edge_rt.api.kserve_infer import origin_headers, placed, put_the_rest
from edge_rt.api.status import reply
from edge_rt.api.tensor_json import pack
from edge_rt.cache.admission import wishes
from edge_rt.errors import ConfigError, EdgeRtError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.guard.limits import check_shape, check_size
from edge_rt.tensor_types import Datatype, Tensor, TensorRegion, TensorRequest

_log = logging.getLogger("edge_rt.api")
_access = logging.getLogger("edge_rt.access")

TENANT: Final = "grpc"
_HEAD_BYTES: Final = 64 * 1024  # of a message beside its tensors
_CALLS_PER_RUNNING: Final = 2
_INLINE_ITEMS: Final = 4096  # of typed contents that are converted on the event loop
_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Context(Protocol):
    """What is used of grpc.aio.ServicerContext, which has no types."""

    def time_remaining(self) -> float | None: ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...

    async def abort(self, code: Any, details: str, trailing_metadata: tuple[tuple[str, str], ...]) -> NoReturn: ...


Handler = Callable[[Any, Context], Awaitable[dict[str, Any]]]


class GrpcServer:
    """start once, then stop once. Raises ConfigError where the socket cannot be had."""

    def __init__(self, api: Api, path: Path) -> None:
        self._api = api
        self._path = path
        self._server: Any = None
        self._inode: tuple[int, int] | None = None

    def use(self, api: Api) -> None:
        """Answer all calls from now on by another configuration. gRPC's own limit of a message stays."""
        self._api = api

    async def start(self) -> None:
        server = self._api.config.server
        mode, key = int(server.socket_mode, 8), "server.grpc_socket_path"
        with listen.bound_by_another(self._path, mode=mode, group=server.socket_group, key=key) as path:
            self._server = grpc.aio.server(
                options=[
                    # Beyond the limit gRPC itself refuses, and says no more than a number: up to twice it, we do.
                    ("grpc.max_receive_message_length", 2 * (server.max_body_bytes + _HEAD_BYTES)),
                    ("grpc.max_send_message_length", -1),
                ],
                # Each may hold a whole message before it can be counted among the bodies.
                maximum_concurrent_rpcs=min(
                    server.max_connections, _CALLS_PER_RUNNING * self._api.config.tensor.n_parallel
                ),
            )
            self._server.add_generic_rpc_handlers((self._handlers(),))
            try:
                self._server.add_insecure_port(f"unix:{quote(str(path))}")
            except RuntimeError as exc:
                await self._server.stop(0.0)
                raise ConfigError(key=key, problem=f"cannot be bound: {exc}", origin=str(self._path)) from exc
            await self._server.start()
        self._inode = listen.inode(self._path)

    def _handlers(self) -> Any:
        handlers: dict[str, Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._observed(rpc, handlers[name]))
            for name, rpc in load_rpcs().items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def stop(self, grace_s: float) -> None:
        """Take no new call, and cut off those that run after grace_s."""
        if self._inode is not None:
            listen.remove(self._path, self._inode)
        await self._server.stop(grace_s)

    def _observed(self, rpc: Rpc, handler: Handler) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """Wrap a handler as api/boundary.py wraps routes: limits, the request's id, errors, metrics, the access log."""

        async def answer(raw: bytes, context: Context) -> bytes:
            server = self._api.config.server
            if len(raw) > (limit := server.max_body_bytes + _HEAD_BYTES):
                problem = f"the message is {len(raw)} bytes long, the limit is {limit}; server.max_body_bytes sets it"
                raise InvalidRequestError(param="", problem=problem)
            self._api.bodies.take(len(raw), max(server.max_bodies_bytes, limit))
            try:
                fields = await handler(rpc.request.FromString(raw), context)
                encoded: bytes = rpc.response(**fields).SerializeToString()
                return encoded
            except DecodeError as exc:
                raise InvalidRequestError(param="", problem=f"not a message of the type {rpc.name} takes") from exc
            finally:
                self._api.bodies.give_back(len(raw))

        async def observed(raw: bytes, context: Context) -> bytes:
            started_s = time.monotonic()
            logs.request_id.set(uuid.uuid4().hex)
            status, outcome, code = 499, "hung_up", "CANCELLED"  # unless something else is known below
            try:
                answered = await answer(raw, context)
                status, outcome, code = 200, "ok", "OK"
                return answered
            except asyncio.CancelledError:
                raise
            except Exception as exc:  # noqa: BLE001  the request boundary: nothing may end without an answer
                if not isinstance(exc, EdgeRtError):
                    _log.error("a call failed unexpectedly", exc_info=exc)
                told = reply(exc)
                status, outcome, code = told.status, told.code, grpc_status(exc)
                await context.abort(getattr(grpc.StatusCode, code), told.message, (("edge-rt-code", told.code),))
            finally:
                duration_s = time.monotonic() - started_s
                self._api.telemetry.request_finished(
                    f"/{SERVICE}/{rpc.name}", status=status, outcome=outcome, duration_s=duration_s
                )
                if self._api.config.server.access_log:
                    extra = {"duration_s": round(duration_s, 4), "outcome": outcome, "tenant": TENANT}
                    _access.info("gRPC %s %s", rpc.name, code, extra=extra)

        return observed

    # The calls. Each gives the fields of its answer.

    async def _server_live(self, _: Any, __: Context) -> dict[str, Any]:
        return {"live": True}

    async def _server_ready(self, _: Any, __: Context) -> dict[str, Any]:
        return {"ready": self._api.runtime.ready()}

    async def _model_ready(self, asked: Any, _: Context) -> dict[str, Any]:
        return {"ready": models.is_ready(self._api, asked.name, asked.version)}

    async def _server_metadata(self, _: Any, __: Context) -> dict[str, Any]:
        found = models.server_metadata(self._api)
        return {"name": found.name, "version": found.version, "extensions": found.extensions}

    async def _model_metadata(self, asked: Any, _: Context) -> dict[str, Any]:
        found = await models.metadata(self._api, asked.name, asked.version)
        tensors = {
            name: [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in getattr(found, name)]
            for name in ("inputs", "outputs")
        }
        return {"name": found.name, "versions": found.versions, "platform": found.platform, **tensors}

    async def _index(self, asked: Any, _: Context) -> dict[str, Any]:
        entries = models.index(self._api, only_ready=asked.ready)
        return {
            "models": [{"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in entries]
        }

    async def _load(self, asked: Any, _: Context) -> dict[str, Any]:
        models.refuse_load_parameters(asked.parameters)
        await self._api.runtime.load(models.find(self._api, asked.model_name).id, tensors=True)
        return {}

    async def _unload(self, asked: Any, _: Context) -> dict[str, Any]:
        await self._api.runtime.unload(models.find(self._api, asked.model_name).id)
        return {}

    async def _model_infer(self, asked: Any, context: Context) -> dict[str, Any]:
        variant = models.form(self._api, asked.model_name, asked.model_version)
        with ExitStack() as leases:
            request = await self._tensor_request(asked, variant, context, leases)
            answer = await put_the_rest(await self._api.runtime.infer(request), request)
        if origin := origin_headers(answer):
            context.set_trailing_metadata(tuple((name.decode(), value.decode()) for name, value in origin))
        return {
            "model_name": asked.model_name,
            "model_version": answer.variant,
            "id": asked.id,
            "parameters": _sent(wire.answer_parameters(answer)),
            "outputs": [
                {
                    "name": t.name,
                    "datatype": t.datatype,
                    "shape": t.shape,
                    "parameters": _sent(placed(t.region)) if t.region is not None else {},
                }
                for t in answer.outputs
            ],
            "raw_output_contents": [t.data for t in answer.outputs if t.region is None],
        }

    async def _tensor_request(self, asked: Any, variant: str, context: Context, leases: ExitStack) -> TensorRequest:
        options = wire.options(_parameters("", asked.parameters))
        remaining_s = context.time_remaining()
        deadlines_s = [max(s, 0.001) for s in (options.deadline_s, remaining_s) if s is not None]
        inputs = []
        room_bytes = self._api.config.limits.max_tensor_bytes
        parts = [
            wire.region(f"inputs[{i}]", _parameters(f"inputs[{i}].", t.parameters)) for i, t in enumerate(asked.inputs)
        ]
        raw = list(asked.raw_input_contents)
        if raw and len(raw) != parts.count(None):
            problem = f"holds {len(raw)} tensors for {parts.count(None)} inputs outside shared memory"
            raise InvalidRequestError(param="raw_input_contents", problem=problem)
        for i, (sent, part) in enumerate(zip(asked.inputs, parts, strict=True)):
            region = leases.enter_context(self._api.lease(part, None)) if part is not None else None
            data = raw.pop(0) if raw and region is None else None
            tensor = await _tensor(f"inputs[{i}]", sent, data, region, room_bytes)
            room_bytes -= tensor.size_bytes
            inputs.append(tensor)
        regions = {}
        for i, output in enumerate(asked.outputs):
            parameters = _parameters(f"outputs[{i}].", output.parameters)
            models.check_output_parameters(f"outputs[{i}]", parameters)
            if (part := wire.region(f"outputs[{i}]", parameters)) is not None:
                regions[output.name] = leases.enter_context(self._api.lease(part, None))
        wished = wishes(", ".join(_metadata(context, "cache-control")))
        return TensorRequest(
            id=logs.request_id.get(),
            model=asked.model_name,
            variant=variant,
            inputs=tuple(inputs),
            outputs=tuple(output.name for output in asked.outputs),
            regions=regions,
            tenant=TENANT,
            stream=options.stream,
            is_first=options.is_first,
            is_last=options.is_last,
            deadline_s=min(deadlines_s, default=None),
            no_cache=wished.no_cache,
            no_store=wished.no_store,
            only_if_cached=wished.only_if_cached,
        )


def _metadata(context: Context, wanted: str) -> list[str]:
    """Give the values of a call's metadata of this name; gRPC writes names in lower case."""
    return [value for name, value in context.invocation_metadata() or () if name == wanted and isinstance(value, str)]


def _parameters(place: str, sent: Any) -> wire.Parameters:
    found: wire.Parameters = {}
    for name, value in sent.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequestError(param=f"{place}parameters.{name[:80]}", problem="has no value")
        found[name] = getattr(value, choice)
    return found


def _sent(parameters: wire.Parameters) -> dict[str, Any]:
    kinds = {str: "string_param", float: "double_param", int: "int64_param", bool: "bool_param"}
    return {name: {kinds[type(value)]: value} for name, value in parameters.items()}


async def _tensor(param: str, sent: Any, raw: bytes | None, region: TensorRegion | None, room_bytes: int) -> Tensor:
    datatype = wire.datatype(param, sent.datatype)
    shape = tuple(sent.shape)
    check_shape(param, shape)
    check_size(param, datatype, shape, room_bytes)
    if raw is not None or region is not None:
        if sent.HasField("contents"):
            problem = "must not be beside raw_input_contents or shared memory"
            raise InvalidRequestError(param=f"{param}.contents", problem=problem)
        return Tensor(name=sent.name, datatype=datatype, shape=shape, data=raw or b"", region=region)
    field = _CONTENTS.get(datatype)
    if field is None:
        raise UnsupportedFeatureError(feature=f"{param}: {datatype} in contents", remedy="send raw_input_contents")
    wrong = [found.name for found, _ in sent.contents.ListFields() if found.name != field]
    if wrong:
        problem = f"holds {wrong[0]}, {datatype} goes into {field}"
        raise InvalidRequestError(param=f"{param}.contents", problem=problem)
    values = getattr(sent.contents, field)
    convert = _packed if len(values) <= _INLINE_ITEMS else _packed_on_a_thread
    return Tensor(
        name=sent.name,
        datatype=datatype,
        shape=shape,
        data=await convert(f"{param}.contents.{field}", datatype, values),
    )


async def _packed(param: str, datatype: Datatype, values: Any) -> bytes:
    return pack(param, datatype, values)


async def _packed_on_a_thread(param: str, datatype: Datatype, values: Any) -> bytes:
    return await asyncio.to_thread(pack, param, datatype, values)
