"""The exported detector against the same sums in numpy, and its smaller forms against it. Needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tools.pcb.boards import KINDS, Board  # noqa: E402
from tools.pcb.detect import boxes_of, detect, run, session  # noqa: E402
from tools.pcb.graph import detector_graph, weights_of  # noqa: E402
from tools.pcb.quantise import INT4_LEVELS, int4_levels, packed_int4, to_int4, to_int8  # noqa: E402
from tools.pcb.shape import SHAPES, Conv  # noqa: E402

SIDE = 64
SHAPE = SHAPES["small"]

Weights = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Random ones, on a 4-bit grid so that the INT4 form loses nothing by itself."""
    rng = np.random.default_rng(0)
    made = {}
    for name, conv in SHAPE.named().items():
        weight = rng.normal(
            0, 1 / np.sqrt(conv.n_in * conv.kernel**2), (conv.n_out, conv.n_in, conv.kernel, conv.kernel)
        )
        step, levels = int4_levels(weight.astype(np.float32))
        made[name] = (levels * step[:, None, None, None], rng.normal(0, 0.3, conv.n_out).astype(np.float32))
    return made


@pytest.fixture(scope="module")
def boards() -> list[Board]:
    rng = np.random.default_rng(1)
    pictures = rng.integers(0, 256, (6, 2, SIDE, SIDE)).astype(np.uint8)
    return [
        Board(name=str(i), picture=p[0], golden=p[1], marks=np.zeros((0, 5), np.float32))
        for i, p in enumerate(pictures)
    ]


