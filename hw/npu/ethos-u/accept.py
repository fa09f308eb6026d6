"""Ask a board with SSCMA firmware what it is and how fast it is, and write a report to send back.

    python hw/npu/ethos-u/accept.py --port /dev/ttyACM0 [--json report.json]

Needs edge_rt[power] and a board; the model is the one in its flash.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt.devices.sscma import Sscma, connect
from edge_rt.devices.sscma_wire import BAUD
from edge_rt.errors import DeviceError
from hw.npu.acceptance import about, give, json_option, spread


def examine(board: Sscma, n_runs: int) -> dict[str, Any]:
    """Run the board's model n_runs times; what fails is told in the report, with all that was found before."""
    report: dict[str, Any] = about()
    rounds_s: list[float] = []
    infers_s: list[float] = []
    try:
        report["board"] = asdict(board.identify())
        report["models"] = msgspec.to_builtins(board.models())
        report["running"] = msgspec.to_builtins(board.model())
        report["sensors"] = msgspec.to_builtins(board.sensors())
        report["labels"] = board.labels()
        for _ in range(n_runs):
            begun_s = time.monotonic()
            (sight,) = board.invoke(1)
            rounds_s.append(time.monotonic() - begun_s)
            infers_s.append(sight.infer_s)
            report["last"] = {"boxes": len(sight.answer.boxes), "labels": len(sight.answer.labels)}
    except DeviceError as exc:
        report["failed"] = str(exc)
    return report | {"n_runs": len(rounds_s), "by_the_board_s": spread(infers_s), "round_s": spread(rounds_s)}


@click.command()
@click.option("--port", required=True)
@click.option("--baud", default=BAUD, show_default=True)
@click.option("--runs", default=50, show_default=True, type=click.IntRange(1, 10_000))
@json_option
def main(port: str, baud: int, runs: int, file: Path | None) -> None:
    """Examine the board at PORT; ends with 1 where something failed."""
    with connect(port, baud) as board:
        report = examine(board, runs)
    give(report, file)


if __name__ == "__main__":
    main()
