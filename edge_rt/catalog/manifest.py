"""A model's manifest: what it is, where its files come from and what they must hash to."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edge_rt.catalog.pipelines import Line, Pipeline, StateTensor
from edge_rt.catalog.sources import parse_source
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.tensor_types import Granularity, Require

SHIPPED_DIR = Path(__file__).resolve().parent.parent / "manifests"
MAX_MANIFEST_BYTES = 256 * 1024
UNKNOWN_LICENSE = "LicenseRef-unknown"  # SPDX provides such names for what has no id

# What only models of one kind have.
_OF_KIND = {
    "text": ("arch", "n_ctx", "n_ctx_train", "chat_template", "draft", "adapters"),
    "tensor": ("assets", "materials", "pipeline", "batching", "state"),
}

# Both name files in the store, so neither can hold a slash, begin with a dot or look like an option.
Id = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Spdx = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*\Z", max_length=200)]
Quant = Annotated[str, Meta(pattern=r"^[A-Z][A-Z0-9_]{1,15}\Z")]
Tokens = Annotated[int, Meta(ge=0, le=2**24)]


class Accuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a variant reached: value of metric ("top-1", "mAP@0.33") on n items of data."""

    metric: Line
    value: float
    data: Line
    n: Annotated[int, Meta(ge=1)]


class Asset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that no device runs: what every variant needs beside its own (labels, a tokenizer), or a raw material."""

    id: Id
    file: FileName
    source: Line
    size_bytes: Annotated[int, Meta(ge=1, le=2**32)]
    sha256: Sha256


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests for a tensor model are joined; its first dimension is the batch. max_batch 1 joins none."""

    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_delay_s: Annotated[float, Meta(ge=0, le=10)] = 0.002


