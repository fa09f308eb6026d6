"""Load a model that drafts for another one: of the same vocabulary, on any back end, within the memory there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from edge_rt.worker.load import unpack
from edge_rt.worker.memory import check

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """What drafts for a model, not loaded yet.

    need     of memory, which the model's load counts in unless the draft is optional
    runs_on  its back end and how to load it there; None: it is a head, on the session of the model
    """

    asked: DraftLoad
    file: ModelFile
    need: MemoryNeed
    runs_on: tuple[Backend, LoadOptions] | None


def resolve_draft(load: Load, *, find: Callable[[str], Backend] = registry.get) -> FoundDraft | None:
    """Find what drafts for a model; None if nothing does, or an optional one cannot be had. Raises as dispatch does."""
    draft = load.draft
    if draft is None or not load.max_draft:
        return None
    file = ModelFile(model=draft.model, variant=draft.variant, path=Path(draft.path), quant=draft.quant)
    with _left_out_if_optional(load, draft):
        if draft.path and is_head(file.path):
            return FoundDraft(draft, file, _head_need(load, file.path), None)
        options = _options(load, draft, file)
        backend, _ = dispatch(draft.backend, file, options, find=find)
        return FoundDraft(draft, file, backend.estimate(file, options), (backend, options))
    return None


def with_draft(need: MemoryNeed, draft: FoundDraft | None) -> MemoryNeed:
    """Add what a model's draft takes to what the model does, unless it is loaded without too.

    Both are counted before either is loaded: pages of a mapped file still count as available afterwards.
    """
    if draft is None or draft.asked.is_optional:
        return need
    return MemoryNeed(
        weights_bytes=need.weights_bytes + draft.need.weights_bytes,
        kv_bytes=need.kv_bytes + draft.need.kv_bytes,
        scratch_bytes=need.scratch_bytes + draft.need.scratch_bytes,
    )


def load_draft(
    load: Load,
    session: TokenSession,
    draft: FoundDraft | None,
    *,
    available: Callable[[], Reading[int]] = memory.available_bytes,
) -> SessionDrafts | HeadDrafts | None:
    """Load the model that drafts for session's, or the head; None if there is none, or an optional one cannot be had.

    Raises DraftVocabularyError, ModelError and BackendError.
    """
    if draft is None or not session.caps.can_trim:
        return None
    asked = draft.asked
    if draft.runs_on is None and asked.is_optional and not isinstance(session, Drafting):
        return None  # a manifest's head is for whoever can use it
    with _left_out_if_optional(load, asked):
        if asked.is_optional and not load.force:  # another one was counted with its model
            check(asked.name, draft.need, available(), load.memory_margin_bytes)
        if draft.runs_on is None:
            return _load_head(load, draft, session)
        return _load(load, draft, session, *draft.runs_on)
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


@contextmanager
def _left_out_if_optional(load: Load, draft: DraftLoad) -> Iterator[None]:
    try:
        yield
    except EdgeRtError as exc:
        if not draft.is_optional:
            raise
        _log.warning("%s is loaded without its draft model %s: %s", load.model, draft.name, exc)


def _load(
    load: Load, draft: FoundDraft, session: TokenSession, backend: Backend, options: LoadOptions
) -> SessionDrafts:
    drafting = backend.load(draft.file, options)
    try:
        check_vocabulary(load.model, session, draft.asked.name, drafting)
    except BaseException:
        drafting.close()
        raise
    n_bytes = draft.need.weights_bytes + draft.need.kv_bytes
    return SessionDrafts(drafting, name=draft.asked.name, max_draft=load.max_draft, n_bytes=n_bytes)


def _head_need(load: Load, path: Path) -> MemoryNeed:
    """Estimate a head: its file, as much again for the rows of the output matrix, and what the engine keeps for it."""
    n_bytes = path.stat().st_size
    return MemoryNeed(weights_bytes=2 * n_bytes, kv_bytes=0, scratch_bytes=load.n_seq_max * 2**17)


def _load_head(load: Load, draft: FoundDraft, session: TokenSession) -> HeadDrafts:
    if not isinstance(session, Drafting):
        reason = f"the draft head {draft.asked.name} guesses on the back end native only, not on {session.info.backend}"
        raise BackendLoadError(model=load.model, reason=reason)
    file, _ = unpack(load)
    return HeadDrafts(session, read_head(draft.file.path, load.model, file.path, file.header))


def _options(load: Load, draft: DraftLoad, file: ModelFile) -> LoadOptions:
    """Give how to load a draft.

    As much context as the model has, but no more than the draft was trained for: it goes on with the end of what is
    longer.
    """
    n_ctx = min(load.n_ctx, file.header.n_ctx_train) if draft.path else load.n_ctx
    return LoadOptions(
        n_ctx=max(n_ctx, load.n_seq_max),
        n_seq_max=load.n_seq_max,
        n_batch=load.n_batch,
        n_threads=load.n_threads,
        kv_type=load.kv_type,
        packed_copy=load.packed_copy,
    )
