"""Loading a model that drafts: its vocabulary, its memory, its context, and what happens where it cannot be had."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edge_rt.backends.base import Backend, LoadOptions, MemoryNeed, ModelFile
from edge_rt.backends.native import NativeBackend
from edge_rt.backends.null import NullBackend, NullSession
from edge_rt.devices.base import known
from edge_rt.errors import (
    BackendLoadError,
    BackendUnavailableError,
    DraftVocabularyError,
    ModelFormatError,
    ModelTooLargeError,
)
from edge_rt.worker.channel import DraftLoad, Load
from edge_rt.worker.draft import load_draft, resolve_draft, with_draft
from edge_rt.worker.tokens import load_session
from tests.draft_heads import TinyHead, need_native
from tests.tiny_models import TinyModel

DRAFT = DraftLoad(model="child", variant="step_s=0", path="", quant="", backend="null")
LOAD = Load(model="m", variant="", path="", quant="", backend="null", n_ctx=64, draft=DRAFT)
OPTIONAL = msgspec.structs.replace(LOAD, draft=msgspec.structs.replace(DRAFT, is_optional=True))


def session(**caps: bool) -> NullSession:
    found = NullSession(ModelFile(model="m", variant="", path=__file__, quant=""), LoadOptions(n_ctx=64))  # type: ignore[arg-type]
    found.caps = dataclasses.replace(found.caps, **caps)  # type: ignore[arg-type]
    return found


class Other(NullBackend):
    """Loads a null model that differs a little."""

    def __init__(self, change: Callable[[NullSession], None] = lambda _: None) -> None:
        self.change = change
        self.loaded: list[NullSession] = []
        self.options: list[LoadOptions] = []

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        return MemoryNeed(weights_bytes=100, kv_bytes=20, scratch_bytes=3)

    def load(self, file: ModelFile, options: LoadOptions) -> NullSession:
        self.options.append(options)
        self.loaded.append(super().load(file, options))
        self.change(self.loaded[0])
        return self.loaded[0]


def find(backend: Backend) -> Callable[[str], Backend]:
    return lambda _: backend


def test_a_draft_of_the_same_vocabulary_drafts() -> None:
    backend = Other()
    found = load_draft(LOAD, session(), resolve_draft(LOAD, find=find(backend)))
    assert found is not None
    assert (found.name, found.n_bytes, found.max_draft) == ("child:step_s=0", 120, 15)
    assert backend.options[0] == LoadOptions(n_ctx=64, n_seq_max=8, n_batch=512)
    found.close()
    assert backend.loaded[0]._closed


def has_another_token(other: NullSession) -> None:
    piece = other.piece
    other.piece = lambda i, *, special=False: b"Z" if i == 97 else piece(i, special=special)  # type: ignore[method-assign]


def has_another_end(other: NullSession) -> None:
    other.vocab = dataclasses.replace(other.vocab, eog_ids=frozenset({258, 259}))


def has_more_tokens(other: NullSession) -> None:
    other.vocab = dataclasses.replace(other.vocab, n_vocab=265)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (has_another_token, "token 97 is 'a' in m and 'Z' in child:step_s=0"),
        (has_another_end, "token 259 ends an answer of child:step_s=0 only"),
        (has_more_tokens, "m has 264 tokens and child:step_s=0 265"),
    ],
    ids=["token", "end", "size"],
)
def test_another_vocabulary_is_refused_with_the_first_difference(
    change: Callable[[NullSession], None], difference: str
) -> None:
    backend = Other(change)
    draft = resolve_draft(LOAD, find=find(backend))
    with pytest.raises(DraftVocabularyError) as caught:
        load_draft(LOAD, session(), draft)
    assert caught.value.difference == difference
    assert backend.loaded[0]._closed


def test_the_memory_of_one_that_is_optional_is_checked_before_it_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    backend = Other()
    draft = resolve_draft(OPTIONAL, find=find(backend))
    assert load_draft(OPTIONAL, session(), draft, available=lambda: known(122, "test")) is None
    error = told(caplog)
    assert isinstance(error, ModelTooLargeError)
    assert (error.model, error.need_bytes) == ("child:step_s=0", 123)
    assert backend.loaded == []
    forced = msgspec.structs.replace(OPTIONAL, force=True)
    assert load_draft(forced, session(), draft, available=lambda: known(0, "test")) is not None


def told(caplog: pytest.LogCaptureFixture) -> object:
    """Give the error that the last warning names."""
    args = caplog.records[-1].args
    assert isinstance(args, tuple)
    return args[-1]


def test_one_that_is_not_is_found_and_counted_once() -> None:
    class Counted(Other):
        n_estimates = 0

        def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
            self.n_estimates += file.model == DRAFT.model
            return super().estimate(file, options)

    backend = Counted()
    draft = resolve_draft(LOAD, find=find(backend))
    own = load_session(LOAD, draft, find=find(backend), available=lambda: known(246, "test"))
    # What its model has taken since counts no longer.
    assert load_draft(LOAD, own, draft, available=lambda: known(0, "test")) is not None
    assert backend.n_estimates == 1
    assert len(backend.loaded) == 2


def test_it_is_counted_with_its_model_unless_that_is_loaded_without_too() -> None:
    own, backend = MemoryNeed(weights_bytes=1000, kv_bytes=200, scratch_bytes=30), Other()
    draft = resolve_draft(LOAD, find=find(backend))
    assert with_draft(own, draft) == MemoryNeed(weights_bytes=1100, kv_bytes=220, scratch_bytes=33)
    for load in (OPTIONAL, msgspec.structs.replace(LOAD, draft=None), msgspec.structs.replace(LOAD, max_draft=0)):
        assert with_draft(own, resolve_draft(load, find=find(backend))) == own
    assert backend.loaded == []
    with pytest.raises(ModelTooLargeError) as caught:
        load_session(LOAD, draft, find=find(backend), available=lambda: known(200, "test"))
    assert (caught.value.need_bytes, caught.value.have_bytes) == (246, 200)
    assert backend.loaded == []


def test_one_that_is_optional_is_left_out_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> Backend:
        raise BackendUnavailableError(backend=name, reason="gone", extra="")

    with pytest.raises(BackendUnavailableError):
        resolve_draft(LOAD, find=missing)
    with caplog.at_level(logging.WARNING):
        assert resolve_draft(OPTIONAL, find=missing) is None
    assert "m is loaded without its draft model child:step_s=0" in caplog.text


@pytest.mark.parametrize(
    "load", [msgspec.structs.replace(LOAD, draft=None), msgspec.structs.replace(LOAD, max_draft=0)]
)
def test_none_is_loaded_where_none_is_wanted(load: Load) -> None:
    backend = Other()
    assert load_draft(load, session(), resolve_draft(load, find=find(backend))) is None
    assert load_draft(LOAD, session(can_trim=False), resolve_draft(LOAD, find=find(backend))) is None
    assert backend.loaded == []


def with_head(folder: Path, model: TinyModel, **fields: object) -> Load:
    """Name a head of a tiny model as its draft; the model's file is there too."""
    file = model.write(folder / "m.gguf")
    path = TinyHead(model=TinyModel()).write(folder / "head.gguf", TinyModel().write(folder / "own.gguf"))
    draft = DraftLoad(model="head", variant="", path=str(path), quant="", backend="auto", **fields)  # type: ignore[arg-type]
    return Load(model="m", variant="", path=str(file.path), quant="", backend="native", n_ctx=64, draft=draft)


