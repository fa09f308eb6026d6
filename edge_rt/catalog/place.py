"""Where one model file and what belongs to it stand in the store.

models/ID/FILE              complete and verified; it appears by an atomic rename
models/ID/.FILE.json        its Record, written before the rename
models/ID/.FILE.part        what has come so far, with .FILE.part.json saying of what
models/ID/.FILE.packed      its weights as the native engine packs them (packed.py), with .FILE.packing while it is made
models/ID/.FILE.graph       its graph as the runtime optimises it (graph_copy.py), with .FILE.graph.new while it is made
models/ID/.FILE.prefixes/   prompts' beginnings that were computed with it (engine/prefix_disk.py)
models/ID/.FILE.npu/        its compiled forms for NPUs (backends/npu/artifacts.py)
models/ID/STEM.SOC.rknn     what `edge_rt npu compile` made of it for a board, with STEM.SOC.rknn.json
models/ID/.FILE.lock        held while somebody pulls, derives or removes FILE; never deleted
manifests/ID.toml           the manifest of an imported model, with .ID.toml.lock while it is imported
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_rt.errors import StoreError

if TYPE_CHECKING:  # a worker reads no manifest
    from edge_rt.catalog.manifest import Manifest, Variant


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a file in the store is. source is set for fetched files, the rest for derived ones.

    parent_sha256  the variant's Manifest.lineage: of a quantised GGUF file its parent's sha256
    """

    sha256: str
    size_bytes: int
    source: str = ""
    parent_sha256: str = ""
    tool: str = ""


def manifest_file(root: Path, model_id: str) -> Path:
    """Give where the manifest of an imported model stands."""
    return root / "manifests" / f"{model_id}.toml"


@dataclass(frozen=True, slots=True)
class Place:
    """The paths that belong to one variant's file."""

    file: Path

    @classmethod
    def of(cls, root: Path, manifest: Manifest, variant: Variant) -> Place:
        return cls(root / "models" / manifest.id / variant.file)

    def beside(self, suffix: str) -> Path:
        return self.file.with_name(f".{self.file.name}.{suffix}")

    @property
    def part(self) -> Path:
        return self.beside("part")

    @property
    def packed(self) -> Path:
        return self.beside("packed")

    @property
    def packing(self) -> Path:
        return self.beside("packing")

    @property
    def graph(self) -> Path:
        return self.beside("graph")

    @property
    def compiled(self) -> Path:
        return self.beside("npu")

    @property
    def prefixes(self) -> Path:
        return self.beside("prefixes")

    def read_record(self) -> Record | None:
        """Read the file's record; None unless the file is there and as long as it says."""
        try:
            record = msgspec.json.decode(self.beside("json").read_bytes(), type=Record)
            size = self.file.stat().st_size
        except (OSError, msgspec.DecodeError):
            return None
        return record if size == record.size_bytes else None

    def record(self, manifest: Manifest, variant: Variant) -> Record | None:
        """Read the file's record; None unless the file is there and both are what the manifest promises."""
        if (record := self.read_record()) is None:
            return None
        told = record.parent_sha256 if variant.derived_from else record.sha256
        return record if told == manifest.lineage(variant) else None

    def write_record(self, record: Record) -> None:
        # Without the old file a crash before the rename leaves a record alone, never one beside another's bytes.
        self.file.unlink(missing_ok=True)
        temp = self.beside("json.new")
        with temp.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record)))
            file.flush()
            os.fsync(file.fileno())
        temp.replace(self.beside("json"))

    def forget(self) -> int:
        """Delete the file and everything beside it but the lock; give the bytes freed."""
        freed = 0
        # What becomes another file goes before it.
        suffixes = ("json", "part", "part.json", "new", "packing", "packed", "graph.new", "graph")
        beside = (self.beside(suffix) for suffix in suffixes)
        exported = self.file.parent.glob(f"{self.file.stem}.*.rknn*")  # a stem has no character that glob knows
        for path in (self.file, *beside, *exported):
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            freed += size
        import shutil  # a worker, which deletes nothing, does without it

        shutil.rmtree(self.beside("part.wheel"), ignore_errors=True)
        freed += sum(path.stat().st_size for path in self.compiled.glob("*/*"))
        shutil.rmtree(self.compiled, ignore_errors=True)
        freed += sum(path.stat().st_size for path in self.prefixes.glob("*"))
        shutil.rmtree(self.prefixes, ignore_errors=True)
        return freed

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the file's lock against other processes and threads; calls waiting first if somebody else has it.

        The kernel drops the lock when its holder dies. Raises StoreError when the store cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.beside("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise StoreError(path=str(exc.filename), problem=str(exc.strerror)) from exc
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
