from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from edge_rt.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_calls_edge_rt_back(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_EDGE_RT_COMPLETE={shell}_complete" in result.stdout


def test_an_unknown_shell_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["completion", "tcsh"]).exit_code == 2


def test_the_program_answers_what_the_script_asks() -> None:
    environ = os.environ | {"_EDGE_RT_COMPLETE": "bash_complete", "COMP_WORDS": "edge_rt de", "COMP_CWORD": "1"}
    script = "from edge_rt.cli import main; main(prog_name='edge_rt')"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,devices\n"