@pytest.fixture(scope="module")
def files(weights: Weights, boards: list[Board], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pcb")
    files = {form: folder / f"{form}.onnx" for form in ("fp32", "int8", "int4")}
    onnx.save(detector_graph(SHAPE, weights, side=SIDE), files["fp32"])
    to_int8(files["fp32"], files["int8"], boards)
    to_int4(files["int8"], files["fp32"], files["int4"], keep_int8=("fine.0",))
    return files


def conv2d(x: np.ndarray, conv: Conv, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (conv.pad, conv.pad), (conv.pad, conv.pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (conv.kernel, conv.kernel), axis=(1, 2))
    y = np.einsum("chwij,ocij->ohw", windows[:, :: conv.stride, :: conv.stride], weight) + bias[:, None, None]
    y = y + x if conv.is_residual else y
    return np.maximum(y, 0) if conv.has_relu else y


def expected(weights: Weights, board: Board) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def through(x: np.ndarray, part: str) -> np.ndarray:
        for name, conv in SHAPE.named().items():
            if name.startswith(f"{part}."):
                x = conv2d(x, conv, *weights[name])
        return x

    fine = through(np.stack([board.picture, board.golden]) / 255, "fine")
    coarse = through(fine, "coarse").repeat(2, axis=1).repeat(2, axis=2)
    head = through(through(np.maximum(fine + coarse, 0), "neck"), "head")
    return head[: len(KINDS)], head[len(KINDS) :][:2] + 0.5, head[len(KINDS) + 2 :] + np.log(4)


def test_the_file_computes_what_the_layers_say(weights: Weights, boards: list[Board], files: dict[str, Path]) -> None:
    outputs = run(session(files["fp32"]), boards[0].picture, boards[0].golden)
    for output, wanted in zip(outputs, expected(weights, boards[0]), strict=True):
        assert output[0] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_smaller_forms_stay_close(boards: list[Board], files: dict[str, Path], form: str) -> None:
    exact, rough = (
        np.concatenate([np.concatenate([o.ravel() for o in run(opened, b.picture, b.golden)]) for b in boards])
        for opened in (session(files["fp32"]), session(files[form]))
    )
    error = np.sqrt(np.mean((exact - rough) ** 2)) / np.std(exact)
    assert 0 < error < 0.05


def test_int4_is_smaller_than_int8_and_that_than_float(files: dict[str, Path]) -> None:
    n_weights = sum(c.n_out * c.n_in * c.kernel**2 for name, c in SHAPE.named().items() if name.split(".")[0] != "head")
    fp32, int8, int4 = (files[form].stat().st_size for form in ("fp32", "int8", "int4"))
    assert int8 < fp32 - n_weights
    assert int4 < int8 - n_weights // 4


def test_int4_layers_hold_4_bits_and_the_rest_does_not(files: dict[str, Path]) -> None:
    constants = {c.name: c for c in onnx.load(files["int4"]).graph.initializer}
    packed = {name for name, c in constants.items() if c.data_type == onnx.TensorProto.INT4}
    quantised = [name for name in SHAPE.named() if name not in ("fine.0", "head.0")]
    assert packed == {f"{name}.weight_int4" for name in quantised}
    assert constants["fine.0.weight_quantized"].data_type == onnx.TensorProto.INT8
    assert constants["heat.weight"].data_type == onnx.TensorProto.FLOAT


def test_levels_are_those_of_the_channel() -> None:
    weight = np.array([[0.7, -0.34], [-14.0, 1.0]], np.float32).reshape(2, 2, 1, 1)
    step, levels = int4_levels(weight)
    assert step == pytest.approx([0.1, 2.0])
    assert levels.reshape(2, 2).tolist() == [[7, -3], [-7, 0]]
    assert INT4_LEVELS == 7


@pytest.mark.parametrize("n", [6, 7])
def test_packing_is_onnx_own(n: int) -> None:
    levels = np.arange(-7, -7 + 2 * n, 2).astype(np.int8)
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.INT4, (n,), packed_int4(levels).tobytes(), raw=True)
    assert onnx.numpy_helper.to_array(tensor).astype(int).tolist() == levels.tolist()


def test_weights_of_another_shape_are_refused(weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"neck\.0"):
        detector_graph(SHAPE, {name: w for name, w in weights.items() if name != "neck.0"})


def test_weights_are_read_back(weights: Weights, files: dict[str, Path]) -> None:
    found = weights_of(onnx.load(files["fp32"]), SHAPE)
    assert found.keys() == weights.keys()
    for name, (weight, bias) in weights.items():
        assert np.array_equal(found[name][0], weight)
        assert found[name][1] == pytest.approx(bias, abs=1e-6)
    with pytest.raises(KeyError, match="weight"):
        weights_of(onnx.load(files["int8"]), SHAPE)


def test_boxes_by_hand() -> None:
    heat = np.full((1, 6, 8, 8), -9.0, np.float32)
    heat[0, 3, 2, 5] = 2.0
    heat[0, 3, 2, 6] = 1.0  # beside a higher one: no peak
    heat[0, 1, 6, 1] = 0.0
    heat[0, 1, 6, 3] = -1.0  # a peak, but its box is nearly the one before
    heat[0, 2, 6, 3] = -1.5  # the same box, of another kind
    offset = np.full((1, 2, 8, 8), 0.5, np.float32)
    offset[0, :, 2, 5] = (0.25, 0.75)
    offset[0, :, 6, 3] = (-1.25, 0.5)
    size = np.full((1, 2, 8, 8), np.log(4), np.float32)
    size[0, :, 2, 5] = np.log((2, 6))
    found = boxes_of(heat, offset, size)
    assert found[:, 4] == pytest.approx([1 / (1 + np.exp(-s)) for s in (2.0, 0.0, -1.5)])
    assert found[:, 5].tolist() == [3, 1, 2]
    assert found[0, :4] == pytest.approx([34, -2, 50, 46])
    assert found[1, :4] == pytest.approx([-4, 36, 28, 68])
    assert found[2, :4] == pytest.approx([-2, 36, 30, 68])


def test_every_run_is_timed(boards: list[Board], files: dict[str, Path]) -> None:
    result = detect(files["fp32"], boards)
    assert len(result.found) == len(result.cpu_s) == len(boards)
    assert all(t > 0 for t in result.cpu_s)
