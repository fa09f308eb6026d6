"""Ask a board with SSCMA firmware what it is and how fast it is, and write a report to send back.

    python hw/npu/ethos-u/accept.py --port /dev/ttyACM0 [--json report.json]

Needs edge_rt[power] and a board; the model is the one in its flash.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_rt.devices.sscma import Sscma, connect
from edge_rt.devices.sscma_wire import BAUD
from edge_rt.errors import DeviceError
from edge_rt.version import VERSION


def examine(board: Sscma, n_runs: int) -> dict[str, Any]:
    """Run the board's model n_runs times; what fails is told in the report, with all that was found before."""
    report: dict[str, Any] = {"edge_rt": VERSION, "python": platform.python_version()}
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
    report["n_runs"] = len(rounds_s)
    for name, values in (("by_the_board", infers_s), ("round", rounds_s)):
        if values:
            ordered = sorted(values)
            report[f"{name}_median_s"] = ordered[len(ordered) // 2]
            report[f"{name}_worst_s"] = ordered[-1]
    return report


@click.command()
@click.option("--port", required=True)
@click.option("--baud", default=BAUD, show_default=True)
@click.option("--runs", default=50, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too.")
def main(port: str, baud: int, runs: int, file: Path | None) -> None:
    """Examine the board at PORT; ends with 1 where something failed."""
    with connect(port, baud) as board:
        report = examine(board, runs)
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")
    sys.exit("failed" in report)


if __name__ == "__main__":
    main()
