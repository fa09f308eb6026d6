"""Which back end runs a model: the first in PREFERENCE that supports it on this machine, unless one is named."""

from __future__ import annotations

from collections.abc import Callable

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, Backend, LoadOptions, ModelFile
from edge_rt.errors import BackendLoadError, BackendUnavailableError

AUTO = "auto"
PREFERENCE = ("native", "llama_cpu")


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
