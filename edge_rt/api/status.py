"""The only place that knows HTTP statuses: error class → status, OpenAI error body and headers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import msgspec

from edge_rt import errors

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one error class looks on the wire.

    kind            OpenAI's error.type
    param           the error's field that names the request's parameter, or =NAME for a fixed one
    retry_after_s   sent as Retry-After unless the error has a figure of its own; None sends none
    """

    status: int
    kind: str
    param: str = ""
    retry_after_s: float | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_BUSY = "unavailable_error"

STATUS: Final[dict[type[errors.EdgeRtError], Mapping]] = {
    errors.EdgeRtError: Mapping(500, _SERVER),
    errors.ConfigError: Mapping(500, _SERVER),
    errors.ModelError: Mapping(500, _SERVER),
    errors.ModelNotFoundError: Mapping(404, _INVALID, param="=model"),
    errors.ModelNotPulledError: Mapping(404, _INVALID, param="=model"),
    errors.ModelFormatError: Mapping(500, _SERVER, param="=model"),
    errors.ModelChecksumError: Mapping(500, _SERVER, param="=model"),
    errors.ModelTooLargeError: Mapping(503, _BUSY, param="=model", retry_after_s=30.0),
    errors.ContextBeyondTrainingError: Mapping(500, _SERVER, param="=model"),
    errors.DraftVocabularyError: Mapping(500, _SERVER, param="=model"),
    errors.PullError: Mapping(502, _SERVER, param="=model"),
    errors.OfflineError: Mapping(404, _INVALID, param="=model"),
    errors.DiskFullError: Mapping(507, _SERVER),
    errors.StoreError: Mapping(500, _SERVER),
    errors.RequestError: Mapping(400, _INVALID),
    errors.InvalidRequestError: Mapping(400, _INVALID, param="param"),
    errors.ContextLengthError: Mapping(400, _INVALID, param="=messages"),
    errors.UnsupportedFeatureError: Mapping(400, _INVALID, param="feature"),
    errors.AuthError: Mapping(401, "authentication_error"),
    errors.SlowReaderError: Mapping(400, _INVALID),
    errors.CapacityError: Mapping(503, _BUSY, retry_after_s=1.0),
    errors.QueueFullError: Mapping(429, "rate_limit_error", retry_after_s=1.0),
    errors.OverloadedError: Mapping(503, _BUSY, retry_after_s=1.0),
    errors.DeadlineError: Mapping(503, _BUSY, retry_after_s=1.0),
    errors.DeadlineUnreachableError: Mapping(503, _BUSY, retry_after_s=1.0),
    errors.CellsExhaustedError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.GrammarsFullError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.ShuttingDownError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.BackendError: Mapping(500, _SERVER),
    errors.BackendUnavailableError: Mapping(500, _SERVER),
    errors.VendorSetupError: Mapping(500, _SERVER),
    errors.BackendLoadError: Mapping(500, _SERVER, param="=model"),
    errors.BackendStepError: Mapping(500, _SERVER),
    errors.WorkerLostError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.AcceleratorLostError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.AcceleratorMemoryError: Mapping(503, _BUSY, param="=model", retry_after_s=30.0),
    errors.NotOnAcceleratorError: Mapping(500, _SERVER, param="=model"),
    errors.VersionSkewError: Mapping(500, _SERVER, param="=model"),
    errors.CacheError: Mapping(500, _SERVER),
    errors.NotCachedError: Mapping(504, _SERVER),
    errors.CacheEntryNotFoundError: Mapping(404, _INVALID, param="=key"),
    errors.CacheStoreError: Mapping(500, _SERVER),
    errors.CloudError: Mapping(502, _SERVER),
    errors.CloudUnreachableError: Mapping(502, _SERVER, retry_after_s=2.0),
    errors.CloudTimeoutError: Mapping(504, _SERVER, retry_after_s=2.0),
    errors.CloudRejectedError: Mapping(502, _SERVER),
    errors.CloudAnswerError: Mapping(502, _SERVER),
    errors.CloudDeclinedError: Mapping(502, _SERVER),
    errors.CircuitOpenError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.MustStayError: Mapping(403, _INVALID, param="=route"),
    errors.DeviceError: Mapping(500, _SERVER),
    errors.DeviceLostError: Mapping(503, _BUSY, retry_after_s=2.0),
    errors.DeviceSilentError: Mapping(504, _SERVER, retry_after_s=2.0),
    errors.DeviceRefusedError: Mapping(502, _SERVER),
    errors.DeviceNotFoundError: Mapping(500, _SERVER),
    errors.DeviceMismatchError: Mapping(500, _SERVER),
    errors.DeviceMemoryError: Mapping(503, _BUSY, retry_after_s=30.0),
    errors.DeviceFaultError: Mapping(500, _SERVER),
    errors.DeviceTimeoutError: Mapping(500, _SERVER),
    errors.PowerUnknownError: Mapping(500, _SERVER),
    errors.ServiceError: Mapping(500, _SERVER),
    errors.NoSystemdError: Mapping(500, _SERVER),
    errors.NotRootError: Mapping(500, _SERVER),
    errors.InterpreterError: Mapping(500, _SERVER),
    errors.UnitError: Mapping(500, _SERVER),
    errors.DaemonUnreachableError: Mapping(503, _BUSY, retry_after_s=1.0),
    errors.DaemonLostError: Mapping(503, _BUSY, retry_after_s=1.0),
}


