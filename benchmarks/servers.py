"""The daemon against other model servers: the same ONNX classifier, 16 clients with one row each, again and again.

Rivals are installed in an environment of their own, whose Python is named: `--mlserver VENV/bin/python` (mlserver and
onnxruntime; mlserver 1.7 needs uvloop<0.22, or its workers end at once) or `--bentoml VENV/bin/python` (bentoml and
onnxruntime). OpenVINO's Model Server is no Python package and is not measured. Each has the settings it is fastest
with, of those in the file. The daemon is asked over HTTP with binary tensors; mlserver, whose HTTP takes numbers as
text only, over gRPC by tritonclient, with raw tensors; BentoML, whose own HTTP takes arrays as text only, by a mounted
ASGI route that takes the raw bytes. Bars: requests a second at least 1.0 × the rival's, resident memory at most 0.5 ×
the rival's. Memory is the sum over all processes of a server, read while the clients ask, of each the median over the
rounds. Resident memory (RSS) has what several processes share once for each of them. Beside it stand the same sums of
PSS, which divides it among them, and of what is anonymous, so in no file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import psutil
import tensor_models
from footprint import daemon as running_daemon
from unix_http import UnixConnection

AT_LEAST, MEMORY_AT_MOST = 1.0, 0.5
MEMORY_KINDS = ("Rss", "Pss", "Anonymous")
N_CLIENTS = 16
START_S = 120.0
DATATYPES = {"uint8": "UINT8", "float32": "FP32"}
MLSERVER = {
    "1 worker": {"parallel_workers": 1},
    "in one process": {"parallel_workers": 0},
    "2 workers": {"parallel_workers": 2},
    "1 worker, batching": {"parallel_workers": 1, "max_batch_size": 8, "max_batch_time": 0.002},
}
_RUNTIME = """
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class OnnxModel(MLModel):
    async def load(self):
        self._session = onnxruntime.InferenceSession(self.settings.parameters.uri, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload):
        feeds = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        (answer,) = self._session.run(None, feeds)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", answer)])
"""


BENTOML = {"1 worker": {"workers": 1}, "2 workers": {"workers": 2}}
_SERVICE = """
import bentoml
import numpy as np
import onnxruntime
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route


async def infer(request):
    body = await request.body()
    return Response(await run_in_threadpool(bentoml.get_current_service().run, body))


@bentoml.service(workers={workers}, traffic={{"timeout": 60}}, metrics={{"enabled": False}})
@bentoml.asgi_app(Starlette(routes=[Route("/infer", infer, methods=["POST"])]), path="/raw")
class Classifier:
    def __init__(self) -> None:
        self._session = onnxruntime.InferenceSession({path!r}, providers=["CPUExecutionProvider"])

    def run(self, body):
        x = np.frombuffer(body, {dtype!r}).reshape({shape})
        return self._session.run(None, {{{input!r}: x}})[0].tobytes()
