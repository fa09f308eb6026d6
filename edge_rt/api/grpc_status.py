"""Error class → gRPC status, beside the HTTP statuses of status.py. Knows the names only, so that it needs no grpc."""

from __future__ import annotations

from typing import Final

from edge_rt import errors

GRPC_STATUS: Final[dict[type[errors.EdgeRtError], str]] = {
    errors.EdgeRtError: "INTERNAL",
    errors.ConfigError: "INTERNAL",
    errors.ModelError: "INTERNAL",
    errors.ModelNotFoundError: "NOT_FOUND",
    errors.ModelNotPulledError: "NOT_FOUND",
    errors.ModelFormatError: "INTERNAL",
    errors.ModelChecksumError: "DATA_LOSS",
    errors.ModelTooLargeError: "RESOURCE_EXHAUSTED",
    errors.ContextBeyondTrainingError: "INTERNAL",
    errors.DraftVocabularyError: "INTERNAL",
    errors.PullError: "UNAVAILABLE",
    errors.OfflineError: "NOT_FOUND",
    errors.DiskFullError: "RESOURCE_EXHAUSTED",
    errors.StoreError: "INTERNAL",
    errors.RequestError: "INVALID_ARGUMENT",
    errors.InvalidRequestError: "INVALID_ARGUMENT",
    errors.ContextLengthError: "INVALID_ARGUMENT",
    errors.UnsupportedFeatureError: "UNIMPLEMENTED",
    errors.AuthError: "UNAUTHENTICATED",
    errors.SlowReaderError: "ABORTED",
    errors.CapacityError: "UNAVAILABLE",
    errors.QueueFullError: "RESOURCE_EXHAUSTED",
    errors.OverloadedError: "RESOURCE_EXHAUSTED",
    errors.DeadlineError: "DEADLINE_EXCEEDED",
    errors.DeadlineUnreachableError: "UNAVAILABLE",
    errors.CellsExhaustedError: "UNAVAILABLE",
    errors.GrammarsFullError: "UNAVAILABLE",
    errors.ShuttingDownError: "UNAVAILABLE",
    errors.BackendError: "INTERNAL",
    errors.BackendUnavailableError: "INTERNAL",
    errors.VendorSetupError: "INTERNAL",
    errors.BackendLoadError: "INTERNAL",
    errors.BackendStepError: "INTERNAL",
    errors.WorkerLostError: "UNAVAILABLE",
    errors.DeviceError: "INTERNAL",
    errors.DeviceLostError: "UNAVAILABLE",
    errors.DeviceSilentError: "DEADLINE_EXCEEDED",
    errors.DeviceRefusedError: "FAILED_PRECONDITION",
    errors.AcceleratorLostError: "UNAVAILABLE",
    errors.AcceleratorMemoryError: "RESOURCE_EXHAUSTED",
    errors.NotOnAcceleratorError: "INTERNAL",
    errors.VersionSkewError: "INTERNAL",
    errors.CacheError: "INTERNAL",
    errors.NotCachedError: "FAILED_PRECONDITION",
    errors.CacheEntryNotFoundError: "NOT_FOUND",
    errors.CacheStoreError: "INTERNAL",
    errors.CloudError: "UNAVAILABLE",
    errors.CloudUnreachableError: "UNAVAILABLE",
    errors.CloudTimeoutError: "DEADLINE_EXCEEDED",
    errors.CloudRejectedError: "UNAVAILABLE",
    errors.CloudAnswerError: "UNAVAILABLE",
    errors.CloudDeclinedError: "FAILED_PRECONDITION",
    errors.CircuitOpenError: "UNAVAILABLE",
    errors.MustStayError: "PERMISSION_DENIED",
    errors.DeviceNotFoundError: "INTERNAL",
    errors.DeviceMismatchError: "INTERNAL",
    errors.DeviceMemoryError: "RESOURCE_EXHAUSTED",
    errors.DeviceFaultError: "INTERNAL",
    errors.DeviceTimeoutError: "INTERNAL",
    errors.ServiceError: "INTERNAL",
    errors.NoSystemdError: "INTERNAL",
    errors.NotRootError: "INTERNAL",
    errors.InterpreterError: "INTERNAL",
    errors.UnitError: "INTERNAL",
    errors.PowerUnknownError: "INTERNAL",
    errors.DaemonUnreachableError: "UNAVAILABLE",
    errors.DaemonLostError: "UNAVAILABLE",
}


def grpc_status(error: BaseException) -> str:
    """Name the status of any exception; what edge_rt did not raise on purpose is INTERNAL."""
    if not isinstance(error, errors.EdgeRtError):
        return "INTERNAL"
    return GRPC_STATUS.get(type(error), GRPC_STATUS[errors.EdgeRtError])
