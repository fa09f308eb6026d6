"""A driver that plays an NPU: y = 2 x for the model whose compiled form says so. What goes wrong a file tells.

The environment's FAKE_NPU names a folder. A file there with the name of a call, or import, makes that call fail as the
file's text says: die (by SIGSEGV), exit, hang, memory, fail, absent; or wait until it is gone. Each call appends its
name to `calls`. A file `answers` makes runs give other arrays: shape, rows, type or more. A file `server` makes the
import start a process, a file `refuses` runs fail whose first number is the one in it. `version`, `driver` and `skew`
are what a probe tells.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(os.environ["FAKE_NPU"])


def _meet(call: str) -> None:
    with (_FOLDER / "calls").open("a") as log:
        log.write(f"{call}\n")
    try:
        fault = (_FOLDER / call).read_text()
    except FileNotFoundError:
        return
    if fault == "die":
        print("segmentation violation in libFake.so", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        time.sleep(60)
    if fault == "wait":
        while (_FOLDER / call).exists():
            time.sleep(0.01)
        return
    if fault == "memory":
        raise MemoryError("FAKE_COMMON_ERROR_MEM_ALLOC")
    if fault == "absent":
        raise ImportError("libFake.so: cannot open shared object file")
    raise RuntimeError(fault)


_meet("import")
if (_FOLDER / "server").exists():  # as Rockchip's toolkit starts adb's
    (_FOLDER / "server").write_text(str(subprocess.Popen(["sleep", "600"]).pid))


class Driver:
    def __init__(self) -> None:
        self._specs: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])

    def preload(self) -> None:
        _meet("preload")

    def probe(self) -> dict[str, Any]:
        _meet("probe")
        version = (_FOLDER / "version").read_text() if (_FOLDER / "version").exists() else "1.0"
        told = {name: _FOLDER / name for name in ("driver", "skew")}
        driver, skew = (path.read_text() if path.exists() else "" for path in told.values())
        device = {"id": "fake0", "detail": "an NPU of the test", "soc": "fk1", "evidence": "stub", "skew": skew}
        return {"devices": [device], "versions": {"compiler": version, "runtime": version, "driver": driver}}

    def capabilities(self, device: str, soc: str) -> dict[str, Any]:
        _meet("capabilities")
        bits = [(8, 8), (4, 16)] if soc == "fk2" else [(8, 8)]
        precisions = [{"weight_bits": w, "activation_bits": a, "granularity": "channel"} for w, a in bits]
        return {"precisions": precisions, "datatypes": ["FP32"], "is_confirmed": True}

    def compile(self, model: str, folder: str, soc: str, **_: Any) -> dict[str, Any]:
        _meet("compile")
        n_cpu = int((_FOLDER / "n_cpu").read_text()) if (_FOLDER / "n_cpu").exists() else 0
        Path(folder, "model.bin").write_text(f"{soc} {Path(model).name}")
        placement = [{"provider": "FAKE", "n_nodes": 4 - n_cpu, "kinds": [["Mul", 4 - n_cpu]], "reason": ""}]
        if n_cpu:
            reason = "the chip has no Erf"
            placement.append({"provider": "CPU", "n_nodes": n_cpu, "kinds": [["Erf", n_cpu]], "reason": reason})
        return {"files": ["model.bin"], "placement": placement, "facts": {"placement": placement}}

    def load(self, folder: str, facts: dict[str, Any], rows: int, **_: Any) -> dict[str, Any]:
        _meet("load")
        if not Path(folder, "model.bin").read_text().startswith("fk1"):
            raise ValueError("no program of this chip")
        shape = [rows or 2, 4]
        spec = {"datatype": "FP32", "shape": shape}
        return {
            "inputs": [{"name": "x", **spec}],
            "outputs": [{"name": "y", **spec}],
            "placement": facts["placement"],
        }

    def run(self, feeds: dict[str, Any], outputs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        _meet("run")
        if (_FOLDER / "refuses").exists() and float((_FOLDER / "refuses").read_text()) == feeds["x"].flat[0]:
            raise RuntimeError("graph execute error 1100")
        timings = json.loads('{"upload_s": 0.001, "compute_s": 0.002, "download_s": 0.001}')
        y = np.asarray(feeds["x"] * 2)
        how = (_FOLDER / "answers").read_text() if (_FOLDER / "answers").exists() else ""
        y = {"shape": y.reshape(-1), "rows": y[:0] if y.ndim else y, "type": y.astype("int8")}.get(how, y)
        return timings, dict.fromkeys([*outputs, "z"] if how == "more" else outputs, y)

    def telemetry(self) -> dict[str, Any]:
        _meet("telemetry")
        return {"power_w": 1.5, "power_source": "vendor"}
