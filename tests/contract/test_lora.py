"""Adapters in the step loop: each request is answered as by the model that its adapters are merged into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, SeqRows, TokenSession
from edge_rt.backends.dispatch import dispatch
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import BackendLoadError, InvalidRequestError, ModelFormatError, UnsupportedFeatureError
from edge_rt.types import Adapter, AdapterFile, GenerateRequest
from tests.lora_files import merged, random_pairs, write_adapter, write_model
from tests.unit.engine.null_engine import Answer

IDS = [5, 70, 71, 72, 100, 33, 34, 90]


@pytest.fixture(autouse=True)
def _needs_llama() -> None:
    if isinstance(absent := registry.get("llama_cpu").probe(), Absent):
        pytest.skip(absent.reason)


def options(*adapters: AdapterFile) -> LoadOptions:
    return LoadOptions(n_ctx=256, n_seq_max=4, n_batch=64, n_threads=1, adapters=adapters)


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[AdapterFile, ...]:
    return tuple(
        AdapterFile(name=name, path=str(write_adapter(tmp_path / f"{name}.gguf", random_pairs(seed))))
        for seed, name in enumerate(("one", "two"), 1)
    )


@pytest.fixture
def session(tmp_path: Path, adapters: tuple[AdapterFile, ...]) -> Iterator[TokenSession]:
    file = write_model(tmp_path / "m.gguf")
    backend, reason = dispatch("auto", file, options(*adapters))
    assert backend.name == "llama_cpu"
    assert "LoRA" in reason
    loaded = backend.load(file, options(*adapters))
    yield loaded
    loaded.close()


def logits(session: TokenSession) -> NDArray[np.float32]:
    row = session.decode([SeqRows(0, 0, IDS, want_logits=True)])[0].copy()
    session.seq_trim(0, 0)
    return row


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0])
def test_an_adapter_is_as_good_as_merged(session: TokenSession, tmp_path: Path, scale: float) -> None:
    file = write_model(tmp_path / "merged.gguf", merged(random_pairs(1), scale))
    other = registry.get("llama_cpu").load(file, options())
    expected = logits(other)
    other.close()
    plain = logits(session)
    session.set_adapters([Adapter(name="one", scale=scale)])  # type: ignore[attr-defined]
    assert np.abs(logits(session) - expected).max() < 2e-3
    assert np.abs(plain - expected).max() > 0.05
    session.set_adapters([])  # type: ignore[attr-defined]
    assert np.array_equal(logits(session), plain)


def ask(engine: TokenEngine, request_id: str, *adapters: Adapter) -> Answer:
    answer = Answer()
    request = GenerateRequest(
        id=request_id,
        model="m",
        prompt_token_ids=tuple(IDS),
        max_tokens=16,
        ignore_eos=True,
        stream=False,
        adapters=adapters,
    )
    engine.submit(request, answer)
    return answer


def run(engine: TokenEngine, *answers: Answer) -> None:
    for _ in range(2000):
        if all(answer.is_over for answer in answers):
            return
        engine.step()
    pytest.fail("the engine did not finish")


def test_requests_with_different_adapters_are_answered_as_each_alone(session: TokenSession) -> None:
    sets = [(), (Adapter(name="one"),), (Adapter(name="two", scale=0.5),), (Adapter(name="one"), Adapter(name="two"))]
    engine = TokenEngine(session, EngineSettings(), ThreadChoice((1,)))
    alone = []
    for i, each in enumerate(sets):
        alone.append(ask(engine, f"a{i}", *each))
        run(engine, alone[-1])
    together = [ask(engine, f"b{i}", *each) for i, each in enumerate(sets)]
    run(engine, *together)
    assert [answer.last.token_ids for answer in together] == [answer.last.token_ids for answer in alone]
    assert len({answer.last.token_ids for answer in alone}) == len(sets)
    for i, answer in enumerate(together):
        assert answer.last.usage is not None
        assert answer.last.usage.cached_tokens == 0, i  # eight tokens are not worth keeping; nor are others' rows used


def test_what_is_not_loaded_is_refused(session: TokenSession) -> None:
    engine = TokenEngine(session, EngineSettings(), ThreadChoice((1,)))
    answer = ask(engine, "a", Adapter(name="three"))
    assert isinstance(answer.error, InvalidRequestError)
    assert "one, two" in str(answer.error)


def test_the_native_engine_refuses_by_name(tmp_path: Path, adapters: tuple[AdapterFile, ...]) -> None:
    if isinstance(absent := registry.get("native").probe(), Absent):
        pytest.skip(absent.reason)
    file = write_model(tmp_path / "m.gguf")
    with pytest.raises(BackendLoadError, match="no LoRA adapters"):
        dispatch("native", file, options(*adapters))
    # Without adapters in its options it runs the model, and refuses requests that name one.
    null = registry.get("null").load(file, options())
    answer = ask(TokenEngine(null, EngineSettings(), ThreadChoice((1,))), "a", Adapter(name="one"))
    assert isinstance(answer.error, UnsupportedFeatureError)


def test_a_broken_adapter_stops_the_load(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf")
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError):
        registry.get("llama_cpu").load(file, options(AdapterFile(name="one", path=str(path))))
