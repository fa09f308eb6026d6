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


@dataclass(eq=False)
class AcceleratorLostError(BackendError):
    """The chip, or the process that drives it, is gone or silent; another try may find it again."""

    code = "accelerator_lost"
    retryable = True
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}; it is tried again, and `edge_rt devices` shows how it is"


@dataclass(eq=False)
class AcceleratorMemoryError(BackendError):
    """need_bytes and have_bytes are 0 where the vendor does not tell them."""

    code = "accelerator_memory"
    backend: str
    model: str
    reason: str
    need_bytes: int = 0
    have_bytes: int = 0

    def __str__(self) -> str:
        sizes = f" ({self.need_bytes / 2**20:.0f} MiB needed, {self.have_bytes / 2**20:.0f} MiB there)"
        told = sizes if self.need_bytes else ""
        return (
            f"{self.model} does not fit into {self.backend}'s memory{told}: {self.reason}. "
            "Take a smaller form of the model, or unload another one from that chip"
        )


@dataclass(eq=False)
class NotOnAcceleratorError(BackendError):
    """n_elsewhere of n_nodes run somewhere else, more than npu.require allows; kinds are their operators."""

    code = "not_on_accelerator"
    backend: str
    model: str
    n_nodes: int
    n_elsewhere: int
    kinds: tuple[str, ...]
    reason: str
    require: str

    def __str__(self) -> str:
        return (
            f"{self.backend} would leave {self.n_elsewhere} of {self.model}'s {self.n_nodes} nodes to the CPU: "
            f'{", ".join(self.kinds[:10])} ({self.reason}), and npu.require is "{self.require}". Take a form of '
            'the model whose operators the chip has; "prefer" allows some of them on the CPU, the back end onnx_cpu all'
        )


@dataclass(eq=False)
class VersionSkewError(BackendError):
    """A compiled model was made by other versions than are here, and cannot be made again here."""

    code = "version_skew"
    backend: str
    model: str
    made_with: str
    have: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.model} was compiled for {self.backend} with {self.made_with}; here is {self.have}. {self.remedy}"
