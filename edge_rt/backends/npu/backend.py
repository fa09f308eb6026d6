"""The back end that any vendor's stack makes: `class QnnBackend(NpuBackend)` with a Vendor is all a vendor adds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, ClassVar

from edge_rt.backends.base import (
    Absent,
    Device,
    LoadOptions,
    MemoryNeed,
    ModelFile,
    TensorOptions,
    TensorSession,
    TokenSession,
)
from edge_rt.backends.npu.artifacts import ArtifactCache, artifacts, is_whole
from edge_rt.backends.npu.needs import unknown_chip, unmet_precision, unmet_soc
from edge_rt.backends.npu.rows import differ, static_refusal
from edge_rt.backends.npu.session import NpuSession
from edge_rt.backends.npu.vendor import Artifact, Capabilities, Compiled, CompileRequest, Target, Vendor, VendorSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendError,
    BackendLoadError,
    BackendUnavailableError,
    EdgeRtError,
    InvalidRequestError,
    NotOnAcceleratorError,
    VersionSkewError,
)
from edge_rt.tensor_types import ChipNeeds, NodePlacement, TensorModelInfo

_log = logging.getLogger(__name__)

_HOST_BYTES = 150 * 2**20  # of the process that has the vendor's libraries
_ROWS = 1  # of a run, where a model takes any number: chips gain little from more, and pay for those that are missing


class NpuBackend:
    """Loads ONNX models on a vendor's NPU, with onnxruntime on the CPU behind it."""

    name: ClassVar[str] = "npu"

    def __init__(self, vendor: Vendor, cpu: Callable[[], OnnxCpuBackend] = OnnxCpuBackend) -> None:
        self.vendor = vendor
        self.session_parts: dict[str, Any] = {}  # clock, start and tell of its sessions, for tests
        self._cpu = cpu
        self._found: tuple[Device, ...] | Absent | None = None

    def probe(self) -> tuple[Device, ...] | Absent:
        self._found = self.vendor.probe()
        return self._found

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:  # noqa: ARG002 - the protocol's
        return f"{self.name} runs tensor models, {file.model} is a language model"

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        raise BackendLoadError(model=file.model, reason=self.supports(file, options) or "")

    def load(self, file: ModelFile, options: LoadOptions) -> TokenSession:
        raise BackendLoadError(model=file.model, reason=self.supports(file, options) or "")

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        model = file.onnx
        if model.custom_domains:
            return f"it uses operators of {', '.join(model.custom_domains)[:200]}, which no NPU has"
        device = self._device(options)
        if self.is_static(device) and (reason := static_refusal(model.inputs, model.outputs)) is not None:
            return reason
        return self.vendor.refusal(file, device, options)

    def is_static(self, device: Device) -> bool:  # noqa: ARG002 - subclasses'
        """Say whether a device takes fixed shapes only, as chips do."""
        return True

    def watch(self, device: Device) -> Callable[[], bool]:  # noqa: ARG002 - subclasses'
        """Give what says of a lost device whether it has come back since it was last asked; it must take no time."""
        return lambda: False

    def n_threads(self, device: Device, options: TensorOptions) -> int:  # noqa: ARG002 - subclasses'
        """Give the threads that compute here: one waits for the chip."""
        return 1

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:  # noqa: ARG002 - the protocol's
        """Estimate what the host process takes beside the chip's own memory: the weights, once more while it loads."""
        model = file.onnx
        weights_bytes = model.file_bytes + model.external_bytes
        scratch_bytes = _HOST_BYTES + weights_bytes + model.activation_bytes
        return MemoryNeed(weights_bytes=weights_bytes, kv_bytes=0, scratch_bytes=scratch_bytes)

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> NpuSession:
        self._device(options)  # nothing is started for one that is not here
        with self.vendor.ahead():
            return self._loaded(file, options)

    def _loaded(self, file: ModelFile, options: TensorOptions) -> NpuSession:
        if (reason := self.supports_tensor(file, options)) is not None:
            raise BackendLoadError(model=file.model, reason=reason)
        device = self._device(options)
        is_static = self.is_static(device)
        on_cpu = replace(options, device="cpu")
        open_cpu = lambda: self._cpu().load_tensor(file, on_cpu)  # noqa: E731 - the Opener's, which may never call it
        opener = Opener(self.vendor, file, device, options, open_cpu, is_static=is_static)
        opened: VendorSession | None = None
        lost: EdgeRtError | None = None
        try:
            opened = opener.open(may_rebuild=True)
        except (AcceleratorLostError, AcceleratorMemoryError) as exc:
            if options.npu.require == "npu":
                opener.close()
                raise
            lost = exc
        except BaseException:
            opener.close()
            raise

        def placed(on: VendorSession | EdgeRtError) -> TensorModelInfo:
            placement = _on_cpu(file, on) if isinstance(on, EdgeRtError) else on.placement
            return self._info(file, opener.device, options, placement)

        info = self._info(file, device, options, opened.placement if opened is not None else _on_cpu(file, lost))
        return NpuSession(
            info,
            options.npu,
            opener.open,
            opener.open_cpu,
            opened=opened,
            lost=lost,
            rows=_ROWS if opener.has_rows else 0,
            placed=placed,
            release=opener.close,
            has_returned=self.watch(device),
            **self.session_parts,
        )

    def _device(self, options: TensorOptions) -> Device:
        """Give the device that the options name, else the first. Raises BackendUnavailableError."""
        found = self._found if self._found is not None else self.probe()
        if isinstance(found, Absent):
            raise BackendUnavailableError(backend=self.name, reason=found.reason, extra=found.extra)
        return next((device for device in found if device.id == options.device), found[0])

    def _info(
        self, file: ModelFile, device: Device, options: TensorOptions, placement: tuple[NodePlacement, ...]
    ) -> TensorModelInfo:
        model = file.onnx
        return TensorModelInfo(
            model=file.model,
            variant=file.variant,
            backend=self.name,
            device=device.id,
            quant=file.quant,
            size_bytes=model.file_bytes + model.external_bytes,
            inputs=model.inputs,
            outputs=model.outputs,
            n_threads=self.n_threads(device, options),
            placement=placement,
            evidence=device.evidence,
        )


