"""One inference over HTTP: body → TensorRequest → answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from msgspec import UNSET, Raw
from starlette.types import Receive, Scope, Send

from edge_rt.api import kserve_models as models
from edge_rt.api import kserve_wire as wire
from edge_rt.api.callers import Peer
from edge_rt.api.context import Api
from edge_rt.api.kserve_plan import Plan, Plans, tensor_data
from edge_rt.api.schemas import encode
from edge_rt.api.sse import HangUps, StopOnHangUp
from edge_rt.api.tensor_json import MAX_JSON_BYTES, from_json, to_json
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.guard.limits import check_shape, check_size
from edge_rt.tensor_types import Data, Tensor, TensorAnswer, TensorRegion, TensorRequest
from edge_rt.types import CacheWishes
from edge_rt.worker.regions import put

HEADER_LENGTH: Final = "inference-header-content-length"
_HEADER_LENGTH: Final = HEADER_LENGTH.encode()
_NO_TEXTS: Final[Mapping[str, bytes]] = {}
_JSON: Final = b"application/json"
_BINARY: Final = b"application/octet-stream"
_INLINE_BYTES: Final = 16 * 1024  # of JSON data that is converted on the event loop: less than a millisecond
JOINED_BYTES: Final = 64 * 1024  # answers up to here leave in one write

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Converter:
    """Runs conversions of long JSON data on a thread, one at a time: together they would hold much memory."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, n_bytes: int, convert: Callable[[], bytes]) -> bytes:
        if n_bytes <= _INLINE_BYTES:
            return convert()
        async with self._turn:
            return await asyncio.to_thread(convert)


def split(header_length: str | None, body: Data) -> tuple[bytes, memoryview]:
    """Cut a body into its JSON and the binary tensors behind it."""
    view = memoryview(body)
    n_bytes = len(view)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdecimal() and int(header_length[:20]) <= len(body)):
            raise InvalidRequestError(
                param="Inference-Header-Content-Length",
                problem=f"must be the length of the JSON, at most the body's {len(body)} bytes, "
                f"got {header_length[:40]!r}",
            )
        n_bytes = int(header_length[:20])
    if n_bytes > MAX_JSON_BYTES:
        raise InvalidRequestError(
            param="", problem=f"the JSON is {n_bytes} bytes long, the limit is {MAX_JSON_BYTES}; send binary tensors"
        )
    return bytes(view[:n_bytes]), view[n_bytes:]


