"""What holds for every protocol on a real daemon: clients that hang up at any time leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from tests import patience
from tests.api.daemon import Daemon

MESSAGES = [{"role": "user", "content": ""}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/responses": {"input": MESSAGES, "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 500, "stream": True},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": ""},
}


async def ask(socket: Path, path: str, text: str, *, whole: bool, cut: int | None) -> bool:
    """Ask once and hang up when at least cut bytes have come; say whether the answer was whole."""
    message = {"role": "user", "content": text}
    texts: dict[str, Any] = {"messages": [message], "input": [message], "prompt": text}
    body = {name: texts.get(name, value) for name, value in BODIES[path].items()}
    raw = json.dumps({"model": "null-slow", **body, **({"stream": False} if whole else {})}).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Cache-Control: no-store")
    head = "\r\n".join((*lines, f"Content-Length: {len(raw)}", "", ""))
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(head.encode() + raw)
        received = b""
        while cut is None or len(received) < cut:
            if not (part := await reader.read(300)):
                assert received.startswith(b"HTTP/1.1 200 "), received
                return True
            received += part
        return False
    finally:
        writer.close()


def test_hang_ups_at_random_leave_nothing_in_any_protocol(socket_dir: Path) -> None:
    choices = random.Random(3)
    kinds = [(path, whole) for path in BODIES for whole in (False, True)] * 8
    choices.shuffle(kinds)

    async def scenario(daemon: Daemon) -> None:
        answers = await asyncio.gather(
            *(
                ask(
                    daemon.socket,
                    path,
                    choices.randbytes(choices.randint(5, 20)).hex(),
                    whole=whole,
                    cut=choices.choice([None, 0, 300, 700]),
                )
                for path, whole in kinds
            )
        )
        assert 0 < sum(answers) < len(kinds)

    with Daemon(socket_dir, extra="[scheduler]\nmax_waiting = 100\n") as daemon:
        asyncio.run(scenario(daemon))
        for figure in ("requests_running", "requests_waiting", "kv_cells_used"):
            line = f'edge_rt_{figure}{{model="null-slow"}}'
            patience.until(lambda line=line: daemon.metric(line) == 0, told=lambda line=line: line)  # type: ignore[misc]
        assert daemon.metric('edge_rt_requests_total{outcome="hung_up"') > 0
        assert "failed unexpectedly" not in daemon.log
        assert "Traceback" not in daemon.log
