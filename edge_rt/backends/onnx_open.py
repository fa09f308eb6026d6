"""Open an ONNX model in onnxruntime, from the copy of its optimised graph where there is one.

docs/onnx.md says what was measured of the settings here.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.onnx_facts import OnnxModel, checks_digest, from_bytes
from edge_rt.catalog.graph_copy import give_up, is_hopeless, make_copy, open_copy, read_facts
from edge_rt.catalog.place import Place
from edge_rt.devices import cpu
from edge_rt.devices.memory import give_back

_log = logging.getLogger(__name__)

_PROVIDER = "CPUExecutionProvider"
ACCURACY_LEVEL = 4  # of MatMulNBits: 8-bit activations; what files leave unset can be slower than floats
SPIN_US = 100
MIN_REGION_BYTES, MAX_REGION_BYTES = 2 * 2**20, 64 * 2**20  # of the arena
MAX_COPY_BYTES = 2**30  # of a model whose graph is copied: onnxruntime writes one file, which protobuf limits to 2 GiB


def known_model(
    runtime: Any,
    file: ModelFile,
    options: TensorOptions,
    *,
    features: Callable[[], frozenset[str]] = cpu.features,
    checks: Callable[[], str] = checks_digest,
) -> OnnxModel | None:
    """Give the facts that these checks have found when the copy of the graph was made; None without such a copy."""
    if options.graph_cache is None or options.custom_op_libraries:
        return None
    return from_bytes(read_facts(file.path, options.graph_cache, _key(runtime, features, checks)), file.path)


def lacks_copy(runtime: Any, file: ModelFile, options: TensorOptions) -> bool:
    """Say whether open_session would check the model and make the copy of its graph."""
    if options.graph_cache is None or options.custom_op_libraries or Place(file.path).read_record() is None:
        return False
    if not os.access(options.graph_cache.parent, os.W_OK):
        return False
    key = _key(runtime)
    has_facts = bool(read_facts(file.path, options.graph_cache, key))
    return not has_facts and not is_hopeless(file.path, options.graph_cache, key)


def open_session(
    runtime: Any,
    file: ModelFile,
    options: TensorOptions,
    n_threads: int,
    *,
    max_copy_bytes: int = MAX_COPY_BYTES,
) -> tuple[Any, OnnxModel]:
    """Give an InferenceSession and the model's facts. Raises whatever onnxruntime raises, and ModelFormatError."""
    copy = options.graph_cache
    model = known_model(runtime, file, options) or file.onnx
    if copy is None or options.custom_op_libraries:
        return _open_original(runtime, file.onnx, options, n_threads), file.onnx
    key = _key(runtime)
    if (session := _open_copied(runtime, model, options, n_threads, copy, key)) is not None:
        return session, model
    model = file.onnx  # from here on it is the file itself that is read
    if is_hopeless(model.path, copy, key):
        return _open_original(runtime, model, options, n_threads), model

    def write(target: str) -> None:
        _open_original(runtime, model, options, n_threads, write_to=target)  # the session is dropped at once

    try:
        can_copy = model.file_bytes + model.external_bytes <= max_copy_bytes
        if can_copy and make_copy(model.path, copy, key, write, facts=model.to_bytes()):
            if (session := _open_copied(runtime, model, options, n_threads, copy, key)) is not None:
                return session, model
            can_copy = False
        if not can_copy:
            # Too large, or as an If is, of whose branches onnxruntime 1.32 gives nodes one name: never tried again.
            give_up(model.path, copy, key)
    except Exception as exc:  # noqa: BLE001 - a model that cannot be loaded says so below, once more
        _log.warning("%s: its optimised graph is not kept on disk: %s", model.path.name, exc)
    return _open_original(runtime, model, options, n_threads), model


def _key(
    runtime: Any,
    features: Callable[[], frozenset[str]] = cpu.features,
    checks: Callable[[], str] = checks_digest,
) -> str:
    """Tell what a copy depends on beside its model."""
    level = f"level {ACCURACY_LEVEL}"
    what = (runtime.__version__, platform.machine(), *sorted(features()), _PROVIDER, level, checks())
    return hashlib.sha256("\n".join(what).encode()).hexdigest()


