"""Several endpoints as one: in order of priority, with breakers, retries under a budget, and costs.

What goes wrong before the first text of an answer is made up for by the next endpoint, or by another try; what goes
wrong after it is the caller's to know.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from edge_rt.breaker import Ticket
from edge_rt.cloud import retry, wire
from edge_rt.cloud.credential import hide_memory
from edge_rt.cloud.endpoint import Endpoint, EndpointHealth, may_pass
from edge_rt.config import CloudEndpoint
from edge_rt.errors import (
    CircuitOpenError,
    CloudError,
    CloudRejectedError,
    ContextLengthError,
)
from edge_rt.types import Chunk, GenerateRequest, Origin, Usage

if TYPE_CHECKING:
    from edge_rt.cloud.address import Resolve

_log = logging.getLogger(__name__)


class CloudEvents(Protocol):
    """Where the figures go; edge_rt.telemetry.Telemetry is one."""

    def cloud_answered(self, endpoint: str, *, usage: Usage, cost: float, first_byte_s: float) -> None: ...

    def cloud_failed(self, endpoint: str, code: str) -> None: ...

    def cloud_retried(self, endpoint: str) -> None: ...

    def cloud_state(self, endpoint: str, state: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudHealth:
    """All endpoints, those asked first coming first."""

    endpoints: tuple[EndpointHealth, ...]

    @property
    def best(self) -> EndpointHealth | None:
        """The one that a request would be sent to."""
        return next((one for one in self.endpoints if one.state == "closed"), None)


class CloudModels:
    """Everything that [cloud.NAME] names. Belongs to one event loop, whose clock it uses.

    Raises ConfigError for a setting that cannot be used. With a key among the settings, `protect` is called once: it
    keeps keys out of core dumps, for the whole process.
    """

    def __init__(
        self,
        endpoints: Mapping[str, CloudEndpoint],
        events: CloudEvents,
        *,
        environ: Mapping[str, str] = os.environ,
        resolve: Resolve | None = None,
        chance: Callable[[], float] = random.random,
        protect: Callable[[], None] = hide_memory,
    ) -> None:
        # Imported where an endpoint is configured only: the HTTP library takes 5 MB and a third of a second.
        from edge_rt.cloud.client import Upstream

        self._events, self._chance, self._protect = events, chance, protect

        def make(name: str, settings: CloudEndpoint) -> Endpoint:
            return Endpoint(Upstream(name, settings, environ=environ, resolve=resolve))

        self._make = make
        self._endpoints = [make(name, settings) for name, settings in _in_order(endpoints)]
        self._leaving: list[Endpoint] = []  # not asked any more, by requests that came later
        self._probes: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[None]] = set()
        self._unfinished_cost = 0.0
        self._begin(0.0)

    def _begin(self, now_s: float) -> None:
        for endpoint in self._endpoints:
            self._events.cloud_state(endpoint.name, endpoint.state(now_s))
        if any(endpoint.upstream.key is not None for endpoint in self._endpoints):
            self._protect()

    def prepare(self, endpoints: Mapping[str, CloudEndpoint]) -> Callable[[], None]:
        """Make ready to ask other endpoints; what is given begins it, at once and without fail.

        Reads keys again. Raises ConfigError. Of an endpoint that has not changed, its key neither, all that is known is
        kept; a request that is on its way to one that leaves has its answer.
        """
        known = {endpoint.name: endpoint for endpoint in self._endpoints}
        wanted = [self._make(name, settings) for name, settings in _in_order(endpoints)]
        after = [old if (old := known.get(new.name)) is not None and old.is_same(new) else new for new in wanted]

        def commit() -> None:
            self._leaving += [endpoint for endpoint in self._endpoints if endpoint not in after]
            self._endpoints = after
            self._begin(asyncio.get_running_loop().time())
            self._see_off()

        return commit

    def _see_off(self) -> None:
        """Close the endpoints that have left once their last request has ended."""
        for endpoint in [endpoint for endpoint in self._leaving if not endpoint.n_open]:
            self._leaving.remove(endpoint)
            task = asyncio.get_running_loop().create_task(endpoint.upstream.close())
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)

    def health(self, now_s: float | None = None) -> CloudHealth:
        """Describe every endpoint. One whose pause is over is asked, in the background, whether it works again."""
        now_s = asyncio.get_running_loop().time() if now_s is None else now_s
        self._wake(now_s)
        return CloudHealth(endpoints=tuple(endpoint.health(now_s) for endpoint in self._endpoints))

    def take_unfinished_cost(self) -> float:
        """Give what probes and answers without an end have cost since the last call, the latter estimated.

        Their clients left, or they broke off; an endpoint charges for them all the same, without saying how much.
        """
        cost, self._unfinished_cost = self._unfinished_cost, 0.0
        return cost

    async def generate(
        self, request: GenerateRequest, *, due_at_s: float | None = None, reason: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator stops the work at the endpoint.

        due_at_s  of the first text, by the loop's clock
        reason    why it goes to the cloud, for its Origin: the first chunk has it, and the last once more with the cost

        Raises CloudError, with CircuitOpenError at once where no endpoint can be asked; DeadlineError;
        ContextLengthError where none is large enough; UnsupportedFeatureError for what only the device can do.
        """
        clock = asyncio.get_running_loop().time
        idempotency_key = str(uuid.uuid4())
        candidates = self._large_enough(wire.estimated_tokens(request))
        self._wake(clock())
        failed: dict[str, list[CloudError]] = {}
        errors: list[CloudError] = []
        while True:
            n_before = len(errors)
            for endpoint in candidates:
                if endpoint.state(clock()) != "closed":  # no request finds out whether it works again: probes do
                    continue
                so_far = failed.setdefault(endpoint.name, [])
                if so_far and not self._may_retry(endpoint, so_far):
                    continue
                has_begun = False
                try:
                    async with aclosing(
                        self._ask(endpoint, request, due_at_s, reason, idempotency_key, n_tries=len(so_far))
                    ) as answer:
                        async for chunk in answer:
                            has_begun = True
                            yield chunk
                    return
                except CloudError as exc:
                    if has_begun:
                        raise
                    so_far.append(exc)
                    errors.append(exc)
                    _log.info("%s", exc)
            pause_s = self._pause_s(failed, clock(), due_at_s) if len(errors) > n_before else None
            if pause_s is None:
                raise errors[-1] if errors else self._closed(candidates, clock())
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Hang up everywhere."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, *self._farewells, return_exceptions=True)
        for endpoint in (*self._endpoints, *self._leaving):
            await endpoint.upstream.close()

    def _large_enough(self, n_prompt_tokens: int) -> list[Endpoint]:
        fit = [e for e in self._endpoints if not 0 < e.upstream.settings.n_ctx <= n_prompt_tokens]
        if not fit and self._endpoints:
            largest = max(endpoint.upstream.settings.n_ctx for endpoint in self._endpoints)
            raise ContextLengthError(prompt_tokens=n_prompt_tokens, n_ctx=largest)
        return fit

    def _may_retry(self, endpoint: Endpoint, errors: list[CloudError]) -> bool:
        """Spend a retry if the endpoint's last failure is one that may pass, and there is one left."""
        if len(errors) >= retry.MAX_TRIES or not may_pass(errors[-1]) or not endpoint.budget.take():
            return False
        self._events.cloud_retried(endpoint.name)
        return True

    def _pause_s(self, failed: Mapping[str, list[CloudError]], now_s: float, due_at_s: float | None) -> float | None:
        """Say when to begin another round, None if there is no use."""
        pauses: list[float] = []
        for endpoint in self._endpoints:
            errors = failed.get(endpoint.name)
            if not errors or not may_pass(errors[-1]) or not endpoint.budget.has_any:
                continue
            asked_s = errors[-1].retry_after_s if isinstance(errors[-1], CloudRejectedError) else 0.0
            pause_s = retry.pause_s(len(errors), self._chance(), asked_s)
            if pause_s is not None and endpoint.state(now_s + pause_s) == "closed":
                pauses.append(pause_s)
        if not pauses or (due_at_s is not None and now_s + min(pauses) >= due_at_s):
            return None
        return min(pauses)

    def _closed(self, candidates: list[Endpoint], now_s: float) -> CircuitOpenError:
        soonest = min(candidates, key=lambda endpoint: endpoint.retry_after_s(now_s), default=None)
        if soonest is None:
            return CircuitOpenError(endpoint="(none)", retry_after_s=0.0)
        return CircuitOpenError(endpoint=soonest.name, retry_after_s=soonest.retry_after_s(now_s))

    async def _ask(
        self,
        endpoint: Endpoint,
        request: GenerateRequest,
        due_at_s: float | None,
        reason: str,
        idempotency_key: str,
        *,
        n_tries: int,
    ) -> AsyncGenerator[Chunk, None]:
        """Ask one endpoint once, and keep account of what comes of it."""
        clock = asyncio.get_running_loop().time
        began_s, slow_s = clock(), endpoint.upstream.settings.slow_s
        ticket = endpoint.begin(began_s)
        first_byte_s: float | None = None
        n_chunks, is_whole = 0, False
        origin = Origin(endpoint=endpoint.name, reason=reason)
        error: BaseException | None = None
        try:
            answer = endpoint.upstream.stream(request, due_at_s=due_at_s, idempotency_key=idempotency_key)
            async with aclosing(answer):
                async for chunk in answer:
                    said = chunk
                    n_chunks += 1
                    if first_byte_s is None:
                        first_byte_s = clock() - began_s
                        said = replace(chunk, origin=origin)
                    if chunk.usage is not None and chunk.timings is not None:
                        is_whole = True
                        cost = endpoint.cost(chunk.usage)
                        said = replace(chunk, origin=replace(origin, cost=cost))
                        endpoint.speed.answered(
                            first_byte_s=first_byte_s,
                            n_tokens=chunk.usage.completion_tokens,
                            decode_s=chunk.timings.decode_s,
                        )
                        self._events.cloud_answered(
                            endpoint.name, usage=chunk.usage, cost=cost, first_byte_s=first_byte_s
                        )
                    yield said
        except BaseException as exc:
            error = exc
            raise
        finally:
            if n_chunks and not is_whole:
                usage = Usage(
                    prompt_tokens=wire.estimated_tokens(request), completion_tokens=n_chunks, is_estimate=True
                )
                self._unfinished_cost += endpoint.cost(usage)
            waited_s = clock() - began_s if first_byte_s is None else first_byte_s
            if isinstance(error, CloudError):
                self._events.cloud_failed(endpoint.name, error.code)
            endpoint.end(
                ticket,
                error,
                clock(),
                has_begun=first_byte_s is not None,
                is_slow=waited_s > slow_s,
                is_retry=n_tries > 0,
            )
            self._events.cloud_state(endpoint.name, endpoint.state(clock()))
            self._see_off()

    def _wake(self, now_s: float) -> None:
        """Begin to probe the endpoints whose pause is over."""
        for endpoint in self._endpoints:
            if endpoint.state(now_s) == "half_open" and endpoint.breaker.allows(now_s):
                task = asyncio.get_running_loop().create_task(self._probe(endpoint, endpoint.begin(now_s)))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _probe(self, endpoint: Endpoint, ticket: Ticket) -> None:
        clock = asyncio.get_running_loop().time
        error: BaseException | None = None
        first_byte_s = 0.0
        try:
            first_byte_s, usage = await endpoint.upstream.probe()
            self._unfinished_cost += endpoint.cost(usage)
        except CloudError as exc:
            error = exc
        except BaseException as exc:
            error = exc
            raise
        finally:
            is_slow = first_byte_s > endpoint.upstream.settings.slow_s
            endpoint.end(ticket, error, clock(), has_begun=error is None, is_slow=is_slow)
            self._events.cloud_state(endpoint.name, endpoint.state(clock()))
        _log.info("cloud endpoint %s %s", endpoint.name, "answers again" if error is None else "still fails")


def _in_order(endpoints: Mapping[str, CloudEndpoint]) -> list[tuple[str, CloudEndpoint]]:
    return sorted(endpoints.items(), key=lambda item: (item[1].priority, item[0]))
