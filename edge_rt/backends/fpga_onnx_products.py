"""Which nodes of an ONNX graph the FPGA's engine can compute, and what each of them is: matrices, input, output.

MatMulNBits of 4 bits; Conv, MatMul and Gemm whose weights come from a DequantizeLinear of INT4 or INT8; QLinearConv and
QLinearMatMul. Where the input comes from a DequantizeLinear of 8 bits, the engine gets those 8 bits themselves, less
128: then products are whole numbers, and nothing is rounded but their sum to FLOAT32. What the input's zero point adds
is the same for each vector and goes into the bias. Other inputs are floats, which the engine's numbers round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from edge_rt.backends.fpga_cycles import MIN_INTENSITY
from edge_rt.backends.fpga_numbers import GROUP
from edge_rt.backends.fpga_onnx_graph import NotForEngineError, OnnxGraph, attribute, inputs
from edge_rt.backends.fpga_onnx_patches import MAX_REACH, MAX_TAPS, Window
from edge_rt.backends.fpga_onnx_weights import (
    WeightSource,
    dequantised_source,
    integer_source,
    nbits_source,
)

K_MAX = 8192  # weights a row, of every configuration
_RECORD_BYTES = 4  # that a group of activations takes beside its INT8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Integers of 8 bits that stand for (q - zero) * scale."""

    scale: float
    zero: int
    is_signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A node that runs on the engine.

    at           of the node in the graph; label and kind name it
    value        that it takes: integers as taken says, or floats where that is None
    output       that it makes: integers as given says, or floats
    bias         float64 [rows of all groups], or of size 0
    window       of a convolution
    is_half      floats are FLOAT16
    """

    at: int
    label: str
    kind: str
    value: str
    output: str
    weights: WeightSource
    bias: NDArray[np.float64]
    taken: Quantised | None = None
    given: Quantised | None = None
    window: Window | None = None
    is_half: bool = False

    @property
    def matrix_names(self) -> tuple[str, ...]:
        return tuple(f"{self.at}.{group}" for group in range(self.weights.n_groups))

    @property
    def n_rows(self) -> int:
        return self.weights.n * self.weights.n_groups

    @property
    def intensity(self) -> float:
        """Multiplications per byte that crosses between CPU and engine: vectors in, FLOAT32 out."""
        weights = self.weights
        k = weights.k_padded
        return weights.n * weights.k / (k + k // GROUP * _RECORD_BYTES + 4 * weights.n)


def find_product(
    graph: OnnxGraph, at: int, *, k_max: int = K_MAX, min_intensity: float = MIN_INTENSITY
) -> Product | str:
    """Say what the engine would compute of a node, or why the node stays on the CPU; "" for what is no product."""
    node = graph.nodes[at]
    find = _FINDERS.get((node.op_type, "com.microsoft" if node.domain == "com.microsoft" else ""))
    if find is None or node.domain not in ("", "ai.onnx", "com.microsoft") or len(node.output) != 1:
        return ""
    try:
        found = find(graph, at)
    except NotForEngineError as exc:
        return str(exc)
    if found.weights.k_padded > k_max:
        return f"a row has {found.weights.k} weights, the engine takes {k_max}"
    if found.window is not None and found.weights.n == 1 and found.weights.n_groups > 1:
        return "a depthwise convolution: each vector meets one row"
    if found.intensity < min_intensity:
        return f"fewer than {min_intensity:g} multiplications per byte that would cross"
    return found


def _nbits(graph: OnnxGraph, at: int) -> Product:
    node = graph.nodes[at]
    source = nbits_source(graph, node)
    bias = _bias(graph, inputs(node)[5], source.n)
    return _product(graph, at, source, bias)


def _conv(graph: OnnxGraph, at: int) -> Product:
    node = graph.nodes[at]
    n_groups = _groups(node)
    source = dequantised_source(graph, inputs(node)[1], "conv", n_groups=n_groups)
    bias = _bias(graph, inputs(node)[2], source.n * n_groups)
    return _product(graph, at, source, bias, window=_window(graph, node, source))


def _matmul(graph: OnnxGraph, at: int) -> Product:
    source = dequantised_source(graph, inputs(graph.nodes[at])[1], "columns")
    return _product(graph, at, source, np.zeros(0))


def _gemm(graph: OnnxGraph, at: int) -> Product:
    node = graph.nodes[at]
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1:
        raise NotForEngineError("it scales or transposes its input")
    source = dequantised_source(graph, inputs(node)[1], "rows" if attribute(node, "transB", 0) else "columns")
    bias = _bias(graph, inputs(node)[2], source.n, is_broadcast=True)
    return _product(graph, at, source, bias)


def _qlinear_conv(graph: OnnxGraph, at: int) -> Product:
    node = graph.nodes[at]
    n_groups = _groups(node)
    names = inputs(node)
    source = integer_source(graph, names[3], names[4], names[5], "conv", n_groups=n_groups)
    taken, given = _quantised(graph, *names[1:3]), _quantised(graph, *names[6:8])
    bias = np.zeros(0)
    if names[8]:
        whole, scale = graph.small(names[8]), graph.small(names[4])
        if whole is None or scale is None or whole.size != source.n * n_groups:
            raise NotForEngineError("its bias is computed")
        bias = whole.astype(np.float64) * taken.scale * scale.astype(np.float64).reshape(-1)
    window = _window(graph, node, source)
    product = _product(graph, at, source, bias, window=window, value=names[0])
    return replace(product, taken=taken, given=given)


def _qlinear_matmul(graph: OnnxGraph, at: int) -> Product:
    names = inputs(graph.nodes[at])
    source = integer_source(graph, names[3], names[4], names[5], "columns")
    product = _product(graph, at, source, np.zeros(0), value=names[0])
    return replace(product, taken=_quantised(graph, *names[1:3]), given=_quantised(graph, *names[6:8]))


_FINDERS: Mapping[tuple[str, str], Callable[[OnnxGraph, int], Product]] = {
    ("MatMulNBits", "com.microsoft"): _nbits,
    ("Conv", ""): _conv,
    ("MatMul", ""): _matmul,
    ("Gemm", ""): _gemm,
    ("QLinearConv", ""): _qlinear_conv,
    ("QLinearMatMul", ""): _qlinear_matmul,
}


def _product(
    graph: OnnxGraph,
    at: int,
    source: WeightSource,
    bias: NDArray[np.float64],
    *,
    window: Window | None = None,
    value: str = "",
) -> Product:
    node, taken = graph.nodes[at], None
    if (kind := graph.constants[source.scale].data_type) not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        raise NotForEngineError("its scales are neither FLOAT nor FLOAT16")
    if not value:
        value = node.input[0]
        maker = graph.producer(value)
        if maker is not None and maker.op_type == "DequantizeLinear" and inputs(maker)[0] not in graph.constants:
            value, scale, zero = inputs(maker)[:3]
            taken = _quantised(graph, scale, zero)
    if value not in graph.maker and value not in graph.inputs:
        raise NotForEngineError("its input is a constant")
    return Product(
        at=at,
        label=graph.label(at),
        kind=node.op_type,
        value=value,
        output=node.output[0],
        weights=source,
        bias=bias,
        taken=taken,
        window=window,
        is_half=kind == TensorProto.FLOAT16,
    )


def _quantised(graph: OnnxGraph, scale: str, zero: str) -> Quantised:
    step, point = graph.small(scale), graph.small(zero)
    if step is None or step.size != 1 or point is None or point.size != 1:
        raise NotForEngineError("its activations have no constant scale and zero point for all of them")
    if point.dtype not in (np.uint8, np.int8):
        raise NotForEngineError(f"its activations are {point.dtype}, the engine has 8 bits")
    size = float(step.reshape(-1)[0])
    if not (math.isfinite(size) and size > 0):
        raise NotForEngineError(f"its activations have the scale {size}")
    return Quantised(scale=size, zero=int(point.reshape(-1)[0]), is_signed=point.dtype == np.int8)


def _bias(graph: OnnxGraph, name: str, n: int, *, is_broadcast: bool = False) -> NDArray[np.float64]:
    """Read a bias, as it is or behind a DequantizeLinear; is_broadcast: one number may stand for all rows."""
    if not name:
        return np.zeros(0)
    found: NDArray[Any] | None = None
    if name in graph.constants:
        found = graph.small(name)
    elif (node := graph.producer(name)) is not None and node.op_type == "DequantizeLinear":
        names = inputs(node)
        whole, scale = graph.small(names[0]), graph.small(names[1])
        zero = graph.small(names[2]) if names[2] else np.zeros(1)
        if (
            whole is not None
            and scale is not None
            and zero is not None
            and whole.ndim == 1
            and scale.size in (1, whole.size)
            and zero.size in (1, whole.size)
        ):
            found = (whole.astype(np.float64) - zero.astype(np.float64).reshape(-1)) * scale.astype(np.float64).reshape(
                -1
            )
    # What has several rows of its own is another bias for each vector.
    sizes = (n, 1) if is_broadcast else (n,)
    if found is None or found.size not in sizes or math.prod(found.shape[:-1]) != 1:
        raise NotForEngineError("its bias is computed, or is not one number for each row")
    return np.broadcast_to(found.astype(np.float64).reshape(-1), (n,)).copy()


def _groups(node: NodeProto) -> int:
    n_groups = attribute(node, "group", 1)
    if n_groups < 1:
        raise NotForEngineError(f"it has {n_groups} groups")
    return n_groups


def _window(graph: OnnxGraph, node: NodeProto, source: WeightSource) -> Window:
    kernel = list(graph.constants[source.q].dims)[2:]
    rank = len(kernel)
    if rank not in (1, 2):
        raise NotForEngineError(f"a convolution in {rank} dimensions, the engine's are in 1 or 2")
    strides, dilations = (attribute(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads = attribute(node, "pads", [0] * 2 * rank)
    auto = attribute(node, "auto_pad", b"NOTSET").decode("ascii", "replace")
    if attribute(node, "kernel_shape", kernel) != kernel or {len(strides), len(dilations), len(pads) // 2} != {rank}:
        raise NotForEngineError("its attributes do not agree with its weights")
    if auto not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER") or min(strides + dilations) < 1 or min(pads) < 0:
        raise NotForEngineError("its strides, dilations or pads are not what the engine's patches have")
    reach = [d * (size - 1) + 1 for d, size in zip(dilations, kernel, strict=True)]
    if (
        max(reach) > MAX_REACH
        or math.prod(kernel) > MAX_TAPS
        or any(p >= r + 1 for p, r in zip(pads, reach * 2, strict=True))
    ):
        raise NotForEngineError(f"its window reaches over more than {MAX_REACH}, or its pads over more than the window")

    def both(values: list[int]) -> tuple[int, int]:
        return (1 if rank == 1 else values[0], values[-1])

    low, high = ([0] * (2 - rank) + part for part in (pads[:rank], pads[rank:]))
    return Window(
        rank=rank,
        kernel=both(kernel),
        strides=both(strides),
        dilations=both(dilations),
        pads=((low[0], high[0]), (low[1], high[1])) if auto == "NOTSET" else ((0, 0), (0, 0)),
        auto=auto,
    )
