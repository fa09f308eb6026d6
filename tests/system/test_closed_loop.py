"""The loop of board, powerd, daemon and model: modelled watts, real inference; measured by benchmarks/board.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.plants.closed_loop import CgroupQuota, DutyQuota, activity, share_of
from tests.plants.fuse_board import FuseBoard, why_not
from tests.plants.inference import Loop, loop
from tests.plants.powerd_process import Powerd

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture
def held(model_forms: dict[str, Path], socket_dir: Path) -> Iterator[Loop]:
    """A board whose clock only the test sets."""
    if "q4_0" not in model_forms:
        pytest.skip("the default model's q4_0 is not in the store; `edge_rt models pull` fetches it")
    with loop("x86", socket_dir, model_forms["q4_0"].parents[2]) as found:
        yield found


def test_the_worker_runs_at_the_boards_clock_and_edge_rts_meter_counts_its_joules(held: Loop) -> None:
    for khz in (3_400_000, 800_000):
        held.set_governor("performance", khz)
        run = held.run("held", [0.0] * 3, seed=1, max_tokens=48, is_closed=True)
        assert all(answer.n_tokens == 48 for answer in run.answers)
        assert run.mean_hz == pytest.approx(khz * 1e3, rel=0.15)
        # Decoding is the fastest of what it does at a low clock, for it waits for memory the same.
        assert run.cpu_s <= 1.2 * share_of("decode", khz / 3_400_000) * run.span_s
        assert run.meter_coverage > 0.8
        assert run.meter_error < 0.15  # its edges are blurred when the machine is busy
        assert run.soc_j < run.board_j


def test_what_powerd_sets_is_felt_and_given_back(model_forms: dict[str, Path], socket_dir: Path) -> None:
    if "q4_0" not in model_forms:
        pytest.skip("the default model's q4_0 is not in the store; `edge_rt models pull` fetches it")
    with ExitStack() as stack:
        daemons: list[Powerd] = []

        def begin(board: FuseBoard) -> None:
            daemons.append(stack.enter_context(Powerd(board.root, socket_dir)))

        found = stack.enter_context(loop("pi_5", socket_dir, model_forms["q4_0"].parents[2], begin))
        run = found.run("powerd", [0.0, 0.3, 0.3], seed=1, max_tokens=48, is_closed=False)
        (powerd,) = daemons
        status = powerd.until(lambda status: status["work"] == "idle")
        assert status["n_writes"] > 2
        assert all(answer.n_tokens == 48 for answer in run.answers)
        assert run.mean_hz < 2.4e9
        written = {int(text) for _, path, text, _ in found.board.tell("writes") if path.endswith("scaling_max_freq")}
        assert len(written) > 1
        powerd.process.terminate()  # type: ignore[union-attr]
        powerd.process.wait(20.0)  # type: ignore[union-attr]
        assert found.board.tell("state")["limits"]["policy0"] == [600_000, 2_400_000]


_BUSY = """
import time
input()
wall_s, cpu_s = time.monotonic(), time.process_time()
while time.monotonic() - wall_s < 1.5:
    pass
print((time.process_time() - cpu_s) / (time.monotonic() - wall_s))
"""


@pytest.mark.parametrize("kind", [CgroupQuota, DutyQuota])
def test_a_quota_holds_a_process_down_and_lets_it_go(kind: type[CgroupQuota] | type[DutyQuota]) -> None:
    command = [sys.executable, "-c", _BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            try:
                quota = kind([process.pid], 1)
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            quota.set(0.25)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            share = float(process.stdout.readline())
            quota.close()
            assert share < 0.6
            assert process.wait(10.0) == 0  # what is left stopped does not end
        finally:
            process.kill()


def test_only_computing_follows_the_clock() -> None:
    assert share_of("prefill", 0.25) == 0.25
    assert 0.55 < share_of("decode", 0.25) < 0.65
    assert share_of("decode", 1.0) == activity("prefill", 0.25) == 1.0
    assert activity("decode", 1.0) < activity("decode", 0.25) < 1.0