def _open_copied(
    runtime: Any, model: OnnxModel, options: TensorOptions, n_threads: int, copy: Path, key: str
) -> Any | None:
    if (file := open_copy(model.path, copy, key)) is None:
        return None
    with file:
        settings = _settings(runtime, model, options, n_threads)
        settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # all is done
        try:
            # By the descriptor: what was checked is what is read, whatever stands at the path by now.
            return _open(runtime, f"/proc/self/fd/{file.fileno()}", settings)
        except Exception as exc:  # noqa: BLE001 - whatever ails the copy, the model is still there
            _log.warning("%s: the copy of its optimised graph cannot be used: %s", model.path.name, exc)
            with contextlib.suppress(OSError):  # it may be another's
                copy.unlink()
            return None


def _open_original(
    runtime: Any, model: OnnxModel, options: TensorOptions, n_threads: int, *, write_to: str = ""
) -> Any:
    settings = _settings(runtime, model, options, n_threads)
    settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.optimized_model_filepath = write_to
    if not model.n_slow:
        return _open(runtime, str(model.path), settings)
    # A graph in memory has no folder; the files that it names are in the model's.
    folder = str(model.path.resolve().parent)
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    from edge_rt.backends.onnx_model import fast_graph

    return _open(runtime, fast_graph(model, ACCURACY_LEVEL), settings)


def open_part(runtime: Any, model: OnnxModel, graph: bytes, options: TensorOptions, n_threads: int) -> Any:
    """Open a graph that is a part of a checked model, whose external data it may name.

    A model may have hundreds of parts; an arena for each would keep the most that each has ever needed.
    """
    settings = _settings(runtime, model, replace(options, is_alone=False), n_threads)
    settings.enable_cpu_mem_arena = False
    settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    folder = str(model.path.resolve().parent)
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return _open(runtime, graph, settings)


def _open(runtime: Any, graph: str | bytes, settings: Any) -> Any:
    session = runtime.InferenceSession(graph, sess_options=settings, providers=[_PROVIDER], enable_fallback=0)
    session.disable_fallback()  # a provider that fails shall be heard of, not be replaced behind our back
    give_back()  # a load frees as much as the weights
    return session


@cache
def _make_roomy_arena(runtime: Any, region_bytes: int) -> None:
    """Let the process' arena take regions of that size, once it has been given back for the first time.

    Left alone it takes regions that double from 1 MiB on, each too small for what comes next, and keeps them all: twice
    what a run needs. Of one large region only what is used becomes memory, but for a table of a 32nd of its size.
    """
    values = {
        "arena_extend_strategy": 0,  # regions of powers of two
        "initial_chunk_size_bytes": 2**16,
        "initial_growth_chunk_size_bytes": region_bytes,
        "max_dead_bytes_per_chunk": -1,
        "max_mem": 0,  # without a limit
    }
    kind = runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    cpu_memory = runtime.OrtMemoryInfo("Cpu", kind, 0, runtime.OrtMemType.DEFAULT)
    runtime.create_and_register_allocator(cpu_memory, runtime.OrtArenaCfg(values))


def _region_bytes(wanted: int) -> int:
    """Give the next size that onnxruntime takes for a region: it asserts multiples of 256, once the arena grows."""
    return -(-min(max(wanted, MIN_REGION_BYTES), MAX_REGION_BYTES) // 2**20) * 2**20


def _settings(runtime: Any, model: OnnxModel, options: TensorOptions, n_threads: int) -> Any:
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # fatal: what it says of errors is in the exception
    settings.intra_op_num_threads = n_threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    # A plan of the memory is kept for every shape that ever came, and makes no run faster.
    settings.enable_mem_pattern = not model.is_dynamic
    # Threads spin between a run's operators, which are microseconds apart, but not from one run to the next: without it
    # a run takes a fifth longer, and without an end half as much CPU time again.
    settings.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # Parts that shrink towards an operator's end: a thread that a neighbour has put aside holds the others up less.
    settings.add_session_config_entry("session.dynamic_block_base", "4")
    settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(ACCURACY_LEVEL))
    # Weights in the arena would hold its regions when it is given back.
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if options.is_alone:
        _make_roomy_arena(runtime, _region_bytes(4 * (model.file_bytes + model.external_bytes)))
        settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for library in options.custom_op_libraries:
        settings.register_custom_ops_library(str(library))
    return settings
