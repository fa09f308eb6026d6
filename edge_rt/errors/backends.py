"""Back ends and the workers that run them."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


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
class VendorSetupError(BackendError):
    """The environment of a vendor's packages cannot be made, found or removed."""

    code = "vendor_setup"
    vendor: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"the packages for {self.vendor}: {self.problem}; {self.remedy}"


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
