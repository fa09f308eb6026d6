from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from edge_rt.backends.base import ModelFile
from edge_rt.backends.null import NullBackend
from edge_rt.bench.report import FORMATS, Machine, record, writer
from edge_rt.bench.runner import PowerSource, Repetition, Result, Target
from edge_rt.bench.workload import Case
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.types import Capabilities, ModelInfo

MACHINE = Machine(
    cpu_info="4x Cortex-A76",
    cpu_features="dotprod neon",
    board="a board",
    kernel="6.12.1",
    governor="ondemand",
    edge_rt_version="0.1.0",
)
TARGET = Target(
    backend=NullBackend(),
    detail="llama.cpp 1",
    file=ModelFile(model="smol", variant="q4_0", path=Path("smol.Q4_0.gguf"), quant="Q4_0"),
)
INFO = ModelInfo(
    model="smol",
    variant="q4_0",
    backend="llama_cpu",
    device="cpu",
    arch="llama",
    quant="Q4_0",
    n_params=134_515_008,
    size_bytes=91_726_912,
    n_ctx_train=2048,
    caps=Capabilities(n_ctx=512, n_seq_max=1, n_vocab=49152, n_batch=2048, can_trim=True, can_copy=True, can_save=True),
    n_threads=4,
    has_chat_template=True,
)
LLAMA_BENCH_KEYS = """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params
    n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers flash_attn n_prompt n_gen n_depth
    test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts
"""
GOLDEN = Path(__file__).parents[2] / "golden" / "bench.md"


def _result(
    n_prompt: int,
    n_gen: int,
    *elapsed_s: float,
    n_depth: int = 0,
    n_threads: int = 4,
    energy_j: Reading[float] | None = None,
) -> Result:
    case = Case(n_prompt=n_prompt, n_gen=n_gen, n_depth=n_depth, n_batch=2048, n_ubatch=512, n_threads=n_threads)
    energy = energy_j or unknown("/sys/class/powercap", "no counter")
    repetitions = tuple(
        Repetition(
            elapsed_ns=round(s * 1e9),
            prompt_ns=round(s * 1e9) if n_prompt else None,
            token_ns=tuple(round(1e7 * (i + 1)) for i in range(n_gen)),
            energy_j=energy,
        )
        for s in elapsed_s
    )
    return Result(
        case=case,
        target=TARGET,
        info=INFO,
        kv_type="f16",
        started_at="2026-11-29T12:00:00Z",
        repetitions=repetitions,
        peak_temp_c=known(61.75, "zone0"),
        throttled=unknown("/sys", "no flags"),
        rss_bytes=known(200 * 2**20, "/proc/self/status VmRSS"),
        power=PowerSource("rapl package-0", "soc", "measured") if energy_j else PowerSource("no meter"),
    )


def _write(kind: str, *results: Result, swept: tuple[str, ...] = ()) -> str:
    target = writer(next(f for f in FORMATS if f == kind), MACHINE, swept)
    return target.header() + "".join(target.row(r) for r in results) + target.footer()


def test_keys_begin_with_llama_benchs_in_its_order() -> None:
    keys = LLAMA_BENCH_KEYS.split()
    assert list(record(_result(512, 0, 1.0), MACHINE))[: len(keys)] == keys


def test_rates_and_their_spread() -> None:
    values = record(_result(512, 0, 1.0, 2.0, 4.0), MACHINE)
    assert values["samples_ns"] == [10**9, 2 * 10**9, 4 * 10**9]
    assert values["samples_ts"] == [512.0, 256.0, 128.0]
    assert values["avg_ts"] == pytest.approx(298.666667)
    assert values["stddev_ts"] == pytest.approx(195.523230)  # the sample's, as llama-bench has it
    assert (values["median_ts"], values["q1_ts"], values["q3_ts"]) == (256.0, 192.0, 384.0)
    assert (values["min_ts"], values["max_ts"]) == (128.0, 512.0)
    assert values["avg_ns"] == 2_333_333_333


