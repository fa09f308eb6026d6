"""Who answers a request: a stored answer, this device, or a cloud model; in this order, with second thoughts.

A request that another of the same key is being answered for joins it. A request that nothing is stored for is routed:
to the device, to the cloud, or to the device on probation. On probation the first tokens are held back until the
model's own confidence in them is known; if it is low the request goes to the cloud, as it came, and the client sees one
answer. Once a character has left, an answer is never continued by somebody else: what breaks then, fails.

If the cloud fails before its first text, the device answers and the answer says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Literal, Protocol

from edge_rt.cloud.hedge import hedged
from edge_rt.errors import (
    CloudError,
    DeadlineError,
    InvalidRequestError,
    MustStayError,
    NotCachedError,
    RequestError,
    ShuttingDownError,
)
from edge_rt.router.decide import Decision
from edge_rt.router.judging import read_verdict, verdict_request
from edge_rt.router.rules import REASONS
from edge_rt.types import CacheState, Choice, Chunk, Energy, GenerateRequest, Origin, TokenSignal

_log = logging.getLogger(__name__)

Generate = Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]

_MAX_SIGNALS: Final = 32


class Router(Protocol):
    """Decides where; router.chooser.Chooser is one."""

    def choose(self, request: GenerateRequest) -> Choice:
        """Raises MustStayError where the request asks for the cloud and may not leave."""
        ...

    def is_doubtful(
        self, request: GenerateRequest, text: str, signals: Sequence[TokenSignal], *, is_whole: bool
    ) -> bool:
        """Tell from an answer's beginning whether the cloud should take over."""
        ...

    def finished(self, request: GenerateRequest, origin: Origin, last: Chunk) -> None:
        """Take note of a finished answer: what it cost and how long it took."""
        ...

    def explain(self, request: GenerateRequest) -> Decision:
        """Tell what choose would decide, and why."""
        ...

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Take what a user says of an answer. Raises InvalidRequestError for one that is not remembered."""
        ...

    def repeated(self, request: GenerateRequest) -> None:
        """Take note that the user asked the same again at once; after choose."""
        ...

    def aborted(self, energy: Energy) -> None:
        """Count what this device spent on an answer without an end."""
        ...

    def wants_verdict(self, request: GenerateRequest, origin: Origin, answer: str) -> bool:
        """Tell whether the cloud shall judge this answer."""
        ...

    def judged(self, request: GenerateRequest, worth: float) -> None:
        """Take the cloud's verdict, 0..1."""
        ...


class Cloud(Protocol):
    """Asks cloud models; cloud.endpoints.CloudModels is one."""

    def generate(
        self, request: GenerateRequest, *, due_at_s: float | None = None, reason: str = ""
    ) -> AsyncGenerator[Chunk, None]: ...


