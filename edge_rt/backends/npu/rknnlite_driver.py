"""Rockchip's runtime (rknn-toolkit-lite2) in its host process, on a board with the chip.

The board compiles nothing: what rknn_driver.py has compiled lies beside the model's file as NAME.SOC.rknn, with what
there is to know of it in NAME.SOC.rknn.json (hw/npu/rknn/convert.py makes both). Standard library, numpy and rknnlite.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .chip_heat import hottest_c
from .printed import Printed
from .rknn_driver import COMPILED, OPTIONS, SOCS

LIBRARIES = (
    "usr/lib/librknnrt.so",
    "usr/lib64/librknnrt.so",
    "usr/lib/aarch64-linux-gnu/librknnrt.so",
    "lib/librknnrt.so",
)
CORES = {"auto": 0, "0": 1, "1": 2, "2": 4, "0_1": 3, "0_1_2": 7, "all": 0xFFFF}
MANY_CORES = ("rk3588", "rk3576")
MAX_CONTEXTS = 8
_MAX_TEXT_BYTES = 4096
_MAX_LIBRARY_BYTES = 64 * 2**20
_MAX_JSON_BYTES = 2**20
_FACTS = frozenset(["inputs", "outputs", "placement", "plan"])


class RknnError(Exception):
    """What the runtime says; kind: memory or failed."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.kind = "memory" if "malloc" in said or "memory" in said.lower() else "failed"


