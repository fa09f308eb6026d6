"""One request and what became of it: its id, its caller, and what the metrics and the access log tell of it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from edge_rt.api.callers import Peer
from edge_rt.api.status import ErrorReply, HttpError, reply
from edge_rt.errors import EdgeRtError
from edge_rt.telemetry import Telemetry

_log = logging.getLogger("edge_rt.api")
_access = logging.getLogger("edge_rt.access")

HUNG_UP: Final = 499  # what proxies log for a client that left; it is never sent
# Probes carry no key, and are asked every few seconds, for ever.
OPEN_PATHS: Final = ("/", "/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
_PROBES = frozenset({*OPEN_PATHS, "/metrics"})
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Exchange:
    """status is 0 until the response starts."""

    request_id: str
    peer: Peer | None
    started_s: float
    tenant: str = ""
    status: int = 0
    is_stream: bool = False
    outcome: str = "ok"


class Ledger:
    """Counts requests and writes the access log."""

    def __init__(self, metrics: Telemetry, *, access_log: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._access_log = access_log
        self._clock = clock

    def begin(self, headers: Sequence[tuple[bytes, bytes]], peer: Peer | None) -> Exchange:
        return Exchange(_request_id(headers), peer, self._clock())

    def end(self, exchange: Exchange, *, method: str, path: str, route: str, client: str | None) -> None:
        """Take note of a request that has ended. route is its pattern, path what was asked."""
        duration_s = self._clock() - exchange.started_s
        self._metrics.request_finished(route, status=exchange.status, outcome=exchange.outcome, duration_s=duration_s)
        level = logging.DEBUG if path in _PROBES and exchange.status == 200 else logging.INFO
        if self._access_log and _access.isEnabledFor(level):
            peer = exchange.peer
            extra = {
                "duration_s": round(duration_s, 4),
                "outcome": exchange.outcome,
                "tenant": exchange.tenant or None,
                "uid": peer.uid if peer else None,
                "gid": peer.gid if peer else None,
                "pid": peer.pid if peer else None,
                "client": client,
            }
            _access.log(level, "%s %s %d", method, path[:200], exchange.status, extra=extra)


def told(error: BaseException) -> ErrorReply:
    """Turn an error into its answer, and log what nobody foresaw."""
    if not isinstance(error, EdgeRtError | HttpError):
        _log.error("a request failed unexpectedly", exc_info=error)
    return reply(error)


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Take over the caller's X-Request-Id where it is harmless, else make one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return os.urandom(16).hex()
