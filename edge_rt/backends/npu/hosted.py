"""A Vendor whose code runs in host processes: probed, compiled and loaded there, each within its time limit.

A driver is a Python file with a class Driver. Its methods take and give what JSON can hold, and arrays:

    probe() -> {"devices": [DEVICE…], "versions": {compiler, runtime, driver}}, or {"absent": reason}
    capabilities(device, soc) -> {"precisions": [{weight_bits, activation_bits, granularity}…], "is_confirmed": …, …}
    compile(model, folder, soc, device, options, rows) -> {"files": […], "placement": [PLACEMENT…], "facts": {…}}
    load(folder, soc, device, options, rows, facts) -> {"inputs": [SPEC…], "outputs": [SPEC…], "placement": […]}
    run(feeds, outputs) -> ({"upload_s": …, "compute_s": …, "download_s": …}, arrays)
    telemetry() -> {"power_w": …, "power_source": …, "temp_c": …, "temp_source": …}
    preload(), if it is there: imports what the others need, before anything is asked

DEVICE has the fields of base.Device without kind, and soc; PLACEMENT and SPEC are those of tensor_types. The driver
imports the vendor's package in its methods, not at its top, where it wants an ImportError to mean absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu.client import Client, HostAnswerError
from edge_rt.backends.npu.looks import Looks
from edge_rt.backends.npu.vendor import (
    Artifact,
    Capabilities,
    Compiled,
    CompileRequest,
    Target,
    Telemetry,
    VendorSession,
    Versions,
)
from edge_rt.errors import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendLoadError,
    BackendStepError,
    BackendUnavailableError,
    EdgeRtError,
)
from edge_rt.tensor_types import Evidence, NodePlacement, TensorSpec

T = TypeVar("T")
MAX_REASON = 500
_PATIENCE = 8.0  # times what it took before
_MIN_LOAD_S, _MIN_RUN_S = 4.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a host may take for each call, in seconds; the first probe reads libraries from the disk.

    next_probe_s  how long a later probe is waited for at least; it goes on until probe_s, and may answer the next
    """

    probe_s: float = 20.0
    next_probe_s: float = 5.0
    compile_s: float = 900.0
    load_s: float = 60.0
    run_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A vendor's stack as it is installed.

    name, label, extra  as Vendor has them
    driver     the Python file that the host runs
    python     gives the command of the Python that has the vendor's packages
    installed  says why that Python has none of them, looking at files only; None if it has
    versions   tells their versions, looking at files only
    noise      how lines of its log begin that tell nothing
    """

    name: str
    label: str
    extra: str
    driver: Path
    python: Callable[[], Sequence[str]]
    installed: Callable[[], Absent | None]
    versions: Callable[[], Versions]
    limits: Limits = field(default_factory=Limits)
    noise: tuple[str, ...] = ()


class _Device(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    detail: str
    soc: str = ""
    evidence: Evidence = "device"
    reference: bool = False
    free_bytes: int | None = None
    temp_c: float | None = None
    fault: str = ""
    skew: str = ""


class _Probed(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[_Device, ...] = ()
    versions: Versions = Versions()
    absent: str = ""


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    placement: tuple[NodePlacement, ...]


class HostedVendor:
    """A Vendor of which a driver runs in a host process. Subclasses say for what a model is compiled, and when not."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.name, self.label, self.extra = stack.name, stack.label, stack.extra
        self._socs: dict[str, str] = {}
        self._versions = Versions()
        self._looks = Looks(self._look)
        self._has_probed = False
        self._probed_s = 0.0  # what the longest look has taken that found something
        self._ahead: list[Client] = []  # started, and asked nothing yet
        self._loaded_s: dict[str, float] = {}  # what the longest load of each compiled model has taken

    def limit(self, limits: Limits) -> None:
        """Take other limits than the stack's: measurements in a simulator on a busy machine take their time."""
        self._stack = replace(self._stack, limits=limits)

    def installed(self) -> Absent | None:
        return self._stack.installed()

    def versions(self) -> Versions:
        told, here = self._versions, self._stack.versions()
        return Versions(
            compiler=told.compiler or here.compiler,
            runtime=told.runtime or here.runtime,
            driver=told.driver or here.driver,
        )

    def probe(self) -> tuple[Device, ...] | Absent:
        if (absent := self.installed()) is not None:
            return absent
        limits, is_first, begun_s = self._stack.limits, not self._has_probed, time.monotonic()
        self._has_probed = True
        # What was looked for before is looked for beside requests, and a library that hangs must not be waited for.
        usual_s = min(limits.probe_s, max(limits.next_probe_s, _PATIENCE * self._probed_s))
        wait_s = limits.probe_s if is_first else usual_s
        try:
            found = self._looks.ask(wait_s)
        except (AcceleratorLostError, BackendLoadError, BackendUnavailableError, AcceleratorMemoryError) as exc:
            return (self._faulty(exc.reason),)
        except TimeoutError:
            return (self._faulty(f"its process did not answer probe within {wait_s:g} s"),)
        self._probed_s = max(self._probed_s, time.monotonic() - begun_s)
        if found.absent or not found.devices:
            return Absent(reason=found.absent[:MAX_REASON] or f"{self.label} finds no device", extra="")
        self._socs = {device.id: device.soc for device in found.devices}
        self._versions = found.versions
        return tuple(
            Device(
                id=device.id,
                kind="npu",
                detail=device.detail,
                evidence=device.evidence,
                reference=device.reference,
                free_bytes=device.free_bytes,
                temp_c=device.temp_c,
                fault=device.fault,
                skew=device.skew[:MAX_REASON],
            )
            for device in found.devices
        )

    def _look(self) -> _Probed:
        client = self._new_client()
        try:
            return self._ask(client, "probe", {}, _Probed, self._stack.limits.probe_s, model="its probe")
        finally:
            client.close()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        client = self._new_client()
        with suppress(AcceleratorLostError):  # who asks it starts another, and tells
            client.start()
        self._ahead.append(client)
        try:
            yield
        finally:
            with suppress(ValueError):  # somebody has taken it
                self._ahead.remove(client)
                client.close()

    def soc(self, device: Device) -> str:
        """Give the chip as the last probe has found it, "" where nobody tells."""
        return self._socs.get(device.id, "")

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:  # noqa: ARG002 - subclasses'
        return Target(vendor=self.name, soc=self.soc(device), versions=self.versions())

    def capabilities(self, device: Device, soc: str = "") -> Capabilities:
        client = self._new_client()
        try:
            told = {"device": device.id, "soc": soc or self.soc(device)}
            return self._ask(client, "capabilities", told, Capabilities, self._stack.limits.compile_s, model="a try")
        finally:
            client.close()

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:  # noqa: ARG002 - subclasses'
        return None

    def compile(self, request: CompileRequest) -> Compiled:
        client = self._started_client()
        told = {
            "model": str(request.file.path),
            "folder": str(request.folder),
            "soc": request.target.soc,
            "device": request.device.id,
            "options": dict(request.target.options),
            "rows": request.rows,
        }
        try:
            model, limit_s = request.file.model, self._stack.limits.compile_s
            return self._ask(client, "compile", told, Compiled, limit_s, model=model)
        finally:
            client.close()

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        client = self._started_client()
        told = {
            "folder": str(artifact.folder),
            "soc": artifact.target.soc,
            "device": device.id,
            "options": dict(artifact.target.options),
            "rows": artifact.rows,
            "facts": dict(artifact.compiled.facts),
        }
        limits, begun_s = self._stack.limits, time.monotonic()
        try:
            longest_s = self._loaded_s.get(artifact.key, 0.0)
            limit_s = _patience_s(longest_s, limits.load_s, least_s=_MIN_LOAD_S)
            loaded = self._ask(client, "load", told, _Loaded, limit_s, model=file.model)
        except BaseException:
            client.close()
            raise
        self._loaded_s[artifact.key] = max(longest_s, time.monotonic() - begun_s)
        return HostedSession(self.name, file.model, client, loaded, limits.run_s)

    def _started_client(self) -> Client:
        with suppress(IndexError):
            return self._ahead.pop()
        return self._new_client()

    def _new_client(self) -> Client:
        return Client(self.name, self._stack.driver, self._stack.python(), noise=self._stack.noise)

    def _ask(
        self, client: Client, call: str, told: Mapping[str, Any], kind: type[T], timeout_s: float, *, model: str
    ) -> T:
        try:
            result, _, _ = client.call(call, told, timeout_s=timeout_s)
        except HostAnswerError as exc:
            raise _told(exc, self.name, model) from exc
        return _convert(result, kind, self.name)

    def _faulty(self, reason: str) -> Device:
        return Device(id="npu", kind="npu", detail=f"{self.label} does not answer", fault=reason[:MAX_REASON])


