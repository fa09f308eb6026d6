"""ONNX models cut for the FPGA's engine, against the whole file in onnxruntime. The engine is its golden model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from onnx import ModelProto, TensorProto, helper, numpy_helper  # noqa: E402

from edge_rt.backends import fpga_onnx  # noqa: E402
from edge_rt.backends.base import TensorOptions  # noqa: E402
from edge_rt.backends.fpga_engine import FpgaEngine  # noqa: E402
from edge_rt.backends.fpga_onnx_plan import CPU, FPGA, Part, Rule  # noqa: E402
from edge_rt.backends.fpga_onnx_products import Product  # noqa: E402
from edge_rt.errors import (  # noqa: E402
    BackendLoadError,
    BackendStepError,
    InvalidRequestError,
    ModelFormatError,
)
from hw.fpga.sim.port import GoldenPort  # noqa: E402
from tests.fpga_engines import SimulatedFpga, float_opener, golden_opener, golden_port  # noqa: E402
from tests.tensor_models import (  # noqa: E402
    conv,
    int4,
    int8,
    make,
    quantised_conv,
    rows,
    rows_with_product,
    saved,
    with_external_data,
)

ALL = Rule(min_intensity=0)
K = 64
F = TensorProto.FLOAT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def whole(path: Path, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def load(model: ModelProto, path: Path, opener: Any, rule: Rule = ALL) -> fpga_onnx.FpgaOnnxSession:
    return fpga_onnx.load(saved(model, path), TensorOptions(n_threads=1), opener, rule)


def near(found: NDArray[Any], wanted: NDArray[Any], relative: float, size: float = 1e-3) -> None:
    """Compare to a share of the largest element, or of size where that is more."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    error = np.abs(found.astype(np.float64) - wanted).max(initial=0)
    assert error <= relative * max(np.abs(wanted).max(initial=0), size), error


def placed(session: fpga_onnx.FpgaOnnxSession) -> dict[str, dict[str, int]]:
    """Count kinds of nodes by where they run."""
    found: dict[str, dict[str, int]] = {FPGA: {}, CPU: {}}
    for part in session.info.placement:
        for kind, n in part.kinds:
            found[part.provider][kind] = found[part.provider].get(kind, 0) + n
    return found


