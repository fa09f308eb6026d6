"""Attention over more tokens than one part has: against numpy, and the same bits whoever computes the parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.backends.native import NativeBackend, NativeSession
from tests.tiny_models import TinyLayer, TinyModel

if isinstance(NativeBackend().probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

# The second model's windows begin inside a part and inside a block of it.
MODELS = {
    "full": TinyModel(layers=(TinyLayer(), TinyLayer(n_heads=6, n_kv_heads=1))),
    "window": TinyModel(
        arch="mistral3", layers=(TinyLayer(window=700),) * 2, keys={"attention.sliding_window": ("u32", 700)}
    ),
}
N = 1_200
IDS = [int(i) for i in np.random.default_rng(9).integers(0, 64, N)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def file(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return model.write(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def session(request: pytest.FixtureRequest, file: ModelFile) -> Iterator[NativeSession]:
    options = LoadOptions(n_ctx=6144, n_seq_max=8, n_batch=6144, n_ubatch=128, n_threads=1, kv_type=request.param)
    session = NativeBackend().load(file, options)
    yield session
    session.close()


@pytest.fixture(scope="module")
def whole(session: NativeSession) -> NDArray[np.float32]:
    """The logits after each token, by one thread and in one call."""
    logits = session.decode([SeqRows(0, 0, IDS, False, want_all=True)])[0].copy()
    session.seq_trim(0, 0)
    return logits


@pytest.fixture(autouse=True)
def _empty(session: NativeSession) -> Iterator[None]:
    yield
    session.set_threads(1)
    for seq_id in range(8):
        session.seq_trim(seq_id, 0)


def test_logits_are_numpys(model: TinyModel, session: NativeSession, whole: NDArray[np.float32]) -> None:
    error = np.std(whole - model.logits(IDS), axis=1) / np.std(whole)
    assert error.max() < (0.003 if session._n_state[-1] == 1 else 0.03)


@pytest.mark.parametrize("n_threads", [2, 3, 8])
@pytest.mark.parametrize("chunk", [3, 37, 600])
def test_threads_and_chunks_do_not_change_a_bit(
    session: NativeSession, whole: NDArray[np.float32], n_threads: int, chunk: int
) -> None:
    session.decode([SeqRows(0, 0, IDS[:400], False)])
    session.set_threads(n_threads)
    for at in range(400, N, chunk):
        rows = session.decode([SeqRows(0, at, IDS[at : at + chunk], False, want_all=True)])[0]
        assert rows.tobytes() == whole[at : at + chunk].tobytes()


@pytest.mark.parametrize("n_threads", [1, 4])
def test_company_does_not_change_a_bit(session: NativeSession, whole: NDArray[np.float32], n_threads: int) -> None:
    """Sequences of very different length decode together: some are cut among threads, some are not."""
    session.set_threads(n_threads)
    lengths = [N - 1, 5, 513, 511, 1, 1024, 1100, 40]
    session.decode([SeqRows(i, 0, IDS[:n], False) for i, n in enumerate(lengths)])
    together = session.decode([SeqRows(i, n, IDS[n : n + 1], True) for i, n in enumerate(lengths)])
    for n, logits in zip(lengths, together, strict=True):
        assert logits.tobytes() == whole[n].tobytes()
