from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.catalog.store import SYSTEM_DIR, Store, pick_variant, recipe_version
from edge_rt.config import Catalog
from edge_rt.errors import ConfigError, ModelChecksumError, ModelFormatError, ModelNotFoundError
from tests.unit.catalog.conftest import CONTENT, DERIVED, Shop

NO_FEATURES: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("features", "picked"),
    [
        (set(), "q8_0"),
        ({"sse4_2", "avx"}, "q8_0"),
        ({"avx2"}, "q4_0"),
        ({"avx2", "avx512f", "avx512_vnni"}, "q4_0"),
        ({"neon"}, "q4_0"),
        ({"neon", "dotprod"}, "q4_0"),
        ({"neon", "dotprod", "i8mm", "sve"}, "q4_0"),
    ],
)
def test_the_fastest_form_for_a_cpu(features: set[str], picked: str, shop: Shop) -> None:
    assert pick_variant(shop.manifest, frozenset(features)).id == picked


def test_a_wanted_variant_wins_over_the_cpu(shop: Shop) -> None:
    assert pick_variant(shop.manifest, frozenset({"avx2"}), "q8_0").id == "q8_0"
    with pytest.raises(ModelNotFoundError, match="tiny:q8_0, tiny:q4_0"):
        pick_variant(shop.manifest, NO_FEATURES, "q2_k")


def test_unknown_model(shop: Shop) -> None:
    with pytest.raises(ModelNotFoundError, match="known models: tiny"):
        shop.store.get("big")


def test_state_follows_a_pull(shop: Shop) -> None:
    assert shop.store.state(shop.manifest, shop.variant()) == ("absent", 0)
    shop.beside("part").parent.mkdir(parents=True)
    shop.beside("part").write_bytes(b"x" * 7)
    assert shop.store.state(shop.manifest, shop.variant()) == ("partial", 7)
    shop.pull()
    assert shop.store.state(shop.manifest, shop.variant()) == ("pulled", len(CONTENT))


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"sha256": 1, "size_bytes": 2}'])
def test_a_file_with_a_broken_record_counts_as_absent(record: bytes, shop: Shop) -> None:
    shop.pull()
    shop.beside("json").write_bytes(record)
    assert shop.path() is None
    assert shop.pull() == shop.path()


def test_a_shortened_file_counts_as_absent(shop: Shop) -> None:
    path = shop.pull()
    os.truncate(path, 100)
    assert shop.path() is None
    assert shop.pull().read_bytes() == CONTENT


def test_verify(shop: Shop) -> None:
    assert shop.store.verify("tiny", progress=shop.steps.append) == ()
    path, derived = shop.pull(), shop.pull("q4_0")
    shop.steps.clear()
    assert shop.store.verify("tiny", progress=shop.steps.append) == (path, derived)
    assert (shop.steps[-1].done_bytes, shop.steps[-1].total_bytes) == (len(DERIVED), len(DERIVED))
    raw = bytearray(derived.read_bytes())
    raw[-1] ^= 1
    derived.write_bytes(raw)
    assert shop.store.verify("tiny", "q8_0", progress=shop.steps.append) == (path,)
    with pytest.raises(ModelChecksumError, match=r"tiny\.Q4_0\.gguf"):
        shop.store.verify("tiny", progress=shop.steps.append)


def test_remove(shop: Shop) -> None:
    assert shop.store.remove("tiny") == 0
    shop.pull("q4_0")
    assert shop.store.remove("tiny", "q4_0") >= len(DERIVED)
    assert (shop.path("q4_0"), shop.path("q8_0")) == (None, shop.root / "models" / "tiny" / "tiny.Q8_0.gguf")
    shop.beside("part", "q4_0").write_bytes(b"x")
    shop.beside("part.wheel").mkdir()
    assert shop.store.remove("tiny") > len(CONTENT)
    assert shop.files() == []
    with pytest.raises(ModelNotFoundError):
        shop.store.remove("big")
    with pytest.raises(ModelNotFoundError):
        shop.store.remove("tiny", "q2_k")


def test_where_the_store_is(tmp_path: Path) -> None:
    def root(environ: dict[str, str], store_dir: str = "") -> Path:
        return Store.open(Catalog(store_dir=store_dir), environ).root

    assert root({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, str(tmp_path)) == tmp_path
    assert root({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "HOME": "/h"}) == Path("/var/lib/a")
    if os.geteuid() == 0:
        assert root({"HOME": "/h"}) == SYSTEM_DIR
    else:
        assert root({"HOME": "/h"}) == Path("/h/.local/share/edge_rt")
        assert root({"HOME": "/h", "XDG_DATA_HOME": "/d"}) == Path("/d/edge_rt")


def test_own_manifests_come_before_the_shipped_ones(shop: Shop, tmp_path: Path) -> None:
    mine = tmp_path / "manifests"
    mine.mkdir()
    (mine / "tiny.toml").write_text(shop.manifest_path.read_text())
    store = Store.open(Catalog(store_dir=str(tmp_path), manifest_dirs=(str(mine),)), {})
    assert store.get("tiny") == shop.manifest
    assert store.get(Catalog().default_model).license == "Apache-2.0"
    with pytest.raises(ConfigError, match="manifest_dirs"):
        Store.open(Catalog(manifest_dirs=(str(tmp_path / "missing"),)), {})


def test_reading_the_store_loads_no_http_client() -> None:
    script = "import sys, edge_rt.catalog.store as s; sys.exit(str({'httpx2', 'stamina', 'numpy'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.stderr.strip() == "set()"


def test_recipe_version_names_the_installed_one() -> None:
    pytest.importorskip("llama_cpp", reason="the back end llama_cpu is not installed")
    assert recipe_version("").startswith("llama-cpp-python 0.")


def test_a_bad_manifest_takes_no_other_with_it_and_is_seen_when_mended(shop: Shop, tmp_path: Path) -> None:
    mine = tmp_path / "manifests"
    mine.mkdir()
    sound = shop.manifest_path.read_text()
    (mine / "tiny.toml").write_text(sound.replace("n_ctx = 64", "n_ctx = -64"))
    store = Store.open(Catalog(store_dir=str(tmp_path / "s"), manifest_dirs=(str(mine),)), {})
    assert store.get(Catalog().default_model).license == "Apache-2.0"
    with pytest.raises(ModelFormatError, match=r"tiny\.toml: n_ctx: "):
        store.get("tiny")
    assert not store.refresh()
    (mine / "tiny.toml").write_text(sound)
    assert store.refresh()
    assert (store.get("tiny"), dict(store.left_out())) == (shop.manifest, {})
    (mine / "link.toml").symlink_to(tmp_path / "nowhere")
    assert store.refresh()
    assert list(store.left_out()) == ["link"]
    assert not store.refresh()
    (mine / "link.toml").unlink()
    (mine / "tiny.toml").unlink()
    assert store.refresh()
    with pytest.raises(ModelNotFoundError):
        store.get("tiny")
