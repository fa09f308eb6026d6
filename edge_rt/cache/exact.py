"""The exact tier: looks a request up by its key, and stores what was answered.

    look = await tier.look_up(request, identities, now_s)
    if look.stored is not None: give replay(look.stored, now_s)
    else: compute, with recorder.add(chunk) for each chunk, sharing under look.flight_key where that is not None;
          then tier.admit(request, identity of who answered, recorder, now_s)

now_s is the wall clock's, which ages survive restarts by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from edge_rt.cache import admission, stored
from edge_rt.cache.admission import Decision
from edge_rt.cache.entries import Meta, StoreEvents
from edge_rt.cache.key import Identity, answer_key, partition_key
from edge_rt.cache.store import Store
from edge_rt.cache.stored import Recorder, StoredAnswer
from edge_rt.config import Cache
from edge_rt.types import CacheState, GenerateRequest


class CacheEvents(StoreEvents, Protocol):
    """Where the figures go; edge_rt.telemetry.Telemetry is one."""

    def cache_looked_up(self, state: str, *, saved_s: float = 0.0, saved_j: float = 0.0) -> None: ...

    def cache_decided(self, decision: str) -> None: ...

    def cache_verified(self, *, is_right: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the exact tier knows of a request.

    key          of the stored answer; of the first identity where there is none
    state        hit-exact, miss, or bypass where the request or its kind keeps from looking
    flight_key   under which like requests in flight share an answer; None: this one is answered by itself
    is_repeated  the client asked the same within the last minute, so it was not content: the router may learn from it
    """

    key: bytes
    state: CacheState
    stored: StoredAnswer | None = None
    flight_key: bytes | None = None
    is_repeated: bool = False


