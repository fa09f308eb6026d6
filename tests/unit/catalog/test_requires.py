"""Forms for accelerators: taken where one is meant, never in place of one for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.catalog.manifest import SHIPPED_DIR, Manifest, load_manifest, load_manifests
from edge_rt.catalog.store import pick_variant
from edge_rt.errors import ModelFormatError
from edge_rt.scheduler.placement import Policy, backends_of, rank
from edge_rt.tensor_types import DeviceState

MODELS = ("efficientnet-lite0", "minilm-l6", "pcb-defect", "pp-ocrv4-det")


def shipped(name: str) -> Manifest:
    return load_manifest(SHIPPED_DIR / f"{name}.toml")


@pytest.mark.parametrize("name", MODELS)
def test_npu_forms_are_there_and_not_picked_for_a_cpu(name: str) -> None:
    manifest = shipped(name)
    assert any(v.requires is not None and "npu_qnn" in v.backends for v in manifest.variants)
    for backend in ("auto", "onnx_cpu", "npu_of_somebody"):
        picked = pick_variant(manifest, frozenset({"avx2"}), backend=backend)
        assert picked == manifest.variants[0]
        assert picked.requires is None


@pytest.mark.parametrize("name", MODELS)
def test_a_back_end_that_is_named_gets_its_form(name: str) -> None:
    manifest = shipped(name)
    picked = pick_variant(manifest, frozenset(), backend="npu_qnn")
    assert picked.requires is not None
    assert "npu_qnn" in picked.backends
    # Who names a form gets it.
    assert pick_variant(manifest, frozenset(), manifest.variants[0].id, backend="npu_qnn") == manifest.variants[0]


def test_placement_lets_no_other_back_end_have_them() -> None:
    for manifest in load_manifests([SHIPPED_DIR]):
        for variant in manifest.variants:
            if variant.requires is not None:
                assert backends_of(variant, Policy()) == variant.backends
                assert backends_of(variant, Policy(backend="onnx_cpu")) == ()
                assert backends_of(variant, Policy(backend=variant.backends[0])) == variant.backends[:1]


@pytest.mark.parametrize(
    ("policy", "ranked"),
    [
        (Policy(), {"npu-w8a8 npu"}),
        (Policy(variant="npu-w8a8"), {"npu-w8a8 npu", "npu-w8a8 cores"}),
        (Policy(backend="npu_openvino"), {"npu-w8a8 npu", "npu-w8a8 cores"}),
    ],
)
def test_cores_that_a_vendor_offers_get_them_only_by_name(policy: Policy, ranked: set[str]) -> None:
    """OpenVINO computes on the CPU too, under the very back end that the forms name."""
    devices = [
        DeviceState(backend="npu_openvino", id=name, kind=kind) for name, kind in (("npu", "npu"), ("cores", "cpu"))
    ]
    manifest = shipped("efficientnet-lite0")
    found = rank(manifest.id, manifest.variants, devices, policy, pulled={"npu-w8a8"})
    assert {f"{row.candidate.variant} {row.candidate.device}" for row in found.ranked} == ranked
    refused = {refusal.reason for refusal in found.refused if refusal.what.startswith("npu-w8a8 on npu_openvino")}
    assert len(ranked) == 2 or refused == {"a form for accelerators; name it, or the back end, to run it on a CPU"}


def test_the_file_they_are_made_with_is_of_this_tree() -> None:
    """`pull` checks the hash; whoever changes the ranges must change the manifest."""
    from hashlib import sha256

    for name in MODELS:
        for material in shipped(name).materials:
            if material.source.startswith("shipped:"):
                data = (SHIPPED_DIR / material.file).read_bytes()
                assert (len(data), sha256(data).hexdigest()) == (material.size_bytes, material.sha256)


FETCHED = 'source = "import:f"\nsize_bytes = 1\nsha256 = "' + "0" * 64 + '"\n'
WANTS = "requires = { weight_bits = 4, activation_bits = 16 }\n"


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("", WANTS, "goes with backends"),
        ('backends = ["npu_qnn"]\n' + WANTS, "", "the first wants an accelerator"),
        ("", 'backends = ["npu_qnn"]\nrequires = { weight_bits = 3, activation_bits = 16 }\n', "Invalid enum value 3"),
    ],
)
def test_contradictions_are_named(first: str, second: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    head = 'id = "m"\nname = "M"\nlicense = "MIT"\nkind = "tensor"\nn_params = 1\n'
    forms = (("a", first), ("b", second))
    tables = (f'[[variants]]\nid = "{i}"\nquant = "W4A16"\nfile = "{i}.onnx"\n{FETCHED}{more}' for i, more in forms)
    path.write_text(head + "".join(tables))
    with pytest.raises(ModelFormatError, match=problem):
        load_manifest(path)
