"""What /v1/models says of models and of chains of them."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from edge_rt.api import schemas
from edge_rt.api.context import ModelStatus, RuntimeProtocol
from edge_rt.catalog.chains import Chain
from edge_rt.tensor_types import TensorModelInfo
from edge_rt.types import Evidence, ModelInfo


class ModelCards:
    """created is what OpenAI's clients want: seconds since 1970. The daemon's start never jumps."""

    def __init__(self, runtime: RuntimeProtocol, *, created: int) -> None:
        self._runtime, self._created = runtime, created

    def model(self, status: ModelStatus) -> schemas.ModelCard:
        """Describe a model, loaded or not."""
        if status.tensor is not None:
            meta = _tensor_meta(status.tensor)
        else:
            meta = schemas.ModelMeta() if status.info is None else _text_meta(status.info)
        return schemas.ModelCard(
            id=status.id,
            created=self._created,
            status="unloaded" if status.tensor is None and status.info is None else "loaded",
            kind=status.manifest.kind if status.manifest is not None else UNSET,
            task=self._runtime.tasks().get(status.id, UNSET),
            meta=meta,
        )

    def chain(self, chain: Chain) -> schemas.ModelCard | None:
        """Describe a chain; None unless all its models have been pulled."""
        parts = [self._runtime.model(part) for part in chain.parts]
        if not all(part.pulled for part in parts):
            return None
        return schemas.ModelCard(
            id=chain.id,
            created=self._created,
            status="loaded" if all(part.tensor for part in parts) else "unloaded",
            kind="tensor",
            task=self._runtime.tasks().get(chain.id, UNSET),
            models=chain.parts,
            meta=schemas.ModelMeta(),
        )


def _tensor_meta(info: TensorModelInfo) -> schemas.ModelMeta:
    return schemas.ModelMeta(
        size=info.size_bytes,
        quant=info.quant,
        variant=info.variant or UNSET,
        backend=info.backend,
        backend_reason=info.backend_reason or UNSET,
        max_batch=info.max_batch,
        device=info.device,
        evidence=_stand_in(info.evidence),
        placement=info.placement or UNSET,
    )


def _text_meta(info: ModelInfo) -> schemas.ModelMeta:
    return schemas.ModelMeta(
        n_ctx=info.caps.n_ctx,
        n_ctx_train=info.n_ctx_train,
        n_params=info.n_params,
        n_vocab=info.caps.n_vocab,
        size=info.size_bytes,
        quant=info.quant,
        variant=info.variant or UNSET,
        backend=info.backend,
        backend_reason=info.backend_reason or UNSET,
        adapters=info.caps.adapters or UNSET,
        evidence=_stand_in(info.evidence),
    )


def _stand_in(evidence: Evidence) -> str | UnsetType:
    return UNSET if evidence == "device" else evidence
