"""`edge_rt power plan`: which kernel files powerd would write in which situation, and what it would write there."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields
from pathlib import Path

import click
from tabulate import tabulate

from edge_rt import config
from edge_rt.cli.power_setter import advice_words
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.assemble import groups, make_meter, make_policy, settable
from edge_rt.power.plan import Plan, plan
from edge_rt.power.sensing import Sensing
from edge_rt.power.settings import Settings
from edge_rt.power.snapshot import DEFAULT_FILE, BadSnapshotError, Snapshot, boot_id
from edge_rt.power.taker import own_limits


@click.command("plan", short_help="Show what powerd would set, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(above: config.Loaded | None, as_json: bool) -> None:
    """Show what powerd would write now, file by file, if the machine were idle, computing a prompt, decoding, hot, or
    above its cap; what it would advise the daemon then; and what keeps it from writing at all.

    Nothing is written. The values are the kernel's: kHz for CPUs, Hz for other devices, µW for the chip's own limit.
    """
    found = take(Path("/"), above or config.load(), DEFAULT_FILE)
    click.echo(json.dumps(asdict(found), indent=2) if as_json else text(found))


def take(root: Path, loaded: config.Loaded, snapshot_file: str) -> Plan:
    """Ask powerd's own parts what they would do on this machine."""
    power = loaded.config.power
    settings = Settings(**{field.name: getattr(power, field.name) for field in fields(Settings)})
    files, sysfs = KernelFiles(str(root)), SysfsRoot(root)
    snapshot = Snapshot(snapshot_file, boot_id(files))
    obstacles = []
    try:
        snapshot.load(keep=True)
    except BadSnapshotError as exc:
        obstacles.append(f"{snapshot_file} {exc}: if powerd has set clocks, they are taken for the user's own here")
    sensing = Sensing(sysfs, files, make_meter(settings, sysfs, _say), groups(sysfs))
    try:
        found = plan(
            settings,
            files,
            settable(sysfs, settings.actuators),
            sensing,
            lambda: make_policy(settings, _say),
            time.monotonic(),
            snapshot.values,
            own_limits(loaded.config),
        )
    finally:
        sensing.close()
        files.close()
    return Plan(situations=found.situations, obstacles=(*found.obstacles, *obstacles))


def text(found: Plan) -> str:
    """Draw it for people."""
    rows = []
    for one in found.situations:
        head = [one.situation, one.reason]
        for change in one.changes:
            rows.append([*head, f"/{change.path}", f"{change.now} → {change.then}"])
            head = ["", ""]
        if not one.changes:
            rows.append([*head, "nothing", one.nothing])
        if words := advice_words(asdict(one.advice)):
            rows.append(["", "", "advice to the daemon", words])
    table = tabulate(rows, ["WHEN", "WHY", "FILE", "WRITE"], tablefmt="plain", disable_numparse=True)
    return "\n".join([table, *(f"! {obstacle}" for obstacle in found.obstacles)])


def _say(priority: int, matter: str, line: str) -> None:
    """Pass on what goes wrong; what is merely so is in the plan itself."""
    del matter
    if priority <= 4:
        click.echo(f"edge_rt power plan: {line}", err=True)
