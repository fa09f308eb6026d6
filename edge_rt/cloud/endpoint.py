"""One endpoint as requests find it: its breaker, its retries, its speed, and what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from edge_rt.breaker import Breaker, Ticket
from edge_rt.cloud import retry
from edge_rt.cloud.speed import Speed
from edge_rt.errors import CloudAnswerError, CloudDeclinedError, CloudError, CloudRejectedError, CloudTimeoutError
from edge_rt.types import Usage

if TYPE_CHECKING:
    from edge_rt.cloud.client import Upstream

State = Literal["closed", "half_open", "open", "resting"]
_BROKEN_STATUS: Final = frozenset({401, 403, 404, 405, 407})  # no request will fare better until somebody mends it


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """One endpoint as it is now.

    state          closed: it works; open and half_open: it failed lately; resting: it asked for a pause
    retry_after_s  until a request may be sent, 0 when one may
    first_byte_*   quantiles of the last answers; None before the first
    """

    name: str
    state: State
    retry_after_s: float
    first_byte_p50_s: float | None
    first_byte_p95_s: float | None
    tokens_per_s: float | None
    n_ctx: int
    price_in: float
    price_out: float
    n_requests: int
    n_failures: int

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Give what an answer costs, in the currency of the prices."""
        return _cost(self.price_in, self.price_out, prompt_tokens, completion_tokens)


class Endpoint:
    """An upstream and what is known of it."""

    def __init__(self, upstream: Upstream) -> None:
        settings = upstream.settings
        self.upstream, self.name = upstream, upstream.name
        self.breaker = Breaker(max_failures=settings.max_failures, retry_s=settings.retry_s)
        self.budget, self.speed = retry.RetryBudget(settings.retry_share), Speed()
        self._rest_until_s = 0.0
        self._n_requests = self._n_failures = 0
        self.n_open = 0  # tries and probes that have begun and not ended

    def is_same(self, other: Endpoint) -> bool:
        """Say whether another one is asked the same way, with the same key."""
        mine, its = self.upstream.key, other.upstream.key
        return self.upstream.settings == other.upstream.settings and (
            mine is its or (mine is not None and mine.is_same(its))
        )

    def state(self, now_s: float) -> State:
        state = self.breaker.state(now_s)
        return "resting" if state == "closed" and now_s < self._rest_until_s else state

    def retry_after_s(self, now_s: float) -> float:
        return max((self.breaker.retry_at_s or now_s) - now_s, self._rest_until_s - now_s, 0.0)

    def begin(self, now_s: float) -> Ticket:
        self._n_requests += 1
        self.n_open += 1
        self.budget.request()
        return self.breaker.begin(now_s)

    def end(
        self,
        ticket: Ticket,
        error: BaseException | None,
        now_s: float,
        *,
        has_begun: bool,
        is_slow: bool,
        is_retry: bool = False,
    ) -> None:
        """Judge the endpoint by the end of one try."""
        self.n_open -= 1
        asked_s = error.retry_after_s if isinstance(error, CloudRejectedError) else 0.0
        if asked_s > 0:
            self._rest_until_s = now_s + min(asked_s, retry.MAX_REST_S)
        if is_slow or _is_its_fault(error):
            self._n_failures += 1
            if is_retry:  # one request counts once, or a single bad one would close the endpoint to everybody
                self.breaker.abandoned(ticket)
            else:
                self.breaker.failed(ticket, now_s)
        elif (
            has_begun
            or isinstance(error, CloudDeclinedError)
            or (isinstance(error, CloudRejectedError) and not asked_s)
        ):
            self.breaker.succeeded(ticket)  # it answers, if only that it does not like the request
        else:
            self.breaker.abandoned(ticket)

    def cost(self, usage: Usage) -> float:
        settings = self.upstream.settings
        return _cost(settings.price_in, settings.price_out, usage.prompt_tokens, usage.completion_tokens)

    def health(self, now_s: float) -> EndpointHealth:
        settings, first_byte = self.upstream.settings, self.speed.first_byte
        return EndpointHealth(
            name=self.name,
            state=self.state(now_s),
            retry_after_s=self.retry_after_s(now_s),
            first_byte_p50_s=first_byte.quantile(0.5),
            first_byte_p95_s=first_byte.quantile(0.95),
            tokens_per_s=self.speed.tokens.quantile(0.5),
            n_ctx=settings.n_ctx,
            price_in=settings.price_in,
            price_out=settings.price_out,
            n_requests=self._n_requests,
            n_failures=self._n_failures,
        )


def _cost(price_in: float, price_out: float, prompt_tokens: int, completion_tokens: int) -> float:
    return (prompt_tokens * price_in + completion_tokens * price_out) / 1e6  # prices are of a million tokens


def _is_its_fault(error: BaseException | None) -> bool:
    """Say whether an error speaks against the endpoint, and not against the request."""
    if isinstance(error, CloudRejectedError):
        if error.status in retry.RETRYABLE_STATUS:
            return error.retry_after_s == 0 or error.status != 429  # who names a time is busy, not broken
        return error.status in _BROKEN_STATUS or error.status >= 500 or error.status < 400
    return isinstance(error, CloudError) and not isinstance(error, CloudDeclinedError)


def may_pass(error: CloudError) -> bool:
    """Say whether the same request may fare better a moment later."""
    if isinstance(error, CloudRejectedError):
        return error.status in retry.RETRYABLE_STATUS
    if isinstance(error, CloudTimeoutError):
        return error.phase == "connection"  # who has waited for a first byte in vain does not wait again
    return isinstance(error, CloudAnswerError) or error.code == "cloud_unreachable"