class Driver:
    """See hosted.py for what its methods take and give.

    root      of the file system
    evidence  stub where a test's script takes the place of rknnlite
    """

    def __init__(self, root: str = "/", evidence: str = "device") -> None:
        self._root = Path(root)
        self._evidence = evidence
        self._contexts: list[Any] = []
        self._pool: ThreadPoolExecutor | None = None
        self._facts: dict[str, Any] = {}

    def probe(self) -> dict[str, Any]:
        from importlib.metadata import version

        soc, board = self._soc()
        if not soc:
            return {"absent": board}
        lite = version("rknn-toolkit-lite2")
        library, runtime = self._library()
        driver = self._read("sys/kernel/debug/rknpu/version").rpartition(" ")[2]
        fault = ""
        if not library:
            fault = f"librknnrt.so is not here: Rockchip's runtime {lite} belongs into /usr/lib"
        else:
            try:
                with Said():
                    from rknnlite.api import RKNNLite  # noqa: F401
            except Exception as exc:  # noqa: BLE001 - a vendor's package may raise anything
                fault = f"rknnlite cannot be imported: {exc}"
        told = [f"{soc} by rknn-toolkit-lite2 {lite}, librknnrt {runtime or 'of an unknown version'}"]
        skew = ""
        if runtime and _minor(runtime) != _minor(lite):
            skew = f"the two differ: put librknnrt.so {lite} into /usr/lib"
            told.append(skew)
        told += [text for text in (self._devfreq(), f"kernel driver {driver}" if driver else "") if text]
        device = {
            "id": "npu",
            "detail": "; ".join(told),
            "soc": soc,
            "evidence": self._evidence,
            "temp_c": hottest_c(self._root, ("npu",)),
            "fault": fault,
            "skew": f"rknn-toolkit-lite2 {lite} and librknnrt {runtime}: {skew}" if skew else "",
        }
        return {"devices": [device], "versions": {"compiler": lite, "runtime": runtime, "driver": driver}}

    def capabilities(self, device: str, soc: str) -> dict[str, Any]:  # noqa: ARG002 - there is one
        return {
            "precisions": [],  # a board tries nothing: its compiler is elsewhere
            "datatypes": ["FP16", "FP32", "INT32", "INT64", "INT8", "UINT8"],
            "is_static": True,
            "is_confirmed": False,
        }

    def compile(
        self,
        model: str,
        folder: str,
        soc: str,
        device: str,  # noqa: ARG002 - there is one
        options: dict[str, str],
        rows: int,  # noqa: ARG002 - it was compiled with its rows
    ) -> dict[str, Any]:
        """Take what was compiled on another machine, if it is of this very model and chip."""
        if unknown := sorted(set(options) - OPTIONS):
            raise RknnError(f"option {unknown[0]} is not known; there are {', '.join(sorted(OPTIONS))}")
        source = Path(model)
        ready = source.with_name(f"{source.stem}.{soc}.rknn")
        try:
            told = _told(ready.with_name(f"{ready.name}.json"))
            sha256 = _copy(ready, Path(folder, COMPILED))
        except OSError as exc:
            raise RknnError(
                f"{ready.name} is not beside the model ({exc.strerror}): a board compiles nothing. Make it on x86-64 "
                f"by `edge_rt npu compile MODEL:FORM --soc {soc}`, or hw/npu/rknn/convert.py {source.name} --soc {soc}"
            ) from exc
        if told["soc"] != soc or told["model_sha256"] != _copy(source):
            raise RknnError(
                f"{ready.name} was compiled for {told['soc']} from another file than {source.name}: convert it anew"
            )
        if told["sha256"] != sha256:
            raise RknnError(f"{ready.name} is not what was compiled: copy it and its .json again")
        made_by, runtime = str(told.get("compiler", "")), self._library()[1]
        if made_by and runtime and _minor(made_by) > _minor(runtime):  # newer runtimes take older files
            raise RknnError(
                f"{ready.name} was compiled by rknn-toolkit2 {made_by[:40]}, and librknnrt here is {runtime}: put "
                f"librknnrt.so {made_by[:40]} into /usr/lib, or convert the model with rknn-toolkit2 {runtime}"
            )
        return {"files": [COMPILED], "placement": told["facts"]["placement"], "facts": told["facts"]}

    def load(
        self,
        folder: str,
        soc: str,
        device: str,  # noqa: ARG002 - there is one
        options: dict[str, str],
        rows: int,  # noqa: ARG002 - it was compiled with its rows
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        with Said():
            from rknnlite.api import RKNNLite

        cores = options.get("cores", "auto")
        if cores not in CORES:
            raise RknnError(f"cores {cores} is not known; there are {', '.join(CORES)}")
        wanted = options.get("contexts", "1")
        if not re.match(r"[0-9]{1,3}\Z", wanted) or not 1 <= int(wanted) <= MAX_CONTEXTS:
            raise RknnError(f"contexts {wanted[:20]}: there are 1 to {MAX_CONTEXTS}")
        n_contexts = int(wanted)
        many = soc in MANY_CORES
        if cores != "auto" and not many:
            raise RknnError(f"cores {cores}: {soc} has one core")
        for _ in range(n_contexts):
            context = RKNNLite()
            with Said() as said:
                if context.load_rknn(os.path.join(folder, COMPILED)) != 0:  # noqa: PTH118
                    raise RknnError(f"load_rknn: {said.words()}")
                code = context.init_runtime(**({"core_mask": CORES[cores]} if many else {}))
                if code != 0:
                    raise RknnError(f"init_runtime gave {code}: {said.words()}")
            self._contexts.append(context)
        self._pool = ThreadPoolExecutor(n_contexts) if n_contexts > 1 else None
        self._facts = facts
        return {name: facts[name] for name in ("inputs", "outputs", "placement")}

    def run(self, feeds: dict[str, Any], outputs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        begun_s = time.monotonic()
        plan = self._facts["plan"]
        n_parts = self._n_parts(feeds)
        cut = {each["name"]: np.split(np.ascontiguousarray(feeds[each["name"]]), n_parts) for each in plan}
        parts = [[cut[each["name"]][i] for each in plan] for i in range(n_parts)]
        formats = [each["layout"] or "nchw" for each in plan]
        found: list[Any] = []
        for at in range(0, n_parts, len(self._contexts)):  # one run at a time on each context
            some = parts[at : at + len(self._contexts)]
            if self._pool is None or len(some) == 1:
                found += [self._infer(self._contexts[0], part, formats) for part in some]
            else:
                runs = [
                    self._pool.submit(self._infer, context, part, formats)
                    for context, part in zip(self._contexts, some)  # noqa: B905 - Python 3.8 has none
                ]
                found += [run.result() for run in runs]
        answers = {}
        for index, spec in enumerate(self._facts["outputs"]):
            if spec["name"] in outputs:
                whole = [np.asarray(each[index]).reshape(spec["shape"]) for each in found]
                answers[spec["name"]] = (np.concatenate(whole) if n_parts > 1 else whole[0]).astype(
                    _dtype(spec["datatype"])
                )
        return {"compute_s": time.monotonic() - begun_s}, answers

    def telemetry(self) -> dict[str, Any]:
        temp_c = hottest_c(self._root, ("npu",))
        return {"temp_c": temp_c, "temp_source": "none" if temp_c is None else "sysfs"}

    def _n_parts(self, feeds: dict[str, Any]) -> int:
        spec = self._facts["inputs"][0]
        return max(1, len(feeds[spec["name"]]) // max(spec["shape"][0], 1)) if spec["shape"] else 1

    def _infer(self, context: Any, arrays: list[Any], formats: list[str]) -> list[Any]:
        answers = context.inference(inputs=arrays, data_format=formats)
        if answers is None:
            raise RknnError("the runtime gave no answer; its log says why")
        if len(answers) != len(self._facts["outputs"]):
            raise RknnError(f"{len(answers)} outputs came, the model has {len(self._facts['outputs'])}")
        return list(answers)

    def _soc(self) -> tuple[str, str]:
        """Give the chip, or '' and why there is none that is known."""
        names = [name for name in self._read("proc/device-tree/compatible").split("\0") if name]
        if not names:
            return "", "no NPU of Rockchip's is here: there is no /proc/device-tree/compatible that names a board"
        for soc in SOCS:
            if any(name.startswith(f"rockchip,{soc}") for name in names):
                return soc, ""
        return "", f"no NPU of Rockchip's is here: the board is {', '.join(names[:3])}"

    def _library(self) -> tuple[str, str]:
        """Give the runtime library's path and version, "" where it is not here or does not say."""
        for name in LIBRARIES:
            path = self._root / name
            with contextlib.suppress(OSError), path.open("rb") as file:
                found = re.search(rb"librknnrt version: (\d[\w.]*)", file.read(_MAX_LIBRARY_BYTES))
                return str(path), found[1].decode() if found else ""
        return "", ""

    def _devfreq(self) -> str:
        """Say at which clock the NPU is, and who sets it."""
        for folder in sorted((self._root / "sys/class/devfreq").glob("*npu*")):
            now, most = (self._read(f"sys/class/devfreq/{folder.name}/{name}") for name in ("cur_freq", "max_freq"))
            governor = self._read(f"sys/class/devfreq/{folder.name}/governor")
            if now.isdigit() and most.isdigit():
                return f"{int(now) / 1e6:.0f} of {int(most) / 1e6:.0f} MHz by {governor or 'an unknown governor'}"
        return ""

    def _read(self, name: str) -> str:
        try:
            with (self._root / name).open("rb") as file:
                return file.read(_MAX_TEXT_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return ""


class Said(Printed):
    """What the runtime prints within."""

    def words(self) -> str:
        """Say in a line what the library has printed: files that it misses, or its last error."""
        text = self.plain()
        if missing := re.findall(r"-v (\S+):\1", text):
            return f"the runtime misses {' and '.join(dict.fromkeys(missing))}"
        lines = [line.strip() for line in text.splitlines()]
        telling = [line for line in lines if re.match(r"E (?!Traceback|Catch)|\w*(Error|Exception)\b", line)] or lines
        return " | ".join(dict.fromkeys(line for line in telling if line))[-600:] or "it said nothing"


def _minor(version: str) -> list[int]:
    """Give the numbers of a version by which files and runtimes fit: its first two."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _told(path: Path) -> dict[str, Any]:
    """Read what convert.py wrote of a compiled model."""
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise RknnError(f"{path.name} has more than {_MAX_JSON_BYTES} bytes: convert the model anew")
    try:
        told = json.loads(text)
        is_whole = {"soc", "model_sha256", "sha256"} <= set(told) and set(told["facts"]) >= _FACTS
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RknnError(f"{path.name} is not what convert.py writes: copy it again, or convert the model anew")
    return dict(told)


def _copy(path: Path, into: Path | None = None) -> str:
    """Hash a file, and write it elsewhere too; a piece at a time."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(path.open("rb"))
        copy = stack.enter_context(into.open("wb")) if into is not None else None
        while piece := source.read(2**20):
            digest.update(piece)
            if copy is not None:
                copy.write(piece)
    return digest.hexdigest()


def _dtype(datatype: str) -> Any:
    kinds = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8, "INT8": np.int8, "INT32": np.int32}
    return kinds.get(datatype, np.int64)
