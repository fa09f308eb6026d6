"""`edge_rt status`: how the service does, in a few lines."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any, Protocol

import click

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.cli.scrape import Scrape
from edge_rt.cli.talk import daemon_path
from edge_rt.errors import EdgeRtError
from edge_rt.power.client import ask
from edge_rt.service import inspection
from edge_rt.service.inspection import Unit
from edge_rt.service.system import Host, Machine
from edge_rt.service.units import ALL_UNITS, DAEMON
from edge_rt.turns import PRIORITIES

_TIMEOUT_S = 5.0
_OF_POWERD = ("state", "stopped_by", "reason", "power_w", "power_age_s", "boundary", "slow_sensors")


class _Daemon(Protocol):
    """What is asked of a daemon."""

    def models(self) -> list[dict[str, Any]]: ...

    def metrics_text(self) -> str: ...


@click.command("status", short_help="Show how the service does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(above: config.Loaded | None, as_json: bool) -> None:
    """Show the units of systemd, the socket, the models in memory, the power helper and the last error.

    Of a language model it shows who runs and waits by priority, and what is kept of prompts.

    Asking starts a daemon whose socket is open: that is what the socket is for. The exit code is 0 if it
    answers.
    """
    settings = (above or config.load()).config
    found = gather(settings, Host())
    click.echo(json.dumps(found, indent=2) if as_json else text(found))
    if not found["daemon"]["answers"]:
        raise click.exceptions.Exit(1)


def gather(settings: config.Config, machine: Machine) -> dict[str, Any]:
    """Ask systemd, the daemon and the journal."""
    units = inspection.look(machine, ALL_UNITS)
    there = [unit for unit in units or () if unit.is_there]
    return {
        "systemd": units is not None,
        "units": [asdict(unit) for unit in there],
        "daemon": _ask(settings),
        "power": _power(settings),
        "last_errors": list(inspection.last_errors(machine, DAEMON)) if there else [],
    }


def _ask(settings: config.Config) -> dict[str, Any]:
    path = daemon_path(settings.server, os.environ)
    if path is None:
        return {"answers": False, "socket": None, "problem": "no place for a socket: XDG_RUNTIME_DIR is not set"}
    try:
        with Client(path, timeout_s=_TIMEOUT_S) as client:
            return {"socket": str(path), **_told(client)}
    except EdgeRtError as exc:
        return {"answers": False, "socket": str(path), "problem": str(exc)}


def _told(daemon: _Daemon) -> dict[str, Any]:
    """Say what a daemon tells of itself; without metrics that can be read it answers all the same."""
    models = daemon.models()
    loaded = {model["id"]: model.get("meta", {}).get("evidence") for model in models if model["status"] == "loaded"}
    told = {
        "answers": True,
        "problem": "",
        "models": list(loaded),
        "stand_ins": {model: evidence for model, evidence in loaded.items() if evidence},
        "n_pulled": len(models),
    }
    try:
        told["language_models"] = _language_models(Scrape.of(daemon.metrics_text(), 0.0))
    except (EdgeRtError, ValueError, LookupError) as exc:  # the parser's are the last two
        told["metrics_problem"] = str(exc)
    return told


def _language_models(scrape: Scrape) -> list[dict[str, Any]]:
    """Tell of the language models in memory, which have KV cells."""
    return [_language_model(model, scrape) for model in scrape.models() if scrape.count("kv_cells", model) is not None]


def _language_model(model: str, scrape: Scrape) -> dict[str, Any]:
    """Say how a loaded language model's requests stand and what is kept of prompts."""
    states = ("running", "waiting")
    return {
        "model": model,
        "requests": {
            priority: {state: scrape.priorities.get((model, priority, state), 0) for state in states}
            for priority in PRIORITIES
        },
        "kv_cells": scrape.count("kv_cells", model),
        "kv_cells_used": scrape.count("kv_cells_used", model),
        "prefix_bytes": scrape.count("prefix_bytes", model),
        "prefix_disk_bytes": scrape.count("prefix_disk_bytes", model),
        "prefix_hits": scrape.count("prefix_hits_total", model),
        "pins": scrape.count("pinned_prefixes", model),
        "pins_with_problem": scrape.count("pins_with_problem", model),
    }


