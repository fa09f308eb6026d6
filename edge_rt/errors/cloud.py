"""Endpoints in the cloud, and what must not go there."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class CloudError(EdgeRtError):
    """A cloud endpoint did not answer as it should; endpoint is its name in the configuration."""

    code = "cloud_error"
    retryable = True


@dataclass(eq=False)
class CloudUnreachableError(CloudError):
    code = "cloud_unreachable"
    endpoint: str
    reason: str

    def __str__(self) -> str:
        return (
            f"cloud endpoint {self.endpoint} cannot be reached: {self.reason}; check the network and "
            f"cloud.{self.endpoint}.base_url"
        )


@dataclass(eq=False)
class CloudTimeoutError(CloudError):
    """phase is what took too long: connection, first byte, next byte or whole answer."""

    code = "cloud_timeout"
    endpoint: str
    phase: str
    timeout_s: float

    def __str__(self) -> str:
        return f"cloud endpoint {self.endpoint}: no {self.phase} within {self.timeout_s:g} s (cloud.{self.endpoint})"


@dataclass(eq=False)
class CloudRejectedError(CloudError):
    """The endpoint answered with an HTTP error; its message is shown shortened and holds no key.

    retry_after_s  the pause it asked for, 0 if it asked for none
    """

    code = "cloud_rejected"
    endpoint: str
    status: int
    message: str
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        pause = f" (try again in {self.retry_after_s:.0f} s)" if self.retry_after_s else ""
        return f"cloud endpoint {self.endpoint} answered HTTP {self.status}: {self.message}{pause}"


@dataclass(eq=False)
class CloudAnswerError(CloudError):
    """The endpoint's answer breaks its protocol, or broke off after a part of it had left."""

    code = "cloud_answer"
    endpoint: str
    problem: str

    def __str__(self) -> str:
        return f"cloud endpoint {self.endpoint}: {self.problem}"


@dataclass(eq=False)
class CloudDeclinedError(CloudError):
    """The endpoint works and does not answer this request: a filter cut it off, or it ended as nobody had asked."""

    code = "cloud_declined"
    retryable = False
    endpoint: str
    problem: str

    def __str__(self) -> str:
        return f"cloud endpoint {self.endpoint}: {self.problem}"


@dataclass(eq=False)
class CircuitOpenError(CloudError):
    """Too many failures lately: the endpoint is left alone for a while."""

    code = "circuit_open"
    endpoint: str
    retry_after_s: float

    def __str__(self) -> str:
        return f"cloud endpoint {self.endpoint} failed lately and is left alone for {self.retry_after_s:.0f} s more"


@dataclass(eq=False)
class MustStayError(CloudError):
    """The request was to go to the cloud, and a rule keeps it on the device."""

    code = "must_stay"
    retryable = False
    rule: str

    def __str__(self) -> str:
        return f"the request may not leave this device: {self.rule}. Ask with route auto or local"