def exact_scales(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Scales that the engine's 16 bits hold without rounding."""
    whole = random.integers(1, 32768, shape)
    whole[:, 0] = 32767
    return (whole * 2.0**-20).astype(np.float32)


class Builder:
    """A random model: values [m, 64] from inputs x and w, each node reading some of the values before it."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: dict[str, NDArray[Any]] = {
            "bias": self.random.standard_normal(K).astype(np.float32),
            "xs": np.float32(0.03),
            "xz": np.uint8(117),
        }
        self.values = ["x", "w"]
        self.n_products = 0

    def add(self, kind: str, *inputs: str, domain: str = "", **facts: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"n{name}", domain=domain, **facts))
        return name

    def step(self, what: int, a: int, b: int) -> None:
        first, second = self.values[a % len(self.values)], self.values[b % len(self.values)]
        if what == 0:
            value = self.add("Tanh", first)
        elif what == 1:
            value = self.add("Add", first, second)
        elif what == 2:
            value = self.add("Mul", self.add("Add", first, "bias"), self.add("Tanh", second))
        elif what == 3:  # weights that a product before it may have, too
            value = self.nbits(first, f"shared{b % 2}")
        elif what == 4:
            value = self.nbits(first, f"own{len(self.nodes)}")
        elif what == 5:
            value = self.quantised(first if first in ("x", "w") else "x")
        else:
            inner = [helper.make_node("Add", [first, second], ["inner"])]
            outer = [helper.make_node("Sub", [first, "bias"], ["outer"])]
            out = helper.make_tensor_value_info
            self.weights["yes"] = np.array(bool(b % 2))
            value = self.add(
                "If",
                "yes",
                then_branch=helper.make_graph(inner, "then", [], [out("inner", F, None)]),
                else_branch=helper.make_graph(outer, "else", [], [out("outer", F, None)]),
            )
        self.values.append(value)

    def nbits(self, value: str, weights: str) -> str:
        self.n_products += 1
        if f"{weights}.q" not in self.weights:
            self.weights[f"{weights}.q"] = self.random.integers(0, 256, (K, K // 32, 16)).astype(np.uint8)
            self.weights[f"{weights}.s"] = exact_scales(self.random, K, K // 32)
        bounded = self.add("Tanh", value)
        return self.add(
            "MatMulNBits",
            bounded,
            f"{weights}.q",
            f"{weights}.s",
            domain="com.microsoft",
            K=K,
            N=K,
            bits=4,
            block_size=32,
        )

    def quantised(self, value: str) -> str:
        """A MatMul in QDQ form, behind which another reader may have the dequantised input, too."""
        self.n_products += 1
        name = f"q{len(self.nodes)}"
        self.weights[name] = self.random.integers(-128, 128, (K, K)).astype(np.int8)
        self.weights[name + ".s"] = self.random.uniform(0.001, 0.01, K).astype(np.float32)
        self.weights[name + ".z"] = np.zeros(K, np.int8)
        narrow = self.add("DequantizeLinear", self.add("QuantizeLinear", value, "xs", "xz"), "xs", "xz")
        self.values.append(narrow)
        return self.add("MatMul", narrow, self.add("DequantizeLinear", name, name + ".s", name + ".z", axis=1))

    def model(self, outputs: list[int]) -> ModelProto:
        wanted = dict.fromkeys(self.values[2 + i % (len(self.values) - 2)] for i in outputs)
        arrays = {name: np.asarray(value) for name, value in self.weights.items()}
        ends = [(name, F, ["m", K]) for name in wanted]
        return make(self.nodes, [("x", F, ["m", K]), ("w", F, ["m", K])], ends, arrays, opset=19, microsoft=True)


numbers = st.integers(0, 10**6)
steps = st.lists(st.tuples(st.integers(0, 6), numbers, numbers), min_size=1, max_size=14)


@given(steps, st.lists(numbers, min_size=1, max_size=4), st.integers(0, 10), numbers)
@settings(max_examples=60)
def test_any_graph_computes_what_the_whole_file_computes(
    folder: Path, steps: list[tuple[int, int, int]], outputs: list[int], m: int, seed: int
) -> None:
    builder = Builder(seed)
    for step in [*steps, (3, seed, 1)]:
        builder.step(*step)
    model = builder.model([*outputs, len(builder.values) - 3])
    opener = float_opener()
    session = load(model, folder / "any.onnx", opener)
    random = np.random.default_rng(seed)
    feeds = {name: random.standard_normal((m, K)).astype(np.float32) for name in ("x", "w")}
    wanted = whole(folder / "any.onnx", feeds)
    found = session.run(feeds)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        near(found[name], array, 2e-5)  # both add up to 14 layers of rounding to FLOAT32
    n_live = len(session.plan.products)
    assert 1 <= n_live <= builder.n_products
    assert opener.last.n_products == (n_live if m else 0)
    assert opener.last.n_vectors == n_live * m
    # Parts and products take turns: no more parts than products in a row, however many branches there are.
    n_parts = sum(isinstance(step, Part) for step in session.plan.steps)
    assert n_parts <= n_live + 1
    counted = sum(part.n_nodes for part in session.info.placement)
    assert counted <= len(model.graph.node)
    assert sum(placed(session)[FPGA].get(kind, 0) for kind in ("MatMul", "MatMulNBits")) == n_live
    session.close()
    assert opener.last.is_closed


@given(steps, numbers)
@settings(max_examples=10)
def test_on_the_golden_model_it_is_off_by_the_formats_rounding(
    folder: Path, steps: list[tuple[int, int, int]], seed: int
) -> None:
    builder = Builder(seed)
    for step in [*steps[:6], (4, seed, 1)]:
        builder.step(*step)
    opener = golden_opener("z2-gemv")
    session = load(builder.model([len(builder.values) - 3]), folder / "golden.onnx", opener)
    random = np.random.default_rng(seed)
    feeds = {name: random.standard_normal((5, K)).astype(np.float32) for name in ("x", "w")}
    (found,), (wanted,) = session.run(feeds).values(), whole(folder / "golden.onnx", feeds).values()
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < 0.03
    report = opener.last.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (len(session.plan.products), 0, 0)
    session.close()


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.sampled_from([1, 2, 2]))
    kernel = [draw(st.integers(1, 4)) for _ in range(rank)]
    dilations = [draw(st.integers(1, 3)) for _ in range(rank)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    facts: dict[str, Any] = {"strides": [draw(st.integers(1, 3)) for _ in range(rank)], "dilations": dilations}
    auto = draw(st.sampled_from(["", "", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto:
        facts["auto_pad"] = auto
        facts["dilations"] = [1] * rank  # with which onnxruntime's SAME is what the specification says
        reach = kernel
    else:
        facts["pads"] = [draw(st.integers(0, size)) for size in reach * 2]
    return {
        "group": draw(st.sampled_from([1, 1, 2, 3])),
        "channels": draw(st.sampled_from([1, 3, 8, 32])),
        "n": draw(st.integers(2, 9)),
        "kernel": kernel,
        "sizes": [size + draw(st.integers(0, 9)) for size in reach],
        "batch": draw(st.integers(1, 3)),
        "signed": draw(st.booleans()),
        "low": draw(st.sampled_from([-128, -8])),
        "facts": facts,
        "seed": draw(numbers),
    }


@given(convolutions())
@settings(max_examples=60)
def test_any_convolution_is_onnxruntimes(folder: Path, case: dict[str, Any]) -> None:
    random = np.random.default_rng(case["seed"])
    shape = (case["n"] * case["group"], case["channels"], *case["kernel"])
    weights = random.integers(case["low"], -case["low"], shape).astype(np.int8)
    model = quantised_conv(random, weights, signed=case["signed"], group=case["group"], **case["facts"])
    opener = golden_opener()
    session = load(model, folder / "conv.onnx", opener)
    low, high, kind = (-128, 128, np.int8) if case["signed"] else (0, 256, np.uint8)
    batch = (case["batch"], case["channels"] * case["group"], *case["sizes"])
    feeds = {"x": random.integers(low, high, batch).astype(kind)}
    (found,) = session.run(feeds).values()
    (wanted,) = whole(folder / "conv.onnx", feeds).values()
    # The zero point's share is in the engine's sums, and taken off again: they are rounded at their own size.
    most = 255 * 0.02 * 0.02 * np.abs(weights.astype(int)).reshape(len(weights), -1).sum(axis=1).max()
    near(found, wanted, 5e-7, float(most))
    assert placed(session)[FPGA] == {"Conv": 1, "DequantizeLinear": 3}
    assert opener.last.report().n_products == case["group"] * case["batch"]
    session.close()


def test_a_picture_larger_than_a_block_is_taken_apart(folder: Path) -> None:
    """Rows and columns both are cut: a vector has 8,192 bytes, a block 512 vectors, a row of the picture 700."""
    random = np.random.default_rng(1)
    weights = random.integers(-8, 8, (4, 8192, 1, 1)).astype(np.int8)
    opener = float_opener()
    session = load(quantised_conv(random, weights), folder / "wide.onnx", opener)
    feeds = {"x": random.integers(0, 256, (1, 8192, 3, 700)).astype(np.uint8)}
    near(session.run(feeds)["y"], whole(folder / "wide.onnx", feeds)["y"], 1e-6)
    assert opener.last.n_products == 6
    session.close()


def test_int8_and_matmulnbits_models_run_and_say_where(folder: Path) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((3, 5, 16)).astype(np.float32)
    opener = golden_opener()
    flat = load(int8(), folder / "int8.onnx", opener)
    feeds = {"x": x.reshape(15, 16)}
    near(flat.run(feeds)["y"], whole(folder / "int8.onnx", feeds)["y"], 1e-6)
    assert placed(flat) == {
        FPGA: {"MatMul": 1, "DequantizeLinear": 2},
        CPU: {"QuantizeLinear": 2, "DequantizeLinear": 1},
    }
    assert opener.last.report().n_products == 1
    nbits = load(int4(0), folder / "int4.onnx", opener)
    feeds = {"x": random.standard_normal((7, 64)).astype(np.float32)}
    near(nbits.run(feeds)["y"], whole(folder / "int4.onnx", feeds)["y"], 0.02)
    assert placed(nbits) == {FPGA: {"MatMulNBits": 1}, CPU: {}}
    assert nbits.info.max_runs == 1


def test_weights_in_another_file_are_read_from_there(folder: Path) -> None:
    model = with_external_data(int8(), folder)
    session = load(model, folder / "external.onnx", float_opener())
    feeds = {"x": np.ones((1, 16), np.float32)}
    near(session.run(feeds)["y"], whole(folder / "external.onnx", feeds)["y"], 1e-6)


def gemm(*, trans_b: bool, blocks: int, bits: int, is_float: bool) -> ModelProto:
    """x FP32 or UINT8 [m, 64] through a Gemm with weights of INT8 or INT4, in blocks or with a scale a row."""
    random = np.random.default_rng(10)
    n, k = 12, 64
    low, kind = (-8, TensorProto.INT4) if bits == 4 else (-128, TensorProto.INT8)
    q = random.integers(low, -low, (n, k))
    scale = exact_scales(random, n, k // blocks) if blocks else random.uniform(0.001, 0.01, (n, 1)).astype(np.float32)
    if blocks and bits == 8:  # the lower halves' scales have fewer bits: only equal ones are exact
        scale[:] = 0.25
    if not trans_b:
        q, scale = q.T, scale.T
    facts = {"block_size": blocks, "axis": int(trans_b)} if blocks else {"axis": 1 - int(trans_b)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], **facts),
        helper.make_node("Gemm", ["x" if is_float else "xd", "wd", "c"], ["y"], transB=int(trans_b)),
    ]
    if not is_float:
        nodes.insert(0, helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xd"]))
    arrays: dict[str, NDArray[Any]] = {
        "ws": scale if blocks else scale.reshape(-1),
        "c": random.standard_normal(n).astype(np.float32),
        "xs": np.asarray(np.float32(0.01)),
        "xz": np.asarray(np.uint8(7)),
    }
    elements = F if is_float else TensorProto.UINT8
    model = make(nodes, [("x", elements, ["m", k])], [("y", F, ["m", n])], arrays, opset=21)
    model.graph.initializer.append(helper.make_tensor("w", kind, q.shape, q.reshape(-1).tolist()))
    return model


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("blocks", [0, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_float", [False, True])
def test_gemm_with_int4_and_int8_in_rows_and_blocks(
    trans_b: bool, blocks: int, bits: int, is_float: bool, folder: Path
) -> None:
    random = np.random.default_rng(11)
    model = gemm(trans_b=trans_b, blocks=blocks, bits=bits, is_float=is_float)
    opener = golden_opener("z2-gemm")
    session = load(model, folder / "gemm.onnx", opener)
    x = (
        random.standard_normal((9, 64)).astype(np.float32)
        if is_float
        else random.integers(0, 256, (9, 64)).astype("u1")
    )
    found, wanted = session.run({"x": x})["y"], whole(folder / "gemm.onnx", {"x": x})["y"]
    near(found, wanted, 0.02 if is_float else 1e-6)
    assert placed(session)[CPU] == {}
    assert opener.last.report().n_products == 1
    # With nothing rounded on the way, floats are exact, too.
    near(load(model, folder / "gemm.onnx", float_opener()).run({"x": x})["y"], wanted, 1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (12,), (1, 1), (1, 12), (12, 1), (12, 12)])
def test_a_gemm_adds_its_bias_as_onnx_broadcasts_it(shape: tuple[int, ...], folder: Path) -> None:
    random = np.random.default_rng(18)
    model = gemm(trans_b=True, blocks=0, bits=8, is_float=True)
    n = next(each for each in model.graph.initializer if each.name == "c").dims[0]
    sizes = tuple(n if size == 12 else 1 for size in shape)
    bias = numpy_helper.from_array(np.asarray(random.uniform(-9, 9, sizes), np.float32), "c")
    next(each for each in model.graph.initializer if each.name == "c").CopyFrom(bias)
    saved(model, folder / "bias.onnx")
    x = random.standard_normal((n, 64)).astype(np.float32)
    wanted = whole(folder / "bias.onnx", {"x": x})["y"]
    if shape[:1] == (12,) and len(shape) == 2:  # another number for each vector
        reason = fpga_onnx.supports(saved(model, folder / "bias.onnx"), TensorOptions(), ALL)
        assert "its bias is computed, or is not one number for each row" in str(reason)
    else:
        near(load(model, folder / "bias.onnx", float_opener()).run({"x": x})["y"], wanted, 1e-6)


@pytest.mark.parametrize(
    ("to", "is_kept"),
    [(TensorProto.UINT8, False), (TensorProto.INT4, False), (TensorProto.UINT4, False), (TensorProto.INT8, True)],
)
def test_a_cast_of_weights_that_changes_them_stays_on_the_cpu(to: int, is_kept: bool, folder: Path) -> None:
    random = np.random.default_rng(19)
    nodes = [
        helper.make_node("Cast", ["w"], ["wc"], to=to),
        helper.make_node("DequantizeLinear", ["wc", "ws", "wz"], ["wd"]),
        helper.make_node("MatMul", ["x", "wd"], ["y"]),
    ]
    arrays: dict[str, NDArray[Any]] = {
        "w": random.integers(-90, 100, (64, 12)).astype(np.int8),
        "ws": np.asarray(np.float32(0.01)),
    }
    model = make(nodes, [("x", F, ["m", 64])], [("y", F, ["m", 12])], arrays, opset=21)
    model.graph.initializer.append(helper.make_tensor("wz", to, [], [5]))
    file = saved(model, folder / "cast.onnx")
    reason = fpga_onnx.supports(file, TensorOptions(), ALL)
    if not is_kept:
        assert "a Cast changes its weights" in str(reason)
        return
    assert reason is None
    feeds = {"x": random.standard_normal((3, 64)).astype(np.float32)}
    near(
        load(model, folder / "cast.onnx", float_opener()).run(feeds)["y"], whole(folder / "cast.onnx", feeds)["y"], 1e-6
    )


@pytest.mark.parametrize("scale_first", [False, True])
def test_weights_behind_a_cast_and_a_mul_are_found(scale_first: bool, folder: Path) -> None:
    random = np.random.default_rng(15)
    names = ["ws", "wc"] if scale_first else ["wc", "ws"]
    nodes = [
        helper.make_node("Cast", ["w"], ["wc"], to=F),
        helper.make_node("Mul", names, ["wd"]),
        helper.make_node("MatMul", ["x", "wd"], ["y"]),
    ]
    arrays: dict[str, NDArray[Any]] = {
        "w": random.integers(-128, 128, (64, 12)).astype(np.int8),
        "ws": random.uniform(0.001, 0.01, (1, 12)).astype(np.float32),
    }
    model = make(nodes, [("x", F, ["b", "m", 64])], [("y", F, ["b", "m", 12])], arrays)
    session = load(model, folder / "cast.onnx", float_opener())
    feeds = {"x": random.standard_normal((2, 3, 64)).astype(np.float32)}
    near(session.run(feeds)["y"], whole(folder / "cast.onnx", feeds)["y"], 1e-6)
    assert placed(session) == {FPGA: {"MatMul": 1, "Cast": 1, "Mul": 1}, CPU: {}}
    # A scale for each weight of a row is none that the engine has.
    arrays = {"w": np.ones((64, 64), np.int8), "ws": np.ones((64, 1), np.float32)}
    columns = make(nodes, [("x", F, ["b", "m", 64])], [("y", F, ["b", "m", 64])], arrays)
    reason = fpga_onnx.supports(saved(columns, folder / "columns.onnx"), TensorOptions(), ALL)
    assert "scales of the shape [64, 1], not one for each row" in str(reason)


def qlinear(kind: str) -> tuple[ModelProto, tuple[int, ...]]:
    random = np.random.default_rng(12)
    arrays: dict[str, NDArray[Any]] = {
        "xs": np.asarray(np.float32(0.02)),
        "xz": np.asarray(np.uint8(100)),
        "ws": random.uniform(0.001, 0.01, 8).astype(np.float32),
        "wz": np.zeros(8, np.int8),
        "ys": np.asarray(np.float32(0.05)),
        "yz": np.asarray(np.uint8(120)),
        "b": random.integers(-4000, 4000, 8).astype(np.int32),
    }
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    if kind == "QLinearConv":
        arrays["w"] = random.integers(-128, 128, (8, 32, 3, 3)).astype(np.int8)
        node, shape = helper.make_node(kind, [*names, "b"], ["y"], pads=[1, 1, 1, 1]), (2, 32, 7, 5)
    else:
        arrays["w"] = random.integers(-128, 128, (32, 8)).astype(np.int8)
        node, shape = helper.make_node(kind, names, ["y"]), (3, 5, 32)
    elements = TensorProto.UINT8
    return make([node], [("x", elements, [None] * len(shape))], [("y", elements, [None] * len(shape))], arrays), shape


@pytest.mark.parametrize("kind", ["QLinearConv", "QLinearMatMul"])
def test_qlinear_operators_give_integers(kind: str, folder: Path) -> None:
    model, shape = qlinear(kind)
    session = load(model, folder / f"{kind}.onnx", golden_opener())
    x = np.random.default_rng(13).integers(0, 256, shape).astype(np.uint8)
    found, wanted = session.run({"x": x})["y"], whole(folder / f"{kind}.onnx", {"x": x})["y"]
    assert found.dtype == wanted.dtype
    off = np.abs(found.astype(int) - wanted)
    assert off.max() <= 1  # halves may be rounded otherwise
    assert (off > 0).mean() < 0.01
    assert placed(session)[FPGA] == {kind: 1}


class SilentPort(GoldenPort):
    """Does not answer the next n_silent starts."""

    n_silent = 0

    def wait(self, limit_s: float) -> bool:
        if self.n_silent:
            self.n_silent -= 1
            return False
        return GoldenPort.wait(self, limit_s)


def test_an_engine_that_falls_silent_is_replaced_by_the_cpu_after_two_strikes(folder: Path) -> None:
    ports: list[SilentPort] = []

    def opener(matrices: Any) -> FpgaEngine:
        golden = golden_port(matrices)
        ports.append(SilentPort(golden.config, golden.memory))
        return FpgaEngine.load(ports[-1], matrices)

    random = np.random.default_rng(14)
    model = quantised_conv(random, random.integers(-128, 128, (8, 32, 1, 1)).astype(np.int8))
    session = load(model, folder / "silent.onnx", opener)
    feeds = {"x": random.integers(0, 256, (1, 32, 3, 3)).astype(np.uint8)}
    wanted = session.run(feeds)["y"]
    for n_silent, n_products, n_on_cpu in ((1, 2, 0), (1, 2, 1), (0, 2, 2)):
        ports[0].n_silent = n_silent
        near(session.run(feeds)["y"], wanted, 1e-6)
        report = session.report()
        assert (report.n_products, report.n_on_cpu) == (n_products, n_on_cpu)
    assert report.n_faults == 2
    assert report.on_cpu == session.plan.products[0].matrix_names


def test_what_it_says_of_the_engine_is_what_the_engine_did(folder: Path) -> None:
    backend = SimulatedFpga()
    session = backend.load_tensor(saved(rows_with_product(), folder / "rows.onnx"), TensorOptions())
    session.run({"x": np.ones((3, 4), np.float32)})
    on_engine = [part for part in session.info.placement if part.provider == FPGA]
    assert [part.kinds for part in on_engine] == [(("MatMulNBits", 1),)]
    assert all(part.reason for part in session.info.placement if part not in on_engine)
    assert (session.report().n_products, session.report().n_on_cpu, session.info.evidence) == (1, 0, "simulator")


REFUSED = {
    "floats": (conv, "its weights are floats"),
    "no products": (rows, "no product for the FPGA's engine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_products_is_refused_with_the_reasons(name: str, folder: Path) -> None:
    make_model, words = REFUSED[name]
    file = saved(make_model(), folder / "refused.onnx")
    reason = fpga_onnx.supports(file, TensorOptions(), ALL)
    assert reason is not None
    assert words in reason
    with pytest.raises(BackendLoadError, match=words):
        fpga_onnx.load(file, TensorOptions(), float_opener(), ALL)


def test_what_is_too_small_stays_by_the_rule_and_says_so(folder: Path) -> None:
    assert "fewer than 16 multiplications per byte" in str(
        fpga_onnx.supports(saved(int8(), folder / "small.onnx"), TensorOptions())
    )
    random = np.random.default_rng(3)
    depthwise = quantised_conv(random, random.integers(-8, 8, (40, 1, 3, 3)).astype(np.int8), group=40)
    reason = fpga_onnx.supports(saved(depthwise, folder / "depthwise.onnx"), TensorOptions(), ALL)
    assert "a depthwise convolution" in str(reason)


def test_half_floats_come_out_as_half_floats(folder: Path) -> None:
    random = np.random.default_rng(4)
    model = quantised_conv(random, random.integers(-128, 128, (8, 32, 1, 1)).astype(np.int8), half=True, opset=19)
    session = load(model, folder / "half.onnx", golden_opener())
    feeds = {"x": random.integers(0, 256, (1, 32, 4, 4)).astype(np.uint8)}
    near(session.run(feeds)["y"], whole(folder / "half.onnx", feeds)["y"], 2e-3)


def test_feeds_that_the_weights_do_not_fit_are_the_callers_fault(folder: Path) -> None:
    random = np.random.default_rng(5)
    model = quantised_conv(random, random.integers(-8, 8, (8, 32, 3, 3)).astype(np.int8), shape=("n", "c", "h", "w"))
    session = load(model, folder / "shapes.onnx", float_opener())
    with pytest.raises(InvalidRequestError, match="'the one' gets \\[1, 31, 8, 8\\], its weights are for 32 channels"):
        session.run({"x": np.zeros((1, 31, 8, 8), np.uint8)})
    with pytest.raises(InvalidRequestError, match="less than its window"):
        session.run({"x": np.zeros((1, 32, 2, 8), np.uint8)})
    session.close()
    with pytest.raises(BackendStepError, match="closed"):
        session.run({"x": np.zeros((1, 32, 8, 8), np.uint8)})


def test_outputs_that_would_be_huge_are_refused_before_anything_is_allocated(folder: Path) -> None:
    """4 MiB of vectors would become 1 GiB of products."""
    opener = float_opener()
    session = load(int4(4, k=32, n=8192), folder / "huge.onnx", opener)
    with pytest.raises(InvalidRequestError, match="would make 268443648 elements of"):
        session.run({"x": np.zeros((2**15 + 1, 32), np.float32)})
    assert opener.last.n_products == 0


def test_models_with_operators_of_others_are_refused(folder: Path) -> None:
    model = int8()
    model.graph.node.append(helper.make_node("Strange", ["y"], ["odd"], domain="of.others"))
    model.opset_import.append(helper.make_opsetid("of.others", 1))
    reason = fpga_onnx.supports(saved(model, folder / "strange.onnx"), TensorOptions(), ALL)
    assert "operators that are not onnxruntime's own" in str(reason)


def hostile(nodes: list[Any], output: str = "y") -> ModelProto:
    return make(nodes, [("x", F, [1, 4])], [(output, F, [1, 4])], {"c": np.ones((1, 4), np.float32)})


@pytest.mark.parametrize(
    ("nodes", "output", "words"),
    [
        ([("Add", "x", "b", "a"), ("Add", "a", "x", "b")], "b", "waits for itself"),
        ([("Add", "x", "x", "a"), ("Add", "x", "x", "a")], "a", "two makers"),
        ([("Add", "x", "x", "c")], "c", "two makers"),
        ([("Add", "x", "missing", "a")], "a", "nobody makes it"),
        ([("Add", "x", "x", "a")], "lost", "is an output and nobody makes it"),
    ],
)
def test_graphs_that_are_none_are_refused(nodes: Any, output: str, words: str, folder: Path) -> None:
    made = [helper.make_node(kind, [a, b], [out]) for kind, a, b, out in nodes]
    file = saved(hostile(made, output), folder / "hostile.onnx")
    with pytest.raises(ModelFormatError, match=words):
        fpga_onnx.supports(file, TensorOptions(), ALL)


def test_outputs_that_are_inputs_or_constants_are_copies(folder: Path) -> None:
    builder = Builder(6)
    builder.step(4, 0, 0)
    model = builder.model([0])
    for name in ("x", "bias"):
        shape = [K] if name == "bias" else ["m", K]
        model.graph.output.append(helper.make_tensor_value_info(name, F, shape))
    session = load(model, folder / "through.onnx", float_opener())
    feeds = {name: np.ones((2, K), np.float32) for name in ("x", "w")}
    for _ in range(2):
        found = session.run(feeds)
        np.testing.assert_array_equal(found["x"], np.ones((2, K)))
        np.testing.assert_array_equal(found["bias"], builder.weights["bias"])
        found["x"][:] = found["bias"][:] = 7


def test_thousands_of_nodes_are_cut_in_a_moment(folder: Path) -> None:
    """1,500 products in a row: the first 512 run on the engine, the rest says why not."""
    builder = Builder(7)
    for _ in range(1500):
        builder.values = builder.values[-1:]
        builder.values.append(builder.nbits(builder.values[-1], "shared0"))
    builder.values = ["x", "w", builder.values[-1]]
    file = saved(builder.model([0]), folder / "long.onnx")
    assert fpga_onnx.supports(file, TensorOptions(), ALL) is None
    graph = fpga_onnx._planned(file, ALL)[1]
    assert len(graph.products) == 512
    assert sum(isinstance(step, Product) for step in graph.steps) == 512
    assert sum("512 products already" in reason for reason in graph.stayed.values()) == 988
    assert fpga_onnx.estimate(file, TensorOptions(), ALL).total_bytes > 512 * K * K // 2


def test_a_long_way_from_a_constant_is_gone_once_and_not_in_every_part(folder: Path) -> None:
    """3,000 Identity nodes behind a constant that 100 parts read; of the first four every part may have a copy."""
    builder = Builder(9)
    value = "bias"
    for _ in range(3000):
        value = builder.add("Identity", value)
    for _ in range(100):
        builder.values.append(builder.add("Add", builder.nbits(builder.values[-1], "shared0"), value))
    model = builder.model([len(builder.values) - 3])
    session = load(model, folder / "way.onnx", float_opener())
    n_nodes = sum(len(step.nodes) for step in session.plan.steps if isinstance(step, Part))
    assert n_nodes < 1.1 * len(model.graph.node)
    feeds = {name: np.ones((2, K), np.float32) for name in ("x", "w")}
    for name, wanted in whole(folder / "way.onnx", feeds).items():
        near(session.run(feeds)[name], wanted, 2e-5)


def test_constants_that_parts_would_hold_over_and_over_are_refused(folder: Path) -> None:
    builder = Builder(8)
    builder.weights["large"] = np.zeros((2**17, K), np.float32)  # 32 MiB
    for _ in range(12):
        value = builder.nbits(builder.values[-1], "shared0")
        pick = builder.add(
            "Gather", "large", builder.add("Cast", builder.add("ArgMax", value, axis=1, keepdims=0), to=7)
        )
        builder.values.append(builder.add("Add", value, pick))
    model = builder.model([len(builder.values) - 3])
    with pytest.raises(ModelFormatError, match="bytes of constants and functions, the limit is"):
        load(model, folder / "large.onnx", float_opener())
