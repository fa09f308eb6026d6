"""The answer cache as edge_rt sees it: looks a request up, lets like ones share, and keeps what was said."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from edge_rt.cache.exact import ExactTier, Look
from edge_rt.cache.flights import Flights
from edge_rt.cache.key import Identity
from edge_rt.cache.stored import StoredAnswer, replay
from edge_rt.config import Cache
from edge_rt.types import CacheState, Chunk, GenerateRequest

# Who may answer a request, in order of preference: this device's model, cloud endpoints' models, or both.
Identities = Callable[[GenerateRequest], Sequence[Identity]]


def store_path(settings: Cache, store_root: Path) -> Path:
    """Give where the stored answers are: as the settings say, else beside the models."""
    return Path(settings.store_file).expanduser() if settings.store_file else store_root / "cache.sqlite"


class Meant(Protocol):
    """What is known by meaning of one request; see meaning.Meant."""

    @property
    def state(self) -> CacheState: ...
    @property
    def stored(self) -> StoredAnswer | None: ...
    @property
    def similarity(self) -> float | None: ...

    def computed(self, key: bytes, text: str) -> None:
        """Take in the answer that was computed and stored under key."""
        ...


class Meanings(Protocol):
    """Finds answers by what is asked; meaning.Meanings is one. It loads numpy, so it is not imported here."""

    async def look_up(self, request: GenerateRequest, identity: Identity, now_s: float) -> Meant | None: ...


class Lookup:
    """What the cache knows of one request; see answering.Lookup."""

    def __init__(
        self,
        tier: ExactTier,
        request: GenerateRequest,
        identities: Sequence[Identity],
        look: Look,
        meant: Meant | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._request = request
        self._identities = identities
        self._wall_clock = wall_clock
        self._meant = meant
        self.state: CacheState = look.state if meant is None else meant.state
        self.key = look.flight_key
        self.is_repeated = look.is_repeated
        self.stored: tuple[Chunk, ...] | None = None
        if look.stored is not None:
            self.stored = replay(look.stored, wall_clock())
        elif meant is not None and meant.stored is not None:
            self.stored = replay(meant.stored, wall_clock(), state="hit-semantic", similarity=meant.similarity)
        self._recorder = tier.recorder() if self.stored is None else None

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk of the answer as it passes; its last one stores it, if it is one to be stored."""
        recorder = self._recorder
        assert recorder is not None, "a stored answer is not computed"
        recorder.add(chunk)
        if chunk.finish_reason is None:
            return
        endpoint = recorder.origin.endpoint
        for identity in self._identities:
            if identity.endpoint == endpoint:
                decision = self._tier.admit(self._request, identity, recorder, self._wall_clock())
                if decision == "store" and self._meant is not None:
                    self._meant.computed(self._tier.key(self._request, identity), recorder.text())
                return


class Answers:
    """Belongs to one event loop."""

    def __init__(
        self,
        tier: ExactTier,
        identities: Identities,
        *,
        meanings: Meanings | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tier = tier
        self._meanings = meanings
        self._identities = identities
        self._wall_clock = wall_clock
        self._flights = Flights()
        self._files: dict[str, str] = {}  # of this device's models when they were asked last

    async def look_up(self, request: GenerateRequest) -> Lookup:
        """Tell what is known of a request. Only a stored value that is not in memory is waited for."""
        identities = self._identities(request)
        for identity in identities:
            if not identity.endpoint and self._files.get(identity.model) != identity.file_sha256:
                self._files[identity.model] = identity.file_sha256
                self._tier.forget_other_files(identity)
        look = await self._tier.look_up(request, identities, self._wall_clock())
        meant = None
        if look.state == "miss" and self._meanings is not None:
            meant = await self._meanings.look_up(request, identities[0], self._wall_clock())
        if look.stored is None and (meant is None or meant.stored is None):
            self._tier.missed(look.state if meant is None else meant.state)
        return Lookup(self._tier, request, identities, look, meant, self._wall_clock)

    def join(
        self, key: bytes, start: Callable[[], AsyncGenerator[Chunk, None]], *, deadline_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        """Share one generation with all requests of the key; see flights.Flights.stream."""
        return self._flights.stream(key, start, deadline_s=deadline_s)
