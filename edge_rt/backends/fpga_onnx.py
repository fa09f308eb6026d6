"""ONNX models with their INT4 and INT8 products on the FPGA's engine, and the rest in onnxruntime on the CPU.

fpga_onnx_plan.py cuts the checked file, fpga_onnx_walk.py runs what it was cut into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, TypeProto, ValueInfoProto

from edge_rt.backends.base import DeviceCounts, MemoryNeed, ModelFile, TensorOptions
from edge_rt.backends.fpga_engine import EngineOpener, EngineReport, MatrixEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_onnx_graph import NotForEngineError, OnnxGraph
from edge_rt.backends.fpga_onnx_patches import MAX_BLOCK_BYTES
from edge_rt.backends.fpga_onnx_plan import DEFAULT_RULE, Part, Plan, Rule, check_constants, part_model, plan
from edge_rt.backends.fpga_onnx_walk import PartStep, ProductStep, Walker
from edge_rt.backends.fpga_onnx_weights import read_matrices, row_sums
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.onnx_cpu import RUNTIME_BYTES, first_line, load_runtime, run_error
from edge_rt.backends.onnx_facts import OnnxModel
from edge_rt.backends.onnx_model import read_checked
from edge_rt.backends.onnx_open import open_part
from edge_rt.backends.tensor_feeds import FeedCheck, Texts, check_outputs
from edge_rt.devices import cpu
from edge_rt.errors import BackendLoadError, BackendStepError, EdgeRtError
from edge_rt.tensor_types import Evidence, TensorModelInfo

# Operators that are worth several threads; a session of any others has one, and so no pool of threads.
_HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "MatMulInteger", "MatMulNBits", "RNN"})
_TYPES = {
    "bool": TensorProto.BOOL,
    "double": TensorProto.DOUBLE,
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "string": TensorProto.STRING,
    **{name: getattr(TensorProto, name.upper()) for name in ("int8", "int16", "int32", "int64")},
    **{name: getattr(TensorProto, name.upper()) for name in ("uint8", "uint16", "uint32", "uint64")},
}


def supports(file: ModelFile, options: TensorOptions, rule: Rule = DEFAULT_RULE) -> str | None:
    """Say why the engine has nothing to do in a model; None if it has. Raises ModelFormatError."""
    return _refusal(file, options, *_planned(file, rule))


def estimate(file: ModelFile, options: TensorOptions, rule: Rule = DEFAULT_RULE) -> MemoryNeed:
    """Estimate from the file: the parts' weights, the engine's, and what vectors and values take."""
    model, found = _planned(file, rule)
    layout = Layout(128)
    engine_bytes = sum(
        product.weights.n_groups
        * product.weights.n_pieces
        * layout.weight_bytes(product.weights.n, product.weights.k_padded, 0)
        for product in found.products
    )
    return MemoryNeed(
        weights_bytes=model.file_bytes + model.external_bytes + engine_bytes,
        kv_bytes=0,
        scratch_bytes=RUNTIME_BYTES
        + model.file_bytes
        + 2 * MAX_BLOCK_BYTES
        + options.max_batch * model.activation_bytes,
    )


def load(
    file: ModelFile,
    options: TensorOptions,
    engine_opener: EngineOpener,
    rule: Rule = DEFAULT_RULE,
    *,
    evidence: Evidence = "device",
    usable: Callable[[], cpu.Usable] = cpu.usable,
) -> FpgaOnnxSession:
    """Load a model: its products' matrices into the engine that engine_opener gives for them, the parts on the CPU.

    evidence says what that engine is. The session owns it.

    Raises ModelFormatError, BackendLoadError, BackendUnavailableError, and what engine_opener raises.
    """
    runtime = load_runtime()
    n_threads = options.n_threads or len(usable().compute_cpus)
    model, proto = read_checked(file.path)
    graph = OnnxGraph(proto, file.path)
    found, matrices = _with_matrices(graph, rule)
    if (reason := _refusal(file, options, model, found)) is not None:
        raise BackendLoadError(model=file.model, reason=reason)
    check_constants(found, model)
    engine = engine_opener(matrices)
    try:
        steps = _steps(runtime, model, found, matrices, engine, options, n_threads)
    except EdgeRtError:
        engine.close()
        raise
    except Exception as exc:
        engine.close()
        raise BackendLoadError(model=file.model, reason=first_line(exc)) from exc
    kept = {name: graph.array(name) for name in graph.outputs if name in graph.constants}
    return FpgaOnnxSession(file, options, model, found, Walker(found, steps, kept), steps, engine, n_threads, evidence)


class FpgaOnnxSession:
    """A model whose products run on an engine, and the rest in onnxruntime."""

    def __init__(
        self,
        file: ModelFile,
        options: TensorOptions,
        model: OnnxModel,
        found: Plan,
        walker: Walker,
        steps: Sequence[PartStep | ProductStep],
        engine: MatrixEngine,
        n_threads: int,
        evidence: Evidence,
    ) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self.plan = found
        self.steps = tuple(steps)
        self._walker: Walker | None = walker
        self._engine = engine
        self._check_feeds = FeedCheck(model.inputs)
        self._all_outputs = check_outputs(model.outputs, ())
        self._texts = Texts(model.inputs, model.outputs)
        self.info = TensorModelInfo(
            model=file.model,
            variant=file.variant,
            backend="fpga",
            device=options.device,
            quant=file.quant,
            size_bytes=model.file_bytes + model.external_bytes,
            inputs=self.inputs,
            outputs=self.outputs,
            n_threads=n_threads,
            max_batch=options.max_batch,
            placement=found.placement(),
            evidence=evidence,
        )

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        if self._walker is None:
            raise BackendStepError(reason="the session is closed")
        self._check_feeds(feeds)
        wanted = check_outputs(self.outputs, outputs) if outputs else self._all_outputs
        given = self._texts.read(feeds)
        try:
            answers = self._walker.run(given, wanted)
        except EdgeRtError:
            raise
        except Exception as exc:
            raise run_error(exc) from exc
        return self._texts.written(answers)

    def report(self) -> EngineReport:
        """Say what the engine has done, and what the CPU did in its place."""
        return self._engine.report()

    def device_counts(self) -> DeviceCounts:
        return self._engine.report().counts()

    def close(self) -> None:
        if self._walker is not None:
            self._walker = None
            self._engine.close()


def _planned(file: ModelFile, rule: Rule) -> tuple[OnnxModel, Plan]:
    model, proto = read_checked(file.path)
    return model, plan(OnnxGraph(proto, file.path), rule)


def _refusal(file: ModelFile, options: TensorOptions, model: OnnxModel, found: Plan) -> str | None:
    if options.custom_op_libraries or model.custom_domains:
        return "it has operators that are not onnxruntime's own, with which the FPGA's engine runs no model"
    if found.products:
        return None
    reasons = "; ".join(dict.fromkeys(found.stayed.values()))
    return f"{file.model} has no product for the FPGA's engine" + (f": {reasons[:400]}" if reasons else "")


def _with_matrices(graph: OnnxGraph, rule: Rule) -> tuple[Plan, dict[str, Matrix]]:
    """Plan with the weights read: a product whose values the engine does not hold stays on the CPU."""
    found = plan(graph, rule)
    matrices: dict[str, Matrix] = {}
    refused: dict[int, str] = {}
    for product in found.products:
        try:
            own = read_matrices(graph, product.weights)
        except NotForEngineError as exc:
            refused[product.at] = str(exc)
        else:
            matrices |= dict(zip(product.matrix_names, own, strict=True))
    return (plan(graph, rule, refused) if refused else found), matrices


def _steps(
    runtime: Any,
    model: OnnxModel,
    found: Plan,
    matrices: Mapping[str, Matrix],
    engine: MatrixEngine,
    options: TensorOptions,
    n_threads: int,
) -> list[PartStep | ProductStep]:
    types = {value.name: value for value in found.graph.model.graph.input}
    steps: list[PartStep | ProductStep] = []
    for step in found.steps:
        if isinstance(step, Part):
            kinds = {found.graph.nodes[at].op_type for at in step.nodes}
            graph = bytes(part_model(found.graph, step, types).SerializeToString())
            session = open_part(runtime, model, graph, options, n_threads if kinds & _HEAVY else 1)
            for made in session.get_outputs():
                types[made.name] = _typed(made.name, made.type, made.shape)
            steps.append(PartStep(session.run, step.inputs, step.outputs))
            continue
        sums = np.concatenate([row_sums(matrices[name]) for name in step.matrix_names])
        steps.append(ProductStep(step, sums, engine.multiply))
        kind = "float16" if step.is_half else "float"
        if step.given is not None:
            kind = "int8" if step.given.is_signed else "uint8"
        types[step.output] = _typed(step.output, f"tensor({kind})", [])
    return steps


def _typed(name: str, said: str, shape: Sequence[Any]) -> ValueInfoProto:
    """Write down a value's type as onnxruntime tells it; a shape only where all of it is known to have a rank."""
    elements = _TYPES.get(said.removeprefix("tensor(").removesuffix(")")) if said.startswith("tensor(") else None
    if elements is None:
        raise ValueError(f"the value {name[:100]!r} between two parts is a {said[:100]}, not a tensor")
    proto = TypeProto()
    proto.tensor_type.elem_type = elements
    for size in shape:
        dim = proto.tensor_type.shape.dim.add()
        if isinstance(size, int):
            dim.dim_value = size
    return ValueInfoProto(name=name, type=proto)
