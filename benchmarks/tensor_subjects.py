"""Who runs a tensor model in the benchmarks, each in a process of its own: onnxruntime alone, and edge_rt as a library.

python tensor_subjects.py KIND FILE SETTINGS   reads [what, *values] as JSON lines and answers with a number
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensor_models
from subject_process import SubjectProcess

from edge_rt import config
from edge_rt.bench.samples import quantile


class Process(SubjectProcess):
    """A subject in a process of its own.

    kind is "onnxruntime", whose settings are n_threads (0: its own choice) and spin, or "edge_rt", whose settings are
    those of its configuration.
    """

    def __init__(self, kind: str, name: str, path: Path, **settings: Any) -> None:
        super().__init__(__file__, kind, name, str(path), json.dumps(settings))

    def infer_s(self, n: int) -> float:
        """Give the median time of one inference, of n one after the other."""
        return float(self._ask("infer_s", n)[0])

    def clients(self, n_clients: int, seconds: float) -> tuple[float, float]:
        """Let n_clients threads ask for one row each, again and again; give requests a second, and CPU s a request."""
        rate, cpu_s = self._ask("clients", n_clients, seconds)
        return rate, cpu_s

    def rows(self, n_rows: int, seconds: float) -> tuple[float, float]:
        """Infer n_rows rows at a time from one thread; give rows a second, and CPU s a row."""
        rate, cpu_s = self._ask("rows", n_rows, seconds)
        return rate, cpu_s


class Subject:
    """Measures whatever infers one row of a model."""

    def __init__(self, name: str, infer: Callable[[dict[str, Any]], object]) -> None:
        self._model = tensor_models.MODELS[name]
        self._infer = infer

    def infer_s(self, n: int) -> list[float]:
        feeds = self._model.feeds()
        for _ in range(3):
            self._infer(feeds)
        return [quantile(sorted(_timed(self._infer, feeds) for _ in range(n)), 0.5)]

    def clients(self, n_clients: int, seconds: float) -> list[float]:
        counts = [0] * n_clients
        begin, stop = threading.Barrier(n_clients + 1), threading.Event()

        def client(number: int) -> None:
            feeds = self._model.feeds(seed=number)
            self._infer(feeds)
            begin.wait()
            while not stop.is_set():
                self._infer(feeds)
                counts[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(n_clients)]
        for thread in threads:
            thread.start()
        begin.wait()
        stop.wait(seconds / 4)  # from here on as much is under way at the begin as at the end
        n_before, begun_s, begun_cpu_s = sum(counts), time.perf_counter(), time.process_time()
        stop.wait(seconds)
        n_done, elapsed_s = sum(counts) - n_before, time.perf_counter() - begun_s
        cpu_s = time.process_time() - begun_cpu_s
        stop.set()
        for thread in threads:
            thread.join()
        return [n_done / elapsed_s, cpu_s / max(1, n_done)]

    def rows(self, n_rows: int, seconds: float) -> list[float]:
        feeds = self._model.feeds(n_rows)
        for _ in range(2):
            self._infer(feeds)
        n_done, begun_s, begun_cpu_s = 0, time.perf_counter(), time.process_time()
        while not n_done or time.perf_counter() - begun_s < seconds:
            self._infer(feeds)
            n_done += n_rows
        return [n_done / (time.perf_counter() - begun_s), (time.process_time() - begun_cpu_s) / n_done]


def onnxruntime_alone(name: str, path: Path, *, n_threads: int = 0, spin: bool = True) -> Subject:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Subject(name, lambda feeds: session.run(None, feeds))


def edge_rt_library(name: str, _: Path, **flags: Any) -> Subject:
    from edge_rt.library import load_tensors

    model = load_tensors(name, settings=config.load(environ={}, flags=flags))
    return Subject(name, model.run)


def _timed(infer: Callable[[dict[str, Any]], object], feeds: dict[str, Any]) -> float:
    begun_s = time.perf_counter()
    infer(feeds)
    return time.perf_counter() - begun_s


def main() -> None:
    kinds: dict[str, Callable[..., Subject]] = {"onnxruntime": onnxruntime_alone, "edge_rt": edge_rt_library}
    kind, name, path, settings = sys.argv[1:]
    subject = kinds[kind](name, Path(path), **json.loads(settings))
    for line in sys.stdin:
        what, *values = json.loads(line)
        print(json.dumps(getattr(subject, what)(*values)), flush=True)


if __name__ == "__main__":
    main()