class ExactTier:
    """Belongs to one event loop.

    clock  monotonic, for what was asked within the last minute
    """

    def __init__(
        self, settings: Cache, store: Store, events: CacheEvents, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._store = store
        self._events = events
        self._clock = clock
        self._repeats = admission.Repeats()

    def configure(self, settings: Cache) -> None:
        """Go by other settings from the next request on; those of the store itself count at a restart."""
        self._settings = settings

    def key(self, request: GenerateRequest, identity: Identity) -> bytes:
        return answer_key(request, identity, epoch=self._store.epoch, isolate=self._settings.isolate)

    def recorder(self) -> Recorder:
        """Give what gathers an answer; made before the answer is begun, so that one of a cleared cache is known."""
        return Recorder(self._settings.max_answer_bytes, self._store.epoch)

    async def look_up(self, request: GenerateRequest, identities: Sequence[Identity], now_s: float) -> Look:
        """Find the answer that one of identities gave, the first one's first.

        identities  who may answer this request: this device's model, cloud models, or both, in order of preference
        A hit is counted. A miss or bypass is not: the semantic tier may still find something; tell it by missed.
        """
        keys = [self.key(request, identity) for identity in identities]
        if not keys or not admission.is_shareable(request, self._settings):
            return Look(key=keys[0] if keys else b"", state="bypass")
        wish = request.cache
        is_repeated = self._repeats.note(request.tenant, keys[0], self._clock())
        flight_key = blake2b(request.route.encode() + b"".join(keys), digest_size=32).digest()
        if wish.no_cache:
            return Look(key=keys[0], state="bypass", is_repeated=is_repeated)
        is_passed = False
        for key in keys:
            found = await self._fresh(key, request, now_s)
            if found is None:
                continue
            if not (wish.only_if_cached or found.is_corrected) and admission.regenerates(
                repeated=is_repeated, is_deterministic=found.is_deterministic, endpoint=found.endpoint
            ):
                is_passed = True
                continue
            meta = self._store.meta(key)
            self._store.hit(key, now_s)
            if meta is not None:
                self._events.cache_looked_up("hit-exact", saved_s=meta.saved_s, saved_j=meta.saved_j)
            return Look(key=key, state="hit-exact", stored=found, is_repeated=is_repeated)
        return Look(
            key=keys[0],
            state="bypass" if is_passed else "miss",
            flight_key=None if is_passed else flight_key,
            is_repeated=is_repeated,
        )

    def missed(self, state: CacheState) -> None:
        """Count a request that is computed: a miss or a bypass."""
        self._events.cache_looked_up(state)

    def admit(self, request: GenerateRequest, identity: Identity, answer: Recorder, now_s: float) -> Decision:
        """Store an answer that has ended, if it is one to be stored; the decision says whether, or why not."""
        last = answer.last
        decision = admission.decide(
            request,
            self._settings,
            text=answer.text(),
            finish_reason=None if last is None or last.usage is None else last.finish_reason,
            size_bytes=answer.size_bytes,
        )
        if decision == "store" and answer.epoch != self._store.epoch:
            decision = "cleared"
        if decision == "store":
            decision = self._put(request, identity, answer, now_s)
        self._events.cache_decided(decision)
        return decision

    async def stored(self, key: bytes, request: GenerateRequest, now_s: float) -> StoredAnswer | None:
        """Give the answer of a key that another tier found, if it may be given for this request; count nothing."""
        return await self._fresh(key, request, now_s)

    def given(self, key: bytes, now_s: float) -> None:
        """Count that the semantic tier gave the answer of a key."""
        if (meta := self._store.meta(key)) is not None:
            self._store.hit(key, now_s)
            self._events.cache_looked_up("hit-semantic", saved_s=meta.saved_s, saved_j=meta.saved_j)

    def peek(self, key: bytes) -> StoredAnswer | None:
        """Read a stored answer as it stands; waits for the disk if it is not in memory."""
        found = self._store.get_now(key)
        return None if found is None or found.meta.kind != stored.KIND else stored.decode(found.value)

    def partition(self, request: GenerateRequest, identity: Identity) -> bytes | None:
        return partition_key(request, identity, epoch=self._store.epoch, isolate=self._settings.isolate)

    async def all_stored(self) -> AsyncGenerator[tuple[bytes, StoredAnswer], None]:
        """Give each stored answer with its key; other work goes on in between."""
        for key, meta, _, _ in list(self._store.items()):
            found = await self._store.get(key) if meta.kind == stored.KIND else None
            if found is not None and (answer := stored.decode(found.value)) is not None:
                yield key, answer
            await asyncio.sleep(0)

    def verified(self, *, is_right: bool) -> None:
        """Count a comparison of a stored answer with a computed one."""
        self._events.cache_verified(is_right=is_right)

    def forget_other_files(self, identity: Identity) -> int:
        """Remove what this device's model answered from another file; give how many answers there were."""
        return self._store.remove_if(
            lambda meta: meta.model == identity.model and not meta.endpoint and meta.file_sha256 != identity.file_sha256
        )

    async def _fresh(self, key: bytes, request: GenerateRequest, now_s: float) -> StoredAnswer | None:
        meta = self._store.meta(key)
        if meta is None:
            return None
        if not admission.is_fresh(meta.created_at_s, meta.ttl_s, request.cache, now_s):
            age = admission.age_s(meta.created_at_s, now_s)
            if meta.ttl_s is not None and age is not None and age >= meta.ttl_s:
                self._store.remove([key])
            return None
        found = await self._store.get(key)
        # The description that was checked is signed only now that it came with its value.
        if found is None or not admission.is_fresh(found.meta.created_at_s, found.meta.ttl_s, request.cache, now_s):
            return None
        answer = stored.decode(found.value) if found.meta.kind == stored.KIND else None
        if answer is None:
            self._store.remove([key])
        return answer

    def _put(self, request: GenerateRequest, identity: Identity, answer: Recorder, now_s: float) -> Decision:
        key = self.key(request, identity)
        before = self._store.meta(key)
        if before is not None and before.ttl_s is None:
            return "corrected"
        last = answer.last
        assert last is not None
        assert last.usage is not None
        times = last.timings
        # A cloud's own waiting is part of what a hit saves; the wait for a place on this device is not.
        first_s = 0.0 if times is None else (times.ttft_s if identity.endpoint else times.prefill_s)
        compute_s = first_s + (0.0 if times is None else times.decode_s)
        asked = request.question
        partition = self.partition(request, identity)
        value = stored.encode(
            StoredAnswer(
                model=request.model,
                variant=identity.variant,
                endpoint=identity.endpoint,
                pieces=answer.pieces(),
                prompt_tokens=last.usage.prompt_tokens,
                completion_tokens=last.usage.completion_tokens,
                created_at_s=now_s,
                question=stored.shortened(asked),
                partition="" if partition is None else partition.hex(),
                compute_s=compute_s,
                cost=last.origin.cost if last.origin is not None else answer.origin.cost,
                is_deterministic=admission.is_deterministic(request),
                stopped_by=last.stopped_by,
            )
        )
        if len(value) > self._settings.max_answer_bytes:
            return "too large"
        meta = Meta(
            kind=stored.KIND,
            model=request.model,
            file_sha256=identity.file_sha256,
            endpoint=identity.endpoint,
            tenant=request.tenant,
            title=stored.title(asked),
            tags=request.cache.tags,
            created_at_s=now_s,
            ttl_s=admission.ttl_s(asked, self._settings),
            saved_s=compute_s,
            saved_j=0.0 if last.usage.energy is None else last.usage.energy.saved_j,
        )
        return "store" if self._store.put(key, meta, value) else "not taken"
