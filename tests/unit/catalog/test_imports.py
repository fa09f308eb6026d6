"""Importing a GGUF file of one's own; folders with ONNX models are in tests/unit/convert."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edge_rt.catalog.imports import id_of, manifest_text, spdx_id
from edge_rt.catalog.manifest import load_manifest
from edge_rt.catalog.part import PullProgress
from edge_rt.catalog.store import Store
from edge_rt.config import Catalog
from edge_rt.errors import DiskFullError, InvalidRequestError, ModelFormatError, ModelNotFoundError, PullError
from tests.gguf_files import tiny_llama


class Home:
    """A store and a file to import."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.free = 10**12
        self.steps: list[PullProgress] = []
        self.converted: list[Path] = []
        self.file = self.write("My Model (v2).Q4_0.gguf")

    def write(self, name: str, **keys: str) -> Path:
        file = tiny_llama()
        for key, text in keys.items():
            file.set(key.replace("_", "."), "string", text)
        path = self.folder / name
        path.write_bytes(file.encode())
        return path

    def store(self) -> Store:
        opened = Store.open(Catalog(store_dir=str(self.folder / "store")), {})
        return Store(opened.root, opened.manifests(), free_bytes=lambda _: self.free)

    def add(self, path: Path, **asked: str) -> str:
        return self.store().add(path, **asked, progress=self.steps.append, convert=self.convert).id  # type: ignore[arg-type]

    def convert(self, folder: Path, vocab: Path, dst: Path) -> None:
        self.converted += [folder, vocab]
        dst.write_bytes(vocab.read_bytes())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_an_imported_file_is_a_model_like_any_other(home: Home) -> None:
    assert home.add(home.file) == "my-model-v2-.q4_0"
    store = home.store()
    manifest = store.get("my-model-v2-.q4_0")
    path = store.path(manifest, manifest.variants[0])
    assert path is not None
    assert path.read_bytes() == home.file.read_bytes()
    assert (manifest.name, manifest.license, manifest.arch) == ("tiny", "LicenseRef-unknown", "llama")
    assert (manifest.n_ctx, manifest.n_ctx_train) == (128, 128)
    variant = manifest.variants[0]
    assert (variant.id, variant.quant, variant.file) == ("q4_0", "Q4_0", "my-model-v2-.q4_0.gguf")
    assert variant.sha256 == hashlib.sha256(home.file.read_bytes()).hexdigest()
    assert store.verify(manifest.id, progress=home.steps.append) == (path,)
    home.file.unlink()
    assert store.pull(manifest.id, progress=home.steps.append, offline=True, derive=never) == path


def never(src: Path, dst: Path, how: object) -> None:
    raise AssertionError


def test_removing_an_imported_model_removes_its_entry(home: Home) -> None:
    model_id = home.add(home.file, model_id="mine")
    store = home.store()
    assert store.remove(model_id) >= home.file.stat().st_size
    assert [p.name for p in (store.root / "manifests").iterdir()] == [".mine.toml.lock"]
    with pytest.raises(ModelNotFoundError):
        home.store().get(model_id)


def test_a_lost_file_cannot_be_pulled_but_imported_again(home: Home) -> None:
    home.add(home.file, model_id="mine")
    store = home.store()
    manifest = store.get("mine")
    path = store.path(manifest, manifest.variants[0])
    assert path is not None
    path.unlink()
    with pytest.raises(PullError, match="edge_rt models import PATH --id mine"):
        store.pull("mine", progress=home.steps.append, offline=False, derive=never)
    home.add(home.file, model_id="mine")
    assert path.read_bytes() == home.file.read_bytes()


def test_an_id_that_is_taken(home: Home) -> None:
    home.add(home.file, model_id="mine")
    with pytest.raises(InvalidRequestError, match="models rm mine"):
        home.add(home.file, model_id="mine")
    with pytest.raises(InvalidRequestError, match=r"is taken by 'SmolLM2 135M Instruct'; choose another$"):
        home.add(home.file, model_id=Catalog().default_model)


