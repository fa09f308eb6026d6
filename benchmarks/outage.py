"""What an outage of the cloud costs the requests that were to go there, and what deciding costs any request.

Bars: once the breaker is open, 95 of 100 requests take at most 50 ms longer than the same requests to a daemon without
a cloud; 95 of 100 decisions by rules, privacy and budget, without the scorer, take at most 3 ms.

Every request of the second daemon is to go to the cloud (router.route). Its endpoint refuses connections, takes them
and says nothing, answers 500, or has a name that nobody knows. Both daemons have the null model, so that what is left
is the way of a request; they are asked in turns, while the breaker's pauses end and probes go out beside the requests.
What the requests before the breaker opens take is printed, without a bar: their timeouts are what is configured.

Prompts for the decisions: those in DIR/router_cache, with --data DIR or $EDGE_RT_DATA; without, made ones.
"""

from __future__ import annotations

import argparse
import csv
import http.server
import lzma
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import harness
from footprint import daemon as running_daemon

from edge_rt.api.client import Client
from edge_rt.bench.samples import quantile
from edge_rt.config import Router
from edge_rt.router.budget import Budget
from edge_rt.router.decide import decide
from edge_rt.router.rules import Circumstances, Rules
from edge_rt.types import GenerateRequest, Message

MAX_ADDED_MS = 50.0
MAX_DECISION_MS = 3.0
_PAUSE_S = 0.04  # between requests
_SETS = {
    "llmrouter_mix": "question",
    "qqp_pairs": "text_a",
    "routellm_gsm8k": "prompt",
    "vllm_sr_privacy_labels": "text",
}

_SENTENCE = "how does the scheduler decide which of 12 requests is first, and why (2026-11-30)?"

CONFIG = """
[catalog]
default_model = "null"
store_dir = "{folder}/store"
[cache]
enabled = false
[models.null]
backend = "null"
preload = true
[router]
route = "cloud"
scorer = false
"""
ENDPOINT = """
[cloud.gone]
base_url = "{url}"
model = "m"
allow_http = true
allow_private = true
connect_timeout_s = 1.0
first_byte_timeout_s = 1.0
retry_s = 0.5
"""


@contextmanager
def refusing() -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{one.getsockname()[1]}/v1"  # bound and not listening


@contextmanager
def silent() -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen(512)  # the kernel takes connections, and nobody reads them
        yield f"http://127.0.0.1:{one.getsockname()[1]}/v1"


class _Failing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(500)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass


@contextmanager
def failing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@contextmanager
def nameless() -> Iterator[str]:
    yield "http://nobody.invalid/v1"


OUTAGES = {"refuses": refusing, "is silent": silent, "answers 500": failing, "has no name": nameless}


@contextmanager
def serving(extra: str = "") -> Iterator[Client]:
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(CONFIG.format(folder=folder) + extra)
        with running_daemon("--config", str(file)) as (_, path, _), Client(path) as client:
            yield client


def asked_ms(client: Client) -> float:
    begun_s = time.perf_counter()
    text = "".join(piece.text for piece in client.chat([Message(role="user", content="Good morning!")]))
    assert text == "Good morning!", text  # the null model repeats what it is told: the device has answered
    return (time.perf_counter() - begun_s) * 1e3


def is_open(client: Client) -> bool:
    lines = client.metrics_text().splitlines()
    return any(line.startswith("edge_rt_cloud_state") and line.endswith(" 2.0") for line in lines)


def added_ms(alone: Client, outage: Client, n_requests: int) -> float:
    """Ask both in turns; give what 95 of 100 requests take in the outage, less what half of them take without."""
    a, b = [], []
    for _ in range(n_requests):
        a.append(asked_ms(alone))
        b.append(asked_ms(outage))
        time.sleep(_PAUSE_S)
    return quantile(b, 0.95) - quantile(a, 0.5)


def prompts(data: str | None) -> list[str]:
    if not data:
        words = _SENTENCE.split(" ")
        return [" ".join(words[(i + j) % len(words)] for j in range(5 + i % 300)) for i in range(2000)]
    found: list[str] = []
    for name, column in _SETS.items():
        path = Path(data, "router_cache", f"{name}.csv.xz")
        if not path.is_file():
            sys.exit(f"{path} is missing: --data DIR must hold router_cache/")
        with lzma.open(path, "rt", encoding="utf-8") as file:
            found += [row[column] for row, _ in zip(csv.DictReader(file), range(1000), strict=False)]
    return found


def decision_ms(texts: list[str]) -> Callable[[], float]:
    rules, budget = Rules(Router()), Budget(share=0.4, max_cost_per_day=1.0)
    requests = [
        GenerateRequest(id=str(i), model="m", messages=(Message(role="user", content=text),), tenant=f"uid:{i % 9}")
        for i, text in enumerate(texts)
    ]

    def run() -> float:
        taken: list[float] = []
        now = Circumstances()
        for request in requests:
            begun_s = time.perf_counter()
            verdict = rules.judge(request, now)
            allowance = budget.allowance(request.tenant, now_s=begun_s, wall_s=time.time())
            decision = decide(verdict, now, allowance, expected_cost=0.001)
            budget.observe(request.tenant, None, went=decision.where == "cloud")
            taken.append((time.perf_counter() - begun_s) * 1e3)
        return quantile(taken, 0.95)

    return run


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=os.environ.get("EDGE_RT_DATA"), metavar="DIR", help="where router_cache is")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    n_rounds, n_requests = (2, 15) if arguments.quick else (5, 100)
    run = decision_ms(prompts(arguments.own.data))
    figures = [
        harness.Figure(
            name="route decision p95",
            unit="ms",
            samples=tuple(run() for _ in range(2 if arguments.quick else 5)),
            at_most=MAX_DECISION_MS,
        )
    ]
    opening: dict[str, list[float]] = {}
    with ExitStack() as stack:
        alone = stack.enter_context(serving())
        asked_ms(alone)
        for name, outage in OUTAGES.items():
            with outage() as url, serving(ENDPOINT.format(url=url)) as client:
                opening[name] = []
                while not is_open(client):
                    opening[name].append(asked_ms(client))
                samples = tuple(added_ms(alone, client, n_requests) for _ in range(n_rounds))
            figures.append(
                harness.Figure(name=f"added p95, endpoint {name}", unit="ms", samples=samples, at_most=MAX_ADDED_MS)
            )
    for name, taken in opening.items():
        print(f"before the breaker opened, endpoint {name}: {', '.join(f'{ms:.0f}' for ms in taken)} ms")
    harness.finish(arguments, figures=figures, extra={"before_open_ms": opening})


if __name__ == "__main__":
    main()