def test_a_head_guesses_on_the_models_own_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_native()
    load, optional = with_head(tmp_path, TinyModel()), with_head(tmp_path, TinyModel(), is_optional=True)
    file = ModelFile(model="m", variant="", path=Path(load.path), quant="")
    drafted = NativeBackend().load(file, LoadOptions(n_ctx=64, n_seq_max=2))
    assert load_draft(optional, drafted, resolve_draft(optional), available=lambda: known(10, "test")) is None
    assert isinstance(told(caplog), ModelTooLargeError)
    assert drafted.head_bytes() == 0
    draft = resolve_draft(load)
    found = load_draft(load, drafted, draft)
    assert found is not None
    assert (found.name, found.n_bytes) == ("head.gguf", drafted.head_bytes())
    nothing = MemoryNeed(weights_bytes=0, kv_bytes=0, scratch_bytes=0)
    assert 0 < found.n_bytes < with_draft(nothing, draft).total_bytes
    drafted.close()


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    need_native()
    load = with_head(tmp_path, TinyModel(seed=8))
    file = ModelFile(model="m", variant="", path=Path(load.path), quant="")
    drafted = NativeBackend().load(file, LoadOptions(n_ctx=64, n_seq_max=2))
    with pytest.raises(ModelFormatError, match="trained on another model"):
        load_draft(load, drafted, resolve_draft(load))
    drafted.close()


def test_a_head_needs_hidden_states(tmp_path: Path) -> None:
    load, optional = with_head(tmp_path, TinyModel()), with_head(tmp_path, TinyModel(), is_optional=True)
    with pytest.raises(BackendLoadError, match="native only, not on null"):
        load_draft(load, session(), resolve_draft(load))
    assert load_draft(optional, session(), resolve_draft(optional)) is None