class Requires(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a form wants of an accelerator. Such a form runs where it is asked for or where one of its back ends is.

    weight_bits, activation_bits  that it computes in; 16 and 16 are floats
    granularity                   of the weights' scales; "" leaves it to the compiler
    socs                          chips that have it, as their vendors name them; () leaves it to the compiler
    place                         where it must run, as npu.require, which goes before it
    """

    weight_bits: Literal[4, 8, 16]
    activation_bits: Literal[8, 16]
    granularity: Granularity = ""
    socs: Annotated[tuple[Line, ...], Meta(max_length=64)] = ()
    place: Require = "prefer"


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One form of a model: fetched (source, size_bytes, sha256) or derived_from another variant or a material here.

    derive      names the recipe that derives it; "" quantises a GGUF file
    derive_with the id of a material that the recipe takes beside what it derives from, or several of them
    backends    that can run it, in order of preference; () leaves it to its format
    requires    of a form for accelerators: backends names which, and no CPU takes it unless it stands in for one
    perplexity, accuracy  measured as docs/models.md says; None is not measured
    """

    id: Id
    quant: Quant
    file: FileName
    source: Line = ""
    size_bytes: Annotated[int, Meta(ge=0, le=2**42)] = 0
    sha256: Sha256 | Literal[""] = ""
    derived_from: str = ""
    derive: Id | Literal[""] = ""
    derive_with: str | Annotated[tuple[Id, ...], Meta(min_length=1, max_length=16)] = ""
    backends: tuple[Id, ...] = ()
    requires: Requires | None = None
    perplexity: Annotated[float, Meta(gt=0)] | None = None
    accuracy: Accuracy | None = None

    @property
    def beside(self) -> tuple[str, ...]:
        """Give the ids of the materials in derive_with."""
        told = self.derive_with
        return told if isinstance(told, tuple) else (told,) if told else ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model. variants stand in order of preference.

    license        SPDX expression
    kind           text: a language model; tensor: arrays in, arrays out
    arch           of a language model, as GGUF names it
    n_ctx          context to run with unless told otherwise; n_ctx_train is what the model was trained for
    chat_template  None takes the one inside the model file
    draft          MODEL[:VARIANT] of the catalog that guesses tokens ahead of a language model, where it is pulled
    assets         every variant needs them; they come and go with the model
    materials      variants are derived from them; fetched when one is
    adapters       LoRA adapters in GGUF for a language model; each is fetched by its own name, and loaded if it is here
    """

    id: Id
    name: Line
    license: Spdx
    kind: Literal["text", "tensor"]
    arch: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_-]{0,63})?\Z")] = ""
    n_ctx: Tokens = 0
    n_ctx_train: Tokens = 0
    n_params: Annotated[int, Meta(ge=1)]
    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=64)]
    source_note: Line = ""
    chat_template: str | None = None
    draft: Line = ""
    assets: Annotated[tuple[Asset, ...], Meta(max_length=16)] = ()
    materials: Annotated[tuple[Asset, ...], Meta(max_length=16)] = ()
    adapters: Annotated[tuple[Asset, ...], Meta(max_length=32)] = ()
    pipeline: Pipeline | None = None
    batching: Batching = Batching()
    state: Annotated[tuple[StateTensor, ...], Meta(max_length=64)] = ()

    def variant(self, variant_id: str) -> Variant | None:
        return next((v for v in self.variants if v.id == variant_id), None)

    def adapter(self, adapter_id: str) -> Variant | None:
        """Give an adapter, described as a variant."""
        return next((as_variant(adapter) for adapter in self.adapters if adapter.id == adapter_id), None)

    def file(self, file_id: str) -> Variant | None:
        """Give a variant, an asset, a material or an adapter, all but the first described as variants."""
        return next((v for v in self.files() if v.id == file_id), None)

    def files(self) -> tuple[Variant, ...]:
        """Give what may stand in the store: variants, then assets, materials and adapters."""
        return (*self.variants, *map(as_variant, (*self.assets, *self.materials, *self.adapters)))

    def lineage(self, variant: Variant) -> str:
        """Tell what a variant is made of, as 64 hexadecimal digits: its own sha256, or one over its whole derivation.

        Plain quantisation of a fetched file is its parent's sha256.
        """
        parent = self.file(variant.derived_from)
        if parent is None:
            return variant.sha256
        made_of = self.lineage(parent)
        if not variant.derive:
            return made_of
        beside = [found.sha256 if (found := self.file(name)) else "" for name in variant.beside]
        told = "\n".join((variant.derive, made_of, *(beside or [""])))
        return sha256(told.encode()).hexdigest()


def as_variant(asset: Asset) -> Variant:
    """Describe an asset, a material or an adapter as the store fetches and keeps files: as a variant."""
    return Variant(
        id=asset.id,
        quant="ASSET",
        file=asset.file,
        source=asset.source,
        size_bytes=asset.size_bytes,
        sha256=asset.sha256,
    )


def load_manifest(path: Path) -> Manifest:
    """Read and check one manifest. Raises ModelFormatError naming the field."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ModelFormatError(path=str(path), field="file", problem=f"longer than {MAX_MANIFEST_BYTES} bytes")
        table = tomllib.loads(raw.decode("utf-8"))
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFormatError(path=str(path), field="TOML", problem=str(exc)) from exc
    manifest = _convert(table, path)
    for field, problem in _contradictions(manifest):
        raise ModelFormatError(path=str(path), field=field, problem=problem)
    return manifest


def load_manifests(
    dirs: Sequence[Path], *, left_out: dict[str, ModelFormatError] | None = None
) -> tuple[Manifest, ...]:
    """Read every *.toml of some directories, sorted by id; of two with one id the earlier directory's counts.

    left_out  takes the error of each bad manifest under the id it claims, which no other manifest is taken for then:
              another model in its place would be a surprise. None: the first error is raised.

    Raises ModelFormatError for a bad manifest, and for a directory that is not there.
    """
    found: dict[str, Manifest | None] = {}
    for directory in dirs:
        here: dict[str, Path] = {}
        for path in toml_files(directory, "manifest_dirs", left_out):
            try:
                manifest = load_manifest(path)
                if manifest.id in here:
                    problem = f"{manifest.id!r} is taken by {here[manifest.id].name}"
                    raise ModelFormatError(path=str(path), field="id", problem=problem)
            except ModelFormatError as exc:
                if left_out is None:
                    raise
                leave_out(path, exc, found, left_out)
                continue
            here[manifest.id] = path
            found.setdefault(manifest.id, manifest)
    return tuple(manifest for _, manifest in sorted(found.items()) if manifest is not None)


def toml_files(directory: Path, field: str, left_out: dict[str, ModelFormatError] | None) -> list[Path]:
    """List a directory's *.toml, sorted. Raises ModelFormatError where it cannot be read, or leaves it out."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == ".toml" and path.name[0] != ".")
    except OSError as exc:
        problem = "no such directory" if isinstance(exc, FileNotFoundError) else f"cannot be read: {exc.strerror}"
        error = ModelFormatError(path=str(directory), field=field, problem=problem)
        if left_out is None:
            raise error from exc
        left_out[str(directory)] = error
        return []


def leave_out(
    path: Path, error: ModelFormatError, found: dict[str, Any], left_out: dict[str, ModelFormatError]
) -> None:
    """Note a bad manifest, and that the id it claims is taken unless another had it before."""
    claimed = _claimed_id(path)
    is_first = claimed not in found
    if is_first:
        found[claimed] = None
    left_out[claimed if is_first else str(path)] = error


def _claimed_id(path: Path) -> str:
    """Tell what a bad manifest is about: the id in it, as far as it can be read, else its file's name."""
    try:
        with open_regular(path) as file:
            told = tomllib.loads(file.read(MAX_MANIFEST_BYTES).decode("utf-8")).get("id")
    except (OSError, ValueError, RecursionError):
        told = None
    return told if isinstance(told, str) and told else path.stem


def _convert(table: dict[str, Any], path: Path) -> Manifest:
    try:
        return msgspec.convert(table, Manifest)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$")
        raise ModelFormatError(path=str(path), field=place.strip("`.") or "manifest", problem=problem) from exc


def _contradictions(manifest: Manifest) -> list[tuple[str, str]]:
    """List what the types alone cannot rule out, as (field, problem)."""
    found: list[tuple[str, str]] = []
    if manifest.variants[0].requires is not None:
        found.append(("variants", "the first wants an accelerator; it must run where there is none"))
    if manifest.kind == "text":
        found += [(name, "is missing") for name in ("arch", "n_ctx", "n_ctx_train") if not getattr(manifest, name)]
    defaults = {field.name: field.default for field in msgspec.structs.fields(Manifest)}
    for kind, names in _OF_KIND.items():
        if kind != manifest.kind:
            foreign = [name for name in names if getattr(manifest, name) != defaults[name]]
            found += [(name, f"is for models of kind {kind}") for name in foreign]
    if manifest.state and manifest.batching.max_batch > 1:
        found.append(("batching.max_batch", "must be 1 for a model with a state"))
    if manifest.n_ctx > manifest.n_ctx_train:
        found.append(("n_ctx", f"{manifest.n_ctx} is more than n_ctx_train {manifest.n_ctx_train}"))
    listed = [("variants", variant) for variant in manifest.variants]
    for table in ("assets", "materials", "adapters"):
        listed += [(table, as_variant(entry)) for entry in getattr(manifest, table)]
    for name in ("id", "file"):
        values = [getattr(v, name) for _, v in listed]
        doubled = [i for i, value in enumerate(values) if value in values[:i]]
        found += [(f"{listed[i][0]}.{name}", f"{values[i]!r} is there twice") for i in doubled]
    for table, variant in listed:
        field = f"{table}.{variant.id}"
        if variant.requires is not None and not variant.backends:
            found.append((f"{field}.requires", "goes with backends, which are not named"))
        if variant.derived_from:
            found += [(f"{field}{key}", problem) for key, problem in _derivation(manifest, variant)]
            continue
        if not (variant.source and variant.sha256 and variant.size_bytes):
            found.append((field, "needs source, size_bytes and sha256, or derived_from"))
            continue
        if variant.derive or variant.derive_with:
            found.append((field, "has a source; derive and derive_with go with derived_from"))
        try:
            parse_source(variant.source)
        except ValueError as exc:
            found.append((f"{field}.source", str(exc)))
    return found


def _derivation(manifest: Manifest, variant: Variant) -> list[tuple[str, str]]:
    """List what is wrong with a derived variant, as (key, problem)."""
    found: list[tuple[str, str]] = []
    if variant.source or variant.sha256 or variant.size_bytes:
        found.append(("", "has derived_from and a source, size_bytes or sha256; it can have only one"))
    materials = {material.id for material in manifest.materials}
    found += [(".derive_with", f"{name!r} is not a material here") for name in variant.beside if name not in materials]
    seen = {variant.id}
    parent = manifest.file(variant.derived_from)
    while parent is not None and parent.derived_from and parent.id not in seen:
        seen.add(parent.id)
        parent = manifest.file(parent.derived_from)
    if parent is None or not parent.source:
        found.append((".derived_from", f"{variant.derived_from!r} leads to nothing here that has a source"))
    return found
