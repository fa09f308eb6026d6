"""Take a model of one's own into the store: its file beside the pulled ones, its manifest in ROOT/manifests.

A GGUF file is copied as a pull from `file:` would copy it. Whatever else PATH is goes through convert, which makes a
GGUF file of it. Imported only when something is imported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from edge_rt.catalog.fetch import FetchSettings
from edge_rt.catalog.gguf import GgufHeader, read_header
from edge_rt.catalog.manifest import UNKNOWN_LICENSE, FileName, Id, Manifest, Spdx, Variant, load_manifest
from edge_rt.catalog.part import Derivation, Phase, Progress, PullProgress, disk_full, hash_file, sync_dir
from edge_rt.catalog.place import Place, Record, manifest_file
from edge_rt.catalog.pull import SPACE_MARGIN_BYTES, Pull
from edge_rt.catalog.sources import is_imported
from edge_rt.errors import DiskFullError, InvalidRequestError, ModelFormatError

Convert = Callable[[Path, Path, Path], None]

_N_CTX = 4096
_MAX_TOKENS = 2**24
_MAX_NAME = 200
# SPDX ids of the licences that model cards name, by their lower case, which is how hubs write them.
_SPDX: Mapping[str, str] = {
    name.lower(): name
    for name in (
        *("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "Unlicense", "Zlib", "BSL-1.0"),
        *("CC0-1.0", "CC-BY-3.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-3.0", "CC-BY-NC-4.0"),
        *("CC-BY-ND-4.0", "CC-BY-NC-ND-4.0", "CC-BY-NC-SA-3.0", "CC-BY-NC-SA-4.0", "AFL-3.0", "Artistic-2.0"),
        *("ECL-2.0", "EPL-1.0", "EPL-2.0", "EUPL-1.1", "EUPL-1.2", "MS-PL", "NCSA", "OFL-1.1", "OSL-3.0", "WTFPL"),
        *("GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-only", "GPL-3.0-or-later", "LGPL-3.0-only"),
        *("LGPL-3.0-or-later", "AGPL-3.0-only", "AGPL-3.0-or-later"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import's surroundings.

    known       the manifests there are, by id
    convert     writes a GGUF file: convert(folder, vocab, dst)
    free_bytes  free space of the disk a path is on
    """

    root: Path
    known: Mapping[str, Manifest]
    progress: Progress
    convert: Convert
    free_bytes: Callable[[Path], int]

    def run(self, path: Path, *, model_id: str = "", license_id: str = "", vocab: Path | None = None) -> Manifest:
        """Bring path into the store and write its manifest, which is what makes it appear.

        Raises InvalidRequestError for a bad id, licence or vocab, ModelFormatError, DiskFullError, StoreError,
        ModelChecksumError where path changes meanwhile, and what convert raises.
        """
        wanted = _Wanted(_checked(model_id or id_of(path), Id, "--id"), license_id and _checked_license(license_id))
        if path.is_dir() == (vocab is None):
            raise InvalidRequestError(
                param="--vocab",
                problem="a folder with an ONNX model needs a GGUF file of the same model for tokenizer and "
                "hyperparameters"
                if vocab is None
                else "a GGUF file has a vocabulary of its own; --vocab is for folders with an ONNX model",
            )
        place = Place(manifest_file(self.root, wanted.model_id))
        with place.locked(lambda: self._report(wanted.model_id, "", "wait", 0, None)):
            self._check_free(wanted.model_id)
            manifest = self._copy(path, wanted) if vocab is None else self._convert(path, vocab, wanted)
            self._write(manifest, place)
        return manifest

    def _check_free(self, model_id: str) -> None:
        there = self.known.get(model_id)
        if there is None:
            return
        is_here = any(Place.of(self.root, there, v).record(there, v) for v in there.variants)
        if is_here or not is_imported(there.variants[0].source):
            remedy = f", or remove it first with `edge_rt models rm {model_id}`" if is_here else ""
            raise InvalidRequestError(
                param="--id", problem=f"{model_id!r} is taken by {there.name!r}; choose another{remedy}"
            )

    def _copy(self, path: Path, wanted: _Wanted) -> Manifest:
        header = read_header(path)
        report = lambda done: self._report(wanted.model_id, path.name, "check", done, header.file_bytes)  # noqa: E731
        own_name = _is(path.name, FileName)
        variant = Variant(
            id=header.quant.lower(),
            quant=header.quant,
            file=path.name if own_name else f"{wanted.model_id}.gguf",
            source=f"file:{quote(str(path.absolute()))}",
            size_bytes=header.file_bytes,
            sha256=hash_file(path, report),
        )
        manifest = _describe(header, wanted, variant)
        Pull(
            root=self.root,
            manifest=manifest,
            settings=FetchSettings(hub_endpoint=""),
            tool=lambda _: "",
            free_bytes=self.free_bytes,
            progress=self.progress,
            offline=False,
            derive=_nothing_to_derive,
        ).run(variant)
        return _with_source(manifest, path)

    def _convert(self, path: Path, vocab: Path, wanted: _Wanted) -> Manifest:
        read_header(vocab)
        place = Place(self.root / "models" / wanted.model_id / f"{wanted.model_id}.gguf")
        new, directory = place.beside("new"), place.file.parent
        with place.locked(lambda: self._report(wanted.model_id, "", "wait", 0, None)):
            need = sum(p.stat().st_size for p in path.iterdir() if p.is_file()) + SPACE_MARGIN_BYTES
            if (have := self.free_bytes(directory)) < need:
                raise DiskFullError(path=str(directory), need_bytes=need, have_bytes=have)
            self._report(wanted.model_id, "", "convert", 0, None)
            try:
                with disk_full(directory, need, lambda: self.free_bytes(directory)):
                    self.convert(path, vocab, new)
                    header = read_header(new)
                    report = lambda done: self._report(wanted.model_id, "", "check", done, header.file_bytes)  # noqa: E731
                    variant = Variant(
                        id=header.quant.lower(),
                        quant=header.quant,
                        file=place.file.name,
                        size_bytes=header.file_bytes,
                        sha256=hash_file(new, report),
                    )
                    with new.open("rb") as file:
                        os.fsync(file.fileno())
                    place.write_record(Record(sha256=variant.sha256, size_bytes=variant.size_bytes))
                    new.rename(place.file)
                    sync_dir(directory)
            finally:
                new.unlink(missing_ok=True)
        return _with_source(_describe(header, wanted, variant), path)

    def _write(self, manifest: Manifest, place: Place) -> None:
        new = place.beside("new")
        try:
            with disk_full(new.parent, 4096, lambda: self.free_bytes(new.parent)), new.open("wb") as file:
                file.write(manifest_text(manifest).encode())
                file.flush()
                os.fsync(file.fileno())
            load_manifest(new)
            new.rename(place.file)
            sync_dir(place.file.parent)
        finally:
            new.unlink(missing_ok=True)

    def _report(self, model_id: str, file: str, phase: Phase, done_bytes: int, total_bytes: int | None) -> None:
        self.progress(
            PullProgress(
                model=model_id, variant="", file=file, phase=phase, done_bytes=done_bytes, total_bytes=total_bytes
            )
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller asked for; license_id '' takes the file's."""

    model_id: str
    license_id: str


def id_of(path: Path) -> str:
    """Make an id of a file's or folder's name."""
    stem = path.absolute().name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem).lstrip("._-")[:64]


