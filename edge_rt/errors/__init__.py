"""Every error edge_rt raises on purpose.

EdgeRtError(code, retryable)
├ ConfigError
├ ModelError
│ ├ ModelNotFoundError · ModelNotPulledError · ModelFormatError · ModelChecksumError · ModelTooLargeError ·
│ │   ContextBeyondTrainingError
│ │   DraftVocabularyError
│ ├ PullError · OfflineError · DiskFullError · StoreError
├ RequestError
│ ├ InvalidRequestError · ContextLengthError · UnsupportedFeatureError · AuthError · SlowReaderError
├ CapacityError (retryable)
│ ├ QueueFullError · OverloadedError · DeadlineError · DeadlineUnreachableError · CellsExhaustedError ·
│   GrammarsFullError · ShuttingDownError
├ BackendError
│ ├ BackendUnavailableError · BackendLoadError · BackendStepError · WorkerLostError · VendorSetupError
│ ├ AcceleratorLostError · AcceleratorMemoryError · NotOnAcceleratorError · VersionSkewError
├ CacheError
│ ├ NotCachedError · CacheEntryNotFoundError · CacheStoreError
├ CloudError
│ ├ CloudUnreachableError · CloudTimeoutError · CloudRejectedError · CloudAnswerError · CloudDeclinedError ·
│   CircuitOpenError · MustStayError
├ DeviceError
│ ├ DeviceLostError · DeviceSilentError · DeviceRefusedError · DeviceNotFoundError · DeviceMismatchError ·
│   DeviceMemoryError · DeviceFaultError · DeviceTimeoutError
├ PowerUnknownError
├ ServiceError
│ ├ NoSystemdError · NotRootError · InterpreterError · UnitError
└ DaemonUnreachableError · DaemonLostError

Fields first: a class holds the facts, the sentence is made from them, nobody parses text. The sentence says
what, value, limit and remedy. api/status.py alone knows HTTP, cli/ alone knows exit codes. An error crosses
the worker channel as (code, fields) through to_wire and from_wire.
"""

from __future__ import annotations

from edge_rt.errors.backends import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendError,
    BackendLoadError,
    BackendStepError,
    BackendUnavailableError,
    NotOnAcceleratorError,
    VendorSetupError,
    VersionSkewError,
    WorkerLostError,
)
from edge_rt.errors.base import ConfigError, EdgeRtError
from edge_rt.errors.cache import CacheEntryNotFoundError, CacheError, CacheStoreError, NotCachedError
from edge_rt.errors.cloud import (
    CircuitOpenError,
    CloudAnswerError,
    CloudDeclinedError,
    CloudError,
    CloudRejectedError,
    CloudTimeoutError,
    CloudUnreachableError,
    MustStayError,
)
from edge_rt.errors.devices import (
    DeviceError,
    DeviceFaultError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceMismatchError,
    DeviceNotFoundError,
    DeviceRefusedError,
    DeviceSilentError,
    DeviceTimeoutError,
)
from edge_rt.errors.models import (
    ContextBeyondTrainingError,
    DiskFullError,
    DraftVocabularyError,
    ModelChecksumError,
    ModelError,
    ModelFormatError,
    ModelNotFoundError,
    ModelNotPulledError,
    ModelTooLargeError,
    OfflineError,
    PullError,
    StoreError,
)
from edge_rt.errors.requests import (
    AuthError,
    CapacityError,
    CellsExhaustedError,
    ContextLengthError,
    DeadlineError,
    DeadlineUnreachableError,
    GrammarsFullError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    SlowReaderError,
    UnsupportedFeatureError,
)
from edge_rt.errors.service import (
    DaemonLostError,
    DaemonUnreachableError,
    InterpreterError,
    NoSystemdError,
    NotRootError,
    PowerUnknownError,
    ServiceError,
    UnitError,
)
from edge_rt.errors.wire import from_wire, subclasses

__all__ = [
    "AcceleratorLostError",
    "AcceleratorMemoryError",
    "AuthError",
    "BackendError",
    "BackendLoadError",
    "BackendStepError",
    "BackendUnavailableError",
    "CacheEntryNotFoundError",
    "CacheError",
    "CacheStoreError",
    "CapacityError",
    "CellsExhaustedError",
    "CircuitOpenError",
    "CloudAnswerError",
    "CloudDeclinedError",
    "CloudError",
    "CloudRejectedError",
    "CloudTimeoutError",
    "CloudUnreachableError",
    "ConfigError",
    "ContextBeyondTrainingError",
    "ContextLengthError",
    "DaemonLostError",
    "DaemonUnreachableError",
    "DeadlineError",
    "DeadlineUnreachableError",
    "DeviceError",
    "DeviceFaultError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DeviceMismatchError",
    "DeviceNotFoundError",
    "DeviceRefusedError",
    "DeviceSilentError",
    "DeviceTimeoutError",
    "DiskFullError",
    "DraftVocabularyError",
    "EdgeRtError",
    "GrammarsFullError",
    "InterpreterError",
    "InvalidRequestError",
    "ModelChecksumError",
    "ModelError",
    "ModelFormatError",
    "ModelNotFoundError",
    "ModelNotPulledError",
    "ModelTooLargeError",
    "MustStayError",
    "NoSystemdError",
    "NotCachedError",
    "NotOnAcceleratorError",
    "NotRootError",
    "OfflineError",
    "OverloadedError",
    "PowerUnknownError",
    "PullError",
    "QueueFullError",
    "RequestError",
    "ServiceError",
    "ShuttingDownError",
    "SlowReaderError",
    "StoreError",
    "UnitError",
    "UnsupportedFeatureError",
    "VendorSetupError",
    "VersionSkewError",
    "WorkerLostError",
    "from_wire",
    "subclasses",
]
