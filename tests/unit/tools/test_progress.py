from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tools.progress import CommandError, StatusLine, compile_stage, run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "  [30/120] /usr/bin/c++ -O3 -o a/ggml.c.o -c /t/ggml-quants.c\n",
            "[######..................] 30/120 ggml-quants.c",
        ),
        ("[120/120] Linking CXX shared library bin/libllama.so\n", "[########################] 120/120"),
        ("[ 50%] Building CXX object src/llama.cpp.o\n", "[############............] 50/100 llama.cpp"),
        ("Collecting numpy>=1.26\n", "resolving numpy>=1.26"),
        ("  Installing collected packages: a, b\n", "installing: a, b"),
        ("-- Detecting CXX compile features\n", None),
        ("\n", None),
        ("[0/0] nothing to do\n", "[........................] 0/0"),
    ],
)
def test_an_output_line_becomes_what_is_shown(line: str, shown: str | None) -> None:
    assert compile_stage(line) == shown


def test_without_a_terminal_a_line_is_printed_every_ten_seconds() -> None:
    out, clock = io.StringIO(), FakeClock()
    status = StatusLine("compiling", out, clock)
    for n in range(25):
        status.update(f"step {n}")
        clock.advance(1)
    status.finish("done")
    assert out.getvalue().splitlines() == [
        "compiling  0:00  step 0",
        "compiling  0:10  step 10",
        "compiling  0:20  step 20",
        "compiling  0:25  done",
    ]


def test_on_a_terminal_one_line_is_drawn_again() -> None:
    out, clock = Terminal(), FakeClock()
    status = StatusLine("compiling", out, clock)
    status.update("a" * 500)
    clock.advance(75)
    status.finish("done")
    first, second = out.getvalue().split("\r\033[K")[1:]
    assert len(first) < 500
    assert second == "compiling  1:15  done\n"


def test_a_commands_output_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "new" / "run.log"
    run("printing", [sys.executable, "-c", "print('[1/1] a.c')"], stage=compile_stage, log=log)
    assert log.read_text() == "[1/1] a.c\n"
    assert capsys.readouterr().err.splitlines()[-1].endswith("done")


def test_a_failing_command_shows_the_end_of_its_output(tmp_path: Path) -> None:
    code = "import sys; print(*range(100), sep='\\n'); sys.exit('boom')"
    with pytest.raises(CommandError) as caught:
        run("failing", [sys.executable, "-c", code], stage=compile_stage, log=tmp_path / "log")
    assert caught.value.returncode == 1
    assert "boom" in caught.value.tail
    assert "50" not in caught.value.tail.splitlines()
    assert len(caught.value.log.read_text().splitlines()) == 101