@pytest.mark.parametrize("model_id", ["a/b", "../x", "-x", "A", "a b", "x" * 65])
def test_a_bad_id(model_id: str, home: Home) -> None:
    with pytest.raises(InvalidRequestError, match="is not an id"):
        home.add(home.file, model_id=model_id)
    assert not (home.folder / "store").exists()


@pytest.mark.parametrize(
    ("text", "spdx"),
    [
        ("apache-2.0", "Apache-2.0"),
        (" MIT ", "MIT"),
        ("llama3.2", "LicenseRef-unknown"),
        ("other", "LicenseRef-unknown"),
        (7, "LicenseRef-unknown"),
        (None, "LicenseRef-unknown"),
    ],
)
def test_licences(text: object, spdx: str) -> None:
    assert spdx_id(text) == spdx


def test_name_and_licence_come_from_the_file(home: Home) -> None:
    path = home.write("b.gguf", general_name='Wolf "Grau" \\ 7', general_license="apache-2.0")
    home.add(path)
    manifest = home.store().get("b")
    assert (manifest.name, manifest.license) == ('Wolf "Grau" \\ 7', "Apache-2.0")
    home.add(path, model_id="c", license_id="mit")
    assert home.store().get("c").license == "MIT"
    with pytest.raises(InvalidRequestError, match="not an SPDX expression"):
        home.add(path, model_id="d", license_id="my own; ask me")


def test_a_name_with_control_characters_is_not_taken(home: Home) -> None:
    home.add(home.write("b.gguf", general_name='x"\nid = "evil'))
    assert home.store().get("b").name == "b"


def test_a_hostile_file_leaves_nothing(home: Home) -> None:
    file = tiny_llama()
    file.set("tokenizer.ggml.scores", "[f32]", [0.0])
    path = home.folder / "bad.gguf"
    path.write_bytes(file.encode())
    with pytest.raises(ModelFormatError, match="scores"):
        home.add(path)
    assert not list((home.folder / "store").rglob("*.toml"))
    assert not list((home.folder / "store").rglob("*.gguf"))


def test_a_full_disk(home: Home) -> None:
    home.free = 1000
    with pytest.raises(DiskFullError):
        home.add(home.file)
    assert not list((home.folder / "store").rglob("*.toml"))


def test_a_manifest_survives_its_file(home: Home) -> None:
    home.add(home.file, model_id="mine")
    manifest = home.store().get("mine")
    path = home.folder / "again.toml"
    path.write_text(manifest_text(manifest))
    assert load_manifest(path) == manifest


def test_folders_go_through_convert(home: Home) -> None:
    folder = home.folder / "onnx"
    folder.mkdir()
    with pytest.raises(InvalidRequestError, match="--vocab"):
        home.add(folder)
    store = home.store()
    manifest = store.add(folder, vocab=home.file, progress=home.steps.append, convert=home.convert)
    assert (manifest.id, home.converted) == ("onnx", [folder, home.file])
    store = home.store()
    path = store.path(manifest, manifest.variants[0])
    assert path is not None
    assert path.name == "onnx.gguf"
    assert "convert" in {step.phase for step in home.steps}
    with pytest.raises(InvalidRequestError, match="--vocab is for folders"):
        store.add(home.file, vocab=home.file, progress=home.steps.append, convert=home.convert)


def test_a_failed_conversion_leaves_nothing(home: Home) -> None:
    folder = home.folder / "onnx"
    folder.mkdir()

    def convert(src: Path, vocab: Path, dst: Path) -> None:
        dst.write_bytes(b"half")
        raise ModelFormatError(path=str(src), field="graph", problem="no")

    with pytest.raises(ModelFormatError):
        home.store().add(folder, vocab=home.file, progress=home.steps.append, convert=convert)
    left = [p.name for p in (home.folder / "store").rglob("*") if p.is_file()]
    assert sorted(left) == [".onnx.gguf.lock", ".onnx.toml.lock"]


def test_ids_from_names() -> None:
    assert id_of(Path("/m/Qwen2.5-0.5B-Instruct-Q4_K_M.gguf")) == "qwen2.5-0.5b-instruct-q4_k_m"
    assert id_of(Path("/m/..hidden.gguf")) == "hidden"
    assert id_of(Path(os.sep)) == ""