"""


class HttpClient(UnixConnection):
    """Sends one inference again and again to a Unix socket, with binary tensors."""

    def __init__(self, path: Path, name: str, seed: int) -> None:
        super().__init__(path)
        model = tensor_models.MODELS[name]
        ((_, array),) = model.feeds(seed=seed).items()
        tensor = {
            "name": model.input,
            "datatype": DATATYPES[model.dtype],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        self._body = head + array.tobytes()
        self._path = f"/v2/models/{name}/infer"
        self._headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}

    def infer(self) -> object:
        self.request("POST", self._path, self._body, self._headers)
        response = self.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(body.decode(errors="replace")[:500])
        return body


class BentoClient(http.client.HTTPConnection):
    """Sends one inference again and again to a port of this machine, as raw bytes."""

    def __init__(self, port: int, name: str, seed: int) -> None:
        super().__init__("127.0.0.1", port, timeout=60.0)
        ((_, array),) = tensor_models.MODELS[name].feeds(seed=seed).items()
        self._body = array.tobytes()

    def infer(self) -> object:
        self.request("POST", "/raw/infer", self._body, {"Content-Type": "application/octet-stream"})
        response = self.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(body.decode(errors="replace")[:500])
        return body


class GrpcClient:
    """Sends one inference again and again to a port of this machine."""

    def __init__(self, port: int, name: str, seed: int) -> None:
        from tritonclient import grpc

        model = tensor_models.MODELS[name]
        ((_, array),) = model.feeds(seed=seed).items()
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        self._tensor = grpc.InferInput(model.input, list(array.shape), DATATYPES[model.dtype])
        self._tensor.set_data_from_numpy(array)
        self._name = name

    def infer(self) -> object:
        return self._client.infer(self._name, [self._tensor]).as_numpy("y")

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server: how to reach it (client(model, seed)), and its first process."""

    client: Callable[[str, int], Any]
    process: psutil.Process

    def memory_mib(self) -> dict[str, float]:
        """Give Rss, Pss and Anonymous as /proc/PID/smaps_rollup has them, summed over all processes."""
        sums = dict.fromkeys(MEMORY_KINDS, 0.0)
        for process in (self.process, *self.process.children(recursive=True)):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in sums:
                    sums[name] += int(rest.split()[0]) / 1024
        return sums

    def cpu_s(self) -> float:
        family = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    def rate(self, name: str, seconds: float) -> tuple[float, float, dict[str, float]]:
        """Let N_CLIENTS ask for so long; give requests a second, the server's CPU s a request, and its memory then."""
        counts, failures = [0] * N_CLIENTS, list[Exception]()
        begin, stop = threading.Barrier(N_CLIENTS + 1), threading.Event()

        def client(number: int) -> None:
            with closing(self.client(name, number)) as connection:
                try:
                    connection.infer()
                    begin.wait()
                    while not stop.is_set():
                        connection.infer()
                        counts[number] += 1
                except Exception as exc:  # noqa: BLE001 - a client's failure is the benchmark's
                    failures.append(exc)
                    begin.abort()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(N_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            begin.wait()
        except threading.BrokenBarrierError:
            raise failures[0] from None
        stop.wait(seconds / 4)  # from here on as much is under way at the begin as at the end
        n_before, begun_s, begun_cpu_s = sum(counts), time.perf_counter(), self.cpu_s()
        stop.wait(seconds)
        n_done, elapsed_s, cpu_s = sum(counts) - n_before, time.perf_counter() - begun_s, self.cpu_s() - begun_cpu_s
        memory = self.memory_mib()
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return n_done / elapsed_s, cpu_s / max(1, n_done), memory


@contextmanager
def edge_rt(folder: Path, flags: dict[str, Any], name: str) -> Iterator[Server]:
    environ = {"EDGE_RT__CATALOG__STORE_DIR": flags["catalog.store_dir"]}
    environ |= {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(folder), "EDGE_RT__SERVER__ACCESS_LOG": "false"}
    with running_daemon("--model", name, **environ) as (process, path, _):
        yield Server(client=partial(HttpClient, path), process=psutil.Process(process.pid))


@contextmanager
def mlserver(python: str, model: Path, settings: dict[str, Any]) -> Iterator[Server]:
    """Start mlserver with one model, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        folder, ports = Path(name), [_free_port() for _ in range(3)]
        server = {"host": "127.0.0.1", "debug": False, "parallel_workers": settings["parallel_workers"]}
        server |= dict(zip(("http_port", "grpc_port", "metrics_port"), ports, strict=True))
        batching = {key: value for key, value in settings.items() if key.startswith("max_batch")}
        own = {"name": model.stem, "implementation": "onnx_runtime.OnnxModel", "parameters": {"uri": str(model)}}
        (folder / "settings.json").write_text(json.dumps(server))
        (folder / "model-settings.json").write_text(json.dumps(own | batching))
        (folder / "onnx_runtime.py").write_text(_RUNTIME)
        process = subprocess.Popen(
            [python, "-c", "from mlserver.cli import main; main()", "start", str(folder)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},  # its workers look for the runtime too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_ready(ports[0], f"/v2/models/{model.stem}/ready", process)
            yield Server(client=partial(GrpcClient, ports[1]), process=psutil.Process(process.pid))
        finally:
            _end(process)


@contextmanager
def bentoml(python: str, model: Path, settings: dict[str, Any]) -> Iterator[Server]:
    """Start BentoML with one model, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        folder, port = Path(name), _free_port()
        made = tensor_models.MODELS[model.stem]
        ((_, array),) = made.feeds(seed=0).items()
        inputs = {"input": made.input, "path": str(model), "dtype": made.dtype, "shape": array.shape}
        (folder / "service.py").write_text(_SERVICE.format(**settings, **inputs))
        process = subprocess.Popen(
            [python, "-m", "bentoml", "serve", "service:Classifier", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=os.environ | {"BENTOML_DO_NOT_TRACK": "true", "BENTOML_HOME": str(folder / "home"), "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_ready(port, "/readyz", process)
            yield Server(client=partial(BentoClient, port), process=psutil.Process(process.pid))
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:  # by itself; why it did is what shall be seen
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    for left in psutil.wait_procs(family, timeout=5.0)[1]:
        left.kill()
    process.wait()


RIVALS = {"mlserver": (mlserver, MLSERVER, "in one process"), "bentoml": (bentoml, BENTOML, "1 worker")}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_ready(port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the rival ended with exit code {process.returncode}")
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the rival is not ready after {START_S:g} s")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mlserver", metavar="PYTHON", help="the Python of an environment with mlserver, onnxruntime")
    parser.add_argument("--bentoml", metavar="PYTHON", help="the Python of an environment with bentoml, onnxruntime")
    parser.add_argument("--model", default="classifier", choices=("classifier", "inspection", "dense"))
    parser.add_argument(
        "--cpu", action="store_true", help="compare the servers' CPU time a request: for a busy machine"
    )


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    own = arguments.own
    rival_name = "mlserver" if own.mlserver else "bentoml"
    if not (python := own.mlserver or own.bentoml):
        sys.exit("name a rival: --mlserver PYTHON (of an environment where `pip install mlserver onnxruntime` was run)")
    start_rival, settings_of, quick = RIVALS[rival_name]
    seconds = 1.5 if arguments.quick else 5.0
    rounds: dict[str, list[dict[str, float]]] = {"edge_rt": [], rival_name: []}

    def measured(server: Server, who: str = "") -> float:
        rate, cpu_s, memory = server.rate(own.model, seconds)
        rounds.get(who, []).append(memory)
        return 1 / cpu_s if own.cpu else rate

    def alone(start: Callable[[], Any]) -> float:
        with start() as server:
            server.rate(own.model, seconds)
            return measured(server)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ert-")))
        flags, file = tensor_models.catalog(folder, own.model), folder / f"{own.model}.onnx"
        choices = {quick: settings_of[quick]} if arguments.quick else settings_of
        rates = {
            label: alone(lambda settings=settings: start_rival(python, file, settings))  # type: ignore[misc]
            for label, settings in choices.items()
        }
        best = max(rates, key=lambda label: rates[label])
        ours = stack.enter_context(edge_rt(folder, flags, own.model))
        rival = stack.enter_context(start_rival(python, file, settings_of[best]))
        pair = harness.paired(
            "edge_rt",
            lambda: measured(ours, "edge_rt"),
            f"{rival_name}, {best}",
            lambda: measured(rival, rival_name),
            n_pairs=arguments.pairs(9, quick=3),
        )
    memory = {
        who: {kind: statistics.median(sample[kind] for sample in samples) for kind in MEMORY_KINDS}
        for who, samples in rounds.items()
    }
    mine, its = memory["edge_rt"], memory[rival_name]
    what = "CPU" if own.cpu else "requests/s"
    harness.finish(
        arguments,
        [harness.Claim(name=f"{own.model}, {N_CLIENTS} clients, {what}", pair=pair, at_least=AT_LEAST)],
        {"memory_mib": memory, "rivals": rates},
        [
            harness.Figure(
                name=", ".join(f"{kind} {mine[kind]:.0f} and {its[kind]:.0f} MiB" for kind in MEMORY_KINDS),
                unit=f"× {rival_name}'s Rss",
                samples=(mine["Rss"] / its["Rss"],),
                at_most=MEMORY_AT_MOST,
            )
        ],
    )


if __name__ == "__main__":
    main()
