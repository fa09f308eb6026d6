"""Memory over 10,000 mixed requests for tensors through the daemon: no process of it may grow.

Eight clients send rows of any number and length, wrong requests, requests they hang up on, and calls of streams that
they never end. Bars: after the first 1,000 requests, the front process and each worker grow by at most 4 MiB.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import psutil
import tensor_models
from footprint import daemon as running_daemon
from unix_http import UnixConnection

AT_MOST_MIB = 4.0
N_CLIENTS = 8
NAMES = ("square", "stateful")


class Client(UnixConnection):
    def infer(self, model: str, tensors: dict[str, tuple[int, int]], *, is_read: bool = True, **more: Any) -> int:
        """Send zeros of the shapes given; the answer's status, or 0 after a hang-up."""
        inputs = [
            {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": 4 * _size(shape)}}
            for name, shape in tensors.items()
        ]
        parameters = {"binary_data_output": True} | more
        head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        body = head + bytes(sum(4 * _size(shape) for shape in tensors.values()))
        self.request("POST", f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(head))})
        if not is_read:
            self.close()
            return 0
        response = self.getresponse()
        response.read()
        return response.status


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def one(client: Client, number: int, noise: random.Random) -> None:
    """Send one request of the mixture, and see that it ends as it should."""
    n_rows, n_columns, kind = noise.randint(1, 4), noise.randint(512, 4096), number % 10
    both = {"x": (n_rows, n_columns), "s": (n_rows, 64)}
    if kind == 0:
        status, expected = client.infer("stateful", {"x": (1, n_columns)}, sequence_id=number + 1), 200
    elif kind == 1:
        status, expected = client.infer("square", {"x": (n_rows, n_columns)}), 400
    elif kind == 2:
        status, expected = client.infer("square", both, is_read=False), 0
    else:
        status, expected = client.infer("square", both), 200
    if status != expected:
        raise RuntimeError(f"request {number} ended with HTTP status {status}, not {expected}")


def send(path: Path, first: int, n: int) -> None:
    """Send n requests by N_CLIENTS threads."""
    failures: list[Exception] = []

    def client(at: int) -> None:
        with contextlib.closing(Client(path)) as connection:
            try:
                for number in range(first + at, first + n, N_CLIENTS):
                    one(connection, number, random.Random(number))
            except Exception as exc:  # noqa: BLE001 - a thread's failure is the benchmark's
                failures.append(exc)

    threads = [threading.Thread(target=client, args=(at,)) for at in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    arguments = harness.parse(__doc__)
    n_warm, n_requests = (300, 1000) if arguments.quick else (1000, 10_000)
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        folder = Path(name)
        flags = tensor_models.catalog(folder, *NAMES)
        environ = {"EDGE_RT__CATALOG__STORE_DIR": flags["catalog.store_dir"]}
        environ |= {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(folder), "EDGE_RT__TENSOR__MAX_STREAMS": "64"}
        environ["EDGE_RT__SERVER__ACCESS_LOG"] = "false"
        with running_daemon(**environ) as (process, path, _):
            front = psutil.Process(process.pid)
            send(path, 0, n_warm)
            before = _mib(front)
            send(path, n_warm, n_requests)
            after = _mib(front)
    figures = [
        harness.Figure(name=f"growth of {who}", unit="MiB", samples=(after[who] - before[who],), at_most=AT_MOST_MIB)
        for who in before
    ]
    harness.finish(arguments, figures=figures, extra={"before_mib": before, "after_mib": after})


def _mib(front: psutil.Process) -> dict[str, float]:
    """Give what the daemon's processes have in memory; the workers in the order in which they were started."""
    workers = sorted(front.children(), key=lambda child: child.create_time())
    named = {"the front process": front} | {f"worker {i}": worker for i, worker in enumerate(workers, 1)}
    read: Callable[[psutil.Process], float] = lambda process: process.memory_info().rss / 2**20  # noqa: E731
    return {name: read(process) for name, process in named.items()}


if __name__ == "__main__":
    main()
