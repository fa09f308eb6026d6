"""How a model is run here: which form of it, on which back end, with how much context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from edge_rt.catalog.manifest import Asset, Batching, Manifest, Requires, Variant
from edge_rt.catalog.store import pick_variant
from edge_rt.config import Config, ModelSettings, Npu, origin_of, pin_name
from edge_rt.errors import ConfigError, ModelNotPulledError
from edge_rt.regular import read_regular
from edge_rt.tensor_types import ChipNeeds
from edge_rt.types import AdapterFile
from edge_rt.worker.channel import Load, NpuLoad, TensorLoad

_NULL_N_CTX = 4096
_TEXT_BACKENDS = frozenset({"native", "llama_cpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model's form, place and context.

    backend  its name, or "auto": then the worker chooses, who can read the file's header
    variant  the form's id; for the null back end the latency it plays
    path     the form's file: None if it is not in the store, "" if the back end needs none
    variant_reason  why it is not the form that would run here, "" if it is; to be told wherever it is loaded
    """

    model: str
    backend: str
    variant: str
    quant: str
    path: str | None
    n_ctx: int
    n_seq_max: int
    chat_template: str | None
    tensor: TensorLoad | None = None
    variant_reason: str = ""
    adapters: tuple[AdapterFile, ...] = ()


def files_key(manifest: Manifest | None, settings: ModelSettings) -> str:
    """Name the files of all forms of a model, any of which may answer."""
    if manifest is None:
        return f"{settings.backend} {settings.variant}"
    forms = ((form.id, manifest.lineage(form)) for form in manifest.variants)
    return blake2b(repr((settings.variant, *forms)).encode(), digest_size=32).hexdigest()


def place(
    model: str,
    manifest: Manifest | None,
    settings: ModelSettings,
    config: Config,
    *,
    features: frozenset[str],
    find: Callable[[Manifest, Variant], Path | None],
    find_asset: Callable[[Manifest, Asset], Path | None] = lambda *_: None,
    as_tensor: bool = False,
) -> Placement:
    """Decide how to run a model; manifest is None for one of the null back end, which as_tensor makes a tensor model.

    The form is the one asked for, else the first that is fast on this CPU; if that is not in the store but another is,
    the first of those in the manifest's order. Raises ModelNotFoundError for a form that the manifest does not have.
    """
    backend = settings.backend or config.engine.backend
    if manifest is not None and manifest.kind == "tensor" and not settings.backend and backend in _TEXT_BACKENDS:
        backend = "auto"  # engine.backend says which of them runs language models; no tensor model is meant
    path: str | None
    reason = ""
    if manifest is None or backend == "null":
        variant, quant, path = settings.variant, "none", ""
    else:
        best = pick_variant(manifest, features, settings.variant, backend=backend)
        chosen, path = _form(manifest, best, settings.variant, find)
        variant, quant = chosen.id, chosen.quant
        reason = form_reason(manifest, best, chosen)
    tensor = None
    if as_tensor and manifest is None:
        tensor = _tensor_load(None, config, {}, None)
    elif manifest is not None and manifest.kind == "tensor":
        assets = {asset.id: find_asset(manifest, asset) for asset in manifest.assets}
        if None in assets.values():
            path = None
        form = manifest.variant(variant)
        tensor = _tensor_load(manifest, config, {name: str(at) for name, at in assets.items()}, form)
    return Placement(
        model=model,
        backend=backend,
        variant=variant,
        quant=quant,
        path=path,
        tensor=tensor,
        n_ctx=settings.n_ctx or config.engine.n_ctx or (manifest.n_ctx if manifest is not None else _NULL_N_CTX),
        n_seq_max=settings.n_parallel or config.engine.n_parallel,
        chat_template=manifest.chat_template if manifest is not None else None,
        variant_reason=reason,
        adapters=_adapters(manifest, settings, find_asset),
    )


def _adapters(
    manifest: Manifest | None, settings: ModelSettings, find_asset: Callable[[Manifest, Asset], Path | None]
) -> tuple[AdapterFile, ...]:
    """Name the configuration's adapters, and those of the manifest whose files are here; of one name the former."""
    found = {
        name: AdapterFile(name=name, path=adapter.file, base_sha256=adapter.base_sha256)
        for name, adapter in settings.adapters.items()
    }
    for adapter in manifest.adapters if manifest is not None else ():
        if adapter.id not in found and (path := find_asset(manifest, adapter)) is not None:  # type: ignore[arg-type]
            found[adapter.id] = AdapterFile(name=adapter.id, path=str(path))
    return tuple(found.values())


def form_reason(manifest: Manifest, best: Variant, chosen: Variant) -> str:
    """Say why another form than the best one runs, and what to do about it; "" if it is the best one. Pure."""
    if chosen.id == best.id:
        return ""
    return (
        f"{manifest.id} runs as {chosen.id}: the file of {best.id}, which would run here, is missing or not whole. "
        f"`edge_rt models pull {manifest.id}:{best.id}` brings it; "
        f'models.{manifest.id}.variant = "{chosen.id}" says that this is meant'
    )


