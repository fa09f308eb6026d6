"""Load a model that drafts for another one: of the same vocabulary, on any back end, within the memory there is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edge_rt.backends import registry
from edge_rt.backends.base import Backend, LoadOptions, MemoryNeed, ModelFile, TokenSession
from edge_rt.backends.dispatch import dispatch
from edge_rt.backends.drafting import Drafting
from edge_rt.catalog.draft_head import is_head, read_head
from edge_rt.devices import memory
from edge_rt.devices.base import Reading
from edge_rt.engine.head_drafts import HeadDrafts
from edge_rt.engine.session_drafts import SessionDrafts
from edge_rt.errors import BackendLoadError, DraftVocabularyError, EdgeRtError
from edge_rt.worker.channel import DraftLoad, Load
from edge_rt.worker.memory import check

_log = logging.getLogger(__name__)


def with_draft(need: MemoryNeed, load: Load, *, find: Callable[[str], Backend] = registry.get) -> MemoryNeed:
    """Add what a model's draft takes to what the model does, unless it is loaded without too. Raises as dispatch does.

    Both are counted before either is loaded: pages of a mapped file still count as available afterwards.
    """
    if load.draft is None or load.draft.is_optional or not load.max_draft:
        return need
    path = Path(load.draft.path)
    if load.draft.path and is_head(path):
        more = _head_need(load, path)
    else:
        file, options = _unpack(load, load.draft)
        more = dispatch(load.draft.backend, file, options, find=find)[0].estimate(file, options)
    return MemoryNeed(
        weights_bytes=need.weights_bytes + more.weights_bytes,
        kv_bytes=need.kv_bytes + more.kv_bytes,
        scratch_bytes=need.scratch_bytes + more.scratch_bytes,
    )


def load_draft(
    load: Load,
    session: TokenSession,
    *,
    find: Callable[[str], Backend] = registry.get,
    available: Callable[[], Reading[int]] = memory.available_bytes,
) -> SessionDrafts | HeadDrafts | None:
    """Load the model that drafts for session's, or the head; None if there is none, or an optional one cannot be had.

    Raises DraftVocabularyError, ModelError and BackendError.
    """
    if load.draft is None or not load.max_draft or not session.caps.can_trim:
        return None
    try:
        if load.draft.path and is_head(Path(load.draft.path)):
            return _load_head(load, load.draft, session, available)
        return _load(load, load.draft, session, find, available)
    except EdgeRtError as exc:
        if not load.draft.is_optional:
            raise
        _log.warning("%s is loaded without its draft model %s: %s", load.model, load.draft.name, exc)
        return None


def check_vocabulary(model: str, session: TokenSession, draft: str, drafting: TokenSession) -> None:
    """Raise DraftVocabularyError, with the first difference, unless both models' tokens are the same."""
    own, other = session.vocab, drafting.vocab
    for token_id in range(min(own.n_vocab, other.n_vocab)):
        texts = session.piece(token_id, special=True), drafting.piece(token_id, special=True)
        if texts[0] != texts[1]:
            told = [text.decode("utf-8", "backslashreplace")[:40] for text in texts]
            difference = f"token {token_id} is {told[0]!r} in {model} and {told[1]!r} in {draft}"
            raise DraftVocabularyError(model=model, draft=draft, difference=difference)
        is_end = token_id in own.eog_ids
        if is_end != (token_id in other.eog_ids):
            difference = f"token {token_id} ends an answer of {model if is_end else draft} only"
            raise DraftVocabularyError(model=model, draft=draft, difference=difference)
    if own.n_vocab != other.n_vocab:
        difference = f"{model} has {own.n_vocab} tokens and {draft} {other.n_vocab}"
        raise DraftVocabularyError(model=model, draft=draft, difference=difference)


def _load(
    load: Load,
    draft: DraftLoad,
    session: TokenSession,
    find: Callable[[str], Backend],
    available: Callable[[], Reading[int]],
) -> SessionDrafts:
    file, options = _unpack(load, draft)
    backend, _ = dispatch(draft.backend, file, options, find=find)
    need = backend.estimate(file, options)
    if not load.force:
        check(draft.name, need, available(), load.memory_margin_bytes)
    drafting = backend.load(file, options)
    try:
        check_vocabulary(load.model, session, draft.name, drafting)
    except BaseException:
        drafting.close()
        raise
    n_bytes = need.weights_bytes + need.kv_bytes
    return SessionDrafts(drafting, name=draft.name, max_draft=load.max_draft, n_bytes=n_bytes)


def _head_need(load: Load, path: Path) -> MemoryNeed:
    """Estimate a head: its file, as much again for the rows of the output matrix, and what the engine keeps for it."""
    n_bytes = path.stat().st_size
    return MemoryNeed(weights_bytes=2 * n_bytes, kv_bytes=0, scratch_bytes=load.n_seq_max * 2**17)


def _load_head(
    load: Load, draft: DraftLoad, session: TokenSession, available: Callable[[], Reading[int]]
) -> HeadDrafts | None:
    path = Path(draft.path)
    if not isinstance(session, Drafting):
        if draft.is_optional:  # a manifest's head is for whoever can use it
            return None
        reason = f"the draft head {draft.name} guesses on the back end native only, not on {session.info.backend}"
        raise BackendLoadError(model=load.model, reason=reason)
    if not load.force:
        check(draft.name, _head_need(load, path), available(), load.memory_margin_bytes)
    file = ModelFile(model=load.model, variant=load.variant, path=Path(load.path), quant=load.quant)
    return HeadDrafts(session, read_head(path, load.model, file.path, file.header))


def _unpack(load: Load, draft: DraftLoad) -> tuple[ModelFile, LoadOptions]:
    """Give the draft's file and how to load it.

    As much context as the model has, but no more than the draft was trained for: it goes on with the end of what is
    longer.
    """
    file = ModelFile(model=draft.model, variant=draft.variant, path=Path(draft.path), quant=draft.quant)
    n_ctx = min(load.n_ctx, file.header.n_ctx_train) if draft.path else load.n_ctx
    options = LoadOptions(
        n_ctx=max(n_ctx, load.n_seq_max),
        n_seq_max=load.n_seq_max,
        n_batch=load.n_batch,
        n_threads=load.n_threads,
        kv_type=load.kv_type,
        packed_copy=load.packed_copy,
    )
    return file, options
