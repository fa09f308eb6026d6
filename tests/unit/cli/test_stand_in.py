"""What runs on a stand-in of a device is said to: before, meanwhile, and in place of a speed."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, replace

import httpx2
import pytest
from click.testing import CliRunner

from edge_rt import config
from edge_rt.cli import main
from edge_rt.cli.bench_options import refuse_stand_in
from edge_rt.cli.bench_serve import check_device
from edge_rt.cli.stand_in import announce, shown
from edge_rt.cli.talk import Account, LocalTalk, with_backend
from edge_rt.errors import UnsupportedFeatureError
from edge_rt.types import Capabilities, EngineStats, ModelInfo, Timings, Usage

INFO = ModelInfo(
    model="m",
    variant="q4_1",
    backend="fpga_sim",
    device="fpga-sim",
    arch="llama",
    quant="Q4_1",
    n_params=1,
    size_bytes=1,
    n_ctx_train=1,
    caps=Capabilities(n_ctx=1, n_seq_max=1, n_vocab=1, n_batch=1, can_trim=True, can_copy=True, can_save=True),
    n_threads=1,
    has_chat_template=False,
    evidence="simulator",
)


class Answer:
    """Two pieces, and what they took."""

    finish_reason = "length"
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    timings = Timings(queue_s=0, prefill_s=2, prefill_tokens=1, decode_s=3, decode_tokens=1, ttft_s=2)

    def __init__(self) -> None:
        self._pieces = iter(["a", "b"])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._pieces)

    def close(self) -> None:
        pass


@dataclass
class Model:
    info: ModelInfo = INFO

    def stats(self) -> EngineStats:
        return EngineStats(device_products_total=7)

    def generate(self, *_: object, **__: object) -> Answer:
        return Answer()


def test_a_stand_in_is_announced_and_a_device_is_not() -> None:
    out = io.StringIO()
    announce(INFO, out)
    assert out.getvalue() == (
        "edge_rt: fpga_sim on fpga-sim is a simulator: a token may take many seconds, and no figure is a speed\n"
    )
    announce(replace(INFO, evidence="device"), out)
    assert out.getvalue().count("\n") == 1


def test_progress_ends_with_the_answer_and_a_device_shows_none() -> None:
    for info in (INFO, replace(INFO, evidence="device")):
        out = io.StringIO()
        with shown(Model(info), out):
            pass
        assert out.getvalue() == ""  # it was over before the first look


def test_an_answer_of_a_stand_in_has_times_and_no_speed() -> None:
    talk = LocalTalk(Model())
    assert list(talk.ask("x", {})) == ["a", "b"]
    assert talk.account is not None
    assert (talk.account.prefill_tps, talk.account.decode_tps) == (None, None)
    assert "t/s" not in talk.account.line()
    assert talk.account.record()["decode_s"] == 3
    assert talk.backend() == "fpga_sim (simulator: no figure of it is a speed)"
    real = LocalTalk(Model(replace(INFO, evidence="device")))
    assert list(real.ask("x", {})) == ["a", "b"]
    assert isinstance(real.account, Account)
    assert "t/s" in real.account.line()


@pytest.mark.parametrize("evidence", ["simulator", "emulated"])
def test_no_benchmark_of_a_stand_in(evidence: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"a benchmark of fpga_sim is not supported.*{evidence}"):
        refuse_stand_in("fpga_sim", evidence)  # type: ignore[arg-type]
    refuse_stand_in("native", "device")
    refuse_stand_in("null", "stub")


def test_no_benchmark_of_a_daemon_whose_model_runs_on_a_stand_in() -> None:
    cards = [
        {"id": "a", "meta": {"backend": "native"}},
        {"id": "b", "meta": {"backend": "fpga_sim", "evidence": "simulator"}},
        {"id": "c", "meta": {"backend": "null", "evidence": "stub"}},
        {"id": "d"},
    ]

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/models"
        return httpx2.Response(200, json={"data": cards})

    async def check(model: str) -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://edge_rt") as client:
            await check_device(client, model)

    for model in ("a", "c", "d", "unknown"):
        asyncio.run(check(model))
    for model in ("b", "b:q4_1"):
        with pytest.raises(UnsupportedFeatureError, match=r"a benchmark of fpga_sim is not supported.*simulator"):
            asyncio.run(check(model))


def test_a_back_end_that_is_named_counts_for_its_model_alone() -> None:
    loaded = config.load(environ={"EDGE_RT__MODELS__M_1__N_CTX": "64"})
    changed = with_backend(loaded, "m-1:q4_1", "fpga_sim").config
    assert changed.model("m-1").backend == "fpga_sim"
    assert changed.model("m-1").n_ctx == 64
    assert changed.model("other").backend == ""
    assert loaded.config.model("m-1").backend == ""


def test_run_takes_a_back_end_by_name_and_asks_no_daemon_then() -> None:
    done = CliRunner().invoke(main, ["run", "null", "Hello", "--backend", "null", "--json"])
    assert done.exit_code == 0, done.output
    assert '"backend": "null"' in done.output
    refused = CliRunner().invoke(main, ["run", "null", "Hello", "--backend", "null", "--socket", "/x"])
    assert refused.exit_code == 2
    assert "--backend loads the model here" in refused.output


def test_status_tells_which_models_in_memory_run_on_a_stand_in() -> None:
    from edge_rt.cli.status import text

    daemon = {"answers": True, "socket": "/s", "models": ["a", "b"], "stand_ins": {"b": "simulator"}, "n_pulled": 2}
    found = {
        "units": [],
        "systemd": False,
        "daemon": daemon,
        "power": {"answers": False, "problem": ""},
        "last_errors": [],
    }
    assert "in memory: a, b (simulator); 2 models pulled" in text(found)
