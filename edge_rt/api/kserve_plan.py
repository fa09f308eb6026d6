"""What the JSON of inference requests says, remembered for those that come again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from edge_rt import logs
from edge_rt.api import kserve_wire as wire
from edge_rt.api.fields import decode_with
from edge_rt.errors import EdgeRtError
from edge_rt.guard.limits import check_shape, check_size
from edge_rt.tensor_types import Data, Datatype, Lent, Reply, Tensor, TensorRegion, TensorRequest
from edge_rt.types import CacheWishes

_MAX_PLANS: Final = 64
_MAX_PLAN_BYTES: Final = 4096  # of JSON that is remembered
_NO_REGIONS: Final[Mapping[str, TensorRegion]] = {}
_NO_WISHES: Final = CacheWishes()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's JSON says.

    is_binary  an output of which nothing else is said; gives_binary: all outputs
    plain      name, datatype, shape and bytes of each input, checked, where all of them are binary and no shared memory
               is meant; None: it is not so, or something is wrong
    """

    asked: wire.InferRequest
    options: wire.Options
    outputs: tuple[str, ...]
    is_binary: bool
    is_output_binary: Mapping[str, bool]
    gives_binary: bool
    plain: tuple[tuple[str, Datatype, tuple[int, ...], int], ...] | None

    def plain_inputs(self, binary: memoryview) -> tuple[Tensor, ...] | None:
        """Give the inputs, which share the body's memory; None where they are others than the plain ones."""
        if self.plain is None:
            return None
        inputs, start = [], 0
        for name, datatype, shape, n_bytes in self.plain:
            data = tensor_data(datatype, binary[start : start + n_bytes])
            start += n_bytes
            inputs.append(Tensor(name=name, datatype=datatype, shape=shape, data=data))
        return tuple(inputs) if start == len(binary) else None

    def wants_binary(self, output: str) -> bool:
        return self.is_output_binary.get(output, self.is_binary)

    def request(
        self,
        model: str,
        variant: str,
        inputs: tuple[Tensor, ...],
        tenant: str,
        *,
        regions: Mapping[str, TensorRegion] = _NO_REGIONS,
        wishes: CacheWishes = _NO_WISHES,
        reply: Reply | None = None,
        memory: tuple[Lent, int] | None = None,
    ) -> TensorRequest:
        options = self.options
        return TensorRequest(
            id=logs.request_id.get(),
            model=model,
            variant=variant,
            inputs=inputs,
            outputs=self.outputs,
            regions=regions,
            tenant=tenant,
            stream=options.stream,
            is_first=options.is_first,
            is_last=options.is_last,
            deadline_s=options.deadline_s,
            no_cache=wishes.no_cache,
            no_store=wishes.no_store,
            only_if_cached=wishes.only_if_cached,
            reply=reply,
            memory=memory,
        )


class Plans:
    """The last requests' plans by their JSON: a camera's is the same for each frame."""

    def __init__(self, max_tensor_bytes: int) -> None:
        self._max_tensor_bytes = max_tensor_bytes
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()

    def read(self, head: bytes) -> Plan:
        """Raises InvalidRequestError and UnsupportedFeatureError."""
        if (plan := self._plans.get(head)) is not None:
            self._plans.move_to_end(head)
            return plan
        plan = self._made(decode_with(head, wire.DECODERS[wire.InferRequest]))
        if plan.plain is not None and len(head) <= _MAX_PLAN_BYTES:
            self._plans[head] = plan
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _made(self, asked: wire.InferRequest) -> Plan:
        is_binary = wire.flag("", asked.parameters, "binary_data_output", False)
        is_output_binary = {
            output.name: wire.flag(f"outputs[{i}]", output.parameters, "binary_data", is_binary)
            for i, output in enumerate(asked.outputs)
        }
        return Plan(
            asked=asked,
            options=wire.options(asked.parameters),
            outputs=tuple(output.name for output in asked.outputs),
            is_binary=is_binary,
            is_output_binary=is_output_binary,
            gives_binary=is_binary and all(is_output_binary.values()),
            plain=self._plain(asked),
        )

    def _plain(self, asked: wire.InferRequest) -> tuple[tuple[str, Datatype, tuple[int, ...], int], ...] | None:
        if any(output.parameters.keys() - {"binary_data"} for output in asked.outputs):
            return None
        inputs = []
        room_bytes = self._max_tensor_bytes
        for sent in asked.inputs:
            n_bytes = sent.parameters.get("binary_data_size")
            if sent.data is not UNSET or len(sent.parameters) != 1 or type(n_bytes) is not int or n_bytes < 0:
                return None
            try:
                datatype = wire.datatype("", sent.datatype)
                check_shape("", sent.shape)
                check_size("", datatype, sent.shape, room_bytes)
            except EdgeRtError:  # which input it is of, and whether it is the first problem, is told elsewhere
                return None
            room_bytes -= n_bytes
            inputs.append((sent.name, datatype, tuple(sent.shape), n_bytes))
        return tuple(inputs) or None


def tensor_data(datatype: Datatype, part: memoryview) -> Data:
    """Give a tensor's part of the body: BYTES elements are cut apart, others only passed on."""
    return bytes(part) if datatype == "BYTES" else part