class Lookup(Protocol):
    """What an answer cache knows of one request.

    state   miss, shadow or bypass until stored is asked
    stored  the answer's chunks, whose first one has the origin, or None
    is_repeated  the same user had an answer to this within the last minute
    key     under which like requests in flight share one answer; None: each has its own
    """

    @property
    def state(self) -> CacheState: ...
    @property
    def stored(self) -> tuple[Chunk, ...] | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def is_repeated(self) -> bool: ...

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of the computed answer; with the last one it is stored, if it is one to be stored."""
        ...


class AnswerCache(Protocol):
    """Knows answers; cache.answers.Answers is one."""

    async def look_up(self, request: GenerateRequest) -> Lookup: ...

    def join(
        self, key: bytes, start: Callable[[], AsyncGenerator[Chunk, None]], *, deadline_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        """Share one generation with all requests of the key."""
        ...


class Hedging(Protocol):
    """Decides when a second source is asked because the first is late; assembly.Hedging is one."""

    def after_s(self, where: Literal["local", "cloud"]) -> float | None:
        """Give how long the first source has; None: no second one is asked. Counts the request."""
        ...

    def take(self) -> bool:
        """Spend a second question, if one is left."""
        ...


class AnsweringEvents(Protocol):
    """Where the figures go; edge_rt.telemetry.Telemetry is one."""

    def routed(self, where: str, reason: str) -> None: ...

    def handed_over(self, reason: str) -> None: ...


class Answering:
    """Answers requests. Belongs to one event loop.

    local   the device's own models
    cache   None without one
    cloud, router   both or neither: without them every request stays
    hedging         None: a second source is asked only when the first has failed
    """

    def __init__(
        self,
        local: Generate,
        events: AnsweringEvents,
        *,
        cache: AnswerCache | None = None,
        cloud: Cloud | None = None,
        router: Router | None = None,
        hedging: Hedging | None = None,
        hold_back_tokens: int = 16,
    ) -> None:
        self._local, self._events = local, events
        self._cache, self._cloud, self._router, self._hedging = cache, cloud, router, hedging
        self._judging: set[asyncio.Task[None]] = set()
        self._n_in_cloud = 0  # answers that come from there
        self._drained: asyncio.Future[None] | None = None
        self._is_closing = self._is_cut = False
        self._hold_back_tokens = min(hold_back_tokens, _MAX_SIGNALS)

    def configure(self, *, hedging: Hedging | None, hold_back_tokens: int) -> None:
        """Answer otherwise from the next request on."""
        self._hedging, self._hold_back_tokens = hedging, min(hold_back_tokens, _MAX_SIGNALS)

    def aborted(self, energy: Energy) -> None:
        """Take note of what this device spent on an answer that broke off or was cancelled."""
        if self._router is not None:
            self._router.aborted(energy)

    def explain(self, request: GenerateRequest) -> Decision:
        """Tell where a request would be answered, and why."""
        if self._router is not None:
            return self._router.explain(request)
        where: Literal["local", "refused"] = "refused" if request.route == "cloud" else "local"
        return Decision(
            where=where,
            reason="no-cloud",
            may_go=False,
            lines=(f"{where}: {REASONS['no-cloud']}",),
            threshold=math.inf,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer; its first chunk says where it comes from.

        Raises what the models raise, NotCachedError, MustStayError, and CloudError for an answer that broke off.
        """
        if self._is_closing:
            raise ShuttingDownError
        if self._router is None and request.route == "cloud":
            raise MustStayError(rule="no [cloud.NAME] is configured")
        found = await self._cache.look_up(request) if self._cache is not None else None
        if found is not None and found.stored is not None:
            for chunk in found.stored:
                yield chunk
            return
        if request.cache.only_if_cached:
            raise NotCachedError
        state = None if found is None else found.state
        if found is None or found.key is None or self._cache is None:
            answer = self._answer(request, found, state)
        else:
            answer = self._cache.join(
                found.key, lambda: self._answer(request, found, state), deadline_s=request.deadline_s
            )
        async with aclosing(answer):
            async for chunk in answer:
                yield chunk

    async def _answer(
        self, request: GenerateRequest, found: Lookup | None, state: CacheState | None
    ) -> AsyncGenerator[Chunk, None]:
        """Compute an answer, say on its first chunk where it comes from, and store it."""
        first = True
        origin = Origin()
        is_repeated = found is not None and found.is_repeated
        async with aclosing(self._routed(request, is_repeated=is_repeated)) as answer:
            async for chunk in answer:
                said = replace(chunk, signals=()) if chunk.signals else chunk
                if said.origin is not None:
                    origin = replace(said.origin, cache=state)
                if first or said.origin is not None:
                    said = replace(said, origin=origin)
                    first = False
                if found is not None:
                    found.add(said)
                yield said

    async def _routed(self, request: GenerateRequest, *, is_repeated: bool) -> AsyncGenerator[Chunk, None]:
        if self._router is None:
            async with aclosing(self._on_device(request, "no-cloud")) as answer:
                async for chunk in answer:
                    yield chunk
            return
        choice = self._router.choose(request)
        self._events.routed(choice.where, choice.reason)
        if is_repeated:
            self._router.repeated(request)
        answer = self._chosen(request, choice)
        origin, texts = Origin(), []
        async with aclosing(answer):
            async for chunk in answer:
                origin = chunk.origin or origin
                texts.append(chunk.text)
                if chunk.finish_reason is not None:
                    self._router.finished(request, origin, chunk)
                    if self._router.wants_verdict(request, origin, "".join(texts)):
                        self._ask_verdict(request, "".join(texts))
                yield chunk

    def _ask_verdict(self, request: GenerateRequest, answer: str) -> None:
        """Let the cloud judge an answer of the device, in the background."""
        if (asked := verdict_request(request, answer)) is not None:
            task = asyncio.get_running_loop().create_task(self._judge(request, asked))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)

    async def _judge(self, request: GenerateRequest, asked: GenerateRequest) -> None:
        assert self._cloud is not None
        assert self._router is not None
        text, origin = "", Origin()
        try:
            async with aclosing(self._cloud.generate(asked, reason="verdict")) as answer:
                async for chunk in answer:
                    text, origin = text + chunk.text, chunk.origin or origin
                    if chunk.finish_reason is not None:
                        self._router.finished(asked, origin, chunk)
        except (CloudError, RequestError) as exc:
            _log.info("no verdict: %s", exc)
            return
        if (worth := read_verdict(text)) is not None:
            self._router.judged(request, worth)

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Learn from what a user says of an answer. Raises InvalidRequestError."""
        if self._router is None:
            raise InvalidRequestError(param="id", problem="nothing is learnt here: no [cloud.NAME] is configured")
        self._router.feedback(request_id, tenant, is_good=is_good)

    async def settle(self) -> None:
        """Wait for the verdicts that have been asked for."""
        await asyncio.gather(*self._judging)

    async def close(self, drain_s: float) -> None:
        """Take nothing new, let answers from the cloud go on for drain_s; those left then end as the daemon does."""
        self._is_closing = True
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        if self._n_in_cloud:
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._drained,), timeout=drain_s)
        self._is_cut = True

    def _chosen(self, request: GenerateRequest, choice: Choice) -> AsyncGenerator[Chunk, None]:
        if choice.on_probation and self._hold_back_tokens:
            return self._on_probation(request, choice.reason)
        sources: dict[str, Callable[[], AsyncGenerator[Chunk, None]]] = {
            "local": lambda: self._on_device(request, choice.reason),
            "cloud": lambda: self._in_cloud(request, choice.reason),
        }
        if self._hedging is None or not choice.may_go or request.route != "auto":
            return sources[choice.where]()
        after_s = self._hedging.after_s(choice.where)
        if after_s is None:
            return sources[choice.where]()
        late: dict[str, Callable[[], AsyncGenerator[Chunk, None]]] = {
            "local": lambda: self._in_cloud_alone(request),
            "cloud": lambda: self._on_device(request, "cloud-late"),
        }
        return hedged(sources[choice.where], late[choice.where], after_s=after_s, may=self._hedging.take)

    def _in_cloud_alone(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._from_cloud(request, self._due_at_s(request), "device-late")

    async def _from_cloud(
        self, request: GenerateRequest, due_at_s: float | None, reason: str
    ) -> AsyncGenerator[Chunk, None]:
        """Give the cloud's answer, which close waits for."""
        assert self._cloud is not None
        self._n_in_cloud += 1
        try:
            async with aclosing(self._cloud.generate(request, due_at_s=due_at_s, reason=reason)) as answer:
                async for chunk in answer:
                    yield chunk
        except CloudError as exc:
            if self._is_cut:  # this daemon hung up
                raise ShuttingDownError from exc
            raise
        finally:
            self._n_in_cloud -= 1
            if not self._n_in_cloud and self._drained is not None and not self._drained.done():
                self._drained.set_result(None)

    async def _on_device(self, request: GenerateRequest, reason: str) -> AsyncGenerator[Chunk, None]:
        first = True
        async with aclosing(self._local(request)) as answer:
            async for chunk in answer:
                yield replace(chunk, origin=Origin(reason=reason)) if first else chunk
                first = False

    async def _in_cloud(self, request: GenerateRequest, reason: str) -> AsyncGenerator[Chunk, None]:
        """Let the cloud answer; where it fails before its first text the device does."""
        assert self._cloud is not None
        due_at_s = self._due_at_s(request)
        has_begun = False
        try:
            async with aclosing(self._from_cloud(request, due_at_s, reason)) as answer:
                async for chunk in answer:
                    has_begun = True
                    yield chunk
            return
        except (CloudError, RequestError) as exc:  # a refusal too: the device may take what the cloud does not
            if has_begun:
                raise
            _log.info("answering here instead: %s", exc)
        self._events.handed_over("cloud-failed")
        if due_at_s is not None:
            request = replace(request, deadline_s=max(due_at_s - asyncio.get_running_loop().time(), 0.001))
        async with aclosing(self._on_device(request, "cloud-failed")) as answer:
            async for chunk in answer:
                yield chunk

    async def _on_probation(self, request: GenerateRequest, reason: str) -> AsyncGenerator[Chunk, None]:
        """Let the device begin, and hold its words back until its confidence in them is known.

        The device goes on while the cloud is asked, and is stopped by the cloud's first text; so where there is none,
        nothing is computed twice.
        """
        assert self._router is not None
        due_at_s = self._due_at_s(request)
        asked = replace(request, stream=True, max_signals=self._hold_back_tokens)
        held: list[Chunk] = []
        signals: list[TokenSignal] = []
        async with aclosing(self._on_device(asked, reason)) as answer:
            async for chunk in answer:
                held.append(chunk)
                signals += chunk.signals
                if len(signals) >= self._hold_back_tokens or chunk.finish_reason is not None:
                    break
            is_whole = bool(held) and held[-1].finish_reason is not None
            begun_text = "".join(chunk.text for chunk in held)
            if held and self._router.is_doubtful(request, begun_text, signals, is_whole=is_whole):
                self._events.handed_over("not-sure")
                begun = await self._begun_in_cloud(request, due_at_s)
                if begun is not None:
                    first, rest = begun
                    async with aclosing(rest):
                        await answer.aclose()
                        yield first
                        async for chunk in rest:
                            yield chunk
                    return
                held[0] = replace(held[0], origin=Origin(reason="cloud-failed"))
            for chunk in held:
                yield chunk
            async for chunk in answer:
                yield chunk

    async def _begun_in_cloud(
        self, request: GenerateRequest, due_at_s: float | None
    ) -> tuple[Chunk, AsyncGenerator[Chunk, None]] | None:
        """Ask the cloud for an answer that the device has begun; None if it fails before its first text."""
        assert self._cloud is not None
        answer = self._from_cloud(request, due_at_s, "not-sure")
        try:
            return await anext(answer), answer
        except BaseException as exc:
            await answer.aclose()
            if not isinstance(exc, CloudError | DeadlineError | RequestError | StopAsyncIteration):
                raise
            _log.info("the device keeps its answer, of which it was not sure: %s", exc)
            self._events.handed_over("cloud-failed")
            return None

    @staticmethod
    def _due_at_s(request: GenerateRequest) -> float | None:
        return None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s
