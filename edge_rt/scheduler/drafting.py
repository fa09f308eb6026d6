"""Which model drafts for another one, and in which form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.store import is_file_name
from edge_rt.config import Config, ModelSettings
from edge_rt.errors import ConfigError, ModelNotPulledError
from edge_rt.scheduler.forms import place
from edge_rt.worker.channel import DraftLoad

_NONE = "none"


def place_draft(
    model: str,
    manifest: Manifest | None,
    own: ModelSettings,
    config: Config,
    manifests: Mapping[str, Manifest],
    *,
    features: frozenset[str],
    find: Callable[[Manifest, Variant], Path | None],
) -> DraftLoad | None:
    """Say how the draft of a language model is loaded: the configuration's, else its manifest's; None for none.

    manifest  of the model; manifests  all of them, by id

    What a manifest names is left out where it is not there. For what the configuration names, raises ConfigError where
    it is no language model or no file, ModelNotFoundError for a variant that there is not, and ModelNotPulledError.
    """
    name = own.draft or (manifest.draft if manifest is not None else "")
    if name in ("", _NONE) or not config.engine.max_draft:
        return None
    is_optional = not own.draft
    if is_file_name(name):
        path = Path(name).expanduser()
        if not path.is_file():
            problem = f"{path} is no file; name a GGUF file that the daemon can read, or MODEL[:VARIANT] of the catalog"
            raise ConfigError(key=f"models.{model}.draft", problem=problem, origin="configuration")
        return DraftLoad(model=path.stem, variant="", path=str(path), quant="", backend=config.engine.backend)
    draft, _, variant = name.partition(":")
    settings, found = config.model(draft), manifests.get(draft)
    if variant:
        settings = msgspec.structs.replace(settings, variant=variant)
    if settings.backend != "null" and (found is None or found.kind != "text"):
        if is_optional:
            return None
        texts = sorted(each.id for each in manifests.values() if each.kind == "text")
        problem = f"no language model is named {draft!r}; there are {', '.join(texts)}"
        raise ConfigError(key=f"models.{model}.draft", problem=problem, origin="configuration")
    placement = place(draft, found, settings, config, features=features, find=find)
    if placement.path is None:
        if is_optional:
            return None
        raise ModelNotPulledError(model=name)
    return DraftLoad(
        model=draft,
        variant=placement.variant,
        path=placement.path,
        quant=placement.quant,
        backend=placement.backend,
        is_optional=is_optional,
    )
