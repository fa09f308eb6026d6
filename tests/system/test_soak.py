"""A seeded soak on the native engine and the real model: under any mix of load each answer is the one it has alone.

EDGE_RT_SOAK_S says for how long; `make soak` takes ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, TokenSession
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.turns import PRIORITIES
from edge_rt.types import GenerateRequest
from tests.unit.engine.null_engine import Answer

pytestmark = pytest.mark.model

PROSE = (Path(__file__).resolve().parents[1] / "golden" / "prose.txt").read_text(encoding="utf-8").split("\n\n")
N_ANSWER = 12
SOAK_S = float(os.environ.get("EDGE_RT_SOAK_S", "20"))


@pytest.fixture(scope="module")
def session(model_store: Path) -> Iterator[TokenSession]:
    backend = registry.get("native")
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    file = ModelFile(model="m", variant="", path=model_store, quant="")
    loaded = backend.load(file, LoadOptions(n_ctx=1024, n_seq_max=4, n_batch=128, n_threads=1))
    yield loaded
    loaded.close()


def engine(session: TokenSession, disk: PrefixDisk | None = None, **settings: float) -> TokenEngine:
    made = TokenEngine(session, EngineSettings(**settings), ThreadChoice((1,)), disk=disk)  # type: ignore[arg-type]
    made.warm_up()
    return made


def request(number: int, prompt: str, **fields: object) -> GenerateRequest:
    return GenerateRequest(id=str(number), model="m", prompt=prompt, ignore_eos=True, **fields)  # type: ignore[arg-type]


def finish(running: TokenEngine, *answers: Answer) -> None:
    while not all(answer.is_over for answer in answers):
        running.step()


def test_answers_under_load_are_those_of_lone_runs(session: TokenSession, tmp_path: Path) -> None:
    chance = random.Random(20261130)
    systems = [PROSE[i % len(PROSE)][:500] for i in range(3)]
    prompts = [chance.choice(systems)[: chance.randrange(40, 500)] + f"\n\nQuestion {i}:" for i in range(16)]
    expected: list[list[int]] = []
    alone = engine(session, max_prefix_bytes=0, max_draft=0)
    for number, prompt in enumerate(prompts):
        answer = Answer()
        alone.submit(request(number, prompt, max_tokens=N_ANSWER), answer)
        finish(alone, answer)
        expected.append([token_id for chunk in answer.chunks for token_id in chunk.token_ids])
    alone.stop(0.0)
    alone.run()
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)

    until_s = time.monotonic() + SOAK_S
    n_asked = n_checked = n_preempted = n_cached = n_restored = 0
    while n_checked == 0 or time.monotonic() < until_s:  # each round with an engine of its own, over the same disk
        disk = PrefixDisk(tmp_path / "p", "soak", 200 * 2**20, free_bytes=lambda _: 10**12)
        running = engine(
            session,
            disk,
            max_prefix_bytes=chance.choice([0, 4 * 2**20, 64 * 2**20]),
            isolate_prefixes=chance.random() < 0.3,
            max_draft=chance.choice([0, 15]),
            max_stall_s=0.05,
        )
        open_: dict[int, tuple[int, int, Answer]] = {}
        for _ in range(chance.randrange(10, 30)):
            which, n_tokens, answer = chance.randrange(len(prompts)), chance.randrange(1, N_ANSWER + 1), Answer()
            fields = {"priority": chance.choice(PRIORITIES), "tenant": chance.choice(["uid:1", "uid:2"])}
            running.submit(request(n_asked, prompts[which], max_tokens=n_tokens, **fields), answer)
            open_[n_asked] = (which, n_tokens, answer)
            n_asked += 1
            for _ in range(chance.randrange(6)):
                running.step()
            if chance.random() < 0.2:
                gone = chance.choice(list(open_))
                running.cancel(str(gone))
                del open_[gone]
        running.step()
        finish(running, *(answer for _, _, answer in open_.values()))
        for which, n_tokens, answer in open_.values():
            assert answer.error is None
            ids = [token_id for chunk in answer.chunks for token_id in chunk.token_ids]
            assert ids == expected[which][:n_tokens]
            n_checked += 1
        stats = running.stats()
        assert (stats.running, stats.waiting, stats.cells_used) == (0, 0, 0)
        n_preempted += stats.preempted_total
        n_cached += stats.cached_tokens_total
        running.stop(0.0)
        running.run()
        n_restored += running.stats().restored_tokens_total
        for seq_id in range(session.caps.n_seq_max):
            session.seq_trim(seq_id, 0)
    print(f"{n_checked} answers of {n_asked}, {n_preempted} put back, {n_cached} tokens shared, {n_restored} from disk")
    assert n_cached > 0