class HttpError(Exception):
    """Something wrong with the HTTP itself: no such route, a body too large or too slow."""

    _CODES: Final = {
        404: "not_found",
        405: "method_not_allowed",
        408: "request_timeout",
        413: "request_too_large",
        415: "unsupported_media_type",
        501: "not_implemented",
    }

    def __init__(self, status: int, message: str, *, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = self._CODES[status]
        self.headers = headers or []


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error ready to be sent; body is OpenAI's {"error": …}, both in answers and in streams."""

    status: int
    code: str
    body: bytes
    headers: Headers
    message: str
    details: dict[str, Any]


def open_inference_body(answer: ErrorReply) -> bytes:
    """Write an error as the Open Inference Protocol wants it; code and details let a client rebuild the error."""
    body: dict[str, Any] = {"error": answer.message, "code": answer.code}
    if answer.details:
        body["details"] = answer.details
    return msgspec.json.encode(body)


def reply(error: BaseException) -> ErrorReply:
    """Turn any exception into its answer. What edge_rt did not raise on purpose shows nothing of itself."""
    if isinstance(error, HttpError):
        return _reply(error.status, _INVALID, error.code, str(error), None, {}, error.headers)
    if not isinstance(error, errors.EdgeRtError):
        return _reply(500, _SERVER, "internal_error", "internal error; the daemon's log has the details", None, {}, [])
    entry = STATUS.get(type(error), STATUS[errors.EdgeRtError])
    if entry.param.startswith("="):
        param: str | None = entry.param[1:]
    else:
        param = getattr(error, entry.param) or None if entry.param else None
    headers: Headers = []
    if entry.retry_after_s is not None:
        retry_after_s = getattr(error, "retry_after_s", entry.retry_after_s)
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
    if entry.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return _reply(entry.status, entry.kind, error.code, str(error), param, asdict(error), headers)


def _reply(
    status: int, kind: str, code: str, message: str, param: str | None, details: dict[str, Any], headers: Headers
) -> ErrorReply:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if details:
        error["details"] = details  # the error's fields, from which the client rebuilds it
    body = msgspec.json.encode({"error": error})
    return ErrorReply(status, code, body, headers, message, details)


def rebuild(status: int, body: bytes) -> errors.EdgeRtError:
    """Turn an error body back into the error it was made from.

    A body of another server, or an HTTP error without fields, becomes InvalidRequestError (4xx) or BackendError.
    """
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
        error = found.error
        if isinstance(error, str):  # the Open Inference Protocol's
            error = _Error(message=error, code=found.code, details=found.details)
    except msgspec.DecodeError:
        error = _Error(message=f"HTTP {status}: {body[:200].decode(errors='replace')}")
    for cls in errors.subclasses():
        concrete = "__str__" in vars(cls)
        if concrete and cls.code == error.code and {f.name for f in fields(cls)} == set(error.details):
            return errors.from_wire(error.code, error.details)
    if 400 <= status < 500:
        return errors.InvalidRequestError(param="", problem=error.message)
    return errors.BackendStepError(reason=error.message)


class _Error(msgspec.Struct):
    message: str
    code: str | None = None
    details: dict[str, Any] = {}


class _ErrorBody(msgspec.Struct):
    error: _Error | str
    code: str | None = None
    details: dict[str, Any] = {}
