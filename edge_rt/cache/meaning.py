"""The semantic tier in the daemon: found answers come from the exact tier's store, computed ones verify and extend it.

Loads numpy; imported only where cache.semantic is not "off".
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import msgspec

from edge_rt.cache.exact import ExactTier
from edge_rt.cache.key import Identity
from edge_rt.cache.semantic import Match, SemanticTier
from edge_rt.cache.stored import StoredAnswer
from edge_rt.errors import CacheStoreError
from edge_rt.regular import open_regular
from edge_rt.types import CacheState, GenerateRequest

_log = logging.getLogger("edge_rt.cache")

_MAX_STATE_BYTES: Final = 32 * 2**20


class Meant:
    """What is known by meaning of one request.

    state   hit-semantic, shadow where a stored answer would have been given or is to be verified, or miss
    stored  the answer to give, None unless it is a hit
    """

    def __init__(
        self,
        meanings: Meanings,
        partition: bytes,
        asked: str,
        *,
        state: CacheState,
        stored: StoredAnswer | None = None,
        similarity: float | None = None,
        matches: tuple[Match, ...] = (),
    ) -> None:
        self.state, self.stored, self.similarity = state, stored, similarity
        self._meanings, self._partition, self._asked, self._matches = meanings, partition, asked, matches

    def computed(self, key: bytes, text: str) -> None:
        """Take in the answer that was computed and stored under key."""
        self._meanings.learn(self._matches, text)
        self._meanings.semantic.admit(self._partition, self._asked, key, text)


class Meanings:
    """Belongs to one event loop. path: where what was verified outlives a restart."""

    def __init__(self, tier: ExactTier, semantic: SemanticTier, path: Path) -> None:
        self.semantic = semantic
        self._tier, self._path = tier, path

    async def look_up(self, request: GenerateRequest, identity: Identity, now_s: float) -> Meant | None:
        """Find an answer to a question that means the same; None for a request that no meaning can be compared of.

        identity  who would answer, by preference: its partition is searched
        """
        partition = self._tier.partition(request, identity)
        if partition is None:
            return None
        asked = request.question
        found = self.semantic.lookup(partition, asked)
        if found.outcome == "hit" and found.match is not None:
            stored = await self._tier.stored(found.match.answer_ref, request, now_s)
            if stored is not None:
                self._tier.given(found.match.answer_ref, now_s)
                similarity = found.match.similarity
                return Meant(self, partition, asked, state="hit-semantic", stored=stored, similarity=similarity)
            self.semantic.forget(found.match.answer_ref)
        state: CacheState = "shadow" if found.outcome in ("verify", "shadow") else "miss"
        return Meant(self, partition, asked, state=state, matches=found.matches)

    def learn(self, matches: tuple[Match, ...], text: str) -> None:
        """Compare matches' stored answers with one that was computed."""
        for match in matches:
            stored = self._tier.peek(match.answer_ref)
            if stored is None:
                self.semantic.forget(match.answer_ref)
                continue
            is_right = self.semantic.same_answer(stored.text, text)
            self.semantic.verified(match, is_right)
            self._tier.verified(is_right=is_right)

    async def rebuild(self) -> None:
        """Learn the stored questions again, after a start, and what was verified of them."""
        async for key, answer in self._tier.all_stored():
            if answer.partition:
                self.semantic.admit(bytes.fromhex(answer.partition), answer.question, key, answer.text)
        try:
            with open_regular(self._path) as file:
                state = msgspec.json.decode(file.read(_MAX_STATE_BYTES), type=dict[str, Any])
            self.semantic.restore(state)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, CacheStoreError) as exc:
            _log.warning("%s cannot be used, so stored answers are verified anew: %s", self._path, exc)

    def save(self) -> None:
        """Keep what was verified for the next start."""
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(self.semantic.state()))
            beside.replace(self._path)
        except OSError as exc:
            _log.warning("%s cannot be written, so stored answers will be verified anew: %s", self._path, exc.strerror)
