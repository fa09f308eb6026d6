from __future__ import annotations

import io

import pytest

from edge_rt.catalog.part import Phase, PullProgress
from edge_rt.cli.progress import Lines, pull_progress, size_text
from tests.fakes import FakeClock


def step(phase: Phase, done: int = 0, total: int | None = None, variant: str = "q4_0") -> PullProgress:
    return PullProgress(model="m", variant=variant, file="m.gguf", phase=phase, done_bytes=done, total_bytes=total)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_for_each_phase_and_one_every_five_seconds(clock: FakeClock) -> None:
    out = io.StringIO()
    lines = Lines(out, clock)
    lines.show(step("wait"))
    lines.show(step("fetch", 1_000_000, 10_000_000))
    lines.show(step("fetch", 2_000_000, 10_000_000))
    clock.advance(5)
    lines.show(step("fetch", 3_000_000, 10_000_000))
    lines.show(step("fetch", 4_000_000, 10_000_000, variant="q8_0"))
    lines.show(step("done", 10_000_000, 10_000_000))
    assert out.getvalue().splitlines() == [
        "m:q4_0: waiting for another process that pulls it",
        "m:q4_0: fetching, 1.0 MB of 10.0 MB",
        "m:q4_0: fetching, 3.0 MB of 10.0 MB",
        "m:q8_0: fetching, 4.0 MB of 10.0 MB",
        "m:q4_0: ready, 10.0 MB",
    ]


def test_a_pipe_gets_lines_without_control_characters() -> None:
    out = io.StringIO()
    with pull_progress(out) as show:
        show(step("fetch", 1, 2))
    assert out.getvalue() == "m:q4_0: fetching, 1 B of 2 B\n"


def test_a_terminal_gets_a_bar_and_keeps_one_line() -> None:
    pytest.importorskip("tqdm", reason="the extra cli is not installed")
    out = FakeTerminal()
    with pull_progress(out) as show:
        show(step("fetch", 5_000_000, 10_000_000))
        show(step("fetch", 10_000_000, 10_000_000))
        show(step("done", 10_000_000, 10_000_000))
    assert "m:q4_0: fetching" in out.getvalue()
    assert "m:q4_0: ready, 10.0 MB\n" in out.getvalue()


@pytest.mark.parametrize(("n_bytes", "text"), [(0, "0 B"), (99_999, "99999 B"), (98_362_432, "98.4 MB")])
def test_size_text(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text