def _power(settings: config.Config) -> dict[str, Any]:
    """Ask powerd; a few of the things it tells."""
    path = settings.power.socket_path
    if not path or not os.path.lexists(path):
        is_missed = settings.power.enabled
        return {"answers": False, "problem": f"power.enabled is set, but no powerd is at {path!r}" if is_missed else ""}
    try:
        told = ask(path, "status")
    except EdgeRtError as exc:
        return {"answers": False, "problem": str(exc)}
    return {"answers": True, **{key: told.get(key) for key in _OF_POWERD}}


def _power_line(power: dict[str, Any]) -> str:
    if not power["answers"]:
        return f"power: {power['problem']}"
    watts = f", {power['power_w']:.1f} W ({power['boundary']})" if power["power_w"] is not None else ""
    slow = [
        f"{name}, {times['read_s']:.2g} s a reading" + (f", {times['age_s']:.2g} s old" if "age_s" in times else "")
        for name, times in (power["slow_sensors"] or {}).items()
    ]
    beside = f"; slow: {'; '.join(slow)}" if slow else ""
    return f"power: {power['state']}, {power['stopped_by'] or power['reason']}{watts}{beside}"


def _language_lines(told: dict[str, Any]) -> list[str]:
    """Write what _language_model says of a model."""
    requests = told["requests"]
    running, waiting = (sum(each[state] for each in requests.values()) for state in ("running", "waiting"))
    which = [f"{name} {n['running']} + {n['waiting']}" for name, n in requests.items() if n["running"] or n["waiting"]]
    by_priority = f" ({', '.join(which)})" if which else ""
    wrong = told["pins_with_problem"]
    return [
        f"{told['model']}: {running} running, {waiting} waiting{by_priority}",
        f"  prefixes: {told['kv_cells_used']} of {told['kv_cells']} cells in use; "
        f"{told['prefix_bytes'] / 2**20:.0f} MiB kept, {told['prefix_disk_bytes'] / 2**20:.0f} MiB on disk; "
        f"{told['prefix_hits']} hits; {told['pins']} pinned",
    ] + [f"  {wrong} pins are not kept", "  → edge_rt prefix list"] * bool(wrong)


def text(found: dict[str, Any]) -> str:
    """Write it for people."""
    lines = []
    for fields in found["units"]:
        unit = Unit(**fields)
        parts = [f"{unit.state} ({unit.sub_state})", "enabled" if unit.is_enabled else "not enabled"]
        if unit.pid is not None:
            parts.append(f"pid {unit.pid}")
        if unit.memory_bytes is not None:
            parts.append(f"{unit.memory_bytes / 2**20:.0f} MiB")
        if unit.n_restarts:
            parts.append(f"restarted {unit.n_restarts} times")
        lines.append(f"{unit.name}: {', '.join(parts)}")
        if unit.says:
            lines.append(f"  {unit.says}")
        if (wrong := inspection.problem(unit)) is not None:
            lines += [f"  {wrong[0]}", f"  → {wrong[1]}"]
        if unit.is_stale:
            lines += ["  its file has changed since systemd read it", "  → systemctl daemon-reload"]
    if not found["systemd"]:
        lines.append("service: none, systemd does not run this machine; a daemon may run by itself all the same")
    elif not found["units"]:
        lines.append("service: not installed, `edge_rt install` does it")
    daemon = found["daemon"]
    if daemon["answers"]:
        stand_ins = {model: f" ({evidence})" for model, evidence in daemon.get("stand_ins", {}).items()}
        models = ", ".join(model + stand_ins.get(model, "") for model in daemon["models"]) or "none"
        lines.append(f"daemon: answers on {daemon['socket']}; in memory: {models}; {daemon['n_pulled']} models pulled")
        for told in daemon.get("language_models", ()):
            lines += _language_lines(told)
        if "metrics_problem" in daemon:
            lines.append(f"  its metrics cannot be read: {daemon['metrics_problem']}")
    else:
        lines.append(f"daemon: {daemon['problem']}")
    if found["power"]["answers"] or found["power"]["problem"]:
        lines.append(_power_line(found["power"]))
    lines += [f"last error: {line}" for line in found["last_errors"][-1:]]
    return "\n".join(lines)
