"""Requests that are wrong, and those that there is no room for."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class RequestError(EdgeRtError):
    """The caller asked for something that cannot be answered as asked."""

    code = "request_error"


@dataclass(eq=False)
class InvalidRequestError(RequestError):
    code = "invalid_request"
    param: str
    problem: str

    def __str__(self) -> str:
        return f"{self.param}: {self.problem}" if self.param else self.problem


@dataclass(eq=False)
class ContextLengthError(RequestError):
    code = "context_length_exceeded"
    prompt_tokens: int
    n_ctx: int

    def __str__(self) -> str:
        if self.prompt_tokens > self.n_ctx:
            return (
                f"the text has {self.prompt_tokens} tokens, this model's context is {self.n_ctx}. "
                "Shorten it; a language model's n_ctx can be raised"
            )
        return (
            f"the prompt has {self.prompt_tokens} tokens and leaves no room for an answer in this model's context "
            f"of {self.n_ctx}. Shorten the prompt or raise n_ctx"
        )


@dataclass(eq=False)
class UnsupportedFeatureError(RequestError):
    code = "unsupported"
    feature: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.feature} is not supported" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(eq=False)
class AuthError(RequestError):
    code = "unauthorized"

    def __str__(self) -> str:
        return "a valid API key is required: Authorization: Bearer KEY"


@dataclass(eq=False)
class SlowReaderError(RequestError):
    """The client did not read its answer; unread and limit count tokens and logprob rivals."""

    code = "slow_reader"
    unread: int
    limit: int

    def __str__(self) -> str:
        return f"the answer was stopped: {self.unread} unread tokens, the limit is {self.limit}. Read it faster"


class CapacityError(EdgeRtError):
    """The request is fine, the machine has no room for it now."""

    code = "capacity"
    retryable = True


@dataclass(eq=False)
class QueueFullError(CapacityError):
    code = "queue_full"
    waiting: int
    limit: int
    retry_after_s: float

    def __str__(self) -> str:
        return f"{self.waiting} requests wait, the limit is {self.limit}; try again in {self.retry_after_s:.0f} s"


@dataclass(eq=False)
class OverloadedError(CapacityError):
    """The daemon holds as much for its clients as it may; setting is the configuration key of the limit."""

    code = "overloaded"
    resource: str
    limit: int
    setting: str

    def __str__(self) -> str:
        return f"the limit of {self.limit} {self.resource} is reached ({self.setting}); try again in a moment"


@dataclass(eq=False)
class DeadlineError(CapacityError):
    code = "deadline_exceeded"
    deadline_s: float

    def __str__(self) -> str:
        return f"not answered within its deadline of {self.deadline_s:g} s; ask for less, or allow more time"


@dataclass(eq=False)
class DeadlineUnreachableError(CapacityError):
    """Refused before anything was computed: what is ahead of the request takes longer than it allows."""

    code = "deadline_unreachable"
    needed_s: float
    deadline_s: float

    @property
    def retry_after_s(self) -> float:
        return max(1.0, self.needed_s - self.deadline_s)

    def __str__(self) -> str:
        return (
            f"the first token would come in {self.needed_s:g} s at the earliest, the deadline allows "
            f"{self.deadline_s:g} s; allow more time, or try again when there is less to do"
        )


@dataclass(eq=False)
class CellsExhaustedError(CapacityError):
    code = "kv_cells_exhausted"
    needed_cells: int
    n_ctx: int
    n_beams: int = 1

    def __str__(self) -> str:
        what = f"{self.n_beams} beams" if self.n_beams > 1 else "this answer"
        return (
            f"{what} would need {self.needed_cells} cells of the KV, which has {self.n_ctx} and others in it that must "
            "stay; try again in a moment" + (", ask for fewer beams" if self.n_beams > 1 else "") + ", or raise n_ctx"
        )


@dataclass(eq=False)
class GrammarsFullError(CapacityError):
    """What one user's unfinished requests for forms hold in memory has reached its limit."""

    code = "grammars_full"
    needed_bytes: int
    used_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        needed, used, limit = (n / 2**20 for n in (self.needed_bytes, self.used_bytes, self.limit_bytes))
        return (
            f"this answer's grammar takes {needed:.1f} MiB beside {used:.1f} MiB of your other requests', "
            f"the limit is {limit:.0f} MiB; try again when they are answered, or simplify it"
        )


@dataclass(eq=False)
class ShuttingDownError(CapacityError):
    code = "shutting_down"

    def __str__(self) -> str:
        return "shutting down: no new request is taken"
