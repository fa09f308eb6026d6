"""Which model the library is asked for: one of the catalog, pulled first where that is wanted, or a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from edge_rt import config
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.part import Progress
from edge_rt.catalog.store import Store, is_file_name, pick_variant
from edge_rt.devices import cpu
from edge_rt.errors import ModelNotPulledError, OfflineError
from edge_rt.scheduler.drafting import place_draft
from edge_rt.scheduler.forms import Placement, npu_load, place
from edge_rt.worker.channel import DraftLoad, TensorLoad
from edge_rt.worker.derive import derive

_log = logging.getLogger(__name__)

_MAX_DEFAULT_N_CTX = 4096
_DEFAULT_DELAY_S = 0.002


def find_model(model: str | Path, settings: config.Config, *, pull: bool, progress: Progress) -> Placement:
    """Say where a model is and how to load it; its tensor is None for a language model.

    Raises ModelError: not in the catalog, not pulled, or a broken file.
    """
    if isinstance(model, Path) or is_file_name(model):
        path = Path(model).expanduser()
        return _tensor_file(path, settings) if path.suffix == ".onnx" else _text_file(path, settings)
    model_id, _, variant = (model or settings.catalog.default_model).partition(":")
    own = settings.model(model_id)
    if variant:
        own = msgspec.structs.replace(own, variant=variant)
    store = Store.open(settings.catalog, os.environ)
    if own.backend == "null":
        manifest = next((m for m in store.manifests() if m.id == model_id and m.kind == "tensor"), None)
        return place(model_id, manifest, own, settings, features=frozenset(), find=lambda *_: None)
    manifest, features = store.get(model_id), cpu.features()

    def placed() -> Placement:
        return place(model_id, manifest, own, settings, features=features, find=store.path, find_asset=store.asset_path)

    placement = placed()
    if placement.path is None and pull:
        chosen = pick_variant(manifest, features, own.variant, backend=placement.backend)
        store.pull(model_id, chosen.id, progress=progress, offline=settings.catalog.offline, derive=derive)
        placement = placed()
    if placement.path is None:
        raise OfflineError(model=model_id) if settings.catalog.offline else ModelNotPulledError(model=model_id)
    if placement.variant_reason:
        _log.warning("%s", placement.variant_reason)
    return placement


def find_draft(model: str, settings: config.Config, *, pull: bool, progress: Progress) -> DraftLoad | None:
    """Say which model drafts for one that is loaded, pulled first where that is wanted; None if there is none.

    Raises ConfigError, ModelNotFoundError and ModelNotPulledError for one that the configuration names.
    """
    own, store = settings.model(model), Store.open(settings.catalog, os.environ)
    manifests, features = {manifest.id: manifest for manifest in store.manifests()}, cpu.features()

    def placed() -> DraftLoad | None:
        return place_draft(model, manifests.get(model), own, settings, manifests, features=features, find=store.path)

    try:
        return placed()
    except ModelNotPulledError:
        if not pull or is_file_name(own.draft):
            raise
        model_id, _, variant = own.draft.partition(":")
        chosen = pick_variant(manifests[model_id], features, variant)
        store.pull(model_id, chosen.id, progress=progress, offline=settings.catalog.offline, derive=derive)
        return placed()


def find_chain(model: str | Path, settings: config.Config) -> Chain | None:
    """Give the chain of that name; None if it is none, and where a model has the same name."""
    if isinstance(model, Path) or not model or is_file_name(model):
        return None
    store = Store.open(settings.catalog, os.environ)
    if model in {manifest.id for manifest in store.manifests()} or settings.model(model).backend == "null":
        return None
    return next((chain for chain in store.chains() if chain.id == model), None)


def _text_file(path: Path, settings: config.Config) -> Placement:
    header = read_header(path)
    return Placement(
        model=path.stem,
        backend=settings.engine.backend,
        variant="",
        quant="",
        path=str(path),
        n_ctx=settings.engine.n_ctx or min(_MAX_DEFAULT_N_CTX, header.n_ctx_train),
        n_seq_max=settings.engine.n_parallel,
        chat_template=None,
    )


def _tensor_file(path: Path, settings: config.Config) -> Placement:
    """Describe a file without a manifest: requests are joined only if the configuration says up to how many rows."""
    tensor, limits = settings.tensor, settings.limits
    return Placement(
        model=path.stem,
        backend=settings.engine.backend,
        variant="",
        quant="",
        path=str(path),
        n_ctx=0,
        n_seq_max=settings.tensor.n_parallel,
        chat_template=None,
        tensor=TensorLoad(
            max_batch=tensor.max_batch or 1,
            max_delay_s=_DEFAULT_DELAY_S if tensor.max_delay_s < 0 else tensor.max_delay_s,
            max_shapes=tensor.max_shapes,
            max_streams=tensor.max_streams,
            max_tensor_bytes=limits.max_tensor_bytes,
            max_pixels=limits.max_pixels,
            max_audio_s=limits.max_audio_s,
            graph_cache=tensor.graph_cache,
            custom_op_libraries=tensor.custom_op_libraries,
            npu=npu_load(settings.npu),
        ),
    )