def test_latencies_and_why_there_are_none() -> None:
    values = record(_result(0, 100, 1.0, 1.0), MACHINE)
    assert values["tpot_p50_s"] == pytest.approx(0.505, rel=0.01)
    assert values["tpot_p90_s"] == pytest.approx(0.9, rel=0.02)
    assert values["tpot_p99_s"] == pytest.approx(0.99, rel=0.02)
    assert values["tpot_reason"] == ""
    assert values["ttft_p50_s"] is None
    assert values["ttft_reason"] == "no prompt in this test"
    assert record(_result(8, 0, 2.0), MACHINE)["ttft_p99_s"] == 2.0
    assert record(_result(8, 0, 2.0), MACHINE)["tpot_reason"] == "no decoded tokens in this test"


def test_unknown_is_null_with_a_reason() -> None:
    values = record(_result(512, 0, 1.0), MACHINE)
    for name in ("avg_watts", "joules_per_token"):
        assert values[name] is None
        assert values[f"{name}_reason"] == "/sys/class/powercap: no counter"
    assert values["throttled"] is None
    assert values["throttled_reason"] == "/sys: no flags"
    assert values["peak_temp_c"] == 61.75
    assert values["peak_temp_c_reason"] == ""


def test_energy_per_token_and_watts() -> None:
    values = record(_result(100, 0, 1.0, 3.0, energy_j=known(10.0, "rapl")), MACHINE)
    assert values["avg_watts"] == pytest.approx(5.0)
    assert values["joules_per_token"] == pytest.approx(0.1)
    assert values["joules_per_token_reason"] == ""
    assert [values[f"power_{key}"] for key in ("source", "boundary", "quality")] == [
        "rapl package-0",
        "soc",
        "measured",
    ]
    text = _write("md", _result(100, 0, 1.0, energy_j=known(10.0, "rapl")))
    assert "watts, J/token: of the soc, measured (rapl package-0)\n" in text


def test_the_table_is_llama_benchs_with_a_second_one_below() -> None:
    assert _write("md", _result(512, 0, 1.0, 1.1), _result(0, 2, 0.1, n_depth=64)) == GOLDEN.read_text(encoding="utf-8")


def test_the_second_table_tells_rows_apart_by_what_was_swept() -> None:
    text = _write("md", _result(8, 0, 1.0, n_threads=1), _result(8, 0, 1.0, n_threads=2))
    assert "| threads | test | median t/s |" in text
    assert "|       1 |  pp8 |" in text
    assert "|       2 |  pp8 |" in text


def test_given_batch_sizes_become_columns() -> None:
    header = _write("md", _result(8, 0, 1.0), swept=("n_batch", "n_ubatch")).splitlines()
    assert "| threads | n_batch | n_ubatch |            test |" in header[0]
    assert "|       4 |    2048 |      512 |             pp8 |" in header[2]


def test_a_table_without_results_is_only_a_header() -> None:
    assert len(_write("md").splitlines()) == 2


def test_json_is_an_array_even_when_nothing_was_measured() -> None:
    assert json.loads(_write("json")) == []
    two = json.loads(_write("json", _result(8, 0, 1.0), _result(0, 8, 1.0)))
    assert [(r["n_prompt"], r["n_gen"]) for r in two] == [(8, 0), (0, 8)]


def test_json_lines() -> None:
    lines = _write("jsonl", _result(8, 0, 1.0), _result(0, 8, 1.0)).splitlines()
    assert [json.loads(line)["n_gen"] for line in lines] == [0, 8]


def test_csv_has_the_keys_without_the_samples() -> None:
    rows = list(csv.DictReader(io.StringIO(_write("csv", _result(8, 0, 1.0), _result(0, 8, 1.0)))))
    expected = [key for key in record(_result(8, 0, 1.0), MACHINE) if not key.startswith("samples_")]
    assert list(rows[0]) == expected
    assert [row["n_prompt"] for row in rows] == ["8", "0"]
    assert rows[0]["cpu_strict"] == "0"
    assert rows[0]["avg_watts"] == ""
    assert rows[0]["avg_ts"] == "8.0"
