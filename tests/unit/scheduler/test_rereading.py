"""What becomes of models when manifests change."""

from __future__ import annotations

import msgspec

from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.scheduler.rereading import Rereading, reread


def manifest(model: str, name: str = "M") -> Manifest:
    form = Variant(id="fp32", quant="FP32", file="m.onnx", source="shipped:m.onnx", size_bytes=1, sha256="0" * 64)
    return Manifest(id=model, name=name, license="MIT", kind="tensor", n_params=1, variants=(form,))


def test_what_runs_keeps_its_manifest_until_it_is_idle() -> None:
    before = {"null": None, "same": manifest("same"), "busy": manifest("busy"), "idle": manifest("idle"),
              "gone": manifest("gone"), "leaving": manifest("leaving")}  # fmt: skip
    now = {m.id: m for m in (manifest("same"), manifest("busy", "new"), manifest("idle", "new"), manifest("fresh"))}
    plan = reread(before, now, lambda model: model not in {"busy", "leaving"})
    assert plan == Rereading(taken_up=(now["fresh"], now["idle"]), gone=("gone",), is_pending=True)
    after = {**before, **{m.id: m for m in plan.taken_up}}
    del after["gone"]
    assert reread(after, now, lambda _: True) == Rereading(taken_up=(now["busy"],), gone=("leaving",), is_pending=False)


def test_a_model_without_a_manifest_stays_as_it_is() -> None:
    now = {"null": msgspec.structs.replace(manifest("null"))}
    assert reread({"null": None}, now, lambda _: True) == Rereading(taken_up=(), gone=(), is_pending=False)
