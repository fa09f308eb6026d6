"""Which model drafts for another: the configuration's, else its manifest's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.config import Config, Engine, ModelSettings
from edge_rt.errors import ConfigError, ModelNotFoundError, ModelNotPulledError
from edge_rt.scheduler.drafting import place_draft
from edge_rt.worker.channel import DraftLoad


def manifest(model: str, *forms: str, **fields: Any) -> Manifest:
    variants = tuple(
        Variant(id=form, quant="Q4_0", file=f"{model}.{form}.gguf", source="x", size_bytes=1, sha256="0" * 64)
        for form in forms
    )
    return Manifest(id=model, name=model, license="MIT", n_params=1, variants=variants, **{"kind": "text", **fields})


BIG = manifest("big", "q8_0", draft="small:q4_0")
SMALL = manifest("small", "q4_1", "q4_0")
PICTURES = manifest("pictures", "fp32", kind="tensor")
MANIFESTS = {each.id: each for each in (BIG, SMALL, PICTURES)}


def placed(
    draft: str = "",
    *,
    model: Manifest = BIG,
    pulled: tuple[str, ...] = ("q4_0", "q4_1"),
    models: dict[str, ModelSettings] | None = None,
    max_draft: int = 15,
    manifests: dict[str, Manifest] = MANIFESTS,
) -> DraftLoad | None:
    config = Config(engine=Engine(max_draft=max_draft), models=models or {})
    return place_draft(
        model.id,
        model,
        ModelSettings(draft=draft),
        config,
        manifests,
        features=frozenset(),
        find=lambda _, variant: Path("/store", variant.file) if variant.id in pulled else None,
    )


def drafts(variant: str, *, is_optional: bool = False, backend: str = "auto") -> DraftLoad:
    return DraftLoad(
        model="small",
        variant=variant,
        path=f"/store/small.{variant}.gguf",
        quant="Q4_0",
        backend=backend,
        is_optional=is_optional,
    )


def test_the_configuration_goes_before_the_manifest() -> None:
    assert placed() == drafts("q4_0", is_optional=True)
    assert placed("small:q4_1") == drafts("q4_1")
    assert placed("none") is None
    assert placed(max_draft=0) is None
    assert placed(model=SMALL) is None


def test_a_draft_runs_on_the_back_end_of_its_own() -> None:
    models = {"small": ModelSettings(backend="llama_cpu", variant="q4_0")}
    assert placed("small", models=models) == drafts("q4_0", backend="llama_cpu")


def test_what_a_manifest_names_may_be_missing() -> None:
    assert placed(pulled=()) is None
    assert placed(manifests={"big": BIG}) is None


def test_what_the_configuration_names_may_not() -> None:
    with pytest.raises(ModelNotPulledError):
        placed("small", pulled=())
    with pytest.raises(ModelNotFoundError):
        placed("small:q2", pulled=())
    for name in ("tiny", "pictures"):
        with pytest.raises(ConfigError) as caught:
            placed(name)
        assert caught.value.key == "models.big.draft"
        assert caught.value.problem == f"no language model is named {name!r}; there are big, small"


def test_a_file_may_draft(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    with pytest.raises(ConfigError, match="is no file; name a GGUF file"):
        placed(str(path))
    path.touch()
    found = placed(str(path))
    assert found == DraftLoad(model="small", variant="", path=str(path), quant="", backend="auto")
    assert found.name == "small"


def test_a_null_model_drafts_too() -> None:
    models = {"toy": ModelSettings(backend="null", variant="step_s=0.1")}
    found = placed("toy", models=models)
    assert found is not None
    assert (found.model, found.path, found.backend, found.variant) == ("toy", "", "null", "step_s=0.1")


def test_a_draft_crosses_the_channel() -> None:
    found = drafts("q4_0")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=DraftLoad) == found
