"""A small catalog of one model: a Q8_0 file that can be fetched and a Q4_0 variant derived from it."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_rt.catalog.manifest import Manifest, Variant, load_manifest
from edge_rt.catalog.part import Derivation, PullProgress
from edge_rt.catalog.store import Store
from tests.gguf_files import tiny_llama

CONTENT = tiny_llama(linear="Q8_0", n_layers=16).encode()
DERIVED = tiny_llama(linear="Q4_0", n_layers=16).encode()


def manifest_text(source: str, content: bytes = CONTENT) -> str:
    return f"""
id = "tiny"
name = "Tiny"
license = "Apache-2.0"
kind = "text"
arch = "llama"
n_ctx = 64
n_ctx_train = 128
n_params = 1000

[[variants]]
id = "q8_0"
quant = "Q8_0"
file = "tiny.Q8_0.gguf"
source = "{source}"
size_bytes = {len(content)}
sha256 = "{hashlib.sha256(content).hexdigest()}"

[[variants]]
id = "q4_0"
quant = "Q4_0"
file = "tiny.Q4_0.gguf"
derived_from = "q8_0"
"""


@dataclass
class Shop:
    """A store of one model with everything it leans on in the test's hand."""

    folder: Path
    free: int = 10**12
    tool: str = "quantiser 1"
    derived: bytes = DERIVED
    n_derived: int = 0
    steps: list[PullProgress] = field(default_factory=list)
    manifest_path: Path = field(init=False)
    root: Path = field(init=False)
    manifest: Manifest = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.folder / "store"
        self.manifest_path = self.folder / "tiny.toml"
        self.source_file = self.folder / "source.gguf"
        self.source_file.write_bytes(CONTENT)
        self.use(f"file:{self.source_file}")

    def use(self, source: str, content: bytes = CONTENT) -> None:
        """Let the model come from another source, as a new manifest would."""
        self.manifest_path.write_text(manifest_text(source, content))
        self.manifest = load_manifest(self.manifest_path)
        self.store = Store(self.root, (self.manifest,), tool=lambda _: self.tool, free_bytes=lambda _: self.free)

    def variant(self, variant_id: str = "q8_0") -> Variant:
        variant = self.manifest.variant(variant_id)
        assert variant is not None
        return variant

    def path(self, variant_id: str = "q8_0") -> Path | None:
        return self.store.path(self.manifest, self.variant(variant_id))

    def beside(self, suffix: str, variant_id: str = "q8_0") -> Path:
        return self.root / "models" / "tiny" / f".{self.variant(variant_id).file}.{suffix}"

    def files(self) -> list[str]:
        """Names of all files of the model but the locks."""
        return sorted(p.name for p in (self.root / "models" / "tiny").iterdir() if not p.name.endswith(".lock"))

    def derive(self, src: Path, dst: Path, how: Derivation) -> None:
        assert (src.name, how.quant) == ("tiny.Q8_0.gguf", "Q4_0")
        self.n_derived += 1
        dst.write_bytes(self.derived)

    def pull(self, variant_id: str = "", *, offline: bool = False) -> Path:
        return self.store.pull("tiny", variant_id, progress=self.steps.append, offline=offline, derive=self.derive)

    def phases(self) -> list[str]:
        """Phases of the pulls so far, as variant:phase, without repetitions."""
        seen: list[str] = []
        for step in self.steps:
            name = f"{step.variant}:{step.phase}"
            if not seen or seen[-1] != name:
                seen.append(name)
        return seen


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB, which the model does not fit on."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip("this user cannot mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)
