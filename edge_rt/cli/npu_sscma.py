"""`edge_rt npu sscma`: boards with SSCMA firmware, which run a model of their own on what their camera sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from tabulate import tabulate

from edge_rt.devices.sscma import ALGORITHMS, SENSORS, Sscma, connect
from edge_rt.devices.sscma_results import Sight
from edge_rt.devices.sscma_wire import BAUD

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


@click.group("sscma", short_help="Ask a board with SSCMA firmware what its camera sees.")
@click.option("--port", required=True, type=click.Path(path_type=Path), help="Such as /dev/ttyACM0.")
@click.option("--baud", default=BAUD, show_default=True, type=click.IntRange(300, 4_000_000), help="The line's speed.")
@click.pass_context
def command(ctx: click.Context, port: Path, baud: int) -> None:
    """Ask a board at a serial port: Grove Vision AI V2, XIAO ESP32-S3 Sense and others with SSCMA firmware.

    The model and the camera are the board's. docs/npu.md tells more.
    """
    ctx.obj = connect(str(port), baud)
    ctx.call_on_close(ctx.obj.close)


@command.command("info", short_help="Show the board, its models and cameras.")
@_JSON
@click.pass_obj
def info(board: Sscma, as_json: bool) -> None:
    """Show who answers, which models are in its flash and which one runs."""
    identity, models, sensors = board.identify(), board.models(), board.sensors()
    running = board.model().id if models else None
    labels = board.labels()
    if as_json:
        said = {"board": identity, "running": running, "models": models, "sensors": sensors, "labels": labels}
        _print_json(said)
        return
    click.echo(f"{identity.name} {identity.id}, firmware {identity.firmware}, protocol {identity.at_api}")
    rows = [
        [each.id, ALGORITHMS.get(each.algorithm, str(each.algorithm)), each.size, "runs" if each.id == running else ""]
        for each in models
    ]
    click.echo(tabulate(rows, ["MODEL", "KIND", "BYTES", ""], tablefmt="plain") if rows else "no model in its flash")
    if labels:
        click.echo(f"classes: {', '.join(labels)}")
    for sensor in sensors:
        click.echo(f"{SENSORS.get(sensor.kind, 'sensor')} {sensor.id}")


@command.command("use", short_help="Let it run another of its models.")
@click.argument("model", type=int)
@click.pass_obj
def use(board: Sscma, model: int) -> None:
    """Let the board run MODEL, a number that `info` shows."""
    click.echo(f"model {board.use_model(model).id} runs")


@command.command("invoke", short_help="Print what it sees.")
@click.option("-n", "--count", default=1, show_default=True, type=click.IntRange(0, 65535), help="Times; 0: until ^C.")
@click.option("--changes", is_flag=True, help="Leave out results like the one before.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Keep the last picture here (JPEG).")
@click.option(
    "--wait", "timeout_s", default=10.0, show_default=True, type=click.FloatRange(0.1), help="Seconds a result."
)
@_JSON
@click.pass_obj
def invoke(board: Sscma, count: int, changes: bool, picture: Path | None, timeout_s: float, as_json: bool) -> None:
    """Let the board look with its camera, and print what its model finds."""
    limit_s = float("inf") if changes else timeout_s
    for sight in board.invoke(count or None, with_picture=picture is not None, only_changes=changes, timeout_s=limit_s):
        if picture is not None:
            picture.write_bytes(sight.jpeg)
        if as_json:
            _print_json(_found(sight))
            continue
        for box in sight.answer.boxes:
            click.echo(f"{box.label}  {box.score:.2f}  {box.x:.0f},{box.y:.0f} {box.width:.0f}×{box.height:.0f}")
        for label in sight.answer.labels:
            click.echo(f"{label.label}  {label.score:.2f}")
        if not sight.answer.boxes and not sight.answer.labels:
            click.echo("nothing")
        click.echo(f"[{sight.infer_s * 1e3:.0f} ms in the board's model, by the board]", err=True)


def _found(sight: Sight) -> dict[str, Any]:
    return {
        "boxes": sight.answer.boxes,
        "labels": sight.answer.labels,
        "width": sight.answer.width,
        "height": sight.answer.height,
        "preprocess_s": sight.preprocess_s,
        "infer_s": sight.infer_s,
        "postprocess_s": sight.postprocess_s,
    }


def _print_json(said: dict[str, Any]) -> None:
    click.echo(msgspec.json.encode(said).decode())
