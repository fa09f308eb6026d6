from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt.cli import EXIT_CONFIG, main


@pytest.mark.parametrize("tcp", ["8970", "host:", ":8970", "host:port", "host"])
def test_tcp_needs_host_and_port(tcp: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--tcp", tcp])
    assert done.exit_code == 2
    assert "HOST:PORT" in done.stderr


@pytest.mark.parametrize("before", [True, False])
def test_the_file_may_be_named_before_and_after_the_command(tmp_path: Path, before: bool) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[server]\nzzz = 1\n")
    args = ["--config", str(file)]
    done = CliRunner().invoke(main, [*args, "serve"] if before else ["serve", *args])
    assert done.exit_code == EXIT_CONFIG
    assert "server.zzz" in done.stderr


def test_a_port_out_of_range_is_a_configuration_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["serve", "--tcp", "127.0.0.1:70000", "--socket", str(tmp_path / "s")])
    assert done.exit_code == EXIT_CONFIG
    assert "server.tcp_port" in done.stderr


def test_a_model_may_be_named_with_its_variant(tmp_path: Path) -> None:
    args = ["serve", "--socket", str(tmp_path / "s"), "--model", "smollm2-135m-instruct:q9_9"]
    done = CliRunner(env={"EDGE_RT__CATALOG__STORE_DIR": str(tmp_path)}).invoke(main, args)
    assert done.exit_code == EXIT_CONFIG
    assert "models.smollm2-135m-instruct.variant" in done.stderr
    assert "(from flag)" in done.stderr
