from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from edge_rt.catalog.manifest import MAX_MANIFEST_BYTES, SHIPPED_DIR, _contradictions, load_manifest, load_manifests
from edge_rt.config import Catalog
from edge_rt.errors import ModelFormatError

SOUND = f"""
id = "m"
name = "M"
license = "Apache-2.0 WITH LLVM-exception"
kind = "text"
arch = "llama"
n_ctx = 64
n_ctx_train = 128
n_params = 1000

[[variants]]
id = "q8_0"
quant = "Q8_0"
file = "m.Q8_0.gguf"
source = "https://host.example/m.gguf"
size_bytes = 10
sha256 = "{"a" * 64}"

[[variants]]
id = "q4_0"
quant = "Q4_0"
file = "m.Q4_0.gguf"
derived_from = "q8_0"
"""


def write(folder: Path, text: str, name: str = "m.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_sound_manifest(tmp_path: Path) -> None:
    manifest = load_manifest(write(tmp_path, SOUND))
    assert [v.id for v in manifest.variants] == ["q8_0", "q4_0"]
    assert manifest.variant("q4_0") == manifest.variants[1]
    assert manifest.variant("") is None


# name -> (old, new, field of the error)
BAD: dict[str, tuple[str, str, str]] = {
    "unknown key": ('name = "M"', 'name = "M"\ncolour = "red"', "manifest"),
    "unknown variant key": ('quant = "Q4_0"', 'quant = "Q4_0"\nurl = "x"', "variants"),
    "missing licence": ('license = "Apache-2.0 WITH LLVM-exception"\n', "", "manifest"),
    "licence that is no SPDX": ("Apache-2.0 WITH LLVM-exception", "free, mostly", "license"),
    "id with a path": ('id = "m"', 'id = "../m"', "id"),
    "id that is a path": ('id = "m"', 'id = ".."', "id"),
    "id with a newline": ('id = "m"', 'id = "m\\n"', "id"),
    "id like an option": ('id = "m"', 'id = "-m"', "id"),
    "file with a path": ('"m.Q4_0.gguf"', '"../m.Q4_0.gguf"', "variants.file"),
    "file that is absolute": ('"m.Q4_0.gguf"', '"/etc/passwd"', "variants.file"),
    "file that is hidden": ('"m.Q4_0.gguf"', '".m.Q8_0.gguf.lock"', "variants.file"),
    "file with a backslash": ('"m.Q4_0.gguf"', '"a\\\\b"', "variants.file"),
    "file that is empty": ('"m.Q4_0.gguf"', '""', "variants.file"),
    "name with an escape sequence": ('name = "M"', 'name = "M\\u001b[2J"', "name"),
    "short sha256": ("a" * 64, "a" * 63, "variants.sha256"),
    "sha256 in capitals": ("a" * 64, "A" * 64, "variants.sha256"),
    "size of 0": ("size_bytes = 10", "size_bytes = 0", "variants.q8_0"),
    "size below 0": ("size_bytes = 10", "size_bytes = -1", "variants.size_bytes"),
    "size as text": ("size_bytes = 10", 'size_bytes = "10"', "variants.size_bytes"),
    "no sha256": (f'sha256 = "{"a" * 64}"', "", "variants.q8_0"),
    "neither source nor parent": ('derived_from = "q8_0"', "", "variants.q4_0"),
    "source and parent": ('derived_from = "q8_0"', 'derived_from = "q8_0"\nsource = "file:/x"', "variants.q4_0"),
    "unknown parent": ('derived_from = "q8_0"', 'derived_from = "q5_0"', "variants.q4_0.derived_from"),
    "its own parent": ('derived_from = "q8_0"', 'derived_from = "q4_0"', "variants.q4_0.derived_from"),
    "bad source": ("https://host.example/m.gguf", "http://host.example/m.gguf", "variants.q8_0.source"),
    "doubled variant": ('id = "q4_0"', 'id = "q8_0"', "variants.id"),
    "doubled file": ('"m.Q4_0.gguf"', '"m.Q8_0.gguf"', "variants.file"),
    "n_ctx over n_ctx_train": ("n_ctx = 64", "n_ctx = 129", "n_ctx"),
    "n_ctx of 0": ("n_ctx = 64", "n_ctx = 0", "n_ctx"),
    "unknown kind": ('kind = "text"', 'kind = "image"', "kind"),
    "not TOML": ("n_ctx = 64", "n_ctx = ", "TOML"),
    "key twice": ("n_ctx = 64", "n_ctx = 64\nn_ctx = 64", "TOML"),
    "nested too deep": ("n_ctx = 64", f"x = {'[' * 5000}{']' * 5000}", "TOML"),
    "too long": ("n_ctx = 64", f"#{'x' * MAX_MANIFEST_BYTES}", "file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_manifest_names_the_field(name: str, tmp_path: Path) -> None:
    old, new, field = BAD[name]
    assert old in SOUND
    with pytest.raises(ModelFormatError) as caught:
        load_manifest(write(tmp_path, SOUND.replace(old, new, 1)))
    assert re.sub(r"\[\d\]", "", caught.value.field) == field
    assert "\x1b" not in str(caught.value)


def asset(table: str, name: str, sha256: str = "a" * 64) -> str:
    facts = f'source = "https://host.example/{name}"\nsize_bytes = 1\nsha256 = "{sha256}"\n'
    return f'\n[[{table}]]\nid = "{name}"\nfile = "m.{name}"\n{facts}'


OF_TEXT = {
    "arch": 'arch = "llama"\n',
    "n_ctx": "n_ctx = 64\nn_ctx_train = 64\n",
    "n_ctx_train": "n_ctx_train = 64\n",
    "chat_template": 'chat_template = ""\n',
    "draft": 'draft = "other:q8_0"\n',
    "adapters": "",
}


@pytest.mark.parametrize("name", OF_TEXT)
def test_what_is_a_language_models_is_no_tensor_models(name: str, tmp_path: Path) -> None:
    tensor = re.sub(r"(arch|n_ctx|n_ctx_train) = .*\n", "", SOUND).replace('"text"', '"tensor"')
    load_manifest(write(tmp_path, tensor))
    adapter = asset("adapters", "poems") if name == "adapters" else ""
    with pytest.raises(ModelFormatError, match="is for models of kind text") as caught:
        load_manifest(write(tmp_path, OF_TEXT[name] + tensor + adapter))
    assert caught.value.field == name


def test_one_contradiction_hides_no_other(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(
        load_manifest(write(tmp_path, SOUND + asset("adapters", "poems"))), kind="tensor", draft="other"
    )
    problem = "is for models of kind text"
    assert _contradictions(manifest) == [
        (name, problem) for name in ("arch", "n_ctx", "n_ctx_train", "draft", "adapters")
    ]


@pytest.mark.parametrize("table", ["assets", "materials", "adapters"])
def test_a_file_is_named_by_the_list_it_stands_in(table: str, tmp_path: Path) -> None:
    kind = SOUND if table == "adapters" else re.sub(r"(arch|n_ctx|n_ctx_train) = .*\n", "", SOUND)
    sound = kind if table == "adapters" else kind.replace('"text"', '"tensor"')
    entry = asset(table, "poems")
    load_manifest(write(tmp_path, sound + entry))
    for old, new, field in (
        ("https://host.example/poems", "http://host.example/poems", f"{table}.poems.source"),
        ('id = "poems"', 'id = "q8_0"', f"{table}.id"),
        ("m.poems", "m.Q8_0.gguf", f"{table}.file"),
    ):
        with pytest.raises(ModelFormatError) as caught:
            load_manifest(write(tmp_path, sound + entry.replace(old, new)))
        assert caught.value.field == field


def test_no_variants(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError) as caught:
        load_manifest(write(tmp_path, SOUND.partition("[[variants]]")[0] + "variants = []"))
    assert caught.value.field == "variants"


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="cannot be read"):
        load_manifest(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ModelFormatError, match="TOML"):
        load_manifest(tmp_path / "latin.toml")


def test_earlier_directory_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    write(first, SOUND.replace('"M"', '"Mine"'))
    write(second, SOUND)
    write(second, SOUND.replace('id = "m"', 'id = "a"'), "a.toml")
    assert [(m.id, m.name) for m in load_manifests([first, second])] == [("a", "M"), ("m", "Mine")]


def test_one_id_twice_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path, SOUND, "1.toml")
    write(tmp_path, SOUND, "2.toml")
    with pytest.raises(ModelFormatError, match=r"'m' is taken by 1\.toml"):
        load_manifests([tmp_path])


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no such directory"):
        load_manifests([tmp_path / "missing"])


def test_shipped_manifests_are_sound_and_hold_the_default_model() -> None:
    assert Catalog().default_model in [m.id for m in load_manifests([SHIPPED_DIR])]


def test_a_bad_manifest_is_left_out_and_named(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    write(first, SOUND.replace('id = "m"', 'id = "good"'), "good.toml")
    write(first, SOUND.replace("n_params = ", "n_params = -"), "m.toml")
    write(first, "id = \n", "torn.toml")
    write(first, SOUND.replace('id = "m"', 'id = "good"'), "twin.toml")
    (first / "folder.toml").mkdir()
    write(second, SOUND)  # what the first directory says of m is broken: that does not bring this one up
    left_out: dict[str, ModelFormatError] = {}
    assert [m.id for m in load_manifests([first, second, tmp_path / "none"], left_out=left_out)] == ["good"]
    told = {name: (error.field, Path(error.path).name) for name, error in left_out.items()}
    assert told == {
        "m": ("n_params", "m.toml"),
        "torn": ("TOML", "torn.toml"),
        "folder": ("file", "folder.toml"),
        str(first / "twin.toml"): ("id", "twin.toml"),
        str(tmp_path / "none"): ("manifest_dirs", "none"),
    }
    assert "line 1" in left_out["torn"].problem
