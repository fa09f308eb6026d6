"""A Load message in the back ends' terms."""

from __future__ import annotations

from pathlib import Path

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.worker.channel import Load


def unpack(load: Load) -> tuple[ModelFile, LoadOptions]:
    """Give the file and how to load it."""
    file = ModelFile(model=load.model, variant=load.variant, path=Path(load.path), quant=load.quant)
    options = LoadOptions(
        n_ctx=load.n_ctx,
        n_seq_max=load.n_seq_max,
        n_batch=load.n_batch,
        n_threads=load.n_threads,
        kv_type=load.kv_type,
        packed_copy=load.packed_copy,
        max_draft=load.max_draft,
        device=load.device,
        adapters=load.adapters,
    )
    return file, options
