"""onnxruntime on the CPU: ONNX models in float, INT8 (QDQ) and INT4 (MatMulNBits).

The file has been checked by onnx_model.py before onnxruntime sees it. Answers are onnxruntime's own, bit for bit.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any, ClassVar

from numpy.typing import NDArray

from edge_rt.backends.base import Absent, Device, LoadOptions, MemoryNeed, ModelFile, TensorOptions, TokenSession
from edge_rt.backends.onnx_facts import OnnxModel
from edge_rt.backends.onnx_open import known_model, lacks_copy, open_session
from edge_rt.backends.onnx_shapes import RecentShapes
from edge_rt.backends.tensor_feeds import FeedCheck, Texts, check_outputs
from edge_rt.devices import cpu
from edge_rt.errors import (
    BackendLoadError,
    BackendStepError,
    BackendUnavailableError,
    EdgeRtError,
    InvalidRequestError,
)
from edge_rt.tensor_types import NodePlacement, TensorModelInfo

# onnxruntime's exceptions for a node that failed, what their text begins with, and how it tells of memory.
_NODE_ERRORS = frozenset({"InvalidArgument", "Fail", "RuntimeException"})
_NODE_FAILED = "Non-zero status code returned while running"
_NO_MEMORY = re.compile(r"allocat|bad_alloc|out of memory", re.IGNORECASE)
RUNTIME_BYTES = 40 * 2**20  # onnxruntime's and onnx's own


def load_runtime() -> Any:
    """Import onnxruntime. Raises BackendUnavailableError."""
    try:
        if PathFinder.find_spec("onnx") is None:  # imported only for files that have not been checked yet
            raise ImportError(name="onnx")
        return import_module("onnxruntime")
    except ImportError as exc:
        reason = f"{exc.name or 'onnxruntime'} cannot be imported"
        raise BackendUnavailableError(backend=OnnxCpuBackend.name, reason=reason, extra="onnx") from exc


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
        if (domains := self._model(file, options).custom_domains) and not options.custom_op_libraries:
            return (
                f"it uses operators of {', '.join(domains)[:200]}, which onnxruntime does not have; "
                "tensor.custom_op_libraries may name a library that does"
            )
        return None

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:
        """Estimate from the file: its weights, once more while they are read and packed, and what its values take."""
        model = self._model(file, options)
        return MemoryNeed(
            weights_bytes=model.file_bytes + model.external_bytes,
            kv_bytes=0,
            scratch_bytes=RUNTIME_BYTES + model.file_bytes + options.max_batch * model.activation_bytes,
        )

    def is_unprepared(self, file: ModelFile, options: TensorOptions) -> bool:
        """Say whether load_tensor would check the file and write the copy of its graph, which takes much memory."""
        try:
            return lacks_copy(self._runtime(), file, options)
        except BackendUnavailableError:
            return False

    def _model(self, file: ModelFile, options: TensorOptions) -> OnnxModel:
        """Give the facts of a file that has been checked, now if need be. Raises ModelFormatError."""
        return known_model(self._runtime(), file, options) or file.onnx

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> OnnxCpuSession:
        if (reason := self.supports_tensor(file, options)) is not None:
            raise BackendLoadError(model=file.model, reason=reason)
        n_cores = len(self._usable().compute_cpus)
        n_threads = options.n_threads or n_cores
        return OnnxCpuSession(self._runtime(), file, options, n_threads, max_runs=max(1, n_cores // n_threads))


class OnnxCpuSession:
    """A model in onnxruntime."""

    def __init__(
        self, runtime: Any, file: ModelFile, options: TensorOptions, n_threads: int, *, max_runs: int = 1
    ) -> None:
        try:
            self._session, model = open_session(runtime, file, options, n_threads)
            placement = _placement(self._session)
        except EdgeRtError:
            raise
        except Exception as exc:
            raise BackendLoadError(model=file.model, reason=first_line(exc)) from exc
        self.inputs, self.outputs = model.inputs, model.outputs
        self._check_feeds = FeedCheck(model.inputs)
        self._all_outputs = check_outputs(model.outputs, ())
        self._texts = Texts(model.inputs, model.outputs)
        self._recent = RecentShapes(options.max_shapes) if model.is_dynamic else None
        self._noting = threading.Lock()
        self._is_fresh = True
        self._shrink = runtime.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
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
            max_runs=max_runs,
            placement=placement,
        )

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        if self._session is None:
            raise BackendStepError(reason="the session is closed")
        self._check_feeds(feeds)
        wanted = check_outputs(self.outputs, outputs) if outputs else self._all_outputs
        given = self._texts.read(feeds)
        shrink = self._is_fresh  # what the first run needs for once, and regions that grew as it went
        self._is_fresh = False
        if self._recent is not None:
            with self._noting:
                shrink |= self._recent.note(feeds)
        try:
            answers = self._session.run(wanted, given, self._shrink if shrink else None)
        except Exception as exc:
            raise run_error(exc) from exc
        return self._texts.written(dict(zip(wanted, answers, strict=True)))

    def close(self) -> None:
        self._session = None


def _placement(session: Any) -> tuple[NodePlacement, ...]:
    """Ask the session which provider runs which nodes of the graph."""
    kinds: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        kinds.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return tuple(
        NodePlacement(provider=name, n_nodes=found.total(), kinds=tuple(found.most_common()))
        for name, found in kinds.items()
    )


def run_error(exc: Exception) -> EdgeRtError:
    """Tell whose fault a failed run is: the model loaded and the CPU does not fail, so it is the values or sizes given.

    An index past the end of a table, a sequence longer than the model knows, a picture smaller than its filters; only
    the lack of memory is ours.
    """
    said = first_line(exc)
    if type(exc).__name__ not in _NODE_ERRORS or _NODE_FAILED not in str(exc) or _NO_MEMORY.search(str(exc)):
        return BackendStepError(reason=said)
    return InvalidRequestError(param="inputs", problem=f"cannot be computed by this model: {said}")


def first_line(exc: Exception) -> str:
    return f"onnxruntime says: {(str(exc).splitlines() or [type(exc).__name__])[0][:500]}"
