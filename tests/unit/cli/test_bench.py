from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import main


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--backend", "null", "-m", "null", "-t", "1", "-r", "2", *arguments])


def test_the_table_goes_to_stdout_and_nothing_to_stderr() -> None:
    result = _bench("-p", "16,32", "-n", "4")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| model  ")
    assert [line.split("|")[6].strip() for line in lines[2:5]] == ["pp16", "pp32", "tg4"]
    assert result.stderr == ""


def test_options_given_more_than_once_and_ranges_add_up() -> None:
    result = _bench("-p", "0", "-n", "1-4*2", "-n", "3", "-d", "0,8", "-o", "jsonl")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["n_gen"], r["n_depth"]) for r in records] == [(n, d) for d in (0, 8) for n in (1, 2, 4, 3)]
    assert all(len(r["samples_ns"]) == 2 for r in records)


def test_llama_benchs_short_options() -> None:
    result = _bench("-p", "0", "-n", "0", "-pg", "16,2", "-b", "64", "-ub", "16", "-o", "json")
    (record,) = json.loads(result.stdout)
    assert (record["n_prompt"], record["n_gen"], record["n_batch"], record["n_ubatch"]) == (16, 2, 64, 16)
    assert record["backends"] == "null"
    assert record["model_id"] == "null"


def test_a_micro_batch_that_was_given_is_a_column() -> None:
    assert "| n_ubatch |" in _bench("-p", "8", "-n", "0", "-ub", "8").stdout.splitlines()[0]
    assert "n_ubatch" not in _bench("-p", "8", "-n", "0", "-ub", "512").stdout.splitlines()[0]


def test_a_second_format_on_stderr_and_progress() -> None:
    result = _bench("-p", "8", "-n", "0", "-o", "csv", "-oe", "jsonl", "--progress")
    assert result.stdout.splitlines()[0].startswith("build_commit,build_number,cpu_info")
    lines = result.stderr.splitlines()
    assert lines[0] == "edge_rt bench: benchmark 1/1: loading null"
    assert json.loads(lines[-1])["n_prompt"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-p", "8-2"), "ends before it begins"),
        (("-b", "0"), "0 is not in 1"),
        (("-pg", "8"), "not PROMPT,GEN"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-r", "0"), "0 is not in the range"),
        (("-o", "sql"), "not one of"),
        (("--backend", "tpu"), "'auto', 'native', 'llama_cpu', 'onnx_cpu', "),
    ],
)
def test_bad_options_are_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    result = _bench(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_an_unknown_model_back_end_or_file_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUFnothing")
    for arguments, says in (
        (["-m", "nope"], "nope"),
        (["-m", str(broken)], "broken.gguf"),
        (["-m", str(tmp_path / "absent.gguf")], "absent.gguf"),
    ):
        result = CliRunner().invoke(main, ["bench", *arguments])
        assert result.exit_code == 1
        assert result.stderr.startswith("edge_rt: ")
        assert says in result.stderr
        assert result.stdout == ""


def test_a_model_that_has_not_been_pulled_says_how_to_pull_it(tmp_path: Path) -> None:
    result = CliRunner(env={"EDGE_RT__CATALOG__STORE_DIR": str(tmp_path)}).invoke(main, ["bench"])
    assert result.exit_code == 1
    assert "edge_rt models pull" in result.stderr


def test_serve_without_a_daemon_says_how_to_start_one(socket_dir: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--socket", str(socket_dir / "none.sock")])
    assert result.exit_code == 1
    assert "edge_rt serve" in result.stderr


@pytest.mark.model
def test_the_real_model_by_path(model_store: Path) -> None:
    arguments = ["bench", "-m", str(model_store), "-p", "8", "-n", "2", "-r", "1", "-o", "json", "-t", "1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    prefill, decode = json.loads(result.stdout)
    assert prefill["model_n_params"] == 134_515_008
    assert prefill["samples_ns"][0] > 0
    assert prefill["rss_bytes"] > 50 * 2**20
    assert decode["tpot_p50_s"] > 0
