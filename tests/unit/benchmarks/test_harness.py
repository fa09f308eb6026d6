from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import harness


def _pair(a: list[float], b: list[float]) -> harness.Pair:
    return harness.Pair(name_a="a", name_b="b", a=tuple(a), b=tuple(b))


def test_runs_alternate_and_the_order_changes() -> None:
    order: list[str] = []
    rates = iter(range(1, 100))

    def run(name: str) -> float:
        order.append(name)
        return float(next(rates))

    lines: list[str] = []
    pair = harness.paired("x", lambda: run("a"), "y", lambda: run("b"), n_pairs=3, n_warmup=1, say=lines.append)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert pair.a == (3.0, 6.0, 7.0)
    assert pair.b == (4.0, 5.0, 8.0)
    assert lines[0] == "1/3: x 3.00, y 4.00, ratio 0.750"


def test_the_ratio_is_the_median_of_pairs_and_not_of_all() -> None:
    pair = _pair([10.0, 1.0, 4.0], [20.0, 1.0, 5.0])
    assert pair.ratios == (0.5, 1.0, 0.8)
    assert pair.median_ratio == 0.8


def test_a_claim_holds_by_its_median() -> None:
    pair = _pair([1.0, 0.98, 0.1], [1.0, 1.0, 1.0])
    assert harness.Claim(name="c", pair=pair, at_least=0.97).holds
    assert not harness.Claim(name="c", pair=pair, at_least=0.99).holds
    assert harness.Claim(name="c", pair=pair).holds


def test_arguments() -> None:
    arguments = harness.parse("x", ["--quick", "--json", "out.json"])
    assert (arguments.quick, arguments.check, arguments.json_file) == (True, False, Path("out.json"))
    assert arguments.pairs(7, quick=3) == 3
    assert harness.parse("x", []).pairs(7, quick=3) == 7


def test_finish_prints_and_writes_and_fails_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    claims = [harness.Claim(name="decode", pair=_pair([1.0, 1.0], [2.0, 2.0]), at_least=0.9)]
    for options, code in (([], 0), (["--check"], 1)):
        with pytest.raises(SystemExit) as exit_:
            harness.finish(harness.parse("x", [*options, "--json", str(file)]), claims, {"note": "n"})
        assert exit_.value.code == code
    shown = capsys.readouterr().out
    assert "| decode | a | b |     1.00 |     2.00 |      0.500 |" in shown
    assert "NO |" in shown
    record = json.loads(file.read_text())
    assert record["claims"][0]["ratio_median"] == 0.5
    assert record["claims"][0]["holds"] is False
    assert record["machine"]["kernel"] == os.uname().release
    assert record["note"] == "n"


def test_neighbours_run_in_the_block_and_are_gone_after_it() -> None:
    core = min(os.sched_getaffinity(0))
    with harness.busy_neighbours(2, [core]) as pids:
        assert len(set(pids)) == 2
        for pid in pids:
            assert os.sched_getaffinity(pid) == {core}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_neighbours_end_with_a_block_that_fails() -> None:
    started: list[int] = []

    def fail_among_neighbours() -> None:
        with harness.busy_neighbours(1) as pids:
            started.extend(pids)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail_among_neighbours()
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_figure_holds_up_to_its_bar_in_the_median() -> None:
    figure = harness.Figure(name="f", unit="s", samples=(9.0, 1.0, 2.0), at_most=2.0)
    assert figure.holds
    assert not harness.Figure(name="f", unit="s", samples=(2.1,), at_most=2.0).holds
    assert "| f " in harness.figures_table([figure])


def test_check_names_each_bar_that_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = harness.Arguments(quick=True, check=True, json_file=None)
    missed = harness.Figure(name="too slow", unit="s", samples=(3.0,), at_most=2.0)
    held = harness.Figure(name="fast", unit="s", samples=(1.0,), at_most=2.0)
    with pytest.raises(SystemExit) as ended:
        harness.finish(arguments, figures=[missed, held])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "missed: too slow\n"
    with pytest.raises(SystemExit) as ended:
        harness.finish(arguments, figures=[held])
    assert ended.value.code == 0