async def _from_json(param: str, sent: wire.WireInput, datatype: Any, convert: Converter) -> bytes:
    assert isinstance(sent.data, Raw)
    data = bytes(sent.data)
    return await convert(len(data), lambda: from_json(param, datatype, sent.shape, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what of the cache; peer is None where the kernel does not tell."""

    tenant: str
    peer: Peer | None
    wishes: CacheWishes = field(default_factory=CacheWishes)


class Inference:
    """One inference: an ASGI app that runs it and answers. Made by read, which raises what is wrong with the body."""

    def __init__(self, api: Api, plan: Plan, caller: Caller, convert: Converter) -> None:
        self._api = api
        self._plan = plan
        self._caller = caller
        self._convert = convert
        self._request: TensorRequest
        self._leases = ExitStack()  # of the shared memory it uses, until it is answered

    @classmethod
    def of(cls, api: Api, plan: Plan, caller: Caller, convert: Converter, request: TensorRequest) -> Inference:
        """Make one of a request that has been read; it leases no shared memory."""
        made = cls(api, plan, caller, convert)
        made._request = request
        return made

    @classmethod
    async def read(
        cls,
        api: Api,
        body: Data,
        header_length: str | None,
        caller: Caller,
        convert: Converter,
        plans: Plans,
        *,
        model: str,
        version: str,
    ) -> Inference:
        variant = models.form(api, model, version)
        head, tensors = split(header_length, body)
        made = cls(api, plans.read(head), caller, convert)
        if (inputs := made._plan.plain_inputs(tensors)) is not None:
            made._request = made._plan.request(model, variant, inputs, caller.tenant, wishes=caller.wishes)
            return made
        with made._leases:
            inputs, regions = await made._inputs_and_regions(tensors)
            made._request = made._plan.request(
                model, variant, inputs, caller.tenant, regions=regions, wishes=caller.wishes
            )
            made._leases = made._leases.pop_all()
        return made

    async def _inputs_and_regions(self, binary: memoryview) -> tuple[tuple[Tensor, ...], dict[str, TensorRegion]]:
        """Read the inputs, and where outputs shall be put."""
        asked, start = self._plan.asked, 0
        inputs = []
        room_bytes = self._api.config.limits.max_tensor_bytes
        for i, sent in enumerate(asked.inputs):
            tensor, start = await self._input(f"inputs[{i}]", sent, binary, start, room_bytes)
            room_bytes -= tensor.size_bytes
            inputs.append(tensor)
        if start != len(binary):
            raise InvalidRequestError(
                param="", problem=f"{len(binary) - start} bytes behind the JSON belong to no input's binary_data_size"
            )
        regions = {}
        for i, output in enumerate(asked.outputs):
            models.check_output_parameters(f"outputs[{i}]", output.parameters)
            if (region := self._region(f"outputs[{i}]", output.parameters)) is not None:
                regions[output.name] = region
        return tuple(inputs), regions

    async def _input(
        self, param: str, sent: wire.WireInput, binary: memoryview, start: int, room_bytes: int
    ) -> tuple[Tensor, int]:
        """Give a tensor, and where the next one begins among the binary ones."""
        datatype = wire.datatype(param, sent.datatype)
        check_shape(param, sent.shape)
        check_size(param, datatype, sent.shape, room_bytes)
        n_bytes = wire.number(param, sent.parameters, "binary_data_size")
        region = self._region(param, sent.parameters)
        if (n_bytes is not None) + (region is not None) + (sent.data is not UNSET) != 1:
            problem = "give one of data, parameters.binary_data_size and parameters.shared_memory_region"
            raise InvalidRequestError(param=param, problem=problem)
        if n_bytes is not None and start + n_bytes > len(binary):
            problem = f"is {n_bytes}, but {len(binary) - start} bytes are left of the binary tensors"
            raise InvalidRequestError(param=f"{param}.parameters.binary_data_size", problem=problem)
        if n_bytes is not None:
            data = tensor_data(datatype, binary[start : start + n_bytes])
            start += n_bytes
        elif region is not None:
            data = b""
        else:
            data = await _from_json(f"{param}.data", sent, datatype, self._convert)
        tensor = Tensor(name=sent.name, datatype=datatype, shape=tuple(sent.shape), data=data, region=region)
        return tensor, start

    def _region(self, param: str, parameters: wire.Parameters) -> TensorRegion | None:
        part = wire.region(param, parameters)
        if part is None:
            return None
        if self._caller.peer is None:
            raise UnsupportedFeatureError(feature="shared memory over TCP", remedy="ask on the Unix socket")
        return self._leases.enter_context(self._api.lease(part, self._caller.peer.uid))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, parts = await self.answer(receive, scope["state"].get("hang_ups"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i < len(parts) - 1})

    async def answer(self, receive: Receive | None, hang_ups: HangUps | None) -> tuple[Headers, list[Data]]:
        """Run it; give the answer's headers, and its body in the parts that leave one by one.

        Raises what the runtime raises, and HungUpError.
        """
        with self._leases:
            async with StopOnHangUp(receive, hang_ups):
                answer = await self._api.runtime.infer(self._request)
                answer = await put_the_rest(answer, self._request)
                texts = {t.name: await self._text(t) for t in answer.outputs if self._is_text(t)}
        return written(self._plan, self._request.model, answer, texts)

    def _is_text(self, tensor: Tensor) -> bool:
        return tensor.region is None and not self._plan.wants_binary(tensor.name)

    async def _text(self, tensor: Tensor) -> bytes:
        return await self._convert(len(tensor.data), partial(to_json, tensor))


def written(
    plan: Plan, model: str, answer: TensorAnswer, texts: Mapping[str, bytes] = _NO_TEXTS
) -> tuple[Headers, list[Data]]:
    """Write an answer: its headers, and its body in the parts that leave one by one; see described."""
    headers, head, tensors = described(plan, model, answer, texts)
    parts: list[Data] = [head, *tensors]
    return headers, [b"".join(parts)] if sum(map(len, parts)) <= JOINED_BYTES else parts


def described(
    plan: Plan, model: str, answer: TensorAnswer, texts: Mapping[str, bytes] = _NO_TEXTS
) -> tuple[Headers, bytes, list[Data]]:
    """Write an answer: its headers, its JSON, and the binary tensors behind that.

    texts  the outputs that are not binary, in JSON
    """
    tensors: list[Data] = []
    outputs: list[wire.AnswerTensor] = []
    for tensor in answer.outputs:
        output = wire.AnswerTensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.region is not None:
            output.parameters = placed(tensor.region)
        elif tensor.name in texts:
            output.data = Raw(texts[tensor.name])
        else:
            output.parameters = {"binary_data_size": len(tensor.data)}
            tensors.append(tensor.data)
        outputs.append(output)
    head = encode(
        wire.InferAnswer(
            model_name=model,
            model_version=answer.variant,
            id=plan.asked.id,
            parameters=wire.answer_parameters(answer),
            outputs=outputs,
        )
    )
    size_bytes = len(head) + sum(map(len, tensors))
    headers: Headers = [(b"content-type", _JSON)]
    if tensors:
        headers = [(b"content-type", _BINARY), (_HEADER_LENGTH, b"%d" % len(head))]
    headers.append((b"content-length", b"%d" % size_bytes))
    headers += origin_headers(answer)
    return headers, head, tensors


async def put_the_rest(answer: TensorAnswer, request: TensorRequest) -> TensorAnswer:
    """Put outputs into their regions that the worker has not put there: those that were compared on the way.

    Raises InvalidRequestError where one does not fit.
    """
    if not request.regions:
        return answer
    rest = [t for t in answer.outputs if t.region is None and t.name in request.regions]
    if not rest:
        return answer
    done = {tensor.name: await asyncio.to_thread(put, tensor, request.regions[tensor.name]) for tensor in rest}
    return replace(answer, outputs=tuple(done.get(tensor.name, tensor) for tensor in answer.outputs))


def origin_headers(answer: TensorAnswer) -> list[tuple[bytes, bytes]]:
    """Say of stored outputs that they are, and how old."""
    if answer.age_s is None:
        return []
    state = b"hit-exact" if answer.similarity is None else b"hit-semantic"
    headers = [(b"x-edge-cache", state), (b"age", b"%d" % answer.age_s)]
    if answer.similarity is not None:
        headers.append((b"x-edge-similarity", b"%.3f" % answer.similarity))
    return headers


def placed(region: TensorRegion) -> wire.Parameters:
    """Say where an output was put."""
    return wire.region_parameters(region.name, region.offset, region.size_bytes)