class HostedSession:
    """A model that a host has loaded."""

    def __init__(self, backend: str, model: str, client: Client, loaded: _Loaded, run_s: float) -> None:
        self._backend, self._model = backend, model
        self._client: Client | None = client
        self._max_run_s, self._ran_s = run_s, 0.0
        self._timings = Telemetry()
        self.inputs, self.outputs, self.placement = loaded.inputs, loaded.outputs, loaded.placement

    @property
    def pid(self) -> int | None:
        """The host's process, for those who watch or end it."""
        return self._client.pid if self._client is not None else None

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        if self._client is None:
            raise BackendStepError(reason="the session is closed")
        if self._client.pid is None:  # it was lost in an earlier run, and nothing is loaded in another
            raise AcceleratorLostError(backend=self._backend, reason="its process has ended")
        limit_s = _patience_s(self._ran_s, self._max_run_s, least_s=_MIN_RUN_S)
        try:
            told, given, took_s = self._client.call("run", {"outputs": list(outputs)}, feeds, timeout_s=limit_s)
        except HostAnswerError as exc:
            error = _told(exc, self._backend, self._model)
            if not isinstance(error, AcceleratorMemoryError):
                raise BackendStepError(reason=f"{self._backend}: {error.reason}") from exc
            raise error from exc
        except ValueError as exc:
            raise BackendStepError(reason=f"{self._backend}: {exc}") from exc
        if missing := [name for name in outputs if name not in given]:
            raise BackendStepError(reason=f"{self._backend} gives no {missing[0]}")
        self._timings, self._ran_s = _convert(told, Telemetry, self._backend), max(self._ran_s, took_s)
        return given

    def telemetry(self) -> Telemetry:
        if self._client is None or self._client.pid is None:
            return Telemetry()
        try:
            told, _, _ = self._client.call("telemetry", {}, timeout_s=_MIN_RUN_S)
            now = _convert(told, Telemetry, self._backend)
        except (HostAnswerError, EdgeRtError):
            return self._timings
        return replace(
            self._timings,
            power_w=now.power_w,
            power_source=now.power_source,
            temp_c=now.temp_c,
            temp_source=now.temp_source,
        )

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _patience_s(longest_s: float, max_s: float, *, least_s: float) -> float:
    """Say how long to wait for what has never taken longer than longest_s; 0 for the first time, which may take max_s.

    A stack that hangs is so found out before it has cost a client half a minute.
    """
    return max_s if longest_s == 0.0 else min(max_s, max(least_s, _PATIENCE * longest_s))


def _told(
    exc: HostAnswerError, backend: str, model: str
) -> BackendLoadError | BackendUnavailableError | AcceleratorMemoryError:
    if exc.kind == "memory":
        return AcceleratorMemoryError(backend=backend, model=model, reason=exc.said[:MAX_REASON])
    if exc.kind == "absent":
        return BackendUnavailableError(backend=backend, reason=exc.said[:MAX_REASON])
    return BackendLoadError(model=model, reason=f"{backend}: {exc.said[:MAX_REASON]}")


def _convert(result: Any, kind: type[T], backend: str) -> T:
    try:
        return msgspec.convert(result, kind)
    except msgspec.ValidationError as exc:
        raise AcceleratorLostError(backend=backend, reason=f"its process does not keep to the protocol: {exc}") from exc
