"""Folders that are hostile, or hold what is not known here: each is refused by the name of what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")

from edge_rt.catalog.gguf import read_header  # noqa: E402
from edge_rt.convert.folder import convert_folder  # noqa: E402
from edge_rt.errors import BackendUnavailableError, ModelFormatError, from_wire  # noqa: E402
from edge_rt.worker.convert import convert  # noqa: E402
from tests.onnx_models import OnnxModel  # noqa: E402
from tests.tiny_models import TinyLayer, TinyModel  # noqa: E402

TINY = TinyModel(n_embd=64, head_dim=16, n_vocab=64, layers=(TinyLayer(),))
Edit = Callable[[Any], None]


class Case:
    def __init__(self, folder: Path):
        self.folder = folder / "onnx"
        self.vocab = folder / "vocab.gguf"
        self.dst = folder / "out.gguf"
        TINY.write(self.vocab)

    def write(self, edit: Edit = lambda model: None, *, external: bool = False, **of: Any) -> None:
        OnnxModel(TINY, edit=edit, **of).write(self.folder, external=external)

    def refused(self) -> ModelFormatError:
        with pytest.raises(ModelFormatError) as caught:
            convert_folder(self.folder, self.vocab, self.dst)
        return caught.value


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def node(model: Any, name: str) -> Any:
    return next(n for n in model.graph.node if n.name == name)


def tensor(model: Any, name: str) -> Any:
    return next(t for t in model.graph.initializer if t.name == name)


def set_attribute(model: Any, name: str, key: str, value: Any) -> None:
    found = node(model, name)
    kept = [a for a in found.attribute if a.name != key]
    del found.attribute[:]
    found.attribute.extend([*kept, onnx.helper.make_attribute(key, value)])


Q_PROJ = "/model/layers.0/attn/q_proj/MatMul_Q4"
Q_NAME = "model.layers.0.attn.q_proj.MatMul.weight"
GQA = "/model/layers.0/attn/GroupQueryAttention"
NORM = "/model/layers.0/post_attention_layernorm/SkipLayerNorm"


def add_g_idx(model: Any) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(64, np.int32), "g"))
    node(model, Q_PROJ).input.extend(["", "g"])


def add_lost_initializer(model: Any) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(64, np.float32), "lost"))


def add_lost_node(model: Any) -> None:
    model.graph.node.append(onnx.helper.make_node("Relu", [NORM.replace("SkipLayerNorm", "output_0")], ["r"], name="x"))


def scale_the_embedding(model: Any) -> None:
    gather = node(model, "/model/embed_tokens/Gather")
    gather.output[0] = "plain"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    scaled = onnx.helper.make_node("Mul", ["plain", "two"], ["/model/embed_tokens/Gather/output_0"], name="scale")
    model.graph.node.append(scaled)


def change_activation(model: Any) -> None:
    node(model, "/model/layers.0/mlp/act_fn/Sigmoid").op_type = "Tanh"


def swap_the_residual(model: Any) -> None:
    final = node(model, "/model/layers.1/final_norm_layernorm/SkipLayerNorm")
    final.input[0] = "/model/embed_tokens/Gather/output_0"


def other_input_for_v(model: Any) -> None:
    node(model, "/model/layers.0/attn/v_proj/MatMul_Q4").input[0] = "/model/embed_tokens/Gather/output_0"


def wrong_angles(model: Any) -> None:
    angles = np.arange(128)[:, None] * 500.0 ** (-np.arange(0, 16, 2) / 16)
    tensor(model, "cos_cache").CopyFrom(onnx.numpy_helper.from_array(np.cos(angles).astype(np.float32), "cos_cache"))


def float_weights_in_int8(model: Any) -> None:
    values = onnx.numpy_helper.from_array(np.zeros((64, 2, 16), np.int8), f"{Q_NAME}_Q4")
    tensor(model, f"{Q_NAME}_Q4").CopyFrom(values)


def short_data(model: Any) -> None:
    found = tensor(model, f"{Q_NAME}_Q4")
    found.raw_data = found.raw_data[:-1]


def huge_shape(model: Any) -> None:
    del tensor(model, "model.embed_tokens.weight").dims[:]
    tensor(model, "model.embed_tokens.weight").dims.extend([2**40, 2**40])


def scale_beyond_f16(model: Any) -> None:
    values = np.full((64, 2), 1e6, np.float32)
    tensor(model, f"{Q_NAME}_scales").CopyFrom(onnx.numpy_helper.from_array(values, f"{Q_NAME}_scales"))


def embedding_beyond_f16(model: Any) -> None:
    values = np.full((64, 64), 1e6, np.float32)
    found = tensor(model, "model.embed_tokens.weight")
    found.CopyFrom(onnx.numpy_helper.from_array(values, found.name))


def norm_of_no_numbers(model: Any) -> None:
    found = tensor(model, "model.layers.0.input_layernorm.weight")
    found.CopyFrom(onnx.numpy_helper.from_array(np.full(64, np.nan, np.float32), found.name))


def double_output(model: Any) -> None:
    model.graph.node.append(onnx.helper.make_node("Identity", ["input_ids"], ["logits"], name="twice"))


def circle(model: Any) -> None:
    node(model, "/lm_head/MatMul_Q4").input[0] = "a"
    model.graph.node.extend([onnx.helper.make_node("Cast", [x], [y], name=x, to=1) for x, y in ("ab", "ba")])


def dequantize_linear(model: Any) -> None:
    found = node(model, Q_PROJ)
    found.op_type, found.domain = "MatMul", ""
    del found.input[2:]
    found.input[1] = "dequantised"
    model.graph.node.append(
        onnx.helper.make_node("DequantizeLinear", [f"{Q_NAME}_Q4", f"{Q_NAME}_scales"], ["dequantised"], name="dq")
    )


REFUSED: dict[str, tuple[Edit, str, str]] = {
    "bits": (lambda m: set_attribute(m, Q_PROJ, "bits", 8), Q_PROJ, "8 bits"),
    "block size": (lambda m: set_attribute(m, Q_PROJ, "block_size", 16), Q_PROJ, "block size of 16"),
    "columns": (lambda m: set_attribute(m, Q_PROJ, "K", 48), Q_PROJ, "multiple of 32"),
    "rows": (lambda m: set_attribute(m, Q_PROJ, "N", 32), f"{Q_NAME}_Q4", "(32, 2, 16) is expected"),
    "g_idx": (add_g_idx, Q_PROJ, "g_idx"),
    "QDQ": (dequantize_linear, Q_PROJ, "QDQ"),
    "lost initialiser": (add_lost_initializer, "lost", "nothing known here makes use of"),
    "lost node": (add_lost_node, "'x' (Relu)", "nothing known here makes use of it"),
    "scaled embedding": (scale_the_embedding, "'scale' (Mul)", "Gather is expected"),
    "activation": (change_activation, "/model/layers.0/mlp/Mul", "other activations"),
    "residual": (swap_the_residual, NORM, "the residual"),
    "input of v": (other_input_for_v, "v_proj", "different inputs"),
    "angles": (wrong_angles, "cos_cache", "not those of --vocab"),
    "window": (lambda m: set_attribute(m, GQA, "local_window_size", 8), GQA, "window is 8"),
    "softcap": (lambda m: set_attribute(m, GQA, "softcap", 30.0), GQA, "softcap 30.0"),
    "heads": (lambda m: set_attribute(m, GQA, "num_heads", 2), GQA, "2 heads"),
    "scale": (lambda m: set_attribute(m, GQA, "scale", 1.0), GQA, "scale is 1"),
    "interleaved": (lambda m: set_attribute(m, GQA, "rotary_interleaved", 1), GQA, "neighbours"),
    "epsilon": (lambda m: set_attribute(m, NORM, "epsilon", 1e-3), NORM, "epsilon is 0.001"),
    "type of weights": (float_weights_in_int8, f"{Q_NAME}_Q4", "INT8"),
    "short data": (short_data, f"{Q_NAME}_Q4", "bytes of data"),
    "huge shape": (huge_shape, "model.embed_tokens.weight", "vocabulary and width"),
    "scale beyond F16": (scale_beyond_f16, Q_PROJ, "does not fit F16"),
    "embedding beyond F16": (embedding_beyond_f16, "model.embed_tokens.weight", "do not fit F16"),
    "norm": (norm_of_no_numbers, "model.layers.0.input_layernorm.weight", "finite"),
    "output twice": (double_output, "'twice' (Identity)", "produced twice"),
    "circle": (circle, "/lm_head/MatMul_Q4", "comes from no node"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, case: Case) -> None:
    edit, field, problem = REFUSED[name]
    case.write(edit)
    error = case.refused()
    assert field in error.field, str(error)
    assert problem in error.problem, str(error)


def test_the_unchanged_folder_is_taken(case: Case) -> None:
    for external in (False, True):
        case.write(external=external)
        convert_folder(case.folder, case.vocab, case.dst)
        header = read_header(case.dst)
        assert header.quant == "Q4_0"
        assert {t.name for t in header.tensors} == {t.name for t in read_header(case.vocab).tensors} | {"output.weight"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 65),
        ("hidden_size", 128),
        ("head_size", 32),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("type", "phi3"),
        ("num_hidden_layers", 10**9),
        ("hidden_size", "64"),
        ("filename", ""),
    ],
)
def test_a_configuration_of_another_model(key: str, value: object, case: Case) -> None:
    case.write()
    path = case.folder / "genai_config.json"
    config = json.loads(path.read_text())
    place = config["model"] if key in config["model"] else config["model"]["decoder"]
    assert key in place
    place[key] = value
    path.write_text(json.dumps(config))
    error = case.refused()
    assert key in f"{error.field} {error.problem}"


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/../../x", "..", "", "x\\y", "missing", "."])
def test_files_outside_the_folder(name: str, case: Case) -> None:
    """As the graph's file, and as the file of a weight's data."""
    case.write(external=True)
    (case.folder.parent / "model.onnx").write_bytes((case.folder / "model.onnx").read_bytes())
    model = onnx.load(case.folder / "model.onnx", load_external_data=False)
    for entry in tensor(model, f"{Q_NAME}_Q4").external_data:
        if entry.key == "location":
            entry.value = name
    (case.folder / "model.onnx").write_bytes(model.SerializeToString())
    assert case.refused().field in (repr(name), f"{Q_NAME}_Q4")
    config = json.loads((case.folder / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = name
    (case.folder / "genai_config.json").write_text(json.dumps(config))
    assert case.refused().field in (repr(name), "file", "JSON")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "genai_config.json"])
def test_links_out_of_the_folder(name: str, case: Case) -> None:
    case.write(external=True)
    outside = case.folder.parent / "outside"
    (case.folder / name).rename(outside)
    (case.folder / name).symlink_to(outside)
    assert "copy the file into it" in case.refused().problem


def test_a_pipe_is_no_file(case: Case) -> None:
    case.write(external=True)
    (case.folder / "model.onnx.data").unlink()
    os.mkfifo(case.folder / "model.onnx.data")
    assert "not a regular file" in case.refused().problem


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("offset", "-4096", "bytes -4096"),
        ("offset", "99999999999", "bytes 99999999999"),
        ("length", "99999999999", "bytes"),
        ("length", "7", "7 bytes of data"),
        ("offset", "x", "no numbers"),
    ],
)
def test_data_outside_their_file(key: str, value: str, problem: str, case: Case) -> None:
    case.write(external=True)
    model = onnx.load(case.folder / "model.onnx", load_external_data=False)
    for entry in tensor(model, f"{Q_NAME}_Q4").external_data:
        if entry.key == key:
            entry.value = value
    (case.folder / "model.onnx").write_bytes(model.SerializeToString())
    error = case.refused()
    assert error.field == f"{Q_NAME}_Q4"
    assert problem in error.problem


def test_broken_protobuf(case: Case) -> None:
    case.write()
    raw = (case.folder / "model.onnx").read_bytes()
    for broken in (b"", b"not a model", raw[: len(raw) // 2]):
        (case.folder / "model.onnx").write_bytes(broken)
        assert case.refused().field in ("protobuf", "graph")


def test_random_damage_never_escapes_the_typed_errors(case: Case) -> None:
    """A byte changed anywhere in graph and names: taken, or refused with a typed error."""
    case.write(external=True)
    path = case.folder / "model.onnx"
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    n_refused = 0
    for at in rng.integers(0, len(raw), 200):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        try:
            convert_folder(case.folder, case.vocab, case.dst)
        except ModelFormatError:
            n_refused += 1
    assert n_refused > 20


def test_errors_cross_the_child_process(case: Case) -> None:
    case.write(lambda model: set_attribute(model, Q_PROJ, "bits", 8))
    with pytest.raises(ModelFormatError, match="8 bits are not known here"):
        convert(case.folder, case.vocab, case.dst)


def test_the_missing_extra_is_named() -> None:
    error = from_wire("backend_unavailable", {"backend": "onnx", "reason": "No module named 'onnx'", "extra": "onnx"})
    assert isinstance(error, BackendUnavailableError)
    assert "pip install 'edge_rt[onnx]'" in str(error)
