"""Load a tensor model as a Load message says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edge_rt.backends import registry
from edge_rt.backends.base import Backend, ModelFile, NpuOptions, TensorBackend, TensorOptions, TensorSession
from edge_rt.backends.dispatch import dispatch_tensor
from edge_rt.catalog.place import Place
from edge_rt.devices import memory
from edge_rt.devices.base import Reading
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.memory import check


def unpack_tensor(load: Load, *, is_alone: bool = False) -> tuple[ModelFile, TensorOptions]:
    """Give the file and how to load it. is_alone as TensorOptions has it."""
    tensor = load.tensor or TensorLoad()
    file = ModelFile(model=load.model, variant=load.variant, path=Path(load.path), quant=load.quant)
    options = TensorOptions(
        n_threads=load.n_threads,
        max_batch=tensor.max_batch,
        max_shapes=tensor.max_shapes,
        device=load.device,
        graph_cache=Place(file.path).graph if tensor.graph_cache and load.path else None,
        custom_op_libraries=tuple(map(Path, tensor.custom_op_libraries)),
        is_alone=is_alone,
        npu=NpuOptions(
            require=tensor.npu.require,
            artifacts=Place(file.path).compiled if tensor.npu.max_artifact_bytes and load.path else None,
            max_artifact_bytes=tensor.npu.max_artifact_bytes,
            retry_s=tensor.npu.retry_s,
            soc=tensor.npu.soc,
            options=tensor.npu.options,
            needs=tensor.npu.needs,
        ),
    )
    return file, options


def load_tensor_session(
    load: Load,
    *,
    find: Callable[[str], Backend | TensorBackend] = registry.get,
    available: Callable[[], Reading[int]] = memory.available_bytes,
    is_alone: bool = False,
) -> TensorSession:
    """Load a tensor model on the back end chosen for it, if the memory suffices. Raises ModelError or BackendError."""
    file, options = unpack_tensor(load, is_alone=is_alone)
    backends = load.tensor.backends if load.tensor is not None else ()
    backend, reason = dispatch_tensor(load.backend, file, options, backends=backends, find=find)
    if not load.force:
        check(load.model, backend.estimate_tensor(file, options), available(), load.memory_margin_bytes)
    session = backend.load_tensor(file, options)
    session.info = replace(session.info, backend_reason=reason)
    return session
