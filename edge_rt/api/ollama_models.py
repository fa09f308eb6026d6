"""Models as Ollama's clients see them: by name and tag, listed, shown, and those in memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from edge_rt.api.context import Api, ModelStatus
from edge_rt.catalog.pipelines import Embed
from edge_rt.errors import ModelNotFoundError

# Of what this API follows, for clients that refuse to speak with older servers.
API_VERSION: Final = "0.12.0"

_FOR_EVER: Final = timedelta(days=36500)  # as far as the clients' calendars go


class Version(msgspec.Struct, kw_only=True):
    version: str
    edge_rt: str


class Details(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str


class Listed(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: Details


class Running(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: datetime
    size_vram: int
    context_length: int


class Models(msgspec.Struct, kw_only=True):
    models: list[Listed | Running] | list[Listed] | list[Running]


class Shown(msgspec.Struct, kw_only=True):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: tuple[str, ...]
    modified_at: datetime


def find(api: Api, name: str) -> ModelStatus:
    """Give the model of a name such as smollm2, smollm2:latest or smollm2:q4_0. Raises ModelNotFoundError.

    A tag other than latest must be the form that the model runs in: the daemon's settings choose it, not a request.
    """
    model, _, tag = name.partition(":")
    status = api.runtime.model(model)
    if tag not in ("", "latest") and tag.lower() != status.variant.lower():
        raise ModelNotFoundError(model=name, known=tuple(f"{model}:{t}" for t in ("latest", status.variant) if t))
    return status


def tags(api: Api, started_at: datetime) -> Models:
    """List the models that can be asked here: those that answer in text, and those that embed."""
    return Models(
        models=[
            Listed(
                name=_name(status),
                model=_name(status),
                modified_at=_modified_at(status, started_at),
                size=_size_bytes(status),
                digest=_digest(status),
                details=_details(status),
            )
            for status in _usable(api)
            if status.pulled
        ]
    )


def running(api: Api, now: datetime) -> Models:
    return Models(
        models=[
            Running(
                name=_name(status),
                model=_name(status),
                size=info.size_bytes,
                digest=_digest(status),
                details=_details(status),
                expires_at=now + _left(status),
                size_vram=0 if info.device == "cpu" else info.size_bytes,
                context_length=status.n_ctx if status.info is not None else _embedded_tokens(status) or 0,
            )
            for status in _usable(api)
            if (info := status.info or status.tensor) is not None
        ]
    )


def show(api: Api, status: ModelStatus, started_at: datetime) -> Shown:
    manifest, info = status.manifest, status.info
    arch = info.arch if info is not None else manifest.arch if manifest is not None else ""
    n_params = info.n_params if info is not None else manifest.n_params if manifest is not None else 0
    known: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": manifest.name if manifest is not None else status.id,
        "general.parameter_count": n_params,
    }
    if _embeds(api, status):
        capabilities: tuple[str, ...] = ("embedding",)
        if (n_tokens := _embedded_tokens(status)) is not None:
            known["general.context_length"] = n_tokens
    else:
        capabilities = ("completion", "tools")  # of all: where a template knows none, a message tells of them
        # What a prompt may fill now, not what the model was trained for: clients fit theirs to it.
        known[f"{arch or 'general'}.context_length"] = status.n_ctx
    return Shown(
        license=manifest.license if manifest is not None else "",
        modelfile=f"FROM {_name(status)}\n",
        parameters="" if _embeds(api, status) else f"num_ctx {status.n_ctx}",
        template=(manifest.chat_template or "") if manifest is not None else "",
        details=_details(status),
        model_info=known,
        capabilities=capabilities,
        modified_at=_modified_at(status, started_at),
    )


def _usable(api: Api) -> Iterable[ModelStatus]:
    for status in api.runtime.models():
        if status.manifest is None or status.manifest.kind == "text" or _embeds(api, status):
            yield status


def _embeds(api: Api, status: ModelStatus) -> bool:
    return api.runtime.tasks().get(status.id) == "embed"


def _embedded_tokens(status: ModelStatus) -> int | None:
    """Give how many tokens a text to embed may have; None for a model of another kind."""
    pipeline = status.manifest.pipeline if status.manifest is not None else None
    return pipeline.max_tokens if isinstance(pipeline, Embed) else None


def _name(status: ModelStatus) -> str:
    return f"{status.id}:latest"


def _left(status: ModelStatus) -> timedelta:
    """Tell how long a model will stay in memory if nobody asks for it."""
    if status.keep_alive_s < 0:
        return _FOR_EVER
    return min(_FOR_EVER, timedelta(seconds=max(0.0, min(status.keep_alive_s, 1e9) - (status.idle_s or 0.0))))


def _size_bytes(status: ModelStatus) -> int:
    if status.path:
        with suppress(OSError):  # removed since it was looked for
            return Path(status.path).stat().st_size
    info = status.info or status.tensor
    return info.size_bytes if info is not None else 0


def _modified_at(status: ModelStatus, otherwise: datetime) -> datetime:
    if status.path:
        with suppress(OSError):
            return datetime.fromtimestamp(Path(status.path).stat().st_mtime, UTC)
    return otherwise


def _digest(status: ModelStatus) -> str:
    """Give the hash of a form's file, or of what it was derived from."""
    manifest = status.manifest
    form = manifest.variant(status.variant) if manifest is not None else None
    return manifest.lineage(form) if manifest is not None and form is not None else ""


def _details(status: ModelStatus) -> Details:
    manifest, info = status.manifest, status.info
    family = info.arch if info is not None else manifest.arch if manifest is not None else ""
    form = manifest.variant(status.variant) if manifest is not None else None
    n_params = manifest.n_params if manifest is not None else 0
    return Details(
        format=(form.file.rpartition(".")[2] if form is not None else "") or "null",
        family=family,
        families=(family,) if family else (),
        parameter_size=_rounded(n_params),
        quantization_level=form.quant if form is not None else "",
    )


def _rounded(n_params: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n_params >= size:
            return f"{n_params / size:.1f}{letter}"
    return str(n_params)
