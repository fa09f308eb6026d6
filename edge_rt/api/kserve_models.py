"""Models and their versions as the Open Inference Protocol sees them: a version is a variant of the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edge_rt.api.context import Api, ModelStatus
from edge_rt.api.kserve_wire import IndexEntry, MetadataTensor, ModelMetadata, Parameter, ServerMetadata
from edge_rt.errors import ModelNotFoundError, ModelNotPulledError, OverloadedError, UnsupportedFeatureError
from edge_rt.tensor_types import TensorSpec
from edge_rt.version import VERSION

EXTENSIONS = ("binary_tensor_data", "sequence", "model_repository")


def server_metadata(api: Api) -> ServerMetadata:
    extensions = EXTENSIONS + (() if api.regions is None else ("memfd_shared_memory",))
    return ServerMetadata(name="edge_rt", version=VERSION, extensions=extensions)


def find(api: Api, model: str, version: str = "") -> ModelStatus:
    """Give the model, if it takes tensors and its file is here in this version; "" is the one that runs.

    Raises ModelNotFoundError, also for a version it does not have, ModelNotPulledError for a version that is not here,
    and UnsupportedFeatureError for a language model.
    """
    status = api.runtime.model(model)
    manifest = status.manifest
    if manifest is not None and manifest.kind != "tensor":
        raise UnsupportedFeatureError(
            feature=f"the Open Inference Protocol for {model}",
            remedy="it is a language model: ask /v1/chat/completions",
        )
    if version == "":
        return status
    if version in status.versions:
        return api.runtime.model(model, version)
    variants = tuple(variant.id for variant in manifest.variants) if manifest is not None else (status.variant,)
    if version not in variants:
        raise ModelNotFoundError(
            model=f"{model}/versions/{version}", known=tuple(f"{model}/versions/{v}" for v in variants if v)
        )
    if manifest is not None and version != status.variant:
        raise ModelNotPulledError(model=f"{model}:{version}")
    return status


def form(api: Api, model: str, version: str) -> str:
    """Give the form that a request for a version must run as, "" for a model with one form only. Raises as find."""
    return version if version and version in find(api, model, version).versions else ""


def is_ready(api: Api, model: str, version: str = "") -> bool:
    """Say whether a request would be answered: a model that is not in memory is loaded for it.

    Raises ModelNotFoundError.
    """
    try:
        status = find(api, model, version)
    except (UnsupportedFeatureError, ModelNotPulledError):
        return False
    return api.runtime.ready() and status.pulled and not status.error


async def metadata(api: Api, model: str, version: str = "") -> ModelMetadata:
    """Describe a model. One that is not in memory is loaded, as a request would do it: only then its tensors are known.

    Raises what find and loading raise.
    """
    status = find(api, model, version)
    if status.tensor is None:
        if not status.pulled:
            raise ModelNotPulledError(model=model)
        await api.runtime.load(model, tensors=True, variant=form(api, model, version))
        status = find(api, model, version)
    info = status.tensor
    if info is None:  # it has made room for another already
        raise OverloadedError(
            resource="models in memory", limit=api.config.worker.max_loaded, setting="worker.max_loaded"
        )
    return ModelMetadata(
        name=model,
        versions=status.versions or ((info.variant,) if info.variant else ()),
        platform=info.backend,
        inputs=tuple(map(_tensor, info.inputs)),
        outputs=tuple(map(_tensor, info.outputs)),
    )


def refuse_load_parameters(parameters: Collection[str]) -> None:
    for name in parameters:
        raise UnsupportedFeatureError(
            feature=f"parameters.{name[:80]} of a load", remedy="its manifest says how a model is loaded"
        )


def check_output_parameters(param: str, parameters: Mapping[str, Parameter]) -> None:
    """Raise UnsupportedFeatureError for a parameter of an output that would change its values."""
    if parameters.get("classification", 0) != 0:
        raise UnsupportedFeatureError(
            feature=f"{param}.parameters.classification", remedy="/v1/vision/classify gives labels"
        )


def _tensor(spec: TensorSpec) -> MetadataTensor:
    return MetadataTensor(name=spec.name, datatype=spec.datatype, shape=spec.shape)


def index(api: Api, *, only_ready: bool) -> list[IndexEntry]:
    """List the tensor models. READY: would be answered now; UNAVAILABLE says why not."""
    entries = []
    for status in api.runtime.models():
        if status.manifest is None or status.manifest.kind != "tensor":
            continue
        for version in status.versions or (status.variant,):
            shown = api.runtime.model(status.id, version) if version in status.versions else status
            reason = shown.error if shown.pulled else str(ModelNotPulledError(model=status.id))
            is_usable = shown.pulled and not reason
            if is_usable or not only_ready:
                state = "READY" if is_usable else "UNAVAILABLE"
                entries.append(IndexEntry(name=status.id, version=version, state=state, reason=reason))
    return entries
