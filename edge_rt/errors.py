"""Every error edge_rt raises on purpose.

EdgeRtError(code, retryable)
├ ConfigError
├ ModelError
│ ├ ModelNotFoundError · ModelNotPulledError · ModelFormatError · ModelChecksumError · ModelTooLargeError
│ ├ PullError · OfflineError · DiskFullError · StoreError
├ RequestError
│ ├ InvalidRequestError · ContextLengthError · UnsupportedFeatureError · AuthError · SlowReaderError
├ CapacityError (retryable)
│ ├ QueueFullError · OverloadedError · DeadlineError · ShuttingDownError
├ BackendError
│ ├ BackendUnavailableError · BackendLoadError · BackendStepError · WorkerLostError
├ CacheError
│ ├ NotCachedError · CacheEntryNotFoundError · CacheStoreError
├ CloudError
│ ├ CloudUnreachableError · CloudTimeoutError · CloudRejectedError · CloudAnswerError · CloudDeclinedError ·
│   CircuitOpenError · MustStayError
├ PowerUnknownError
├ ServiceError
│ ├ NoSystemdError · NotRootError · InterpreterError · UnitError
└ DaemonUnreachableError · DaemonLostError

Fields first: a class holds the facts, the sentence is made from them, nobody parses text. The sentence says
what, value, limit and remedy. api/status.py alone knows HTTP, cli/ alone knows exit codes. An error crosses
the worker channel as (code, fields) through to_wire and from_wire.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar


@dataclass(eq=False)
class EdgeRtError(Exception):
    """Root of the tree; never raised itself."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def to_wire(self) -> tuple[str, dict[str, Any]]:
        return self.code, asdict(self)


@dataclass(eq=False)
class ConfigError(EdgeRtError):
    """A setting is unknown, malformed or out of range; origin names the file, variable or flag."""

    code = "config_error"
    key: str
    problem: str
    origin: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem} (from {self.origin})"


class ModelError(EdgeRtError):
    """Something about a model or its files."""

    code = "model_error"


@dataclass(eq=False)
class ModelNotFoundError(ModelError):
    code = "model_not_found"
    model: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = f"; known models: {', '.join(self.known)}" if self.known else ""
        return f"model {self.model!r} is not in the catalog{known}. `edge_rt models list` shows them all"


@dataclass(eq=False)
class ModelNotPulledError(ModelError):
    """In the catalog, but its file is not in the local store; the daemon never downloads on a request."""

    code = "model_not_pulled"
    model: str

    def __str__(self) -> str:
        return f"{self.model} is not in the local store. Fetch it with `edge_rt models pull {self.model}`"


@dataclass(eq=False)
class ModelFormatError(ModelError):
    """A model file or manifest breaks its format; field is the place in it."""

    code = "model_format"
    path: str
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.field}: {self.problem}"


@dataclass(eq=False)
class ModelChecksumError(ModelError):
    code = "model_checksum"
    path: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"{self.path}: sha256 is {self.actual}, the manifest says {self.expected}. "
            "Remove the model and pull it again; if it stays so, the manifest or its source is wrong"
        )


@dataclass(eq=False)
class ModelTooLargeError(ModelError):
    code = "model_too_large"
    model: str
    need_bytes: int
    have_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.model} needs {self.need_bytes / 2**20:.0f} MiB, {self.have_bytes / 2**20:.0f} MiB are available. "
            "Lower n_ctx, unload another model, or load anyway with --force"
        )


@dataclass(eq=False)
class PullError(ModelError):
    """A download failed; what came so far is kept and resumed by the next pull."""

    code = "pull_failed"
    retryable = True
    source: str
    problem: str

    def __str__(self) -> str:
        return f"cannot fetch {self.source}: {self.problem}"


@dataclass(eq=False)
class OfflineError(ModelError):
    code = "offline"
    model: str

    def __str__(self) -> str:
        return f"{self.model} is not in the local store and --offline forbids fetching it. Pull it while online"


@dataclass(eq=False)
class DiskFullError(ModelError):
    code = "disk_full"
    path: str
    need_bytes: int
    have_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path} has {self.have_bytes / 1e6:.1f} MB free, {self.need_bytes / 1e6:.1f} MB are needed. "
            "Free space or set catalog.store_dir to another disk"
        )


@dataclass(eq=False)
class StoreError(ModelError):
    """The store of model files cannot be changed by this user."""

    code = "store_error"
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {self.problem}; run it as the store's owner or set catalog.store_dir"


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
        return f"not answered within its deadline of {self.deadline_s:g} s"


@dataclass(eq=False)
class ShuttingDownError(CapacityError):
    code = "shutting_down"

    def __str__(self) -> str:
        return "shutting down: no new request is taken"


class BackendError(EdgeRtError):
    """An inference back end failed."""

    code = "backend_error"


@dataclass(eq=False)
class BackendUnavailableError(BackendError):
    """extra is the pip extra that would bring it, '' when none would."""

    code = "backend_unavailable"
    backend: str
    reason: str
    extra: str = ""

    def __str__(self) -> str:
        remedy = f"; install it with `pip install 'edge_rt[{self.extra}]'`" if self.extra else ""
        return f"back end {self.backend} is not available: {self.reason}{remedy}"


