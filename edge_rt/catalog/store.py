"""The models on this machine: what is there, pull, verify, remove, and which variant to run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from edge_rt import config
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.graph_copy import verify_copy
from edge_rt.catalog.listing import Signature, read_listing, signature
from edge_rt.catalog.manifest import SHIPPED_DIR, Asset, Manifest, Variant, as_variant
from edge_rt.catalog.packed import packed_size_bytes, verify_packed
from edge_rt.catalog.part import Derive, Progress, PullProgress, hash_file
from edge_rt.catalog.place import Place, Record, manifest_file
from edge_rt.catalog.sources import is_imported
from edge_rt.catalog.speed import is_fast
from edge_rt.errors import ConfigError, ModelChecksumError, ModelFormatError, ModelNotFoundError

SYSTEM_DIR = Path("/var/lib/edge_rt")

State = Literal["pulled", "partial", "absent"]


def is_file_name(model: str) -> bool:
    """Tell a model file's path from an id of the catalog."""
    return "/" in model or model.endswith((".gguf", ".onnx"))


def pick_variant(manifest: Manifest, features: frozenset[str], wanted: str = "", *, backend: str = "auto") -> Variant:
    """Pick the variant to run: the wanted one, else the first in the manifest's order that runs fast on this CPU.

    features  as `edge_rt devices` lists them: avx2, avx512f, neon, dotprod, i8mm, …
    backend   the one that is configured for the model
    If none runs fast it is the first of all. Forms that want an accelerator are taken for a back end that they name,
    and for no other. Pure.
    Raises ModelNotFoundError when no variant has the wanted name.
    """
    if wanted:
        if (variant := manifest.variant(wanted)) is None:
            raise ModelNotFoundError(
                model=f"{manifest.id}:{wanted}", known=tuple(f"{manifest.id}:{v.id}" for v in manifest.variants)
            )
        return variant
    able = [v for v in manifest.variants if v.requires is not None and backend in v.backends]
    able = able or [v for v in manifest.variants if v.requires is None]
    fast = (v for v in able if is_fast(manifest.arch, v.quant, features, backend))
    return next(fast, able[0])


# Raised when a recipe of convert/ writes other bytes than before.
RECIPE_VERSION = 2


def recipe_version(recipe: str) -> str:
    """Name what runs a recipe ("" is the GGUF quantiser), '' where it is not installed; does not import it."""
    from importlib.metadata import PackageNotFoundError, version  # three dozen modules, which serving does without

    try:
        if not recipe:
            return f"llama-cpp-python {version('llama-cpp-python')}"
        return f"{recipe} {RECIPE_VERSION}, onnx {version('onnx')}, onnxruntime {version('onnxruntime')}"
    except PackageNotFoundError:
        return ""


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


