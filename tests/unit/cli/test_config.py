from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt.cli import main

RUNNER = CliRunner(env={"EDGE_RT__ENGINE__N_THREADS": "3"})


def test_show_names_value_and_origin(tmp_path: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text("[engine]\nn_ctx = 1024\n")
    result = RUNNER.invoke(main, ["config", "show", "--config", str(file), "--json"])
    assert result.exit_code == 0, result.output
    found = {setting["key"]: (setting["value"], setting["origin"]) for setting in json.loads(result.stdout)}
    assert found["engine.n_ctx"] == (1024, str(file))
    assert found["engine.n_threads"] == (3, "env EDGE_RT__ENGINE__N_THREADS")
    assert found["engine.n_batch"] == (512, "default")
    assert found["catalog.manifest_dirs"] == ([], "default")


def test_show_changed_leaves_out_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    lines = RUNNER.invoke(main, ["config", "show", "--changed", "--config", str(file)]).stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].split()[:2] == ["engine.n_threads", "3"]


def test_show_reads_the_file_named_before_the_command(tmp_path: Path) -> None:
    file, other = tmp_path / "edge_rt.toml", tmp_path / "other.toml"
    file.write_text("[engine]\nn_ctx = 1024\n")
    other.write_text("[engine]\nn_ctx = 512\n")
    shown = RUNNER.invoke(main, ["--config", str(file), "config", "show", "--changed"])
    assert f"1024     {file}" in shown.stdout
    shown = RUNNER.invoke(main, ["--config", str(file), "config", "show", "--changed", "--config", str(other)])
    assert f"512      {other}" in shown.stdout


def test_check_ignores_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text("[engine]\nn_ctx = 1024\n")
    result = CliRunner(env={"EDGE_RT__ENGINE__N_THREADS": "many"}).invoke(main, ["config", "check", str(file)])
    assert result.exit_code == 0
    assert result.stdout == f"{file}: ok, 1 key set\n"


def test_check_names_the_wrong_key_and_exits_with_78(tmp_path: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text("[engine]\nn_batch = 5\n")
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    assert result.exit_code == 78
    assert "engine.n_batch" in result.stderr
    assert str(file) in result.stderr
    assert CliRunner().invoke(main, ["config", "check", str(tmp_path / "absent.toml")]).exit_code == 78


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[models.nope]\npreload = true\n", "models.nope: no such model"),
        ('[models.smollm2-135m-instruct]\nvariant = "q9"\n', "models.smollm2-135m-instruct.variant: no such variant"),
    ],
)
def test_check_refuses_models_that_the_daemon_would_refuse(text: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "edge_rt.toml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    assert result.exit_code == 78
    assert result.stderr.startswith(f"edge_rt: {key}")
    assert str(file) in result.stderr