@dataclass(eq=False)
class BackendLoadError(BackendError):
    code = "backend_load"
    model: str
    reason: str

    def __str__(self) -> str:
        return f"cannot load {self.model}: {self.reason}"


@dataclass(eq=False)
class BackendStepError(BackendError):
    code = "backend_step"
    reason: str

    def __str__(self) -> str:
        return f"a step failed: {self.reason}"


@dataclass(eq=False)
class WorkerLostError(BackendError):
    code = "worker_lost"
    retryable = True
    model: str
    reason: str

    def __str__(self) -> str:
        return f"the worker process of {self.model} ended ({self.reason}); it is being restarted, try again"


class CacheError(EdgeRtError):
    """Something about the answer cache."""

    code = "cache_error"


@dataclass(eq=False)
class NotCachedError(CacheError):
    """Cache-Control: only-if-cached, and it is not."""

    code = "not_cached"

    def __str__(self) -> str:
        return "no stored answer fits this request, and only-if-cached forbids computing one"


@dataclass(eq=False)
class CacheEntryNotFoundError(CacheError):
    """No stored entry has such a key, or it is somebody else's."""

    code = "cache_entry_not_found"
    key: str

    def __str__(self) -> str:
        return f"no stored answer has a key that begins with {self.key}. `edge_rt cache show` lists them"


@dataclass(eq=False)
class CacheStoreError(CacheError):
    """The file of stored answers cannot be used."""

    code = "cache_store"
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. Delete the file to begin anew, or set cache.store_file"


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
        return f"cloud endpoint {self.endpoint} cannot be reached: {self.reason}"


@dataclass(eq=False)
class CloudTimeoutError(CloudError):
    """phase is what took too long: connect, first byte, next byte or whole answer."""

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


class ServiceError(EdgeRtError):
    """edge_rt cannot be made a service of systemd."""

    code = "service_error"


@dataclass(eq=False)
class NoSystemdError(ServiceError):
    code = "no_systemd"
    reason: str

    def __str__(self) -> str:
        return (
            f"there is no systemd to install into: {self.reason}. `edge_rt serve` runs under any supervisor; "
            "--root DIR writes the units into a tree that will be a system's root"
        )


@dataclass(eq=False)
class NotRootError(ServiceError):
    code = "not_root"
    what: str
    command: str

    def __str__(self) -> str:
        return f"{self.what} takes root: `sudo {self.command}`; --dry-run shows what it would do"


@dataclass(eq=False)
class InterpreterError(ServiceError):
    """The service's user could not run this Python; problems are sentences."""

    code = "interpreter"
    python: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"a service could not run {self.python}: {'; '.join(self.problems)}. Install edge_rt where all may "
            "read it, with a Python that all may read: `/usr/bin/python3 -m venv /opt/edge_rt`, install it there with "
            "`/opt/edge_rt/bin/pip`, then `/opt/edge_rt/bin/edge_rt install`"
        )


@dataclass(eq=False)
class UnitError(ServiceError):
    """A program that installing needs has failed."""

    code = "unit_failed"
    command: str
    status: int
    said: str
    remedy: str = "`edge_rt doctor` looks further"

    def __str__(self) -> str:
        return f"`{self.command}` ended with {self.status}: {self.said or 'it said nothing'}; {self.remedy}"


@dataclass(eq=False)
class PowerUnknownError(EdgeRtError):
    """A power that is needed cannot be told; reason is the meter's."""

    code = "power_unknown"
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}. Type in what an instrument shows, with --idle-w and --active-w"


@dataclass(eq=False)
class DaemonUnreachableError(EdgeRtError):
    """A client found nobody to talk to, or may not."""

    code = "daemon_unreachable"
    retryable = True
    address: str
    reason: str
    remedy: str = "start one with `edge_rt serve`"

    def __str__(self) -> str:
        return f"no daemon answers on {self.address}: {self.reason}; {self.remedy}"


@dataclass(eq=False)
class DaemonLostError(EdgeRtError):
    """A client's daemon went away in the middle of an answer."""

    code = "daemon_lost"
    retryable = True
    address: str
    reason: str

    def __str__(self) -> str:
        return f"the daemon on {self.address} was lost before the answer was whole: {self.reason}; see its log"


def subclasses(root: type[EdgeRtError] = EdgeRtError) -> list[type[EdgeRtError]]:
    """List the tree below root, root first."""
    return [root, *(c for child in root.__subclasses__() for c in subclasses(child))]


def from_wire(code: str, values: dict[str, Any]) -> EdgeRtError:
    """Rebuild an error that to_wire took apart in another process.

    An unknown code or field set becomes BackendStepError, so that a worker of another version cannot hide a failure.
    """
    for cls in subclasses():
        if cls.code == code and {f.name for f in fields(cls)} == set(values):
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return BackendStepError(reason=f"{code}: {values}")
