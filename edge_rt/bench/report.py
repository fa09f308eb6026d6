"""Results as llama-bench prints them: Markdown, JSON, JSON lines or CSV, its keys first and edge_rt's after them."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from edge_rt.bench.runner import Result
from edge_rt.bench.samples import quantile, summarise
from edge_rt.devices.base import Reading

Format = Literal["md", "json", "jsonl", "csv"]
FORMATS: tuple[Format, ...] = ("md", "json", "jsonl", "csv")
_PERCENTILES = (50, 90, 99)

# Columns that llama-bench's table shows only when the parameter was given: name and width.
_SWEPT = {"n_batch": 7, "n_ubatch": 8, "type_k": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the numbers were measured; every result carries it."""

    cpu_info: str
    cpu_features: str
    board: str | None
    kernel: str
    governor: str | None
    edge_rt_version: str


class Writer(Protocol):
    """Turns results into text as they come in; each method's text ends with a newline or is empty."""

    def header(self) -> str: ...
    def row(self, result: Result) -> str: ...
    def footer(self) -> str: ...


def writer(kind: Format, machine: Machine, swept: Sequence[str] = ()) -> Writer:
    """Make the writer of a format. swept names the parameters the table shows because they were given."""
    if kind == "json":
        return _Json(machine)
    if kind == "jsonl":
        return _JsonLines(machine)
    if kind == "csv":
        return _Csv(machine)
    return _Markdown(machine, swept)


def record(result: Result, machine: Machine) -> dict[str, Any]:
    """Make the JSON object of a result: llama-bench's keys in its order, then ours. Unknown is null with a reason."""
    case, info = result.case, result.info
    samples_ns = [max(1, r.elapsed_ns) for r in result.repetitions]
    samples_ts = [1e9 * case.n_tokens / ns for ns in samples_ns]
    time_ns, rate = summarise(samples_ns), summarise(samples_ts)
    return {
        "build_commit": f"edge_rt-{machine.edge_rt_version}",
        "build_number": None,
        "cpu_info": machine.cpu_info,
        "gpu_info": "",
        "backends": info.backend,
        "model_filename": str(result.target.file.path),
        "model_type": model_type(result),
        "model_size": info.size_bytes,
        "model_n_params": info.n_params,
        "n_batch": case.n_batch,
        "n_ubatch": case.n_ubatch,
        "n_threads": case.n_threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": None,
        "type_k": result.kv_type,
        "type_v": result.kv_type,
        "n_gpu_layers": 0,
        "flash_attn": None,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.n_depth,
        "test_time": result.started_at,
        "avg_ns": round(time_ns.mean),
        "stddev_ns": round(time_ns.stddev),
        "avg_ts": round(rate.mean, 6),
        "stddev_ts": round(rate.stddev, 6),
        "samples_ns": samples_ns,
        "samples_ts": [round(ts, 6) for ts in samples_ts],
        "median_ts": round(rate.median, 6),
        "q1_ts": round(rate.q1, 6),
        "q3_ts": round(rate.q3, 6),
        "min_ts": round(rate.min, 6),
        "max_ts": round(rate.max, 6),
        **_latency(
            "ttft", [r.prompt_ns for r in result.repetitions if r.prompt_ns is not None], "no prompt in this test"
        ),
        **_latency("tpot", [ns for r in result.repetitions for ns in r.token_ns], "no decoded tokens in this test"),
        "rss_bytes": result.rss_bytes.value,
        **_reason("rss_bytes", result.rss_bytes),
        "peak_temp_c": result.peak_temp_c.value,
        **_reason("peak_temp_c", result.peak_temp_c),
        "throttled": result.throttled.value,
        **_reason("throttled", result.throttled),
        **_energy(result),
        "power_source": result.power.name,
        "power_boundary": result.power.boundary,
        "power_quality": result.power.quality,
        "model_id": result.target.file.model,
        "variant": result.target.file.variant,
        "device": info.device,
        "backend_detail": result.target.detail,
        "cpu_features": machine.cpu_features,
        "board": machine.board,
        "kernel": machine.kernel,
        "governor": machine.governor,
    }


def model_type(result: Result) -> str:
    """Describe the model as llama.cpp does: "llama 134.52M Q4_0"."""
    info = result.info
    return f"{info.arch} {_count(info.n_params).replace(' ', '')} {info.quant}"


def _latency(name: str, samples_ns: Sequence[int], reason: str) -> dict[str, Any]:
    keys = [f"{name}_p{p}_s" for p in _PERCENTILES]
    if not samples_ns:
        return {**dict.fromkeys(keys), f"{name}_reason": reason}
    values = [round(quantile(samples_ns, p / 100) / 1e9, 9) for p in _PERCENTILES]
    return {**dict(zip(keys, values, strict=True)), f"{name}_reason": ""}


def _reason(name: str, reading: Reading[Any]) -> dict[str, str]:
    return {f"{name}_reason": "" if reading.value is not None else f"{reading.source}: {reading.reason}"}


def _energy(result: Result) -> dict[str, Any]:
    """Energy over the timed passes only: everything within the meter's boundary, neighbours and idle power included."""
    energies = [r.energy_j for r in result.repetitions]
    missing = next((e for e in energies if e.value is None), None)
    total_j = sum(e.value or 0.0 for e in energies)
    elapsed_s = sum(r.elapsed_ns for r in result.repetitions) / 1e9
    watts: float | None = round(total_j / elapsed_s, 4)
    per_token: float | None = round(total_j / (result.case.n_tokens * len(energies)), 6)
    reason = ""
    if missing is not None:
        watts, per_token, reason = None, None, f"{missing.source}: {missing.reason}"
    return {
        "avg_watts": watts,
        "avg_watts_reason": reason,
        "joules_per_token": per_token,
        "joules_per_token_reason": reason,
    }


