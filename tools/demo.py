"""Show edge_rt at work: what this machine has, the daemon on a socket of its own, and two answers of a real model.

`make demo` runs it with the venv's Python. It calls what a user would call, prints each command before its output, and
leaves nothing running. Exit code 1, with the daemon's log, when a step fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
QUESTION = "What is gravity?"
RUN_QUESTION = "Explain in two sentences what photosynthesis is."
MAX_TOKENS = 120
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
METRICS = (
    "edge_rt_completion_tokens_total",
    "edge_rt_prompt_tokens_total",
    "edge_rt_ttft_seconds_sum",
    "edge_rt_threads",
    "edge_rt_worker_resident_memory_bytes",
    "edge_rt_process_resident_memory_bytes",
)

EDGE_RT = str(Path(sys.executable).with_name("edge_rt"))


class DemoError(Exception):
    """A step failed; the message says which."""


def main() -> None:
    began_s = time.monotonic()
    if shutil.which("curl") is None:
        raise DemoError("the demo asks the daemon with curl, which is not installed (Debian, Ubuntu: apt install curl)")
    title("This machine")
    call("devices")
    title("The model")
    call("models", "pull", MODEL)
    with tempfile.TemporaryDirectory(prefix="edge_rt-") as scratch:
        socket = Path(scratch, "edge_rt.sock")
        title("The daemon, asked over its Unix socket")
        with daemon(socket, Path(scratch, "serve.log")):
            ask(socket)
            show_command("curl --unix-socket edge_rt.sock http://localhost/health")
            print(curl(socket, "/health").strip())
            show_command("curl --unix-socket edge_rt.sock http://localhost/metrics | grep …")
            print("\n".join(metrics(socket)))
        print("The daemon has stopped cleanly.")
    title("The same model in one command, without a daemon")
    call("run", MODEL, RUN_QUESTION, "--local", "--max-tokens", str(MAX_TOKENS), "--temperature", "0")
    print(f"\nDone in {time.monotonic() - began_s:.1f} s. Next: .venv/bin/edge_rt --help, README.md, make test")


def title(text: str) -> None:
    print(f"\n{paint('1', f'━━ {text} ' + '━' * max(0, 72 - len(text)))}", flush=True)


def show_command(text: str) -> None:
    print(f"\n{paint('36', '$ ' + text)}", flush=True)


def paint(code: str, text: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def call(*arguments: str) -> None:
    """Run a command of edge_rt with the terminal as its own."""
    show_command(" ".join(["edge_rt", *(f'"{a}"' if " " in a else a for a in arguments)]))
    if returncode := subprocess.run([EDGE_RT, *arguments], check=False).returncode:
        raise DemoError(f"edge_rt {arguments[0]} ended with {returncode}")


@contextmanager
def daemon(socket: Path, log: Path) -> Iterator[None]:
    """Run `edge_rt serve` on socket; stop it by SIGTERM, and insist that it ends well."""
    show_command("edge_rt serve --socket edge_rt.sock &")
    with log.open("wb") as sink:
        process = subprocess.Popen([EDGE_RT, "serve", "--socket", str(socket)], stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_ready(process, socket)
        yield
        process.send_signal(signal.SIGTERM)
        if returncode := process.wait(STOP_TIMEOUT_S):
            raise DemoError(f"the daemon ended with {returncode}")
    except (DemoError, subprocess.TimeoutExpired) as exc:
        raise DemoError(f"{exc}\n--- the daemon's log ---\n{log.read_text(errors='replace')[-4000:]}") from exc
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], socket: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoError(f"the daemon ended with {process.returncode} before it was ready")
        if socket.exists():
            command = curl_command(socket, "/health/live")
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return
        time.sleep(0.05)
    raise DemoError(f"the daemon was not ready within {START_TIMEOUT_S:.0f} s")


def curl_command(socket: Path, path: str, *options: str) -> list[str]:
    return ["curl", "--silent", "--show-error", "--unix-socket", str(socket), *options, f"http://localhost{path}"]


def curl(socket: Path, path: str) -> str:
    done = subprocess.run(curl_command(socket, path), check=False, capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"curl {path}: {done.stderr.strip()}")
    return done.stdout


def ask(socket: Path) -> None:
    """Stream one chat answer by curl and print its text as it comes."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    # A second demo shall show the model at work too, and not what it said in the first.
    shown = f"-H 'Cache-Control: no-store' -d '{body}'"
    show_command(f"curl --no-buffer --unix-socket edge_rt.sock http://localhost/v1/chat/completions {shown}")
    headers = ("--header", "Content-Type: application/json", "--header", "Cache-Control: no-store")
    options = ("--no-buffer", *headers, "--data", body)
    process = subprocess.Popen(
        curl_command(socket, "/v1/chat/completions", *options), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    with process.stdout as lines:
        events = print_answer(lines)
    if process.wait() or not events:
        raise DemoError("the daemon gave no answer")
    print(f"\n\n{paint('2', summary(events))}", flush=True)


def print_answer(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Print the text of an SSE stream as it comes; give its events. Raises DemoError for an error in place of one."""
    events: list[dict[str, Any]] = []
    for line in lines:
        if not (line := line.strip()) or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise DemoError(f"the daemon answered: {event['error']['message']}")
        if not events:
            print(paint("2", f"{line[:100]}…\n"))
        events.append(event)
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    return events


def summary(events: Sequence[Mapping[str, Any]]) -> str:
    usage: Mapping[str, int] = next((e["usage"] for e in reversed(events) if e.get("usage")), {})
    timings: Mapping[str, float] = next((e["timings"] for e in reversed(events) if e.get("timings")), {})
    tokens = f"{usage.get('prompt_tokens')} prompt and {usage.get('completion_tokens')} answer tokens"
    rates = [
        f"{word} {timings[key]:.0f} tokens/s"
        for word, key in (("prefill", "prompt_per_second"), ("decode", "predicted_per_second"))
        if timings.get(key)
    ]
    return ", ".join([f"{len(events)} events", tokens, *rates])


def metrics(socket: Path) -> list[str]:
    """Give the chosen series."""
    return [line for line in curl(socket, "/metrics").splitlines() if re.split("[{ ]", line)[0] in METRICS]


if __name__ == "__main__":
    try:
        main()
    except DemoError as exc:
        sys.exit(f"\nedge_rt demo: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)
