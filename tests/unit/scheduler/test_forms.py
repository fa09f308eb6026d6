"""What a worker is told to load."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt import config
from edge_rt.backends.base import NpuOptions
from edge_rt.catalog.manifest import Manifest, Requires, Variant
from edge_rt.config.tables import Pin
from edge_rt.errors import ConfigError
from edge_rt.scheduler.forms import Placement, load_message, pinned_texts, place
from edge_rt.tensor_types import ChipNeeds
from edge_rt.worker.channel import FrameReader, Load, ToWorker, encode
from edge_rt.worker.tensor_load import unpack_tensor


def message(**flags: object) -> Load:
    settings = config.load(environ={}, flags={f"engine.{name}": value for name, value in flags.items()}).config
    own = config.ModelSettings(backend="null")
    placement = place("null", None, own, settings, features=frozenset(), find=lambda *_: None)
    return load_message(placement, settings, force=False)


def test_a_step_has_a_row_for_every_stream() -> None:
    few = message(n_batch=32, n_parallel=100)
    assert (few.n_batch, few.n_seq_max) == (100, 100)
    assert message(n_batch=64, n_parallel=4).n_batch == 64


def test_the_language_models_back_end_is_not_asked_to_run_tensor_models() -> None:
    variant = Variant(id="int8", quant="INT8", file="m.onnx", source="pypi:a/1/a.whl#m.onnx", backends=("onnx_cpu",))
    manifest = Manifest(id="m", name="m", license="MIT", kind="tensor", n_params=1, variants=(variant,))

    def chosen(engine: str, own: str = "") -> tuple[str, tuple[str, ...]]:
        settings = config.load(environ={}, flags={"engine.backend": engine}).config
        form = config.ModelSettings(backend=own)  # type: ignore[arg-type]
        placed = place("m", manifest, form, settings, features=frozenset(), find=lambda *_: Path("m.onnx"))
        assert placed.tensor is not None
        return placed.backend, placed.tensor.backends

    assert chosen("native") == chosen("llama_cpu") == chosen("auto") == ("auto", ("onnx_cpu",))
    assert chosen("native", "llama_cpu")[0] == "llama_cpu"  # asked for by name: refused with the reason
    assert chosen("onnx_cpu")[0] == "onnx_cpu"


def test_what_a_form_wants_of_a_chip_reaches_who_compiles_it() -> None:
    forms = (
        Variant(id="int8", quant="INT8", file="m.onnx", source="shipped:x", sha256="0" * 64, size_bytes=1),
        Variant(
            id="npu",
            quant="INT4",
            file="n.onnx",
            source="shipped:x",
            sha256="0" * 64,
            size_bytes=1,
            backends=("npu_qnn",),
            requires=Requires(weight_bits=4, activation_bits=16, granularity="channel", socs=("57",), place="npu"),
        ),
    )
    manifest = Manifest(id="m", name="m", license="MIT", kind="tensor", n_params=1, variants=forms)
    settings = config.load(environ={}).config

    def npu(variant: str) -> NpuOptions:
        own = config.ModelSettings(variant=variant)
        placed = place("m", manifest, own, settings, features=frozenset(), find=lambda *_: Path("m.onnx"))
        load = decode_as_worker(encode(load_message(placed, settings, force=False)))
        return unpack_tensor(load)[1].npu

    assert (npu("int8").needs, npu("int8").require) == (None, "prefer")
    wanted = ChipNeeds(weight_bits=4, activation_bits=16, granularity="channel", socs=("57",))
    assert (npu("npu").needs, npu("npu").require) == (wanted, "npu")


def decode_as_worker(frame: bytes | bytearray) -> Load:
    (message,) = FrameReader(ToWorker).feed(bytes(frame))
    assert isinstance(message, Load)
    return message


def test_another_form_than_the_best_runs_only_with_a_reason() -> None:
    forms = [
        Variant(id=form, quant=form.upper(), file=f"{form}.onnx", source="shipped:x", sha256="0" * 64, size_bytes=1)
        for form in ("int8", "fp32")
    ]
    manifest = Manifest(id="m", name="m", license="MIT", kind="tensor", n_params=1, variants=tuple(forms))
    settings = config.load(environ={}).config

    def placed(here: set[str], wanted: str = "") -> Placement:
        own = config.ModelSettings(variant=wanted)
        found = {form: Path(f"{form}.onnx") for form in here}
        return place("m", manifest, own, settings, features=frozenset(), find=lambda _, v: found.get(v.id))

    assert placed({"int8", "fp32"}).variant_reason == ""
    lost = placed({"fp32"})
    assert lost.variant == "fp32"
    assert "the file of int8" in lost.variant_reason
    assert "edge_rt models pull m:int8" in lost.variant_reason
    assert placed({"fp32"}, "fp32").variant_reason == ""  # it is meant
    assert placed({"fp32"}, "int8").path is None


def test_the_texts_of_pins_are_read_for_their_model_alone(tmp_path: Path) -> None:
    text = tmp_path / "house.txt"
    text.write_text("Be kind.", encoding="utf-8")
    pins = (
        Pin(model="a", system="Be brief."),
        Pin(model="b", file=str(text)),
        Pin(model="a", name="x", file=str(text)),
    )
    settings = config.Config(pin=pins)
    assert pinned_texts(settings, "a") == {"pin-1": "Be brief.", "x": "Be kind."}
    assert pinned_texts(settings, "b") == {"house.txt": "Be kind."}


@pytest.mark.parametrize(("raw", "problem"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff", "cannot be read")])
def test_a_pins_file_that_tells_nothing_is_named_with_its_line(tmp_path: Path, raw: bytes | None, problem: str) -> None:
    path = tmp_path / "house.txt"
    if raw is not None:
        path.write_bytes(raw)
    settings = config.Config(pin=(Pin(model="a", system="x"), Pin(model="a", file=str(path))))
    with pytest.raises(ConfigError, match=problem) as caught:
        pinned_texts(settings, "a", ("c.toml, line 1", "c.toml, line 5"))
    assert (caught.value.key, caught.value.origin) == ("pin[1].file", "c.toml, line 5")
    assert str(path) in caught.value.problem
