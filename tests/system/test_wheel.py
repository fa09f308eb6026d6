"""What a built wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "edge_rt", "models", "native", "systemd")
COMPILERS = ("cc", "gcc", "clang")


@pytest.mark.slow
def test_wheel_holds_every_manifest_and_the_native_engine(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in SOURCES:  # building in place would leave build/ behind
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree / name)
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found for setuptools" in build.stderr:
        pytest.skip("pip cannot fetch setuptools here")
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    script = (
        "from edge_rt.catalog.chains import load_chains\n"
        "from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifests\n"
        "print(SHIPPED_DIR); print(*[m.id for m in load_manifests([SHIPPED_DIR])])\n"
        "print(*[chain.id for chain in load_chains([SHIPPED_DIR])])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "unpacked", capture_output=True, text=True, check=True
    )
    place, ids, chains = child.stdout.splitlines()
    assert Path(place) == tmp_path / "unpacked" / "edge_rt" / "manifests"
    if any(map(shutil.which, COMPILERS)):
        script = "from edge_rt.backends.native_library import isa_names, load_native; print(*isa_names(load_native()))"
        child = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path / "unpacked", capture_output=True, text=True, check=False
        )
        assert "portable" in child.stdout, child.stderr
    shipped, held = (
        sorted(p.name for p in folder.iterdir() if p.is_file()) for folder in (ROOT / "models", Path(place))
    )
    assert held == shipped  # labels, characters and ranges beside the manifests
    units, shipped_units = (
        sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        for folder in (Path(place).parent / "systemd", ROOT / "systemd")
    )
    assert units == shipped_units
    boards = Path("devices", "boards")
    assert {p.name for p in (Path(place).parent / boards).iterdir()} == {
        p.name for p in (ROOT / "edge_rt" / boards).iterdir()
    }
    assert ids.split() == sorted(path.stem for path in (ROOT / "models").glob("*.toml"))
    assert chains.split() == sorted(path.stem for path in (ROOT / "models" / "chains").glob("*.toml"))