class Opener:
    """Opens one model on its NPU: compiles it unless that is kept, loads it, and says whether enough of it is there."""

    def __init__(
        self,
        vendor: Vendor,
        file: ModelFile,
        device: Device,
        options: TensorOptions,
        open_cpu: Callable[[], TensorSession],
        *,
        is_static: bool = True,
    ) -> None:
        self._vendor, self._file, self._options = vendor, file, options
        self.device, self.open_cpu = device, open_cpu
        self._fault, self._has_tried = device.fault, False
        self.has_rows = is_static and any(-1 in spec.shape for spec in file.onnx.inputs)
        self._stack = ExitStack()
        self._artifact: Artifact | None = None
        self._again: Callable[[], Artifact] | None = None

    def open(self, *, may_rebuild: bool = False) -> VendorSession:
        """Open it. Raises BackendLoadError, AcceleratorLostError, AcceleratorMemoryError or NotOnAcceleratorError."""
        if self._fault:
            self._probe()
        is_first = self._artifact is None
        artifact, again = self._compiled()
        if not is_first and not is_whole(artifact, self._file):  # a loader may crash on it, time and again
            artifact = self._artifact = again()
        self._check(artifact.compiled.placement)
        try:
            session = self._vendor.load(self._file, self.device, artifact)
        except (BackendLoadError, AcceleratorLostError) as exc:
            if isinstance(exc, AcceleratorLostError) and not may_rebuild:
                raise  # the chip is gone: to compile it anew would not bring it back
            self._artifact = again()  # what was kept may be at fault, once
            session = self._vendor.load(self._file, self.device, self._artifact)
        try:
            self._check(session.placement)
        except BaseException:
            session.close()
            raise
        return session

    def _check(self, placement: tuple[NodePlacement, ...]) -> None:
        try:
            check_placement(placement, self._options.npu.require, self._vendor.name, self._file.model)
        except NotOnAcceleratorError as exc:
            if exc.n_elsewhere == exc.n_nodes:  # the model may be as it should, and the chip's name not
                soc = self._artifact.target.soc if self._artifact is not None else ""
                told = self._capabilities(soc)
                self._refuse(unknown_chip(told, soc or self._vendor.label) if told is not None else None)
            raise

    def close(self) -> None:
        self._stack.close()

    def _probe(self) -> None:
        """Look again for a device that could not be used when the back end looked."""
        if not self._has_tried:
            self._has_tried = True  # the back end has just looked
            raise AcceleratorLostError(backend=self._vendor.name, reason=self._fault)
        found = self._vendor.probe()
        if isinstance(found, Absent):
            raise AcceleratorLostError(backend=self._vendor.name, reason=found.reason)
        self.device = next((device for device in found if device.id == self._options.device), found[0])
        self._fault = self.device.fault
        if self._fault:
            raise AcceleratorLostError(backend=self._vendor.name, reason=self._fault)

    def _compiled(self) -> tuple[Artifact, Callable[[], Artifact]]:
        if self._artifact is None or self._again is None:
            target = self._vendor.target(self._file, self.device, self._options)
            npu, rows = self._options.npu, _ROWS if self.has_rows else 0
            cache = ArtifactCache(npu.artifacts, max_bytes=npu.max_artifact_bytes)
            # Cores that a stack offers compute in whatever a file has.
            needs = npu.needs if self.device.kind != "cpu" else None
            if needs is not None:
                self._refuse(unmet_soc(needs, target.soc))

            def compile_to(folder: Path) -> Compiled:
                if needs is not None:  # what is kept was taken by the same compiler for the same chip
                    self._refuse(self._unmet_precision(needs, target.soc))
                if self.has_rows and self._options.max_batch == 1:
                    self._check_rows()  # who joins requests has said that rows are independent
                request = CompileRequest(file=self._file, device=self.device, target=target, folder=folder, rows=rows)
                try:
                    return self._vendor.compile(request)
                except BackendUnavailableError as exc:
                    if (made_with := self._skewed(target)) is None:
                        raise
                    have = ", ".join(filter(None, astuple(target.versions)))
                    remedy = f"It must be compiled anew where {self._vendor.label}'s compiler is: {exc.reason}"
                    raise VersionSkewError(
                        backend=self._vendor.name, model=self._file.model, made_with=made_with, have=have, remedy=remedy
                    ) from exc

            external = tuple(self._file.path.parent / name for name in self._file.onnx.external)
            context = cache.artifact(self._file, target, rows, compile_to, external=external)
            self._artifact, self._again = self._stack.enter_context(context)
        return self._artifact, self._again

    def _refuse(self, reason: str | None) -> None:
        """Raise BackendLoadError where there is a reason not to run the model's form on this chip."""
        if reason is None:
            return
        model, name = self._file.model, self._vendor.name
        remedy = f"`edge_rt models show {model}` lists other forms; npu.soc.{name} names the chip where it is another"
        form = self._file.variant or "file"
        raise BackendLoadError(model=model, reason=f"{name}: its form {form} is not for this chip: {reason}. {remedy}")

    def _unmet_precision(self, needs: ChipNeeds, soc: str) -> str | None:
        told = self._capabilities(soc)
        return unmet_precision(needs, told, soc or self._vendor.label) if told is not None else None

    def _capabilities(self, soc: str) -> Capabilities | None:
        try:
            return self._vendor.capabilities(self.device, soc)
        except BackendError as exc:  # what is lost shows when it compiles
            _log.warning("%s: what %s computes in cannot be tried: %s", self._file.model, self._vendor.name, exc)
            return None

    def _skewed(self, target: Target) -> str | None:
        """Name the versions that a kept form of this very model was made with, where only they are others."""
        if self._options.npu.artifacts is None:
            return None
        for found in artifacts(self._options.npu.artifacts):
            then = found.description.target
            if replace(then, versions=target.versions) == target and then != target:
                return ", ".join(filter(None, astuple(then.versions)))
        return None

    def _check_rows(self) -> None:
        """Raise BackendLoadError unless each row is computed by itself."""
        cpu = self.open_cpu()
        try:
            name = differ(cpu.run, cpu.inputs)
        except InvalidRequestError as exc:
            raise BackendLoadError(
                model=self._file.model, reason=f"whether its rows are independent cannot be tried: {exc.problem}"
            ) from exc
        finally:
            cpu.close()
        if name is not None:
            reason = f"its output {name} shows that rows depend on one another; export it with a fixed number of them"
            raise BackendLoadError(model=self._file.model, reason=reason)


def check_placement(placement: tuple[NodePlacement, ...], require: str, backend: str, model: str) -> None:
    """Raise NotOnAcceleratorError where too much of a model is elsewhere: for require npu anything, else all of it."""
    elsewhere = [part for part in placement if part.reason]
    n_nodes, n_elsewhere = sum(part.n_nodes for part in placement), sum(part.n_nodes for part in elsewhere)
    if n_elsewhere == 0 or (require != "npu" and n_elsewhere < n_nodes):
        return
    kinds = tuple(dict.fromkeys(kind for part in elsewhere for kind, _ in part.kinds))
    raise NotOnAcceleratorError(
        backend=backend,
        model=model,
        n_nodes=n_nodes,
        n_elsewhere=n_elsewhere,
        kinds=kinds,
        reason=elsewhere[0].reason,
        require=require,
    )


def _on_cpu(file: ModelFile, lost: EdgeRtError | None) -> tuple[NodePlacement, ...]:
    """Describe a model that is not on its NPU."""
    kinds = file.onnx.kinds
    reason = str(getattr(lost, "reason", lost))
    return (NodePlacement(provider="CPU", n_nodes=sum(n for _, n in kinds), kinds=kinds, reason=reason),)
