"""onnxruntime on the CPU: ONNX models in float, INT8 (QDQ) and INT4 (MatMulNBits).

The file has been checked by onnx_model.py before onnxruntime sees it. Answers are onnxruntime's own, bit for bit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import (
    Absent,
    Device,
    LoadOptions,
    MemoryNeed,
    ModelFile,
    TensorOptions,
    TokenSession,
)
from edge_rt.backends.tensor_feeds import check_feeds, check_outputs, raw, texts
from edge_rt.devices import cpu
from edge_rt.errors import BackendLoadError, BackendStepError, BackendUnavailableError
from edge_rt.types import NodePlacement, TensorModelInfo

if TYPE_CHECKING:
    from edge_rt.backends.onnx_model import OnnxModel

_log = logging.getLogger(__name__)

_PROVIDER = "CPUExecutionProvider"
_RUNTIME_BYTES = 40 * 2**20  # onnxruntime's and onnx's own
_EXTRA = "onnx"


def load_runtime() -> Any:
    """Import onnxruntime. Raises BackendUnavailableError."""
    try:
        import_module("onnx")
        return import_module("onnxruntime")
    except ImportError as exc:
        reason = f"{exc.name or 'onnxruntime'} is not installed"
        raise BackendUnavailableError(backend=OnnxCpuBackend.name, reason=reason, extra=_EXTRA) from exc


class OnnxCpuBackend:
    """Loads ONNX models into onnxruntime."""

    name: ClassVar[str] = "onnx_cpu"

    def __init__(
        self, usable: Callable[[], cpu.Usable] = cpu.usable, runtime: Callable[[], Any] = load_runtime
    ) -> None:
        self._usable = usable
        self._runtime = runtime

    def probe(self) -> tuple[Device, ...] | Absent:
        try:
            version = self._runtime().__version__
        except BackendUnavailableError as exc:
            return Absent(reason=exc.reason, extra=exc.extra)
        return (Device(id="cpu", kind="cpu", detail=f"onnxruntime {version}, for tensor models"),)

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:  # noqa: ARG002 - the protocol's
        return f"onnx_cpu runs tensor models, {file.model} is a language model"

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        raise BackendLoadError(model=file.model, reason=self.supports(file, options) or "")

    def load(self, file: ModelFile, options: LoadOptions) -> TokenSession:
        raise BackendLoadError(model=file.model, reason=self.supports(file, options) or "")

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        if (domains := file.onnx.custom_domains) and not options.custom_op_libraries:
            return (
                f"it uses operators of {', '.join(domains)}, which onnxruntime does not have; "
                "tensor.custom_op_libraries may name a library that does"
            )
        return None

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:
        model = file.onnx
        return MemoryNeed(
            weights_bytes=model.file_bytes + model.external_bytes,
            kv_bytes=0,
            scratch_bytes=_RUNTIME_BYTES + model.file_bytes + options.max_batch * model.activation_bytes,
        )

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> OnnxCpuSession:
        if (reason := self.supports_tensor(file, options)) is not None:
            raise BackendLoadError(model=file.model, reason=reason)
        n_threads = options.n_threads or len(self._usable().compute_cpus)
        return OnnxCpuSession(self._runtime(), file, file.onnx, options, n_threads)


class OnnxCpuSession:
    """A model in onnxruntime."""

    def __init__(self, runtime: Any, file: ModelFile, model: OnnxModel, options: TensorOptions, n_threads: int) -> None:
        self._session: Any = None
        self.inputs, self.outputs = model.inputs, model.outputs
        settings = _settings(runtime, model, options, n_threads)
        try:
            self._session = runtime.InferenceSession(str(model.path), sess_options=settings, providers=[_PROVIDER])
            self._session.disable_fallback()
            placement = _placement(self._session)
        except Exception as exc:
            raise BackendLoadError(model=file.model, reason=_first_line(exc)) from exc
        self.info = TensorModelInfo(
            model=file.model,
            variant=file.variant,
            backend=OnnxCpuBackend.name,
            device=options.device,
            quant=file.quant,
            size_bytes=model.file_bytes + model.external_bytes,
            inputs=self.inputs,
            outputs=self.outputs,
            n_threads=n_threads,
            max_batch=options.max_batch,
            placement=placement,
        )

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        if self._session is None:
            raise BackendStepError(reason="the session is closed")
        check_feeds(self.inputs, feeds)
        wanted = check_outputs(self.outputs, outputs)
        given = {
            spec.name: texts(feeds[spec.name], spec.name)
            if spec.datatype == "BYTES"
            else np.ascontiguousarray(feeds[spec.name])
            for spec in self.inputs
        }
        try:
            answers = self._session.run(list(wanted), given)
        except Exception as exc:
            raise BackendStepError(reason=_first_line(exc)) from exc
        return {
            name: raw(answer) if answer.dtype == object else answer
            for name, answer in zip(wanted, answers, strict=True)
        }

    def close(self) -> None:
        self._session = None


def _settings(runtime: Any, model: OnnxModel, options: TensorOptions, n_threads: int) -> Any:
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # fatal: what it says of errors is in the exception
    settings.intra_op_num_threads = n_threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.enable_cpu_mem_arena = settings.enable_mem_pattern = not model.is_dynamic
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for library in options.custom_op_libraries:
        settings.register_custom_ops_library(str(library))
    return settings


def _placement(session: Any) -> tuple[NodePlacement, ...]:
    """Ask the session which provider runs which nodes of the optimised graph."""
    kinds: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        kinds.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return tuple(
        NodePlacement(provider=name, n_nodes=found.total(), kinds=tuple(found.most_common()))
        for name, found in kinds.items()
    )


def _first_line(exc: Exception) -> str:
    return f"onnxruntime says: {(str(exc).splitlines() or [type(exc).__name__])[0][:500]}"