class _Json:
    def __init__(self, machine: Machine) -> None:
        self._machine, self._n_rows = machine, 0

    def header(self) -> str:
        return "[\n"

    def row(self, result: Result) -> str:
        self._n_rows += 1
        body = textwrap.indent(json.dumps(record(result, self._machine), indent=2), "  ")
        return (",\n" if self._n_rows > 1 else "") + body

    def footer(self) -> str:
        return "\n]\n" if self._n_rows else "]\n"


class _JsonLines:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def header(self) -> str:
        return ""

    def row(self, result: Result) -> str:
        return json.dumps(record(result, self._machine)) + "\n"

    def footer(self) -> str:
        return ""


class _Csv:
    """One line per result; the samples are summed up in the other columns, as in llama-bench. Unknown is empty."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._has_header = machine, False

    def header(self) -> str:
        return ""  # comes with the first row, whose keys it lists

    def row(self, result: Result) -> str:
        values = {k: v for k, v in record(result, self._machine).items() if not isinstance(v, list)}
        text = io.StringIO()
        if not self._has_header:
            text.write(",".join(values) + "\n")
            self._has_header = True
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(map(_csv_value, values.values()))
        return text.getvalue()

    def footer(self) -> str:
        return ""


class _Markdown:
    """llama-bench's table, filled row by row, and below it a second one with latencies and the device's state."""

    def __init__(self, machine: Machine, swept: Sequence[str]) -> None:
        self._machine = machine
        self._records: list[tuple[str, dict[str, Any]]] = []
        # Name -> width; negative is flush left. The widths are llama-bench's, so that rows can be printed as they come.
        self._columns = {"model": -30, "size": 10, "params": 10, "backend": -10, "threads": 7}
        self._columns |= {name: _SWEPT[name] for name in swept if name in _SWEPT}
        self._columns |= {"test": 15, "t/s": 20}

    def header(self) -> str:
        names = _line([_pad(name, width) for name, width in self._columns.items()])
        rules = _line(["-" * (abs(width) - 1) + (":" if width > 0 else "-") for width in self._columns.values()])
        return names + rules

    def row(self, result: Result) -> str:
        values = record(result, self._machine)
        self._records.append((result.case.name, values))
        cells = {
            "model": values["model_type"],
            "size": _size(values["model_size"]),
            "params": _count(values["model_n_params"]),
            "backend": values["backends"],
            "threads": str(values["n_threads"]),
            "test": result.case.name,
            "t/s": f"{values['avg_ts']:.2f} ± {values['stddev_ts']:.2f}",
        }
        return _line([_pad(cells.get(name, str(values.get(name))), width) for name, width in self._columns.items()])

    def footer(self) -> str:
        if not self._records:
            return ""
        head = [*self._identity(), "test", "median t/s", "ttft ms p50 / p90 / p99", "tpot ms p50 / p90 / p99"]
        head += ["RSS", "peak °C", "watts", "J/token", "throttled"]
        rows = [
            [*(str(values[key]) for key in self._identity().values()), name, *_details(values)]
            for name, values in self._records
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        table = _line([cell.rjust(width) for cell, width in zip(head, widths, strict=True)])
        table += _line(["-" * (width - 1) + ":" for width in widths])
        table += "".join(_line([cell.rjust(w) for cell, w in zip(row, widths, strict=True)]) for row in rows)
        last = self._records[-1][1]
        reasons: dict[str, list[str]] = {}
        for name in ("rss_bytes", "peak_temp_c", "avg_watts", "joules_per_token", "throttled"):
            if last[name] is None:
                reasons.setdefault(last[f"{name}_reason"], []).append(name)
        notes = "".join(f"{', '.join(names)}: {reason}\n" for reason, names in reasons.items())
        if last["power_boundary"] is not None:
            notes += (
                f"watts, J/token: of the {last['power_boundary']}, {last['power_quality']} ({last['power_source']})\n"
            )
        builds = dict.fromkeys(f"build: {v['build_commit']}, {v['backend_detail']}\n" for _, v in self._records)
        return f"\n{table}\n{notes}cpu: {self._machine.cpu_info}\n{''.join(builds)}"

    def _identity(self) -> dict[str, str]:
        """Name the columns, and their keys, that differ between rows besides the test."""
        keys = {"model": "model_type", "threads": "n_threads", "n_batch": "n_batch", "n_ubatch": "n_ubatch"}
        return {name: key for name, key in keys.items() if len({values[key] for _, values in self._records}) > 1}


def _details(values: dict[str, Any]) -> list[str]:
    return [
        f"{values['median_ts']:.2f}",
        _milliseconds(values, "ttft"),
        _milliseconds(values, "tpot"),
        _size(values["rss_bytes"]) if values["rss_bytes"] is not None else "-",
        f"{values['peak_temp_c']:.1f}" if values["peak_temp_c"] is not None else "-",
        f"{values['avg_watts']:.2f}" if values["avg_watts"] is not None else "-",
        f"{values['joules_per_token']:.4f}" if values["joules_per_token"] is not None else "-",
        {True: "yes", False: "no", None: "-"}[values["throttled"]],
    ]


def _milliseconds(values: dict[str, Any], name: str) -> str:
    found = [values[f"{name}_p{p}_s"] for p in _PERCENTILES]
    return " / ".join(f"{1e3 * s:.2f}" for s in found) if None not in found else "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _pad(text: str, width: int) -> str:
    return text.rjust(width) if width > 0 else text.ljust(-width)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.2f} MiB" if n_bytes < 2**30 else f"{n_bytes / 2**30:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"


def _csv_value(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    return "" if value is None else value
