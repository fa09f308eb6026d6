"""What the native engine reads out of a header, and what it refuses by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.backends.native_config import ARCHITECTURES, NativeConfig, read_config
from edge_rt.catalog.gguf import read_header
from edge_rt.errors import BackendLoadError, ModelFormatError
from tests.gguf_files import GgufFile, Tensor
from tests.tiny_models import TinyLayer, TinyModel

YARN = {"rope.scaling.type": ("string", "yarn"), "rope.scaling.factor": ("f32", 4.0)}


def config_of(file: GgufFile, tmp_path: Path) -> NativeConfig:
    path = tmp_path / "m.gguf"
    path.write_bytes(file.encode())
    return read_config("tiny", str(path), read_header(path))


def refusal(file: GgufFile, tmp_path: Path) -> str:
    with pytest.raises(BackendLoadError) as caught:
        config_of(file, tmp_path)
    return caught.value.reason


@pytest.mark.parametrize("arch", ["gemma3", "phi3", "qwen2moe", "qwen35", "llama4"])
def test_other_architecture_is_refused(tmp_path: Path, arch: str) -> None:
    assert f"the architecture {arch}" in refusal(TinyModel(arch=arch).file(), tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "kind", "content"),
    [
        ("expert_count", "u32", 8),
        ("attention.scale", "f32", 0.5),
        ("attention.causal", "bool", False),
        ("logit_scale", "f32", 2.0),
        ("rope.scaling.alpha", "f32", 2.0),
        ("rope.scaling.yarn_attn_factor", "f32", 2.0),
        ("rope.freq_base_swa", "f32", 1e6),
        ("attention.key_length_swa", "u32", 64),
        ("rope.dimension_sections", "[i32]", [4, 4, 0, 0]),
    ],
)
def test_key_without_a_meaning_here_is_refused_by_name(
    tmp_path: Path, arch: str, key: str, kind: str, content: object
) -> None:
    assert f"{arch}.{key}" in refusal(TinyModel(arch=arch, keys={key: (kind, content)}).file(), tmp_path)


@pytest.mark.parametrize("key", ["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"])
def test_key_of_one_architecture_is_refused_with_another(tmp_path: Path, key: str) -> None:
    keys = YARN | {key: ("f32", 0.1)}
    config_of(TinyModel(arch="mistral3", keys=keys).file(), tmp_path)
    assert f"llama.{key}" in refusal(TinyModel(keys=keys).file(), tmp_path)


def test_scaling_it_does_not_know_is_refused(tmp_path: Path) -> None:
    model = TinyModel(keys={"rope.scaling.type": ("string", "dynamic")})
    assert "dynamic (llama.rope.scaling.type)" in refusal(model.file(), tmp_path)


def test_yarn_whose_fast_pairs_turn_next_to_never_is_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="yarn_beta_fast"):
        config_of(TinyModel(keys=YARN | {"rope.scaling.yarn_beta_fast": ("f64", 1e-320)}).file(), tmp_path)


def test_more_rotary_dimensions_than_a_head_has_are_refused_before_any_is_computed(tmp_path: Path) -> None:
    file = TinyModel(keys={"rope.dimension_count": ("u32", 18)}).file()
    assert "llama.rope.dimension_count of 18" in refusal(file, tmp_path)


def test_keys_of_yarn_without_yarn_are_refused(tmp_path: Path) -> None:
    model = TinyModel(keys={"rope.scaling.yarn_beta_fast": ("f32", 4.0)})
    assert "llama.rope.scaling.yarn_beta_fast" in refusal(model.file(), tmp_path)


def test_longrope_needs_both_lists_and_no_factor(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": ("string", "longrope")}
    model = TinyModel(keys=keys)
    assert "rope_factors_long.weight" in refusal(model.file(), tmp_path)
    file = replace(model, keys=keys | {"rope.scaling.factor": ("f32", 4.0)}).file()
    assert "llama.rope.scaling.factor" in refusal(file, tmp_path)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "cls"]
)
def test_tensor_without_a_place_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = TinyModel().file()
    file.tensors.append(Tensor(name, (16,)))
    assert f"the tensor {name}" in refusal(file, tmp_path)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (TinyLayer(n_kv_heads=0), "attn_q.weight"),
        (TinyLayer(n_kv_heads=0), "attn_output.bias"),
        (TinyLayer(n_heads=0, n_kv_heads=0), "attn_norm.weight"),
        (TinyLayer(n_ff=0), "ffn_down.bias"),
    ],
)
def test_tensor_of_a_part_that_the_layer_lacks_is_refused(tmp_path: Path, layer: TinyLayer, name: str) -> None:
    file = TinyModel(arch="deci", layers=(TinyLayer(), layer)).file()
    file.tensors.append(Tensor(f"blk.1.{name}", (64,)))
    assert f"the tensor blk.1.{name}" in refusal(file, tmp_path)


def test_qwen3_without_its_norms_is_refused(tmp_path: Path) -> None:
    assert "blk.0.attn_k_norm.weight" in refusal(TinyModel(arch="qwen3").file(), tmp_path)


@pytest.mark.parametrize("arch", sorted(a for a, of in ARCHITECTURES.items() if not of.has_factors))
def test_divisors_of_rope_are_refused_where_nobody_reads_them(tmp_path: Path, arch: str) -> None:
    file = TinyModel(arch=arch, has_qk_norm=arch == "qwen3").file()
    file.tensors.append(Tensor("rope_freqs.weight", (8,)))
    assert f"rope_freqs.weight with the architecture {arch}" in refusal(file, tmp_path)


@pytest.mark.parametrize(("shape", "kind"), [((16,), "F32"), ((8,), "F16")])
def test_divisors_of_rope_in_another_shape_are_refused(tmp_path: Path, shape: tuple[int], kind: str) -> None:
    file = TinyModel().file()
    file.tensors.append(Tensor("rope_freqs.weight", shape, kind))
    assert "rope_freqs.weight" in refusal(file, tmp_path)


def test_kv_heads_without_heads_are_refused(tmp_path: Path) -> None:
    assert "layer 1" in refusal(TinyModel(keys={"attention.head_count": ("[i32]", [4, 0])}).file(), tmp_path)


def test_keys_and_values_of_different_length_are_refused(tmp_path: Path) -> None:
    file = TinyModel(keys={"attention.value_length": ("u32", 32)}).file()
    assert "different length" in refusal(file, tmp_path)


@pytest.mark.parametrize("pattern", [("u32", 2), ("[bool]", [True]), ("[string]", ["a", "b"])])
def test_window_pattern_that_is_no_list_of_the_layers_is_refused(tmp_path: Path, pattern: tuple[str, object]) -> None:
    model = TinyModel(keys={"attention.sliding_window": ("u32", 8), "attention.sliding_window_pattern": pattern})
    assert "llama.attention.sliding_window_pattern" in refusal(model.file(), tmp_path)


@pytest.mark.parametrize(
    ("key", "kind", "content"),
    [
        ("attention.sliding_window", "i32", -1),
        ("rope.freq_base", "f32", 0.0),
        ("rope.scaling.factor", "f32", -2.0),
        ("rope.freq_base", "f64", 5e-324),
        ("rope.dimension_count", "f32", 2.5),
        ("rope.scaling.type", "u32", 1),
        ("rope.scaling.original_context_length", "u32", 0),
        ("attention.layer_norm_rms_epsilon", "string", "small"),
    ],
)
def test_value_out_of_range_is_a_broken_file(tmp_path: Path, key: str, kind: str, content: object) -> None:
    with pytest.raises(ModelFormatError) as caught:
        config_of(TinyModel(keys={key: (kind, content)}).file(), tmp_path)
    assert caught.value.field == f"llama.{key}"


def test_layers_are_read_one_by_one(tmp_path: Path) -> None:
    layers = (TinyLayer(n_heads=8, n_ff=160), TinyLayer(n_kv_heads=0, n_ff=0), TinyLayer(n_heads=0, n_kv_heads=0))
    config = config_of(TinyModel(arch="deci", layers=layers).file(), tmp_path)
    assert [(w.n_heads, w.n_kv_heads, w.n_ff) for w in config.layers] == [(8, 2, 160), (4, 0, 0), (0, 0, 96)]


def test_every_fourth_layer_of_smollm3_has_no_rope(tmp_path: Path) -> None:
    config = config_of(TinyModel(arch="smollm3", layers=(TinyLayer(),) * 9).file(), tmp_path)
    assert [w.uses_rope for w in config.layers] == [True, True, True, False, True, True, True, False, True]


def test_window_of_zero_is_none(tmp_path: Path) -> None:
    config = config_of(TinyModel(keys={"attention.sliding_window": ("u32", 0)}).file(), tmp_path)
    assert {w.window for w in config.layers} == {0}


def test_context_chooses_between_the_lists_of_longrope(tmp_path: Path) -> None:
    file = TinyModel(
        keys={"rope.scaling.type": ("string", "longrope"), "rope.scaling.original_context_length": ("u32", 64)}
    ).file()
    file.tensors += [Tensor("rope_factors_long.weight", (8,)), Tensor("rope_factors_short.weight", (8,))]
    rope = config_of(file, tmp_path).rope
    assert rope.factors_tensor(64) == "rope_factors_short.weight"
    assert rope.factors_tensor(65) == "rope_factors_long.weight"