def spdx_id(text: object) -> str:
    """Give the SPDX id that a file's licence is, or what SPDX provides for those that have none."""
    return _SPDX.get(text.strip().lower(), UNKNOWN_LICENSE) if isinstance(text, str) else UNKNOWN_LICENSE


def manifest_text(manifest: Manifest) -> str:
    """Write a manifest as TOML; JSON's strings and numbers are TOML's too."""
    values = msgspec.to_builtins(manifest)
    lines = ["# Written by `edge_rt models import`; `edge_rt models rm` removes it."]
    for table in (values, *values.pop("variants")):
        lines += ["", "[[variants]]"] if table is not values else []
        lines += [f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in table.items() if v not in (None, "")]
    return "\n".join(lines) + "\n"


def _describe(header: GgufHeader, wanted: _Wanted, variant: Variant) -> Manifest:
    name = header.metadata.get("general.name")
    is_line = isinstance(name, str) and name.strip() and name.isprintable()
    n_ctx_train = min(header.n_ctx_train, _MAX_TOKENS)
    return Manifest(
        id=wanted.model_id,
        name=str(name)[:_MAX_NAME] if is_line else wanted.model_id,
        license=wanted.license_id or spdx_id(header.metadata.get("general.license")),
        kind="text",
        arch=header.arch,
        n_ctx=min(_N_CTX, n_ctx_train),
        n_ctx_train=n_ctx_train,
        n_params=header.n_params,
        variants=(variant,),
    )


def _with_source(manifest: Manifest, path: Path) -> Manifest:
    variant = msgspec.structs.replace(manifest.variants[0], source=f"import:{quote(path.absolute().name)[:_MAX_NAME]}")
    return msgspec.structs.replace(manifest, variants=(variant,))


def _is(value: str, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _checked(value: str, kind: object, param: str) -> str:
    if not _is(value, kind):
        raise InvalidRequestError(
            param=param,
            problem=f"{value!r} is not an id: up to 64 of a-z, 0-9, '.', '_' and '-', with a letter or digit in front",
        )
    return value


def _checked_license(value: str) -> str:
    if not _is(value, Spdx):
        raise InvalidRequestError(param="--license", problem=f"{value!r} is not an SPDX expression")
    return _SPDX.get(value.lower(), value)


def _nothing_to_derive(src: Path, dst: Path, how: Derivation) -> None:  # noqa: ARG001
    raise ModelFormatError(path=str(src), field="variants", problem="an imported model has one variant only")