def _tensor_load(manifest: Manifest | None, config: Config, assets: dict[str, str], form: Variant | None) -> TensorLoad:
    tensor, batching = config.tensor, manifest.batching if manifest is not None else Batching()
    state = manifest.state if manifest is not None else ()
    return TensorLoad(
        pipeline=manifest.pipeline if manifest is not None else None,
        state=state,
        assets=assets,
        max_batch=1 if state else min(tensor.max_batch or batching.max_batch, batching.max_batch),
        max_delay_s=batching.max_delay_s if tensor.max_delay_s < 0 else tensor.max_delay_s,
        max_shapes=tensor.max_shapes,
        max_streams=tensor.max_streams,
        max_tensor_bytes=config.limits.max_tensor_bytes,
        max_pixels=config.limits.max_pixels,
        max_audio_s=config.limits.max_audio_s,
        graph_cache=tensor.graph_cache,
        custom_op_libraries=tensor.custom_op_libraries,
        backends=form.backends if form is not None else (),
        npu=npu_load(config.npu, form.requires if form is not None else None),
    )


def npu_load(npu: Npu, requires: Requires | None = None) -> NpuLoad:
    """Say how a model runs on an NPU: as the configuration has it, else as its form's requires has."""
    options: dict[str, dict[str, str]] = {}
    for name, value in npu.options.items():
        backend, _, option = name.partition(".")
        options.setdefault(backend, {})[option] = value
    return NpuLoad(
        require=npu.require or (requires.place if requires is not None else "prefer"),
        max_artifact_bytes=npu.max_artifact_bytes,
        retry_s=npu.retry_s,
        soc=dict(npu.soc.items()),
        options=options,
        needs=chip_needs(requires) if requires is not None else None,
    )


def chip_needs(requires: Requires) -> ChipNeeds:
    """Give what a manifest says of a form's chip, as back ends take it."""
    return ChipNeeds(
        weight_bits=requires.weight_bits,
        activation_bits=requires.activation_bits,
        granularity=requires.granularity,
        socs=requires.socs,
    )


def _form(
    manifest: Manifest, best: Variant, wanted: str, find: Callable[[Manifest, Variant], Path | None]
) -> tuple[Variant, str | None]:
    # One for another accelerator, or for one where the CPU was meant, stands in for none.
    others = () if wanted else [v for v in manifest.variants if v.requires is None]
    for variant in (best, *others):
        if (path := find(manifest, variant)) is not None:
            return variant, str(path)
    return best, None


def pinned_texts(config: Config, model: str, places: Sequence[str] = ()) -> dict[str, str]:
    """Read the system prompts that the configuration pins for a model, by name.

    places  where each pin of the configuration stands, for the ConfigError that is raised for an unreadable file
    """
    texts: dict[str, str] = {}
    for number, pin in enumerate(config.pin):
        if pin.model != model:
            continue
        try:
            text = pin.system or read_regular(Path(pin.file), config.limits.max_prompt_bytes).decode("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            problem = f"{pin.file} cannot be read: {exc}"
            raise ConfigError(key=f"pin[{number}].file", problem=problem, origin=origin_of(number, places)) from exc
        if not text:
            problem = f"{pin.file} is empty; write the system prompt into it"
            raise ConfigError(key=f"pin[{number}].file", problem=problem, origin=origin_of(number, places))
        texts[pin_name(pin, number)] = text
    return texts


def load_message(placement: Placement, config: Config, *, force: bool) -> Load:
    """Write what a worker needs to know to load the model. Raises ModelNotPulledError."""
    if placement.path is None:
        raise ModelNotPulledError(model=placement.model)
    engine = config.engine
    return Load(
        model=placement.model,
        variant=placement.variant,
        path=placement.path,
        quant=placement.quant,
        backend=placement.backend,
        n_ctx=placement.n_ctx,
        n_seq_max=placement.n_seq_max,
        n_batch=max(engine.n_batch, placement.n_seq_max),  # a step has a row for every stream
        n_threads=config.tensor.n_threads if placement.tensor is not None else engine.n_threads,
        kv_type=engine.kv_type,
        packed_copy=engine.packed_copy,
        chat_template=placement.chat_template,
        max_stall_s=engine.max_stall_s,
        max_prefix_bytes=engine.max_prefix_bytes,
        isolate_prefixes=engine.isolate_prefixes,
        max_prefix_disk_bytes=engine.max_prefix_disk_bytes,
        pins=pinned_texts(config, placement.model),
        stream_interval_s=engine.stream_interval_s,
        memory_margin_bytes=config.worker.memory_margin_bytes,
        force=force or config.worker.force,
        max_draft=engine.max_draft,
        min_draft=engine.min_draft,
        min_draft_chance=engine.min_draft_p,
        tensor=placement.tensor,
        adapters=placement.adapters,
    )
