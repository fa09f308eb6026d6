"""Stored outputs of tensor models: for inputs that are equal byte for byte, and for camera frames that nearly are.

The key is over the inputs' bytes, types and shapes, the outputs wanted and the model's files. Streams have a state that
the inputs do not show, and shared memory may change while it is read: neither is stored.

Near-duplicates are off unless cache.similar_frames says how many of 64 bits of a picture's hash may differ (frames.py).
A frame is compared with stored ones, never with one that was itself answered so; so a scene that changes slowly is
computed again once it has left the first one by as many bits. Such answers stand for volatile_ttl_s.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import msgspec

from edge_rt.cache import admission
from edge_rt.cache.entries import Found, Meta
from edge_rt.cache.exact import CacheEvents
from edge_rt.cache.frames import N_BITS, distance, frame_hash
from edge_rt.cache.store import Store
from edge_rt.cache.tensor_flights import TensorFlights
from edge_rt.config import Cache
from edge_rt.errors import NotCachedError
from edge_rt.tensor_types import Data, Datatype, Tensor, TensorAnswer, TensorRequest, TensorTimings
from edge_rt.types import CacheWishes

KIND: Final = "tensors"

_MAX_FRAMES: Final = 512  # pictures that are compared
_INLINE_BYTES: Final = 2**18  # hashed at once; more in a thread, beside which the event loop goes on


class _Output(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: bytes


class _Outputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    outputs: tuple[_Output, ...]
    place: str
    variant: str


@dataclass(frozen=True, slots=True)
class _Frame:
    bits: int
    alike: bytes  # hash of everything about the request but the picture's elements
    seen_at_s: float


class TensorResults:
    """Belongs to one event loop. wall_clock is what ages are counted by."""

    def __init__(
        self, settings: Cache, store: Store, events: CacheEvents, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._store = store
        self._events = events
        self._wall_clock = wall_clock
        self._frames: OrderedDict[bytes, _Frame] = OrderedDict()  # by the key of the stored outputs
        self._flights = TensorFlights()

    def configure(self, settings: Cache) -> None:
        """Go by other settings from the next request on; those of the store itself count at a restart."""
        self._settings = settings

    async def infer(
        self, request: TensorRequest, files: str, compute: Callable[[], Awaitable[TensorAnswer]]
    ) -> TensorAnswer:
        """Give stored outputs, or compute and store them; equal requests in flight share one run.

        Raises NotCachedError, and what compute raises.

        files  names the model's files: outputs of other files are not found
        """
        if not _is_storable(request) or request.no_store:
            if request.only_if_cached:
                raise NotCachedError
            self._events.cache_looked_up("bypass")
            return await compute()
        n_bytes = sum(tensor.size_bytes for tensor in request.inputs)
        if n_bytes > _INLINE_BYTES:
            key, frame = await asyncio.to_thread(self._hashes, request, files)
        else:
            key, frame = self._hashes(request, files)
        now_s = self._wall_clock()
        if not request.no_cache:
            if (found := await self._found(key, now_s, similarity=None)) is not None:
                return found
            if frame is not None and (near := self._near(frame, now_s)) is not None:
                near_key, similarity = near
                if (found := await self._found(near_key, now_s, similarity=similarity)) is not None:
                    return found
        if request.only_if_cached:
            raise NotCachedError
        self._events.cache_looked_up("bypass" if request.no_cache else "miss")

        async def computed() -> TensorAnswer:
            answer = await compute()
            self._keep(key, frame, request, files, answer)
            return answer

        if request.no_cache:  # asks for a run of its own
            return await computed()
        return await self._flights.share(key, computed, deadline_s=request.deadline_s)

    async def _found(self, key: bytes, now_s: float, *, similarity: float | None) -> TensorAnswer | None:
        found = await self._store.get(key)
        if found is None or found.meta.kind != KIND:
            return None
        if not admission.is_fresh(found.meta.created_at_s, found.meta.ttl_s, CacheWishes(), now_s):
            return None
        answer = _decode(found, now_s, similarity)
        if answer is None:
            self._store.remove([key])
            return None
        self._store.hit(key, now_s)
        state = "hit-exact" if similarity is None else "hit-semantic"
        self._events.cache_looked_up(state, saved_s=found.meta.saved_s, saved_j=found.meta.saved_j)
        return answer

    def _near(self, frame: _Frame, now_s: float) -> tuple[bytes, float] | None:
        """Give the key and the likeness of the stored picture that is nearest, if it is near enough and new enough."""
        best: tuple[int, bytes] | None = None
        for key, other in self._frames.items():
            if other.alike != frame.alike or not 0 <= now_s - other.seen_at_s < self._settings.volatile_ttl_s:
                continue
            n_bits = distance(frame.bits, other.bits)
            if n_bits <= self._settings.similar_frames and (best is None or n_bits < best[0]):
                best = n_bits, key
        return None if best is None else (best[1], 1 - best[0] / N_BITS)

    def _keep(self, key: bytes, frame: _Frame | None, request: TensorRequest, files: str, answer: TensorAnswer) -> None:
        if any(tensor.region is not None for tensor in answer.outputs):
            return
        n_bytes = sum(len(tensor.data) for tensor in answer.outputs)
        if n_bytes * 4 // 3 > self._settings.max_answer_bytes:  # base64
            self._events.cache_decided("too large")
            return
        now_s = self._wall_clock()
        outputs = tuple(_Output(t.name, t.datatype, t.shape, bytes(t.data)) for t in answer.outputs)
        value = msgspec.json.encode(_Outputs(outputs=outputs, place=answer.place, variant=answer.variant))
        meta = Meta(
            kind=KIND,
            model=request.model,
            file_sha256=files,
            tenant=request.tenant,
            title=", ".join(f"{t.name} {t.datatype} {list(t.shape)}" for t in request.inputs)[:80],
            created_at_s=now_s,
            ttl_s=self._settings.ttl_s,
            saved_s=answer.timings.compute_s / answer.timings.batch_size,
            saved_j=0.0 if answer.energy is None else answer.energy.saved_j,
        )
        is_kept = len(value) <= self._settings.max_answer_bytes and self._store.put(key, meta, value)
        self._events.cache_decided("store" if is_kept else "not taken")
        if is_kept and frame is not None:
            self._frames[key] = replace(frame, seen_at_s=now_s)
            self._frames.move_to_end(key)
            if len(self._frames) > _MAX_FRAMES:
                self._frames.popitem(last=False)

    def _hashes(self, request: TensorRequest, files: str) -> tuple[bytes, _Frame | None]:
        key = _digest(self._about(request, files), *(tensor.data for tensor in request.inputs))
        return key, self._frame(request, files) if self._settings.similar_frames else None

    def _frame(self, request: TensorRequest, files: str) -> _Frame | None:
        """Hash the one input that is a picture; None where none is, or several are."""
        hashes = [(tensor, bits) for tensor in request.inputs if (bits := frame_hash(tensor)) is not None]
        if len(hashes) != 1:
            return None
        picture, bits = hashes[0]
        others = (tensor.data for tensor in request.inputs if tensor is not picture)
        return _Frame(bits, _digest(self._about(request, files), *others), 0.0)

    def _about(self, request: TensorRequest, files: str) -> bytes:
        """Encode all that can change the outputs but the inputs' elements."""
        inputs = [(t.name, t.datatype, t.shape, len(t.data)) for t in request.inputs]
        tenant = request.tenant if self._settings.isolate else None
        asked = (request.model, request.variant, files, request.outputs, inputs, tenant, self._store.epoch)
        return msgspec.msgpack.encode(asked)


def _is_storable(request: TensorRequest) -> bool:
    return not request.stream and not request.regions and all(tensor.region is None for tensor in request.inputs)


def _digest(about: bytes, *parts: Data) -> bytes:
    digest = blake2b(len(about).to_bytes(8, "little") + about, digest_size=32, person=b"edge_rt tensors")
    for part in parts:  # whose lengths `about` holds
        digest.update(part)
    return digest.digest()


def _decode(found: Found, now_s: float, similarity: float | None) -> TensorAnswer | None:
    try:
        kept = msgspec.json.decode(found.value, type=_Outputs)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    outputs = tuple(Tensor(name=o.name, datatype=o.datatype, shape=o.shape, data=o.data) for o in kept.outputs)
    return TensorAnswer(
        outputs=outputs,
        timings=TensorTimings(queue_s=0.0, compute_s=0.0, batch_size=1),
        place=kept.place,
        variant=kept.variant,
        age_s=admission.age_s(found.meta.created_at_s, now_s),
        similarity=similarity,
    )
