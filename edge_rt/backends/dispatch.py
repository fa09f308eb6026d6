"""Which back end runs a model: the first in order of preference that supports it here, unless one is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_rt.backends import registry
from edge_rt.backends.base import (
    Absent,
    Backend,
    LoadOptions,
    ModelFile,
    TensorBackend,
    TensorOptions,
)
from edge_rt.errors import BackendLoadError, BackendUnavailableError

AUTO = "auto"
PREFERENCE = ("native", "llama_cpu")
TENSOR_PREFERENCE = ("onnx_cpu",)


def dispatch(
    wanted: str, file: ModelFile, options: LoadOptions, *, find: Callable[[str], Backend] = registry.get
) -> tuple[Backend, str]:
    """Choose the back end for a model; with it why none that comes before takes the model, "" if none comes before.

    wanted  a back end's name: that one or none; AUTO: the first of PREFERENCE that takes the model on a device that
            is not there for reference only

    Reads the file's header only. Raises ModelFormatError; BackendUnavailableError where the back end is absent, and
    BackendLoadError where it does not support the model: of the last one, if none takes it.
    """
    if wanted != AUTO:
        backend = find(wanted)
        if (refusal := _refusal(backend, file, options)) is not None:
            if isinstance(refusal, BackendLoadError) and wanted in PREFERENCE[:-1]:
                refusal.reason += f'; backend = "{AUTO}" takes one that does'
            raise refusal
        return backend, ""
    refusals: list[BackendUnavailableError | BackendLoadError] = []
    for name in PREFERENCE:
        backend = find(name)
        if (refusal := _refusal(backend, file, options, auto=True)) is None:
            return backend, "; ".join(r.reason for r in refusals)
        refusals.append(refusal)
    raise refusals[-1]


def dispatch_tensor(
    wanted: str,
    file: ModelFile,
    options: TensorOptions,
    *,
    backends: Sequence[str] = (),
    find: Callable[[str], Backend | TensorBackend] = registry.get,
) -> tuple[TensorBackend, str]:
    """Choose the back end for a tensor model, as dispatch does for a language model.

    wanted    a back end's name: that one or none; AUTO: the first that takes the model
    backends  that can run the file, as its manifest says in order of preference; () takes TENSOR_PREFERENCE

    Raises as dispatch does; of several that AUTO could not take, BackendLoadError with every one's reason.
    """
    refusals: list[BackendUnavailableError | BackendLoadError] = []
    for name in backends or TENSOR_PREFERENCE if wanted == AUTO else (wanted,):
        found = _tensor_backend(name, file, options, find)
        if isinstance(found, TensorBackend):
            return found, "; ".join(refusal.reason for refusal in refusals)
        refusals.append(found)
    if len(refusals) == 1:
        raise refusals[0]
    raise BackendLoadError(model=file.model, reason="; ".join(refusal.reason for refusal in refusals))


def _tensor_backend(
    name: str, file: ModelFile, options: TensorOptions, find: Callable[[str], Backend | TensorBackend]
) -> TensorBackend | BackendUnavailableError | BackendLoadError:
    try:
        backend = find(name)
    except BackendUnavailableError as exc:
        return exc
    if not isinstance(backend, TensorBackend):
        return BackendLoadError(model=file.model, reason=f"{name} runs language models, {file.model} takes tensors")
    if isinstance(devices := backend.probe(), Absent):
        return BackendUnavailableError(backend=name, reason=devices.reason, extra=devices.extra)
    if (reason := backend.supports_tensor(file, options)) is not None:
        return BackendLoadError(model=file.model, reason=reason)
    return backend


def _refusal(
    backend: Backend, file: ModelFile, options: LoadOptions, *, auto: bool = False
) -> BackendUnavailableError | BackendLoadError | None:
    devices = backend.probe()
    if isinstance(devices, Absent):
        return BackendUnavailableError(backend=backend.name, reason=devices.reason, extra=devices.extra)
    if auto and all(device.reference for device in devices):
        return BackendLoadError(model=file.model, reason=f"{backend.name} is here only as {devices[0].detail}")
    if (reason := backend.supports(file, options)) is not None:
        return BackendLoadError(model=file.model, reason=reason)
    return None