class Store:
    """Model files below root, as the manifests describe them. Safe to use from many processes at once.

    left_out    why manifests are not among them, by the id that they claim
    dirs        where manifests and chains were read from, for refresh
    tool        names what a recipe is run by, with its version
    free_bytes  free space of the disk a path is on
    """

    def __init__(
        self,
        root: Path,
        manifests: tuple[Manifest, ...],
        *,
        catalog: config.Catalog | None = None,
        chains: tuple[Chain, ...] = (),
        left_out: Mapping[str, ModelFormatError] | None = None,
        dirs: tuple[Path, ...] = (),
        tool: Callable[[str], str] = recipe_version,
        free_bytes: Callable[[Path], int] = free_bytes,
    ):
        self.root = root
        self._manifests = {m.id: m for m in manifests}
        self._chains = chains
        self._left_out = dict(left_out or {})
        self._dirs = dirs
        self._signature: Signature = ()
        self._catalog = catalog or config.Catalog()
        self._tool = tool
        self._free_bytes = free_bytes

    @classmethod
    def open(cls, catalog: config.Catalog, environ: Mapping[str, str] = os.environ) -> Store:
        """Find the store and read the manifests; makes no directory. Raises ConfigError.

        A manifest that cannot be used is left out, and left_out tells why.
        """
        dirs = tuple(Path(name).expanduser() for name in catalog.manifest_dirs)
        for path in dirs:
            if not path.is_dir():
                raise ConfigError(key="catalog.manifest_dirs", problem=f"no directory {path}", origin="configuration")
        root = _root(catalog.store_dir, environ)
        imported = manifest_file(root, "").parent
        dirs = (*dirs, imported, SHIPPED_DIR)
        seen = signature(dirs)  # before they are read: what changes meanwhile is seen by refresh
        listing = read_listing(_present(dirs, imported))
        store = cls(
            root, listing.manifests, catalog=catalog, chains=listing.chains, left_out=listing.left_out, dirs=dirs
        )
        store._signature = seen
        return store

    def refresh(self) -> bool:
        """Read the manifests again if their files have changed; says whether they have. No model is loaded or freed."""
        seen = signature(self._dirs)
        if seen == self._signature:
            return False
        self._signature = seen
        listing = read_listing(_present(self._dirs, manifest_file(self.root, "").parent))
        self._manifests = {m.id: m for m in listing.manifests}
        self._chains, self._left_out = listing.chains, dict(listing.left_out)
        return True

    def left_out(self) -> Mapping[str, ModelFormatError]:
        """Give what is wrong with manifests that are not used, by the id they claim, else by their path."""
        return self._left_out

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(self._manifests.values())

    def chains(self) -> tuple[Chain, ...]:
        """Give the chains, also those whose models are not here."""
        return self._chains

    def get(self, model_id: str) -> Manifest:
        if (manifest := self._manifests.get(model_id)) is None:
            if model_id in self._left_out:
                raise self._left_out[model_id]
            raise ModelNotFoundError(model=model_id, known=tuple(self._manifests))
        return manifest

    def path(self, manifest: Manifest, variant: Variant) -> Path | None:
        """Give the file of a variant that is pulled and complete, None for any other. Reads no file contents."""
        place = Place.of(self.root, manifest, variant)
        return place.file if place.record(manifest, variant) else None

    def asset_path(self, manifest: Manifest, asset: Asset) -> Path | None:
        """Give the file of an asset that is pulled and complete, None for any other."""
        return self.path(manifest, as_variant(asset))

    def record(self, manifest: Manifest, variant: Variant) -> Record | None:
        """Give what the store knows of a pulled variant's file."""
        return Place.of(self.root, manifest, variant).record(manifest, variant)

    def state(self, manifest: Manifest, variant: Variant) -> tuple[State, int]:
        """Say whether a variant is here, and how many bytes of it."""
        place = Place.of(self.root, manifest, variant)
        if record := place.record(manifest, variant):
            return "pulled", record.size_bytes
        n_bytes = place.part.stat().st_size if place.part.exists() else 0
        return ("partial" if n_bytes else "absent"), n_bytes

    def pull(self, model_id: str, variant_id: str = "", *, progress: Progress, offline: bool, derive: Derive) -> Path:
        """Bring a variant into the store unless it is there, and before it the one it is derived from.

        variant_id  '' is the first in the manifest; `pick_variant` knows the best for a CPU. Or an adapter's id
        derive      makes dst from src as told: derive(src, dst, how)
        A pull cut short by anything but a full disk is taken up by the next. Raises ModelNotFoundError, OfflineError,
        PullError, DiskFullError, StoreError, ModelChecksumError, ConfigError and what derive raises.
        """
        # Imported here: the daemon, which only reads the store, shall not carry an HTTP client.
        from edge_rt.catalog.fetch import FetchSettings
        from edge_rt.catalog.pull import Pull

        manifest = self.get(model_id)
        wanted = variant_id or manifest.variants[0].id
        variant = manifest.adapter(wanted) or pick_variant(manifest, frozenset(), wanted)
        settings = FetchSettings(hub_endpoint=self._catalog.hub_endpoint, hub_token_file=self._catalog.hub_token_file)
        pull = Pull(
            root=self.root,
            manifest=manifest,
            settings=settings,
            tool=self._tool,
            free_bytes=self._free_bytes,
            progress=progress,
            offline=offline,
            derive=derive,
        )
        for asset in manifest.assets:
            pull.run(as_variant(asset))
        return pull.run(variant)

    def add(
        self,
        path: Path,
        *,
        model_id: str = "",
        license_id: str = "",
        vocab: Path | None = None,
        progress: Progress,
        convert: Callable[[Path, Path, Path], None],
    ) -> Manifest:
        """Import a model of one's own; see catalog/imports.py. '' takes what its file says."""
        from edge_rt.catalog.imports import Import

        manifest = Import(
            root=self.root,
            known=self._manifests,
            progress=progress,
            convert=convert,
            free_bytes=self._free_bytes,
        ).run(path, model_id=model_id, license_id=license_id, vocab=vocab)
        self._manifests[manifest.id] = manifest
        return manifest

    def verify(self, model_id: str, variant_id: str = "", *, progress: Progress) -> tuple[Path, ...]:
        """Hash every pulled file of a model, or one variant's or asset's, and give those that are sound.

        Raises ModelChecksumError at the first that is not.
        """
        manifest = self.get(model_id)
        variants = (self._file(manifest, variant_id),) if variant_id else manifest.files()
        sound: list[Path] = []
        for variant in variants:
            place = Place.of(self.root, manifest, variant)
            if (record := place.record(manifest, variant)) is None:
                continue

            total_bytes = record.size_bytes + packed_size_bytes(place.file)

            def report(done_bytes: int, variant: Variant = variant, total_bytes: int = total_bytes) -> None:
                progress(
                    PullProgress(
                        model=model_id,
                        variant=variant.id,
                        file=variant.file,
                        phase="check",
                        done_bytes=done_bytes,
                        total_bytes=total_bytes,
                    )
                )

            actual = hash_file(place.file, report)
            if actual != record.sha256:
                raise ModelChecksumError(path=str(place.file), expected=record.sha256, actual=actual)
            verify_packed(place.file, report, record.size_bytes)
            verify_copy(place.file)
            sound.append(place.file)
        return tuple(sound)

    def remove(self, model_id: str, variant_id: str = "") -> int:
        """Delete a model's files, or one variant's, partial ones too; give the bytes freed. Of an imported model
        the manifest goes too. Assets and materials go with the last variant.

        A process that has a file mapped keeps its pages until it lets go.
        """
        manifest = self.get(model_id)
        files = (self._file(manifest, variant_id),) if variant_id else manifest.files()
        freed = sum(self._forget(manifest, file) for file in files)
        if variant_id and not any(self.state(manifest, v)[1] for v in manifest.variants):
            freed += sum(self._forget(manifest, file) for file in manifest.files())
        if all(is_imported(v.source) for v in files):
            manifest_file(self.root, model_id).unlink(missing_ok=True)
        return freed

    def _file(self, manifest: Manifest, file_id: str) -> Variant:
        return manifest.file(file_id) or pick_variant(manifest, frozenset(), file_id)

    def _forget(self, manifest: Manifest, variant: Variant) -> int:
        place = Place.of(self.root, manifest, variant)
        if not place.file.parent.is_dir():
            return 0
        with place.locked(lambda: None):
            return place.forget()


def _present(dirs: tuple[Path, ...], imported: Path) -> tuple[Path, ...]:
    """Leave out the directory of imported models' manifests where nothing has been imported."""
    return tuple(path for path in dirs if path != imported or path.is_dir())


def _root(store_dir: str, environ: Mapping[str, str]) -> Path:
    return Path(store_dir).expanduser() if store_dir else data_dir(environ)


def data_dir(environ: Mapping[str, str]) -> Path:
    """Give where what edge_rt keeps stands unless something else is configured. Pure but for who asks."""
    if state := environ.get("STATE_DIRECTORY"):
        return Path(state.split(":")[0])
    if os.geteuid() == 0:
        return SYSTEM_DIR
    data = environ.get("XDG_DATA_HOME") or f"{environ.get('HOME') or Path.home()}/.local/share"
    return Path(data) / "edge_rt"
